"""The report of a decode run: rows and summary as JSON, from the counts of finished batches."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from specjax import metrics
from specjax.decoding.compare_outputs import Difference
from specjax.decoding.generate import Generation
from specjax.decoding.prompts import Question


@dataclass(frozen=True)
class Batch:
    """A finished batch: its questions, the drafter's generation, and plain decoding's.

    `differences` has one entry per row, None where the two agree; it is None where the outputs are
    not compared. `number` is the batch's index in the run.
    """

    number: int
    turn: int
    questions: Sequence[Question]
    ours: Generation
    plain: Generation | None = None
    differences: Sequence[Difference | None] | None = None


@dataclass(frozen=True)
class Setting:
    """Settings of the whole run."""

    drafter: str
    device: str
    dtype: str
    config: Mapping[str, Any]
    load_s: float
    turns: bool = False
    """Whether rows have the field `turn`, the turn of a conversation."""


@dataclass
class Clock:
    """Seconds, summed up during the run."""

    compile_s: float = 0.0
    first_token_s: float | None = None


@dataclass(frozen=True)
class Totals:
    """Totals over the finished batches; speeds are new tokens over seconds of decoding."""

    metrics: metrics.Summary | None
    tokens_per_second: float | None
    baseline_tokens_per_second: float | None
    speedup: float | None
    identical_rows: int | None
    compared_rows: int
    num_rows: int
    differences: Sequence[tuple[Question, Difference]] = ()
    acceptance_of_tested: float | None = None
    """Accepted over tested draft tokens; tested are the accepted ones and the first rejected."""
    expected: metrics.ExpectedAcceptance | None = None
    """The acceptance that the run's distributions imply, where that was computed."""


def total(batches: Sequence[Batch], expected: Sequence[metrics.ExpectedAcceptance] = ()) -> Totals:
    """The totals of finished batches; the speed-up is over those with plain decoding too."""
    both = [batch for batch in batches if batch.plain is not None]
    ours, plain = _speed([b.ours for b in both]), _speed([b.plain for b in both])
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
        differences=[(question, one) for question, one in pairs if one is not None],
        acceptance_of_tested=_tested([batch.ours for batch in batches]),
        expected=_pooled(expected),
    )


def report(
    batches: Sequence[Batch],
    totals: Totals,
    setting: Setting,
    clock: Clock,
    *,
    interrupted: bool = False,
    refused: str | None = None,
) -> dict[str, Any]:
    """The report, JSON-ready; an interrupted run says so.

    `refused` is the error of a later turn that could not be decoded, where there was one.
    """
    counts = totals.metrics
    summary = {
        "drafter": setting.drafter,
        "acceptance_length": counts.acceptance_length if counts else None,
        "tau_drafted": counts.tau_drafted if counts else None,
        "acceptance_rate": counts.acceptance_rate if counts else None,
        "acceptance_at_pos": list(counts.acceptance_at_pos) if counts else [],
        "expected_acceptance": totals.expected.mean if totals.expected else None,
        "tokens_per_second": totals.tokens_per_second,
        "baseline_tokens_per_second": totals.baseline_tokens_per_second,
        "speedup": totals.speedup,
        "identical_rows": totals.identical_rows,
        "num_rows": totals.num_rows,
        "load_s": setting.load_s,
        "compile_s": clock.compile_s,
        "first_token_s": clock.first_token_s,
        "device": setting.device,
        "dtype": setting.dtype,
        "versions": versions(),
        "prompts": _fingerprint(batches),
        "config": setting.config,
    }
    if interrupted:
        summary["interrupted"] = True
    if refused is not None:
        summary["refused"] = refused
    return {"rows": [row for b in batches for row in _rows(b, setting)], "summary": summary}


def versions() -> dict[str, str]:
    """The versions that a result depends on."""
    found = {"python": platform.python_version()}
    for name in ("jax", "jaxlib", "flax", "specjax"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


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


def _rows(batch: Batch, setting: Setting) -> list[dict[str, Any]]:
    lengths = metrics.accept_lengths(batch.ours.emitted)
    rows = []
    for index, question in enumerate(batch.questions):
        difference = batch.differences[index] if batch.differences is not None else None
        row = {
            "question_id": question.question_id,
            "category": question.category,
            "drafter": setting.drafter,
            "token_ids": batch.ours.token_ids[index],
            "text": batch.ours.texts[index],
            "new_tokens": len(batch.ours.token_ids[index]),
            "finish_reason": batch.ours.finish_reasons[index],
            "accept_lengths": lengths[index],
            "rounds": _rounds(batch.ours, index),
            "prefill_s": batch.ours.prefill_s[index],
            "decode_s": batch.ours.decode_s[index],
            "batch": batch.number,
            "plain": None if batch.plain is None else _plain(batch.plain, index),
            "identical": None if batch.differences is None else difference is None,
            "first_difference": None if difference is None else difference.first,
            "margin_at_difference": None if difference is None else difference.margin,
            "resolution_at_difference": None if difference is None else difference.resolution,
        }
        if batch.ours.logprobs[index] is not None:
            row["logprobs"] = batch.ours.logprobs[index]
        if setting.turns:
            row["turn"] = batch.turn
        rows.append(row)
    return rows


def _rounds(run: Generation, index: int) -> dict[str, list[int]]:
    """The raw counts of the rounds in which a row was active; emitted is `accept_lengths`."""
    took_part = run.emitted[index] >= 0
    names = ("drafted", "accepted", "width")
    return {name: getattr(run, name)[index][took_part].tolist() for name in names}


def _plain(run: Generation, index: int) -> dict[str, Any]:
    """Tokens and seconds of plain decoding for a row; seconds are those of its batch."""
    return {
        "new_tokens": len(run.token_ids[index]),
        "prefill_s": run.prefill_s[index],
        "decode_s": run.decode_s[index],
    }


def _fingerprint(batches: Sequence[Batch]) -> str:
    """A hash of the questions, independent of the file they came from."""
    asked = [
        (batch.turn, question.question_id, question.category, question.turns)
        for batch in batches
        for question in batch.questions
    ]
    return hashlib.sha256(repr(asked).encode()).hexdigest()[:16]


def _speed(runs: Sequence[Generation]) -> float | None:
    seconds = sum(run.total_decode_s for run in runs)
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
        *(joined(name) for name in ("drafted", "accepted", "emitted", "width"))
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
