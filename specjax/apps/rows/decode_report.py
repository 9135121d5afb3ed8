"""The report of a decode run: a row for each answer, and a summary for each drafter."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import jax
from jax.sharding import Mesh

from specjax import metrics
from specjax.apps.rows.records import DecodedRow, RunHeader
from specjax.apps.rows.statistics import Figures, figures
from specjax.apps.rows.weight_reads import weight_bandwidth
from specjax.engine.generate import Generation
from specjax.trees import FastestTree, RankedTree

PLAIN = "plain"
"""The name that reports use for plain decoding, where others name a drafter."""


@dataclass
class DrafterRun:
    """The results of one drafter so far, over all prompts that a command decodes.

    `trees` are the trees that `tree.kind=auto` chose, by the name of the drafter that drafts them.
    `rows` are the finished answers. `expected` is the acceptance that the distributions of target
    and drafter imply, None if it was not computed. `engine` is the summary of its engine
    (`statistics.engine_summary`). `step_limits` has for each step the longest draft and the least
    confidence of each drafter, and the number of rounds. `num_reported` counts the rows that
    `new_records` has returned; -1 before the header.
    """

    header: RunHeader
    trees: Mapping[str, FastestTree | RankedTree] = field(default_factory=dict)
    rows: list[DecodedRow] = field(default_factory=list)
    expected: metrics.ExpectedAcceptance | None = None
    engine: dict[str, Any] | None = None
    step_limits: list[tuple[Sequence[int], Sequence[float], int]] = field(default_factory=list)
    num_reported: int = -1
    """The number of rows in records so far; -1 before the first record, which is the header."""

    @property
    def drafter(self) -> str:
        """The name of the drafter."""
        return self.header.drafter

    def new_records(self) -> list[dict[str, Any]]:
        """Return records since the last call, JSON-ready: first the header, then finished rows."""
        header = {"record": "run", **self.header.record()}
        rows = self.rows[max(self.num_reported, 0) :]
        records = [header] if self.num_reported < 0 else []
        self.num_reported = len(self.rows)
        return [*records, *({"record": "row", **asdict(row)} for row in rows)]

    def figures(self) -> Figures | None:
        """Return the figures of the finished rows, or None if there are none."""
        return figures(self.rows) if self.rows else None

    def add(self, result: Generation, rows: Sequence[DecodedRow]) -> None:
        """Add the rows that were decoded together as one group, and the steps of their result."""
        self.step_limits += [
            (limits.longest, limits.confidence, rounds) for limits, rounds in result.step_limits
        ]
        self.rows += rows


@dataclass
class Clock:
    """Times of a command, in seconds.

    `begin` is when it started, by `time.perf_counter`. `compile_s` has the seconds of compiling by
    drafter or `PLAIN`. `first_token_s` is the time from `begin` until the first new token; None
    before.
    """

    begin: float = field(default_factory=time.perf_counter)
    load_s: float = 0.0
    compile_s: dict[str, float] = field(default_factory=dict)
    first_token_s: float | None = None

    def compiled(self, name: str, seconds: float) -> None:
        """Add `seconds` to the time of compiling of the drafter `name`, or of `PLAIN`."""
        self.compile_s[name] = self.compile_s.get(name, 0.0) + seconds


def summary(
    run: DrafterRun,
    clock: Clock,
    *,
    interrupted: bool = False,
    refused: str | None = None,
    memory_bandwidth: float | None = None,
) -> dict[str, Any]:
    """Return the summary record of a drafter, JSON-ready, with the fields of `records.RunEnd`.

    `interrupted` says that some prompts were not answered, and `refused` is the error of a turn
    that could not be decoded. `memory_bandwidth` is what the machine's memory moves in bytes per
    second.
    """
    figures_so_far, expected = run.figures(), run.expected
    reads = weight_bandwidth(run.header, figures_so_far) if figures_so_far else None
    return {
        "drafter": run.drafter,
        "interrupted": interrupted,
        "refused": refused,
        "memory_bandwidth": memory_bandwidth,
        "plain_weight_bandwidth": reads,
        "num_rows": len(run.rows),
        **(figures_so_far.to_dict() if figures_so_far else {}),
        "expected_acceptance": expected.mean if expected else None,
        "load_s": clock.load_s,
        "compile_s": sum(clock.compile_s.get(name, 0.0) for name in (PLAIN, run.drafter)),
        "first_token_s": clock.first_token_s,
        "step_limits": run.step_limits,
        "engines": [] if run.engine is None else [run.engine],
    }


def tree_record(chosen: FastestTree | RankedTree) -> dict[str, Any]:
    """Return the record of a chosen tree, JSON-ready, with its predicted speed if known."""
    if isinstance(chosen, RankedTree):
        return {"choices": [list(path) for path in chosen.choices]}
    return {
        **tree_record(chosen.tree),
        "expected_tokens_per_round": chosen.tokens_per_round,
        "expected_round_s": chosen.round_seconds,
    }


def device_name(mesh: Mesh | None = None) -> str:
    """Return the kind of JAX's first device; for a mesh also its size and shape."""
    kind = jax.devices()[0].device_kind
    if mesh is None:
        return kind
    sizes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
    several = f" in {jax.process_count()} processes" if jax.process_count() > 1 else ""
    return f"{mesh.size} x {kind} ({sizes}){several}"
