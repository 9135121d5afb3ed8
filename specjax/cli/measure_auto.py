"""Whether draft lengths that follow costs ever lose: "auto" against plain decoding, in cells."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, variance
from typing import NamedTuple

from specjax.decoding.executor import compile_session, learn_costs, run_batch
from specjax.decoding.learned_costs import LearnedCosts
from specjax.decoding.options import DecodeOptions
from specjax.decoding.plan import Programs, Session, plan_session
from specjax.decoding.sampling_params import SamplingParams
from specjax.drafters import LoadedDrafter
from specjax.loading.model import Model

UNRESOLVED = 0.03
"""An interval that is wider to either side says nothing."""
_CONFIDENCE = 1.96
"""Standard errors of a 95 % interval."""


class Ratio(NamedTuple):
    """A geometric mean of ratios, and its 95 % interval from the spread of the repeats."""

    mean: float
    low: float
    high: float

    @property
    def resolved(self) -> bool:
        """Whether the interval is narrow enough to say something."""
        return max(self.high / self.mean, self.mean / self.low) - 1 <= UNRESOLVED


@dataclass(frozen=True)
class Cell:
    """How "auto" does against plain decoding with one drafter, batch size and temperature.

    `decoding` is the ratio of tokens/s without prefill, `whole` with prefill; `measure_s` are the
    seconds of the rounds that measured costs, in a first run that does not count. `identical` says
    whether greedy tokens are.
    """

    drafter: str
    batch: int
    temperature: float
    tokens_per_second: float
    plain_tokens_per_second: float
    decoding: Ratio
    whole: Ratio
    acceptance_length: float
    mean_draft: float
    measure_s: float
    identical: bool | None


class _Run(NamedTuple):
    tokens: int
    prefill_s: float
    decode_s: float
    rounds: int
    drafted: int
    token_ids: list[list[int]]


def measure_cell(
    model: Model,
    ids: Sequence[Sequence[int]],
    drafter: LoadedDrafter,
    *,
    label: str,
    batch_size: int,
    temperature: float,
    max_new_tokens: int,
    repeats: int,
) -> Cell:
    """Decode batch after batch plainly and with "auto", in turn, `repeats` times over.

    Too few prompts for the last batch are repeated.
    """
    rows = -(-len(ids) // batch_size) * batch_size
    prompts = list(itertools.islice(itertools.cycle(ids), rows))
    requests = SamplingParams(temperature=temperature, max_new_tokens=max_new_tokens)
    options = DecodeOptions(num_speculative_tokens="auto", batch_size=batch_size)
    plain = plan_session(model, prompts, options=options.without_drafts(), requests=requests)
    auto = plan_session(model, prompts, drafter=drafter, options=options, requests=requests)
    programs = [compile_session(session) for session in (plain, auto)]
    learned = learn_costs(auto)
    runs: dict[int, list[tuple[_Run, _Run]]] = {}
    for number in range(repeats + 1):
        for at, index in enumerate(auto.batches()):
            pair = tuple(
                _decode(session, program, index, known)
                for session, program, known in zip(
                    (plain, auto), programs, (None, learned), strict=True
                )
            )
            if number:  # the first one warms up
                runs.setdefault(at, []).append(pair)
    if learned is not None:
        learned.save()
    every = [pair for pairs in runs.values() for pair in pairs]
    ours = [pair[1] for pair in every]
    return Cell(
        drafter=label,
        batch=batch_size,
        temperature=temperature,
        tokens_per_second=_speed(ours),
        plain_tokens_per_second=_speed([pair[0] for pair in every]),
        decoding=_ratio(runs.values(), whole=False),
        whole=_ratio(runs.values(), whole=True),
        acceptance_length=sum(run.tokens for run in ours) / sum(run.rounds for run in ours),
        mean_draft=sum(run.drafted for run in ours) / sum(run.rounds for run in ours),
        measure_s=learned.measure_s if learned is not None else 0.0,
        identical=(
            None if temperature else all(slow.token_ids == fast.token_ids for slow, fast in every)
        ),
    )


def _decode(
    session: Session, programs: Programs, index: list[int], learned: LearnedCosts | None
) -> _Run:
    for snapshot in run_batch(session, programs, index, session.plan.max_rounds, learned):
        last = snapshot
    emitted, drafted = last.rounds.emitted, last.rounds.drafted
    new = [
        last.tokens[row, len(session.prompts[prompt]) : last.lengths[row]].tolist()
        for row, prompt in enumerate(index)
    ]
    return _Run(
        sum(map(len, new)),
        last.prefill_s,
        last.decode_s,
        int((emitted > 0).sum()),
        int(drafted[drafted > 0].sum()),
        new,
    )


def _speed(runs: Sequence[_Run]) -> float:
    return sum(run.tokens for run in runs) / sum(run.decode_s for run in runs)


def _ratio(batches: Iterable[list[tuple[_Run, _Run]]], *, whole: bool) -> Ratio:
    """The geometric mean of auto / plain over batches; its error is that of the repeats."""

    def seconds_per_token(run: _Run) -> float:
        return (run.decode_s + whole * run.prefill_s) / run.tokens

    means, errors = [], []
    for pairs in batches:
        logs = [math.log(seconds_per_token(a) / seconds_per_token(b)) for a, b in pairs]
        means.append(fmean(logs))
        errors.append(variance(logs) / len(logs) if len(logs) > 1 else math.inf)
    mean = fmean(means)
    error = _CONFIDENCE * math.sqrt(sum(errors)) / len(means)
    return Ratio(math.exp(mean), math.exp(mean - error), math.exp(mean + error))
