"""Serves llama.cpp: one JSON request per line on stdin, one JSON answer per line on stdout.

    python scripts/peers/llama_cpp_peer.py MODEL.gguf [DRAFT.gguf]

As `transformers_peer.py`, with `llama-server` from beside this Python, which runs once for each way
of decoding: plainly, with its prompt lookup (`ngram-simple`), and, as "draft" in a request asks for
that many tokens, with the draft model. Times are those that llama-server measures, so that HTTP is
not in them. Weights are those of the files; llama.cpp rounds activations to 8 bits. No prompt is
cached.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

_CONTEXT = 4096
"""The most tokens of a prompt and its answer."""
_START_S = 300.0
"""The seconds within which a server must have loaded its models."""


class LlamaServer:
    """A running llama-server; `program` is the path of the executable.

    It drafts `lookup` tokens by prompt lookup, or `draft` tokens with the model `draft_model`; with
    0 for both it decodes plainly.
    """

    def __init__(
        self,
        program: str | Path,
        gguf: str,
        *,
        lookup: int = 0,
        draft: int = 0,
        draft_model: str | None = None,
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._address = f"http://127.0.0.1:{port}"
        threads = str(num_threads())
        arguments = ["--model", gguf, "--host", "127.0.0.1", "--port", str(port), "--offline"]
        arguments += ["--threads", threads, "--threads-batch", threads]
        arguments += ["--parallel", "1", "--ctx-size", str(_CONTEXT)]
        arguments += ["--no-cache-prompt", "--cache-ram", "0"]
        if lookup:
            arguments += ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3"]
            arguments += ["--spec-ngram-simple-size-m", str(lookup)]
        if draft:
            arguments += ["--spec-type", "draft-simple", "--spec-draft-model", str(draft_model)]
            arguments += ["--spec-draft-n-max", str(draft), "--spec-draft-threads", threads]
        command = [str(program), *arguments]
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet)
        deadline = time.monotonic() + _START_S
        while not self._healthy():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.close()
                raise SystemExit(f"llama-server did not start; see why: {' '.join(command)}")
            time.sleep(0.1)

    def decode(self, ids: list[int], max_new_tokens: int) -> dict[str, Any]:
        """Return the new token ids of a prompt, decoded greedily, and the times in seconds."""
        body = {
            "prompt": ids,
            "n_predict": max_new_tokens,
            "samplers": ["top_k"],
            "top_k": 1,
            "cache_prompt": False,
            "return_tokens": True,
        }
        request = urllib.request.Request(
            f"{self._address}/completion",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as response:
            answer = json.load(response)
        timings = answer["timings"]
        prefill_s = timings["prompt_ms"] / 1e3
        total_s = prefill_s + timings["predicted_ms"] / 1e3
        return {"ids": answer["tokens"], "prefill_s": prefill_s, "total_s": total_s}

    def close(self) -> None:
        """End the server."""
        self._process.terminate()
        self._process.wait()

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._address}/health") as response:
                return response.status == 200
        except (urllib.error.URLError, OSError):
            return False


def num_threads() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0))


def serve(program: str | Path, gguf: str, draft_model: str | None = None) -> None:
    """Answer requests until the input ends."""
    servers: dict[tuple[int, int], LlamaServer] = {}
    metadata = {"threads": num_threads(), "drafts": draft_model is not None}
    print(json.dumps(metadata), flush=True)
    try:
        for line in sys.stdin:
            request = json.loads(line)
            way = request["lookup"], request.get("draft", 0)
            if way not in servers:
                lookup, draft = way
                servers[way] = LlamaServer(
                    program, gguf, lookup=lookup, draft=draft, draft_model=draft_model
                )
            answer = servers[way].decode(request["ids"], request["max_new_tokens"])
            print(json.dumps(answer), flush=True)
    finally:
        for server in servers.values():
            server.close()


if __name__ == "__main__":
    serve(Path(sys.executable).with_name("llama-server"), *sys.argv[1:])
