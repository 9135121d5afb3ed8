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
from specjax.decoding.rows import session_row
from specjax.decoding.sampling_params import SamplingParams
from specjax.decoding.setup import Session
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

    `margin` is the smallest of the distances that decide there, `measure` says which, and
    `resolution` is the margin below which rounding may decide.
    """

    first: int
    margin: float
    resolution: float = EXCUSED_MARGIN
    measure: str = "top-2 margin"

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
    logits = _logits_after(session, prompt, ours[:first])
    request = session.requests[prompt]
    margins = {"top-2 margin": _top2_margin(session, prompt, logits, len(ours[:first]))}
    if request.temperature > 0:
        differing = [row[first] for row in (ours, plain) if first < len(row)]
        margins |= _threshold_margins(logits, request, differing)
    measure = min(margins, key=margins.get)
    return Difference(
        first, float(margins[measure]), _resolution(session, request, logits), measure
    )


def _logits_after(session: Session, prompt: int, new_tokens: Sequence[int]) -> Float[Array, "1 V"]:
    """The target's logits after a prompt and its first new tokens."""
    plan = session.plan
    ids = (*session.prompts[prompt], *new_tokens)
    tokens = np.zeros((1, plan.capacity), np.int32)
    tokens[0, : len(ids)] = ids
    with use(session.mesh):
        logits = _next_logits(
            plan.target, plan.chunks, session.model.params, tokens, np.array([len(ids)], np.int32)
        )
    return jnp.asarray(fetch(logits))


def _top2_margin(
    session: Session, prompt: int, logits: Float[Array, "1 V"], new_tokens: int
) -> float:
    """How far the best next token leads the second.

    In units of logits; under `coupled` at a positive temperature, of log p plus the Gumbel noise
    that decides there.
    """
    request, scores = session.requests[prompt], logits
    if request.temperature > 0:
        warped = sampling.warp(
            scores, request.temperature, request.top_k, request.top_p, request.min_p
        )
        key = session_row(session, prompt).key(session.seed)[None]
        position = jnp.asarray([len(session.prompts[prompt]) + new_tokens])
        scores = warped + sampling.position_gumbel(key, position, scores.shape[1])
    best = jax.lax.top_k(scores, 2)[0][0]
    return float(best[0] - best[1])


def _threshold_margins(
    logits: Float[Array, "1 V"], request: SamplingParams, tokens: Sequence[int]
) -> dict[str, float]:
    """How close the tokens that differ are to being cut by top-k, top-p or min-p, or to be kept.

    Distances of scaled logits, of mass, and of log-probabilities.
    """
    scores = np.asarray(logits, np.float64)[0] / request.temperature
    scores -= scores.max()
    order, found = np.sort(scores)[::-1], {}
    if 0 < request.top_k < len(order):
        last, following = order[request.top_k - 1], order[request.top_k]
        found["distance of the k-th and next logit"] = min(
            score - following if score >= last else last - score for score in scores[tokens]
        )
        scores = np.where(scores >= last, scores, -np.inf)
    weights = np.exp(scores) / np.exp(scores).sum()
    if request.top_p < 1:
        found["distance of the cumulative mass from top_p"] = min(
            abs(weights[weights > weights[token]].sum() - request.top_p) for token in tokens
        )
    if request.min_p > 0:
        found["distance of the probability from min_p"] = min(
            abs(scores[token] - np.log(request.min_p)) for token in tokens
        )
    return found


def _resolution(session: Session, request: SamplingParams, logits: Float[Array, "1 V"]) -> float:
    """The margin that the model's dtype can resolve."""
    if session.model.dtype == jnp.float32:
        return EXCUSED_MARGIN
    step = jnp.finfo(session.model.dtype).eps
    return float(_ROUNDINGS * step * jnp.abs(logits).max()) / (request.temperature or 1.0)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _next_logits(
    model: LanguageModel,
    chunks: tuple[int, ...],
    params: Any,
    tokens: Int[Array, "1 S"],
    length: Int[Array, "1"],
) -> Float[Array, "1 V"]:
    cache = model.make_cache(1, tokens.shape[1])
    cache, _ = prefill(model, params, tokens, length - 1, cache, chunks)
    last = jnp.take_along_axis(tokens, length[:, None] - 1, axis=1)
    window = model.make_window(1, 1)
    seen = jnp.ones((1, 1, 1), bool)
    return model.extend(params, last, length[:, None] - 1, cache, window, 0, seen).logits[:, 0]
