"""Measure the speed-ups of drafters over plain decoding, and compare with predictions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, variance
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

from specjax import metrics
from specjax.apps.run.predicted_speedup import measure_round_costs
from specjax.apps.run.ways import speedup_of, turn_order
from specjax.drafters import LoadedDrafter
from specjax.engine.engine import Engine
from specjax.engine.generate import Generation, decode_requests, open_engine
from specjax.engine.options import AUTO, FIXED, DecodeOptions
from specjax.engine.outputs import failure_message
from specjax.engine.plan import DecodePlan, plan_requests
from specjax.engine.requests import Request, SamplingParams, groups
from specjax.errors import InputError
from specjax.files.log import share_logger
from specjax.loading.model import Model

UNRESOLVED = 0.03
"""The relative half-width above which a confidence interval is too wide to be meaningful."""
_QUANTILE = 0.975
"""The quantile of Student's t at the upper end of a 95 % interval."""


class Ratio(NamedTuple):
    """A geometric mean of ratios, with its 95 % confidence interval from repeats."""

    mean: float
    low: float
    high: float

    @property
    def resolved(self) -> bool:
        """Whether both ends of the interval are within the factor 1 + `UNRESOLVED` of the mean."""
        widest = 1 + UNRESOLVED
        return self.high <= widest * self.mean and self.mean <= widest * self.low

    def __str__(self) -> str:
        text = f"{self.mean:.3f} [{self.low:.3f}..{self.high:.3f}]"
        return text if self.resolved else f"{text} unresolved"


@dataclass(frozen=True)
class Speedup:
    """The speed of a drafter compared with plain decoding, at a batch size and temperature.

    `acceptance_length` is in tokens per pass of the target, `mean_draft` in draft tokens per pass,
    and `share_drafted` is the fraction of passes with a draft. `speedup` is the ratio of tokens/s
    without prefill, `speedup_with_prefill` with it. `identical` says whether greedy tokens are
    equal, and is None for sampled ones. `predicted` is the speed-up computed from parts of a round
    that are timed alone, among them a draft of `draft_s` seconds; both are None for draft lengths
    that depend on costs. `possible_speedup` is the largest speed-up that the tokens per pass allow,
    None for plain decoding.
    """

    drafter: str
    num_speculative_tokens: int | str
    batch: int
    temperature: float
    acceptance_length: float
    mean_draft: float
    share_drafted: float
    tokens_per_second: float
    plain_tokens_per_second: float
    speedup: Ratio
    speedup_with_prefill: Ratio
    identical: bool | None
    predicted: float | None = None
    draft_s: float | None = None
    possible_speedup: float | None = None

    @property
    def efficiency(self) -> float | None:
        """The measured speed-up divided by the predicted one; None without a prediction."""
        return None if self.predicted is None else self.speedup.mean / self.predicted


def measure_speedups(
    model: Model,
    ids: Sequence[Sequence[int]],
    drafters: Mapping[str, LoadedDrafter | None],
    *,
    num_speculative_tokens: int | str = FIXED,
    batch_size: int,
    temperature: float = 0.0,
    max_new_tokens: int,
    repeats: int,
) -> list[Speedup]:
    """Decode batches plainly and with each of `drafters`; return a result for each drafter.

    `ids` are the token ids of the prompts. A drafter of None is plain decoding by another engine;
    the distance of its ratio from 1 shows how reliable ratios are on this machine.

    Every repeat decodes a batch in all ways in turn (`turn_order`). All engines exist at once, each
    with its caches. All rows emit `max_new_tokens`. Prompts are repeated to fill the last batch.
    Raises InputError if a row fails.
    """
    rows = -(-len(ids) // batch_size) * batch_size
    prompts = list(itertools.islice(itertools.cycle(ids), rows))
    # Rows have equal lengths, since sampled rows would end at different lengths in each way of
    # decoding, and slots that stay empty until the last row ends would make that way look slow.
    sampling = SamplingParams(
        temperature=temperature, max_new_tokens=max_new_tokens, ignore_eos=True
    )
    options = DecodeOptions(num_speculative_tokens=num_speculative_tokens, batch_size=batch_size)
    planned = [
        plan_requests(
            model,
            prompts,
            drafter=drafter,
            options=options if drafter is not None else options.without_drafts(),
            sampling=sampling,
        )
        for drafter in (None, *drafters.values())
    ]
    plans, (requests, *_) = zip(*planned, strict=True)
    engines = [open_engine(plan) for plan in plans]
    batches = groups(requests, batch_size)
    runs: list[list[list[Generation]]] = [[] for _ in batches]
    calls, log = itertools.count(1), share_logger("decoding")
    for number in range(repeats + 1):
        order = turn_order(len(plans), number)
        for batch, of_batch in zip(batches, runs, strict=True):
            decoded = {}
            for way in order:
                decoded[way] = _decode(plans[way], engines[way], batch)
                log(next(calls) / ((repeats + 1) * len(batches) * len(plans)))
            if number:  # the first repeat is a warm-up
                of_batch.append([decoded[way] for way in range(len(plans))])
    results = []
    for way, label in enumerate(drafters, 1):
        pairs = [[(repeat[0], repeat[way]) for repeat in batch] for batch in runs]
        every = [pair for batch in pairs for pair in batch]
        plain, ours = zip(*every, strict=True)
        drafted, accepted, emitted = (
            np.concatenate([getattr(run, name).ravel() for run in ours])[None]
            for name in ("drafted", "accepted", "emitted")
        )
        predicted, draft_s = None, None
        if drafters[label] is not None and num_speculative_tokens != AUTO:
            parts = measure_round_costs(plans[way], requests, max_new_tokens)
            widths = np.concatenate([run.passes()[0] for run in ours])
            predicted, draft_s = (
                parts.speedup(metrics.tokens_per_round(emitted), widths),
                parts.draft_s,
            )
        identical = all(slow.token_ids == fast.token_ids for slow, fast in every)
        results.append(
            Speedup(
                drafter=label,
                num_speculative_tokens=num_speculative_tokens,
                batch=batch_size,
                temperature=temperature,
                acceptance_length=metrics.acceptance_length(accepted),
                mean_draft=float(drafted[drafted >= 0].mean()),
                share_drafted=float((drafted[drafted >= 0] > 0).mean()),
                tokens_per_second=_speed(ours),
                plain_tokens_per_second=_speed(plain),
                speedup=speed_ratio(pairs),
                speedup_with_prefill=speed_ratio(pairs, with_prefill=True),
                identical=None if temperature else identical,
                predicted=predicted,
                draft_s=draft_s,
                possible_speedup=None if drafters[label] is None else _possible_speedup(ours),
            )
        )
    return results


def _decode(plan: DecodePlan, engine: Engine, requests: Sequence[Request]) -> Generation:
    """Decode some requests in the engine of a plan; raise InputError if a row fails."""
    result = decode_requests(plan, requests, engine=engine)
    failed = {f"prompts[{row}]": failure for row, failure in result.failed_rows.items()}
    if failed:
        raise InputError(failure_message(plan.model, failed))
    return result


def speed_ratio(
    batches: Iterable[Sequence[tuple[Generation, Generation]]], *, with_prefill: bool = False
) -> Ratio:
    """Return the geometric mean over batches of a drafter's speed divided by plain decoding's.

    Each batch is a list of pairs of results, (plain, drafter's), one pair per repeat; the spread
    over repeats gives the confidence interval. Variances differ between batches, so the degrees of
    freedom are those of Welch and Satterthwaite: at least one batch's repeats less one, at most the
    sum of that over batches.
    """
    means, errors, weights = [], [], []
    for pairs in batches:
        logs = [math.log(speedup_of(*pair, with_prefill=with_prefill)) for pair in pairs]
        means.append(fmean(logs))
        errors.append(variance(logs) / len(logs) if len(logs) > 1 else math.inf)
        weights.append(errors[-1] ** 2 / max(len(logs) - 1, 1))
    mean, error = fmean(means), math.sqrt(sum(errors)) / len(means)
    if 0 < error < math.inf:
        error *= stdtrit(sum(errors) ** 2 / sum(weights), _QUANTILE)
    return Ratio(math.exp(mean), math.exp(mean - error), math.exp(mean + error))


def _possible_speedup(runs: Sequence[Generation]) -> float:
    """Return the geometric mean over results of the largest acceptance length of a row.

    A round costs at least a pass of plain decoding, and a batch ends with its longest row.
    """
    taus = ([metrics.acceptance_length(row) for row in run.accepted[:, None]] for run in runs)
    return math.exp(fmean(math.log(max(of_rows)) for of_rows in taus))


def _speed(runs: Sequence[Generation]) -> float:
    """Return the tokens per second of several results together, without prefill."""
    return sum(run.new_tokens for run in runs) / sum(run.decode_s for run in runs)
