"""The report of a decode run: a row a prompt, and a summary."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from specjax import metrics
from specjax.errors import InputError, one_line
from specjax.generation import Generation

EXCUSED_MARGIN = 1e-4
"""A top-2 margin below which float32 rounding may pick the other token (DESIGN: exactness)."""


@dataclass(frozen=True)
class Row:
    """One prompt's output; `identical` is None where a random rule makes the question meaningless."""

    question_id: int | str
    category: str
    turn: int
    drafter: str
    token_ids: list[int]
    text: str
    finish_reason: str
    new_tokens: int
    accept_lengths: list[int]
    prefill_s: float
    decode_s: float
    batch: int
    logprobs: list[float] | None = None
    identical: bool | None = None
    first_difference: int | None = None
    margin_at_difference: float | None = None

    @property
    def wrong(self) -> bool:
        """Whether the row differs from plain decoding by more than a near-tie."""
        margin = self.margin_at_difference
        return self.identical is False and not (margin is not None and margin < EXCUSED_MARGIN)


@dataclass
class Totals:
    """Raw counts and seconds, collected batch by batch."""

    tokens: int = 0
    decode_s: float = 0.0
    prefill_s: float = 0.0
    counts: list[Generation] = field(default_factory=list)

    def add(self, result: Generation) -> None:
        """Add one batch."""
        self.tokens += result.new_tokens
        self.decode_s += result.total_decode_s
        self.prefill_s += max(result.prefill_s)
        self.counts.append(result)

    @property
    def tokens_per_second(self) -> float | None:
        """New tokens over seconds of decoding."""
        return self.tokens / self.decode_s if self.decode_s else None

    def summary(self) -> metrics.Summary | None:
        """Acceptance over all batches."""
        if not self.counts:
            return None
        most = max(result.drafted.shape[1] for result in self.counts)
        stacked = [
            np.concatenate(
                [
                    np.pad(
                        getattr(result, name),
                        ((0, 0), (0, most - getattr(result, name).shape[1])),
                        constant_values=-1,
                    )
                    for result in self.counts
                ]
            )
            for name in ("drafted", "accepted", "emitted", "width")
        ]
        return metrics.summarize(*stacked)


def rows_of(
    result: Generation, questions: Sequence[Any], turn: int, drafter: str, batch: int
) -> list[Row]:
    """A row for each prompt of a result."""
    lengths = metrics.accept_lengths(result.emitted)
    return [
        Row(
            question_id=question.question_id,
            category=question.category,
            turn=turn,
            drafter=drafter,
            token_ids=result.token_ids[i],
            text=result.texts[i],
            finish_reason=result.finish_reasons[i],
            new_tokens=len(result.token_ids[i]),
            accept_lengths=lengths[i],
            prefill_s=result.prefill_s[i],
            decode_s=result.decode_s[i],
            batch=batch,
            logprobs=result.logprobs[i],
        )
        for i, question in enumerate(questions)
    ]


def summarize(
    rows: Sequence[Row], drafted: Totals, plain: Totals, facts: Mapping[str, Any]
) -> dict[str, Any]:
    """The summary of a run; `facts` are what the caller knows besides."""
    counts = drafted.summary()
    rate, base = drafted.tokens_per_second, plain.tokens_per_second
    judged = [row for row in rows if row.identical is not None]
    return {
        "drafter": rows[0].drafter if rows else None,
        "acceptance_length": counts and counts.acceptance_length,
        "tau_drafted": counts and counts.tau_drafted,
        "acceptance_rate": counts and counts.acceptance_rate,
        "acceptance_at_pos": counts and list(counts.acceptance_at_pos),
        "tokens_per_round": counts and counts.tokens_per_round,
        "tokens_per_second": rate,
        "baseline_tokens_per_second": base,
        "speedup": rate / base if rate and base else None,
        "identical_rows": sum(bool(row.identical) for row in judged) if judged else None,
        "num_rows": len(rows),
        **facts,
    }


def versions() -> dict[str, str]:
    """The versions that a result depends on."""
    packages = ("specjax", "jax", "jaxlib", "flax", "numpy")
    return {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
    }


def check_writable(path: str | os.PathLike) -> None:
    """Raise InputError unless a report can be written there; nothing is left behind."""
    folder = Path(path).expanduser().resolve().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK) or Path(path).is_dir():
        raise InputError(f"report={str(path)!r} cannot be written: name a file in a folder of yours")


def write(path: str | os.PathLike, rows: Sequence[Row], summary: Mapping[str, Any]) -> None:
    """Write the report as JSON, whole or not at all."""
    target = Path(path).expanduser().resolve()
    text = json.dumps({"rows": [asdict(row) for row in rows], "summary": summary}, indent=1)
    try:
        with tempfile.NamedTemporaryFile("w", dir=target.parent, delete=False) as file:
            file.write(text)
        os.replace(file.name, target)
    except OSError as error:
        raise InputError(f"report={str(path)!r} cannot be written: {one_line(error)}") from None
