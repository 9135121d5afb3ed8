"""From prompts to a session that can run: planned, and with draft lengths chosen where asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from specjax import sampling
from specjax.decoding.costs import round_costs
from specjax.decoding.plan import Session, plan_session
from specjax.decoding.prompts import Prompt
from specjax.decoding.sampling_params import SamplingParams
from specjax.drafters import Drafter
from specjax.loading.model import Model


def open_session(
    target: Model,
    prompts: Sequence[Prompt],
    *,
    drafter: Drafter | None = None,
    num_speculative_tokens: int | str | None = None,
    num_speculative_tokens_per_batch_size: Sequence[tuple[int, int, int]] = (),
    verify: str | sampling.Rule = "rejection",
    requests: Any = SamplingParams(),  # noqa: B008 - frozen
    seed: int = 0,
    batch_size: int | None = None,
    max_length: int | None = None,
) -> Session:
    """Check and encode; with "auto", measure the costs that each row's draft length follows.

    See `generate.generate` for the arguments. Raises InputError.
    """
    session = plan_session(
        target,
        prompts,
        drafter=drafter,
        num_speculative_tokens=num_speculative_tokens,
        num_speculative_tokens_per_batch_size=num_speculative_tokens_per_batch_size,
        verify=verify,
        requests=requests,
        seed=seed,
        batch_size=batch_size,
        max_length=max_length,
    )
    length = session.plan.draft_length
    if num_speculative_tokens != "auto" or not length.max_tokens:
        return session
    measured = replace(length, costs=round_costs(session))
    return replace(session, plan=replace(session.plan, draft_length=measured))
