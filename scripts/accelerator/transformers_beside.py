"""Decode with transformers' assisted generation and with specjax, in turn, on the same device.

    python scripts/accelerator/transformers_beside.py [debug]

The default model in bfloat16 (`debug`: on a CPU, in float32), two built-in prompts, greedily: plain
decoding, and prompt lookup, which transformers calls assisted generation with an n-gram assistant.
The first answer of each system is not timed. Prints "not installed" without torch or transformers.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import specjax
from specjax.apps.run.built_in_prompts import BUILT_IN
from specjax.engine.requests import encode_prompt
from specjax.loading.hub import DEFAULT_MODEL, default_model_file

_NEEDED = ("torch", "transformers", "gguf")
_LOOKUP = 8
_PEER = Path(__file__).parents[1] / "peers" / "transformers_peer.py"


def main() -> int:
    """Print a line for each system and way of decoding; return the exit code."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"not installed: {', '.join(missing)}")
        return 0
    debug = "debug" in sys.argv[1:]
    peer = [sys.executable, str(_PEER), str(default_model_file()), "cpu" if debug else "cuda"]
    compare(peer, "float32" if debug else "bfloat16", 8 if debug else 96)
    return 0


def compare(peer: Sequence[str], dtype: str, new_tokens: int) -> None:
    """Print the speeds of specjax and of the process with the command `peer`, and their ratios."""
    model = specjax.load_model(DEFAULT_MODEL, dtype=dtype)
    prompts = [encode_prompt(model, prompt, "prompt") for prompt in BUILT_IN[:2]]
    with subprocess.Popen(
        peer, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        json.loads(process.stdout.readline())
        for name, lookup in (("plain", 0), ("prompt lookup", _LOOKUP)):

            def theirs(ids: list[int], lookup: int = lookup) -> tuple[float, list[int]]:
                request = {"ids": ids, "max_new_tokens": new_tokens, "lookup": lookup}
                process.stdin.write(json.dumps(request) + "\n")
                process.stdin.flush()
                answer = json.loads(process.stdout.readline())
                return answer["total_s"], answer["ids"]

            def ours(ids: list[int], lookup: int = lookup) -> tuple[float, list[int]]:
                drafter = specjax.make_drafter("ngram", model) if lookup else None
                begin = time.perf_counter()
                found = specjax.generate(
                    model,
                    [ids],
                    drafter=drafter,
                    num_speculative_tokens=lookup,
                    sampling=specjax.SamplingParams(max_new_tokens=new_tokens),
                )
                return time.perf_counter() - begin, found.token_ids[0]

            speeds = [_speed(decode, prompts) for decode in (theirs, ours)]
            print(
                f"{name}: transformers {speeds[0]:.1f} tokens/s, specjax {speeds[1]:.1f}, "
                f"{speeds[1] / speeds[0]:.2f}x, with prefill",
                flush=True,
            )
        process.stdin.close()


def _speed(decode: Any, prompts: Sequence[list[int]]) -> float:
    """Return the tokens per second of `decode`, which returns seconds and tokens for a prompt."""
    decode(prompts[0])
    answers = [decode(ids) for ids in prompts]
    return sum(len(tokens) for _, tokens in answers) / sum(seconds for seconds, _ in answers)


if __name__ == "__main__":
    sys.exit(main())
