"""What passes of a target cost, and one drafter against plain decoding and its prediction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from specjax.decoding.engine.engine import Engine
from specjax.decoding.engine.outputs import failure_message
from specjax.decoding.generate import Generation, decode_session, open_engine
from specjax.decoding.options import DecodeOptions
from specjax.decoding.sampling_params import SamplingParams
from specjax.decoding.setup import Session, plan_session
from specjax.drafters import LoadedDrafter
from specjax.errors import InputError
from specjax.loading.model import Model
from specjax.tuning import costs


@dataclass(frozen=True)
class Comparison:
    """One drafter compared with plain decoding, in alternating runs, and the prediction."""

    drafter: str
    batch: int
    acceptance_length: float
    tokens_per_second: float
    plain_tokens_per_second: float
    speedup: float
    speedup_min: float
    speedup_max: float
    predicted: float
    efficiency: float
    draft_s: float
    identical: bool


def round_costs_table(
    model: Model, widths: Sequence[int], batches: Sequence[int], committed: int, capacity: int
) -> Iterator[dict[str, float]]:
    """T(width) and its ratio to T(1), for each batch size, and the time to read the weights."""
    floor = costs.read_seconds(model.params)
    for batch in batches:
        seconds = costs.widths_seconds(
            model.architecture,
            model.params,
            widths,
            batch=batch,
            committed=committed,
            capacity=capacity,
        )
        for width, value in seconds.items():
            yield {
                "batch": batch,
                "width": width,
                "ms": 1e3 * value,
                "relative": value / seconds[widths[0]],
                "floors": value / floor,
                "tokens_per_second": batch / value,
            }


def compare_with_plain(
    model: Model,
    ids: Sequence[Sequence[int]],
    drafter: LoadedDrafter,
    label: str,
    *,
    num_speculative_tokens: int,
    max_new_tokens: int,
    batch_size: int,
    runs: int,
) -> Comparison:
    """Decode the prompts plainly and with a drafter, in turn, and predict the ratio."""
    requests = SamplingParams(max_new_tokens=max_new_tokens)
    options = DecodeOptions(num_speculative_tokens=num_speculative_tokens, batch_size=batch_size)
    plain = plan_session(model, ids, options=options.without_drafts(), requests=requests)
    drafted = plan_session(model, ids, drafter=drafter, options=options, requests=requests)
    sessions = [(one, open_engine(one)) for one in (plain, drafted)]
    pairs = [tuple(decode_all(*one) for one in sessions) for _ in range(runs + 1)][1:]
    ratios = [fast.tokens_per_second / slow.tokens_per_second for slow, fast in pairs]
    slow, fast = pairs[-1]
    predicted, draft = _predict(drafted, slow, fast, ids, max_new_tokens)
    speedup = median(ratios)
    return Comparison(
        drafter=label,
        batch=batch_size,
        acceptance_length=fast.summary().acceptance_length,
        tokens_per_second=median(pair[1].tokens_per_second for pair in pairs),
        plain_tokens_per_second=median(pair[0].tokens_per_second for pair in pairs),
        speedup=speedup,
        speedup_min=min(ratios),
        speedup_max=max(ratios),
        predicted=predicted,
        efficiency=speedup / predicted,
        draft_s=draft,
        identical=slow.token_ids == fast.token_ids,
    )


def decode_all(session: Session, engine: Engine) -> Generation:
    """Decode a session's prompts; raises InputError where a row fails."""
    result = decode_session(session, engine=engine)
    failed = {f"prompts[{row}]": failure for row, failure in result.failed_rows.items()}
    if failed:
        raise InputError(failure_message(session.model, failed))
    return result


def _predict(
    session: Session,
    plain: Generation,
    result: Generation,
    ids: Sequence[Sequence[int]],
    new_tokens: int,
) -> tuple[float, float]:
    """The ratio of both results' tokens per second by the parts of a round, and T_draft.

    T(width) is that of isolated passes at the mean length.
    """
    committed, plan = int(np.mean([len(one) for one in ids]) + new_tokens / 2), session.plan
    seconds = costs.widths_seconds(
        plan.target,
        session.params[0],
        sorted({1, *plan.widths}),
        batch=session.num_rows,
        committed=committed,
        capacity=plan.capacity,
    )
    draft = costs.propose_seconds(session)
    rates = [
        one.new_tokens / pass_seconds(one, seconds, draft_s)
        for one, draft_s in ((result, draft), (plain, 0.0))
    ]
    return rates[0] / rates[1], draft


def pass_seconds(result: Generation, seconds: Mapping[int, float], draft_s: float) -> float:
    """Seconds that a result's passes take in all, each with `draft_s` for its draft.

    `seconds[width]` is T(width).
    """
    return sum(draft_s + seconds[int(width)] for width in result.passes()[0])
