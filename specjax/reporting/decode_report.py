"""The report of a decode run: rows and summary as JSON, from the counts of finished batches."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from specjax import metrics
from specjax.decoding.compare_outputs import Difference
from specjax.decoding.generate import Generation
from specjax.decoding.prompts import Question
from specjax.files.environment import versions
from specjax.trees import FastestTree, RankedTree


@dataclass(frozen=True)
class Batch:
    """A finished group of rows: its questions, the drafter's generation, and plain decoding's.

    `differences` has one entry per row, None where the two agree; it is None where the outputs are
    not compared. `number` is the group's index in the run.
    """

    number: int
    turn: int
    questions: Sequence[Question]
    ours: Generation
    plain: Generation | None = None
    differences: Sequence[Difference | None] | None = None


@dataclass
class DrafterRun:
    """What one drafter has decoded so far, of all that a command decodes.

    `config` is that of a command with this drafter alone, and `trees` are those that were chosen
    for it, by drafter, with what is expected of them where that is known. `expected` is the
    acceptance that the distributions imply, turn by turn, where it is computed. `engines` are
    summaries (`engine_report.engine_summary`) of what decoded each turn.
    """

    drafter: str
    config: Mapping[str, Any]
    trees: Mapping[str, FastestTree | RankedTree] = field(default_factory=dict)
    batches: list[Batch] = field(default_factory=list)
    expected: list[metrics.ExpectedAcceptance] = field(default_factory=list)
    engines: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def auto(self) -> bool:
        """Whether draft lengths are chosen while decoding."""
        return self.config.get("num_speculative_tokens") == "auto"

    def total(self) -> Totals:
        """The totals of the finished batches."""
        return total(self.batches, self.expected)


@dataclass(frozen=True)
class Setting:
    """Settings of the whole command."""

    device: str
    dtype: str
    load_s: float
    turns: bool = False
    """Whether rows have the field `turn`, the turn of a conversation."""


PLAIN = "plain"
"""The name of plain decoding beside those of drafters."""


@dataclass
class Clock:
    """Seconds, summed up during the command; those of compiling by drafter, or `PLAIN`."""

    compile_s: dict[str, float] = field(default_factory=dict)
    first_token_s: float | None = None

    def compiled(self, name: str, seconds: float) -> None:
        """Add seconds of compiling."""
        self.compile_s[name] = self.compile_s.get(name, 0.0) + seconds


@dataclass(frozen=True)
class Totals:
    """Totals over the finished batches; speeds are new tokens over seconds of decoding.

    `speedup_with_prefill` counts the seconds of prefill on both sides.
    """

    metrics: metrics.Summary | None
    tokens_per_second: float | None
    baseline_tokens_per_second: float | None
    speedup: float | None
    identical_rows: int | None
    compared_rows: int
    num_rows: int
    speedup_with_prefill: float | None = None
    prefill_s: float | None = None
    baseline_prefill_s: float | None = None
    differences: Sequence[tuple[Question, Difference]] = ()
    acceptance_of_tested: float | None = None
    """Accepted over tested draft tokens; tested are the accepted ones and the first rejected."""
    expected: metrics.ExpectedAcceptance | None = None
    """The acceptance that the run's distributions imply, where that was computed."""


def total(batches: Sequence[Batch], expected: Sequence[metrics.ExpectedAcceptance] = ()) -> Totals:
    """The totals of finished batches; speed-ups are over those with plain decoding too."""
    both = [batch for batch in batches if batch.plain is not None]
    all_ours, all_plain = [b.ours for b in both], [b.plain for b in both]
    ours, plain = _speed(all_ours), _speed(all_plain)
    whole = _speed(all_ours, _prefill_s(all_ours))
    whole_plain = _speed(all_plain, _prefill_s(all_plain))
    compared = [batch for batch in batches if batch.differences is not None]
    pairs = [
        (question, difference)
        for batch in compared
        for question, difference in zip(batch.questions, batch.differences, strict=True)
    ]
    return Totals(
        metrics=_summarize([batch.ours for batch in batches]),
        tokens_per_second=_speed([batch.ours for batch in batches]),
        baseline_tokens_per_second=plain,
        speedup=ours / plain if ours and plain else None,
        identical_rows=sum(difference is None for _, difference in pairs) if compared else None,
        compared_rows=len(pairs),
        num_rows=sum(len(batch.questions) for batch in batches),
        speedup_with_prefill=whole / whole_plain if whole and whole_plain else None,
        prefill_s=_prefill_s([batch.ours for batch in batches]) if batches else None,
        baseline_prefill_s=_prefill_s(all_plain) if both else None,
        differences=[(question, one) for question, one in pairs if one is not None],
        acceptance_of_tested=_tested([batch.ours for batch in batches]),
        expected=_pooled(expected),
    )


def report(
    runs: Sequence[DrafterRun],
    setting: Setting,
    clock: Clock,
    *,
    interrupted: bool = False,
    refused: str | None = None,
) -> dict[str, Any]:
    """The report, JSON-ready: that of the only drafter, or `runs` with one of each.

    Rows of several drafters have the same plain decoding beside them. An interrupted run says so;
    `refused` is the error of a later turn that could not be decoded, where there was one.
    """
    reports = [_report(run, setting, clock, interrupted, refused) for run in runs]
    return reports[0] if len(reports) == 1 else {"runs": reports}


def _report(
    run: DrafterRun, setting: Setting, clock: Clock, interrupted: bool, refused: str | None
) -> dict[str, Any]:
    totals, batches = run.total(), run.batches
    counts = totals.metrics
    summary = {
        "drafter": run.drafter,
        "acceptance_length": counts.acceptance_length if counts else None,
        "tau_drafted": counts.tau_drafted if counts else None,
        "acceptance_rate": counts.acceptance_rate if counts else None,
        "acceptance_at_pos": list(counts.acceptance_at_pos) if counts else [],
        "expected_acceptance": totals.expected.mean if totals.expected else None,
        "tokens_per_second": totals.tokens_per_second,
        "baseline_tokens_per_second": totals.baseline_tokens_per_second,
        "speedup": totals.speedup,
        "speedup_with_prefill": totals.speedup_with_prefill,
        "prefill_s": totals.prefill_s,
        "baseline_prefill_s": totals.baseline_prefill_s,
        "identical_rows": totals.identical_rows,
        "num_rows": totals.num_rows,
        "load_s": setting.load_s,
        "compile_s": sum(clock.compile_s.get(name, 0.0) for name in (PLAIN, run.drafter)),
        "first_token_s": clock.first_token_s,
        "device": setting.device,
        "dtype": setting.dtype,
        "versions": versions(),
        "prompts": _fingerprint(batches),
        "step_limits": [
            [list(limits.longest), list(limits.confidence), rounds]
            for batch in batches
            for limits, rounds in batch.ours.step_limits
        ],
        "engines": [run.engines[turn] for turn in sorted(run.engines)],
        "config": run.config,
    }
    if run.trees:
        summary["trees"] = {name: _tree(chosen) for name, chosen in run.trees.items()}
    if any(batch.ours.lossy for batch in batches):
        summary["lossy"] = True
    if interrupted:
        summary["interrupted"] = True
    if refused is not None:
        summary["refused"] = refused
    rows = [row for batch in batches for row in _rows(batch, run.drafter, setting)]
    return {"rows": rows, "summary": summary}


def _tree(chosen: FastestTree | RankedTree) -> dict[str, Any]:
    """A chosen tree, and what is expected of it in each row, where that is known."""
    if isinstance(chosen, RankedTree):
        return {"choices": [list(path) for path in chosen.choices]}
    return {
        **_tree(chosen.tree),
        "expected_tokens_per_round": chosen.tokens_per_round,
        "expected_round_s": chosen.round_seconds,
    }


def device_name(mesh: Mesh | None = None) -> str:
    """The kind of device that JAX computes on; with a mesh, also their number and its shape."""
    kind = jax.devices()[0].device_kind
    if mesh is None:
        return kind
    sizes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
    several = f" in {jax.process_count()} processes" if jax.process_count() > 1 else ""
    return f"{mesh.size} x {kind} ({sizes}){several}"


def largest_size(num_rows: int, new_tokens: int, *, logprobs: bool) -> int:
    """An upper estimate of a report's bytes: ids, counts and text of each token of each row."""
    token = 32 + 24 * logprobs
    return 16_000 + num_rows * (1_500 + token * new_tokens)


def _rows(batch: Batch, drafter: str, setting: Setting) -> list[dict[str, Any]]:
    lengths = metrics.accept_lengths(batch.ours.emitted)
    rows = []
    for index, question in enumerate(batch.questions):
        difference = batch.differences[index] if batch.differences is not None else None
        row = {
            "question_id": question.question_id,
            "category": question.category,
            "drafter": drafter,
            "token_ids": batch.ours.token_ids[index],
            "text": batch.ours.texts[index],
            "new_tokens": len(batch.ours.token_ids[index]),
            "finish_reason": batch.ours.finish_reasons[index],
            "accept_lengths": lengths[index],
            "rounds": _rounds(batch.ours, index),
            "prefill_s": batch.ours.prefill_s,
            "decode_s": batch.ours.decode_s,
            "batch": batch.number,
            "first_round": int(batch.ours.first_round[index]),
            **dataclasses.asdict(batch.ours.times[index]),
            "plain": None if batch.plain is None else _plain(batch.plain, index),
            "identical": None if batch.differences is None else difference is None,
            **_closeness(difference),
        }
        if batch.ours.logprobs[index] is not None:
            row["logprobs"] = batch.ours.logprobs[index]
        if setting.turns:
            row["turn"] = batch.turn
        rows.append(row)
    return rows


def _closeness(difference: Difference | None) -> dict[str, Any]:
    """Where a row differs from plain decoding, and how close the calls were there."""
    decisive = None if difference is None else difference.decisive
    near_ties = () if difference is None else difference.near_ties
    return {
        "first_difference": None if difference is None else difference.first,
        "margin_at_difference": None if decisive is None else decisive.margin,
        "resolution_at_difference": None if decisive is None else decisive.resolution,
        "near_ties": [dataclasses.asdict(one) for one in near_ties],
    }


def _rounds(run: Generation, index: int) -> dict[str, list[int]]:
    """The raw counts of the rounds in which a row was active; emitted is `accept_lengths`."""
    participated = run.emitted[index] >= 0
    names = ("drafted", "accepted", "width", "drafter")
    return {name: getattr(run, name)[index][participated].tolist() for name in names}


def _plain(run: Generation, index: int) -> dict[str, Any]:
    """Tokens and seconds of plain decoding for a row; seconds are those of its group."""
    return {
        "new_tokens": len(run.token_ids[index]),
        "prefill_s": run.prefill_s,
        "decode_s": run.decode_s,
    }


def _fingerprint(batches: Sequence[Batch]) -> str:
    """A hash of the questions, independent of the file they came from."""
    asked = [
        (batch.turn, question.question_id, question.category, question.turns)
        for batch in batches
        for question in batch.questions
    ]
    return hashlib.sha256(repr(asked).encode()).hexdigest()[:16]


def _prefill_s(runs: Sequence[Generation]) -> float:
    """Seconds of prefill."""
    return sum(run.prefill_s for run in runs)


def _speed(runs: Sequence[Generation], more_s: float = 0.0) -> float | None:
    """Tokens/s of decoding, and of `more_s` further seconds."""
    seconds = sum(run.decode_s for run in runs) + more_s
    return sum(run.new_tokens for run in runs) / seconds if seconds else None


def _summarize(runs: Sequence[Generation]) -> metrics.Summary | None:
    if not runs:
        return None
    longest = max(run.drafted.shape[1] for run in runs)

    def joined(name: str) -> np.ndarray:
        arrays = [getattr(run, name) for run in runs]
        padded = [
            np.pad(a, ((0, 0), (0, longest - a.shape[1])), constant_values=-1) for a in arrays
        ]
        return np.concatenate(padded)

    return metrics.summarize(
        *(joined(name) for name in ("drafted", "accepted", "emitted", "width")),
        max((run.longest_path for run in runs if run.longest_path is not None), default=None),
    )


def _tested(runs: Sequence[Generation]) -> float | None:
    accepted = sum(int(np.maximum(run.accepted, 0).sum()) for run in runs)
    tested = sum(
        int(np.maximum(np.minimum(run.accepted + 1, run.drafted), 0).sum()) for run in runs
    )
    return accepted / tested if tested else None


def _pooled(turns: Sequence[metrics.ExpectedAcceptance]) -> metrics.ExpectedAcceptance | None:
    """The mean over all nodes of all turns, whose errors are assumed to be independent."""
    turns = [one for one in turns if one.num_nodes]
    if len(turns) < 2:
        return turns[0] if turns else None
    nodes = sum(one.num_nodes for one in turns)

    def error(name: str) -> float | None:
        errors = [getattr(one, name) for one in turns]
        if None in errors:
            return None
        weighed = [one.num_nodes * each for one, each in zip(turns, errors, strict=True)]
        return float(np.hypot.reduce(weighed)) / nodes

    mean = sum(one.mean * one.num_nodes for one in turns) / nodes
    return metrics.ExpectedAcceptance(mean, error("standard_error"), error("decision_error"), nodes)
