"""transformers with a static cache on the same device and shapes, in its own process."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from accelerator.bench import Options, Result
from accelerator.rows import FAILED, MEASURED, NO_FIT, NO_MEMORY, SKIPPED, Cell, Rows, describe
from accelerator.sizes import Size
from specjax.models.config import DecoderConfig

_SCRIPT = Path(__file__).parents[1] / "peers" / "static_cache_peer.py"
_DEVICES = {"gpu": "cuda", "cpu": "cpu"}


class Missing(Exception):
    """The peer cannot run here."""


class Peer:
    """One model of transformers in a child process, reached through pipes."""

    def __init__(self, python: str, device: str, dtype: str, config: DecoderConfig) -> None:
        shape = {
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "max_position_embeddings": config.max_positions,
            "tie_word_embeddings": config.tie_word_embeddings,
        }
        asked = json.dumps({"device": device, "dtype": dtype, "shape": shape})
        try:
            self._process = subprocess.Popen(
                [python, str(_SCRIPT), asked],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        except OSError as error:
            raise Missing(f"--peer_python={python}: {error.strerror}") from None
        self.versions = self._answer()
        if "error" in self.versions:
            self.close()
            raise Missing(f"--peer_python={python}: {self.versions['error']}")

    def ask(self, **request: int) -> dict[str, Any]:
        """The answer to one request."""
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End the process, so that the device's memory is free."""
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        return json.loads(line) if line else {"error": "the peer process ended"}


def compare(options: Options, size: Size, result: Result, rows: Rows, python: str) -> list[str]:
    """Add the peer's rows for every model, batch and context; returns cells not reached in time."""
    left: list[str] = []
    for name in options.models:
        config = replace(size.models[name], num_layers=result.layers[name])
        waiting = [
            cell
            for cell in _cells(name, config, size)
            if options.wants(cell) and not rows.done(cell, options.retry_failed)
        ]
        fitting = []
        for cell in waiting:
            needed = size.needed_bytes(config, cell["batch"], cell["context"], 1)
            if result.memory_bytes is not None and needed > result.memory_bytes:
                rows.add(cell, NO_FIT, reason="does not fit", needed_bytes=needed)
            else:
                fitting.append(cell)
        if fitting and time.time() < options.deadline:
            fitting = _compare_model(options, size, result.platform, config, rows, fitting, python)
        left += map(describe, fitting)
    return left


def _compare_model(
    options: Options,
    size: Size,
    platform: str,
    config: DecoderConfig,
    rows: Rows,
    cells: list[Cell],
    python: str,
) -> list[Cell]:
    """Add rows of one model's cells; returns the cells that are left."""
    try:
        if platform not in _DEVICES:
            raise Missing(f"transformers is not run on {platform}")
        peer = Peer(python, _DEVICES[platform], size.dtype, config)
    except Missing as error:
        print(f"transformers: {error}", flush=True)
        for cell in cells:
            rows.add(cell, SKIPPED, reason=str(error))
        return []
    try:
        for number, cell in enumerate(cells):
            if time.time() >= options.deadline:
                return cells[number:]
            print(f"{describe(cell)}: compiling and measuring", flush=True)
            answer = peer.ask(
                batch=cell["batch"],
                context=cell["context"],
                new_tokens=size.peer_tokens,
                runs=size.runs,
            )
            if "error" in answer:
                full = "out of memory" in answer["error"]
                rows.add(cell, NO_MEMORY if full else FAILED, reason=answer["error"])
                print(f"    {answer['error']}", flush=True)
                if answer["error"] == "the peer process ended":
                    return cells[number + 1 :]
                continue
            round_s = median(answer["round_s"])
            rate = cell["batch"] / round_s
            values = {"round_s": round_s, "tokens_per_second": rate, **peer.versions}
            rows.add(cell, MEASURED, date=time.strftime("%Y-%m-%d"), **values)
            print(f"    {round_s:.3g} s per token, {rate:.1f} tokens/s", flush=True)
    finally:
        peer.close()
    return []


def _cells(name: str, config: DecoderConfig, size: Size) -> Iterator[Cell]:
    about = {"kind": "transformers", "model": name, "layers": config.num_layers}
    groups = [(batch, context) for batch in size.batches for context in size.contexts]
    for batch, context in sorted(groups, key=lambda group: (group[0] * group[1], group)):
        yield {**about, "batch": batch, "context": context}
