"""Whether draft lengths that follow costs ever lose: "auto" against plain decoding, in cells."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, variance
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

from specjax.decoding.generate import Generation, decode_session, open_engine
from specjax.decoding.options import DecodeOptions
from specjax.decoding.sampling_params import SamplingParams
from specjax.decoding.setup import plan_session
from specjax.drafters import LoadedDrafter
from specjax.loading.model import Model

UNRESOLVED = 0.03
"""An interval that is wider to either side says nothing."""
_QUANTILE = 0.975
"""Of Student's t, on either side of a 95 % interval."""


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

    `decoding` is the ratio of tokens/s without prefill, `whole` with prefill. `identical` says
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
    identical: bool | None


def measure_cells(
    model: Model,
    ids: Sequence[Sequence[int]],
    drafters: Mapping[str, LoadedDrafter | None],
    *,
    batch_size: int,
    temperature: float,
    max_new_tokens: int,
    repeats: int,
) -> list[Cell]:
    """Decode batch after batch plainly and with "auto" by each of `drafters`, a cell for each.

    None among the drafters is plain decoding by another engine: how far its ratio is from 1 says
    how far ratios can be trusted here.

    Every repeat decodes a batch in all ways, one after the other; the next one begins with another
    of them, every other one goes backwards. All engines are there at once, each with its caches.
    All rows make `max_new_tokens`. Too few prompts for the last batch are repeated.
    """
    rows = -(-len(ids) // batch_size) * batch_size
    prompts = list(itertools.islice(itertools.cycle(ids), rows))
    # Rows of equal length: sampled ones would end elsewhere in each way of decoding, and slots that
    # are empty until the last row ends would count as slow ones.
    requests = SamplingParams(
        temperature=temperature, max_new_tokens=max_new_tokens, ignore_eos=True
    )
    options = DecodeOptions(num_speculative_tokens="auto", batch_size=batch_size)
    sessions = [
        plan_session(
            model,
            prompts,
            drafter=drafter,
            options=options if drafter is not None else options.without_drafts(),
            requests=requests,
        )
        for drafter in (None, *drafters.values())
    ]
    engines = [open_engine(session) for session in sessions]
    runs: dict[int, list[list[Generation]]] = {}
    for number in range(repeats + 1):
        order = np.roll(range(len(sessions)), -number)[:: 1 if number % 2 else -1]
        for at, index in enumerate(sessions[0].groups(batch_size)):
            made = {
                way: decode_session(sessions[way], index=index, engine=engines[way])
                for way in order
            }
            if number:  # the first one warms up
                runs.setdefault(at, []).append([made[way] for way in range(len(sessions))])
    batches = list(runs.values())
    cells = []
    for way, label in enumerate(drafters, 1):
        pairs = [[(made[0], made[way]) for made in batch] for batch in batches]
        cells.append(_cell(pairs, label, batch_size, temperature))
    return cells


def _cell(
    batches: Sequence[Sequence[tuple[Generation, Generation]]],
    label: str,
    batch_size: int,
    temperature: float,
) -> Cell:
    """The figures of one drafter, from the plain and its generation of each batch and repeat."""
    every = [pair for pairs in batches for pair in pairs]
    ours = [pair[1] for pair in every]
    rounds = sum(int((run.emitted > 0).sum()) for run in ours)
    return Cell(
        drafter=label,
        batch=batch_size,
        temperature=temperature,
        tokens_per_second=_speed(ours),
        plain_tokens_per_second=_speed([pair[0] for pair in every]),
        decoding=_ratio(batches, whole=False),
        whole=_ratio(batches, whole=True),
        acceptance_length=sum(run.new_tokens for run in ours) / rounds,
        mean_draft=sum(int(run.drafted[run.drafted > 0].sum()) for run in ours) / rounds,
        identical=(
            None if temperature else all(slow.token_ids == fast.token_ids for slow, fast in every)
        ),
    )


def _speed(runs: Sequence[Generation]) -> float:
    return sum(run.new_tokens for run in runs) / sum(run.decode_s for run in runs)


def _ratio(batches: Iterable[Sequence[tuple[Generation, Generation]]], *, whole: bool) -> Ratio:
    """The geometric mean of auto / plain over batches; its error is that of the repeats.

    Batches vary unlike each other, so that the degrees of freedom are those of Welch and
    Satterthwaite: from one batch's repeats less one to that of each batch, added up.
    """

    def seconds_per_token(run: Generation) -> float:
        return (run.decode_s + whole * run.prefill_s) / run.new_tokens

    means, errors, weights = [], [], []
    for pairs in batches:
        logs = [math.log(seconds_per_token(a) / seconds_per_token(b)) for a, b in pairs]
        means.append(fmean(logs))
        errors.append(variance(logs) / len(logs) if len(logs) > 1 else math.inf)
        weights.append(errors[-1] ** 2 / max(len(logs) - 1, 1))
    mean, error = fmean(means), math.sqrt(sum(errors)) / len(means)
    if 0 < error < math.inf:
        error *= stdtrit(sum(errors) ** 2 / sum(weights), _QUANTILE)
    return Ratio(math.exp(mean), math.exp(mean - error), math.exp(mean + error))
