"""Is an output what plain decoding gives, and how close was the choice where it is not?"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from specjax.drafters.base import warp_rows
from specjax.prefill import prefill
from specjax.sampling import position_gumbel
from specjax.session import Session, batch_arguments


def first_difference(mine: Sequence[int], reference: Sequence[int]) -> int | None:
    """Index of the first token that differs, a missing one included; None if there is none."""
    for place, (a, b) in enumerate(zip(mine, reference, strict=False)):
        if a != b:
            return place
    return None if len(mine) == len(reference) else min(len(mine), len(reference))


def top2_margin(session: Session, prompt: int, new_tokens: Sequence[int]) -> float:
    """How far the target's first choice lies before its second, behind a prompt and `new_tokens`.

    In logits for a greedy row; under `coupled` in warped log-probabilities, noise included.
    """
    plan, rows = session.plan, batch_arguments(session, [prompt])[1]
    row = jax.tree.map(lambda leaf: leaf[:1], rows)
    ids = jnp.asarray([[*session.prompts[prompt], *new_tokens]], jnp.int32)
    logits = _last_logits(session, ids)
    if session.requests[prompt].temperature > 0:
        logits = warp_rows(logits, row.sampling, plan.flags)
        position = jnp.asarray([ids.shape[1]], jnp.int32)
        logits = logits + position_gumbel(row.key, position, logits.shape[1])
    best = lax.top_k(logits[0], 2)[0]
    return float(best[0] - best[1])


def _last_logits(session: Session, ids: jax.Array) -> jax.Array:
    """[1, V]: the target's logits behind a row of tokens, the last one run alone as in a round."""
    model, params = session.plan.target, session.params[0]
    length = jnp.asarray([ids.shape[1] - 1], jnp.int32)
    cache = model.make_cache(1, session.plan.capacity)
    cache, _ = prefill(model, params, ids, length, cache, session.plan.chunk)
    result = model.extend(
        params, ids[:, -1:], length[:, None], cache, model.make_window(1, 1), 0,
        jnp.ones((1, 1, 1), bool),
    )
    return result.logits[:, 0]
