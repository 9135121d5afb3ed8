"""Whether two runs gave the same tokens, and how close the call was where they did not."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax import sampling
from specjax.decoding.plan import Session
from specjax.distributed.sharding import fetch, use
from specjax.models.interface import LanguageModel
from specjax.models.prefill import prefill

EXCUSED_MARGIN = 1e-4
"""In float32 a difference is a near-tie, and no error, where the two best scores are this close."""
_ROUNDINGS = 2.0
"""In a narrower dtype, where they are so many of its relative steps of the largest logit apart.

With SmolLM2, passes of 1, 4 and 8 tokens put the two best 0.2 steps closer or further apart (the
median), 1.1 (the 99th percentile) and at most 1.7 (384 tokens in float16) or 1.6 (80 in bfloat16).
"""


@dataclass(frozen=True)
class Difference:
    """The first new token that differs (its index), and how close the call was there.

    `margin` is how far the target's best score leads the second, and `resolution` the margin below
    which rounding may decide between them.
    """

    first: int
    margin: float
    resolution: float = EXCUSED_MARGIN

    @property
    def excused(self) -> bool:
        """Whether it is a near-tie, which says nothing against the method; NaN is none."""
        return self.margin < self.resolution


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """The index of the first token that differs, the end of the shorter one included."""
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        if mine != other:
            return index
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


def compare_row(
    session: Session, prompt: int, ours: Sequence[int], plain: Sequence[int]
) -> Difference | None:
    """Where a row of a session differs from plain decoding; None where it does not."""
    first = first_difference(ours, plain)
    if first is None:
        return None
    return Difference(first, *top2_margin(session, prompt, ours[:first]))


def top2_margin(session: Session, prompt: int, new_tokens: Sequence[int]) -> tuple[float, float]:
    """How far the best next token leads the second after a prompt and its first new tokens.

    In units of logits; under `coupled` at a positive temperature, of log p plus the Gumbel noise
    that decides there. With it comes the margin that the model's dtype can resolve there.
    """
    plan, request = session.plan, session.requests[prompt]
    ids = (*session.prompts[prompt], *new_tokens)
    tokens = np.zeros((1, plan.capacity), np.int32)
    tokens[0, : len(ids)] = ids
    with use(session.mesh):
        logits = _next_logits(
            plan.target, plan.chunk, session.model.params, tokens, np.array([len(ids)], np.int32)
        )
    scores = jnp.asarray(fetch(logits))
    resolution = EXCUSED_MARGIN
    if session.model.dtype != jnp.float32:
        step = jnp.finfo(session.model.dtype).eps
        resolution = float(_ROUNDINGS * step * jnp.abs(scores).max())
        resolution /= request.temperature or 1.0
    if request.temperature > 0:
        warped = sampling.warp(
            scores, request.temperature, request.top_k, request.top_p, request.min_p
        )
        key = session.row_key(prompt)[None]
        position = jnp.asarray([len(ids)])
        scores = warped + sampling.position_gumbel(key, position, scores.shape[1])
    best = jax.lax.top_k(scores, 2)[0][0]
    return float(best[0] - best[1]), resolution


@functools.partial(jax.jit, static_argnums=(0, 1))
def _next_logits(
    model: LanguageModel,
    chunk: int,
    params: Any,
    tokens: Int[Array, "1 S"],
    length: Int[Array, "1"],
) -> Float[Array, "1 V"]:
    cache = model.make_cache(1, tokens.shape[1])
    cache, _ = prefill(model, params, tokens, length - 1, cache, chunk)
    last = jnp.take_along_axis(tokens, length[:, None] - 1, axis=1)
    window = model.make_window(1, 1)
    seen = jnp.ones((1, 1, 1), bool)
    return model.extend(params, last, length[:, None] - 1, cache, window, 0, seen).logits[:, 0]
