"""From prompts to a session that can run: planned, and with draft lengths chosen where asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from specjax.decoding.costs import round_costs
from specjax.decoding.options import DecodeOptions
from specjax.decoding.plan import Session, plan_session
from specjax.decoding.prompts import Prompt
from specjax.loading.model import Model


def open_session(
    target: Model,
    prompts: Sequence[Prompt],
    *,
    options: DecodeOptions = DecodeOptions(),  # noqa: B008 - frozen
    **others: Any,
) -> Session:
    """Check and encode; with "auto", measure the costs that each row's draft length follows.

    Takes what `plan.plan_session` takes. Raises InputError.
    """
    session = plan_session(target, prompts, options=options, **others)
    length = session.plan.draft_length
    if options.num_speculative_tokens != "auto" or not length.max_tokens:
        return session
    measured = replace(length, costs=round_costs(session))
    return replace(session, plan=replace(session.plan, draft_length=measured))
