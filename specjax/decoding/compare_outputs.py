"""Compare a run's tokens with plain decoding, excusing near-ties between logits.

Passes of different widths round differently, so a speculative row may depart from plain decoding at
a near-tie, and continues with another prefix. From there on the row is no longer compared with
plain decoding: instead, each of its tokens must be the target's choice given the row's own prefix,
within the resolution of the model's dtype.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax import sampling
from specjax.cache import KVCache, commit
from specjax.cached_entries import relative_step
from specjax.decoding.rows import session_row
from specjax.decoding.sampling_params import SamplingParams
from specjax.decoding.session import Session
from specjax.distributed.sharding import fetch, use
from specjax.models.interface import LanguageModel
from specjax.models.prefill import prefill

EXCUSED_MARGIN = 1e-4
"""In float32 a difference is a near-tie, and no error, where it is so close."""
_DEVIATIONS = 4.0
"""In a narrower dtype, where it is so many standard deviations of what two passes differ in."""
_LEAST_STEPS, _MOST_STEPS = 0.75, 4.0
"""But at least and at most so many of the dtype's relative steps of the largest logit.

Two passes of SmolLM2 in bfloat16 over 1, 4, 8 or 64 tokens put the two best logits 0.09 steps
closer or further apart (the median), 0.7 (the 99th percentile) and at most 1.3. Of 1,728 such
changes none was above the resolution that follows from these numbers, 0.93 steps on average.
"""
_LIKELIEST = 64
"""The tokens that the deviation is measured on."""
_WIDE = 8
"""The least width of a wide pass, where a drafter's windows are narrower."""
_HALVINGS = 40


@dataclass(frozen=True)
class NearTie:
    """A new token, by index, that the target would not have chosen in each of its passes.

    `margin` is the least change of logit differences, divided by the temperature, that would choose
    it. Below `resolution` rounding may decide; otherwise this is not a near-tie.
    """

    index: int
    margin: float
    resolution: float = EXCUSED_MARGIN

    @property
    def excused(self) -> bool:
        """Whether rounding explains it; False if the margin is NaN."""
        return self.margin < self.resolution


@dataclass(frozen=True)
class Difference:
    """The near-ties at which a row differs from plain decoding.

    They are the first differing token, where plain decoding's token must be as close, and later
    tokens given the row's own prefix. The last one may be a token that rounding does not explain;
    tokens after it are not checked.
    """

    near_ties: tuple[NearTie, ...]

    @property
    def first(self) -> int:
        """The index of the first new token that differs."""
        return self.near_ties[0].index

    @property
    def excused(self) -> bool:
        """Whether rounding explains the whole row."""
        return all(one.excused for one in self.near_ties)


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Return the index of the first difference, which may be the end of the shorter list."""
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        if mine != other:
            return index
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


def compare_row(
    session: Session, prompt: int, ours: Sequence[int], plain: Sequence[int]
) -> Difference | None:
    """Return how a row of a session differs from plain decoding, or None if it does not."""
    first = first_difference(ours, plain)
    if first is None:
        return None
    if first == min(len(ours), len(plain)):
        # Rows of the same tokens end alike, however those are computed.
        return Difference((NearTie(first, math.inf),))
    near_ties, deviations = [], []
    for index, passes in _logits_of_passes(session, prompt, ours):
        deviations.append(_deviation(passes))
        if index < first:
            continue
        tokens = [ours[index], plain[index]] if index == first else [ours[index]]
        close = _near_tie(session, prompt, index, tokens, passes, deviations)
        if index == first or close.margin != 0:
            near_ties.append(close)
        if not close.excused:
            break
    return Difference(tuple(near_ties))


def _near_tie(
    session: Session,
    prompt: int,
    index: int,
    tokens: Sequence[int],
    passes: Float[np.ndarray, "2 V"],
    deviations: Sequence[float],
) -> NearTie:
    """Return how close each token is to being the choice of each pass at an index.

    `deviations` are those of the passes there, the last, and at the row's tokens before.
    """
    request, noise = session.requests[prompt], np.zeros(passes.shape[1])
    largest = max(np.abs(passes.max(axis=1)).max(), np.abs(passes[:, list(tokens)]).max())
    own_step, cache_step = (
        relative_step(dtype) * largest for dtype in (session.model.dtype, session.model.cache_dtype)
    )
    # Passes may happen to agree where others do not.
    deviation = max(deviations[-1], float(np.sqrt(np.mean(np.square(deviations)))))
    resolution = _DEVIATIONS * math.sqrt(2) * deviation
    most = _MOST_STEPS * max(own_step, cache_step)
    resolution = float(np.clip(resolution, _LEAST_STEPS * own_step, most))
    if request.temperature > 0:
        passes, resolution = passes / request.temperature, resolution / request.temperature
        key = session_row(session, prompt).key(session.seed)[None]
        position = jnp.asarray([len(session.prompts[prompt]) + index])
        noise = np.asarray(sampling.position_gumbel(key, position, len(noise))[0], np.float64)
    else:
        request = SamplingParams()
    if session.model.dtype == jnp.float32:
        is_wide = session.model.cache_dtype == jnp.float32
        resolution = EXCUSED_MARGIN if is_wide else max(EXCUSED_MARGIN, resolution)
    margins = [least_change(scores, noise, request, token) for scores in passes for token in tokens]
    return NearTie(index, max(margins), resolution)


def least_change(
    scores: Float[np.ndarray, "V"],
    noise: Float[np.ndarray, "V"],
    request: SamplingParams,
    token: int,
) -> float:
    """Return the least change of score differences for `token` to be drawn with the given noise.

    `scores` are logits divided by the temperature. After the change, top-k, top-p and min-p keep
    the token, and no other kept token has a larger sum with the noise. The result is 0 for the
    token that is drawn, and inf if no change suffices.
    """
    if not np.isfinite(scores[token]) or not np.isfinite(scores.max()):
        return math.inf
    kept = _Filters.of(scores, request)
    noised = scores + noise

    def drawn(change: float) -> bool:
        rivals = scores[noised > noised[token] + change]
        return kept.maybe(scores[token], change) and not kept.surely(rivals, change).any()

    low, high = 0.0, scores.max() - scores[token] + noised.max() - noised[token]
    if drawn(low):
        return low
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if drawn(middle) else (middle, high)
    return float(high)


@dataclass(frozen=True)
class _Filters:
    """What top-k, top-p and min-p keep of scores whose differences may change a little."""

    request: SamplingParams
    order: Float[np.ndarray, "V"]
    """The scores in descending order."""
    mass: Float[np.ndarray, "V+1"]
    """Of the first 0, 1, ... of them, after top-k."""

    @classmethod
    def of(cls, scores: Float[np.ndarray, "V"], request: SamplingParams) -> _Filters:
        order = np.sort(scores)[::-1]
        weights = np.exp(order - order[0])
        if 0 < request.top_k < len(order):
            weights[order < order[request.top_k - 1]] = 0
        return cls(request, order, np.concatenate([[0.0], np.cumsum(weights) / weights.sum()]))

    def maybe(self, score: float, change: float) -> bool:
        """Return whether a score may be kept."""
        k, p = self.request.top_k, self.request.top_p
        kept = not 0 < k < len(self.order) or score + change >= self.order[k - 1]
        if self.request.min_p > 0:
            kept &= score + change >= self.order[0] + np.log(self.request.min_p)
        above = self.mass[self._count_above(score + change)]
        return bool(kept and (p >= 1 or _changed(above, -change) < p))

    def surely(self, scores: Float[np.ndarray, "N"], change: float) -> np.ndarray:
        """Return which scores are kept in any case."""
        k, p = self.request.top_k, self.request.top_p
        kept = np.ones(scores.shape, bool)
        if 0 < k < len(self.order):
            kept &= scores - change > self.order[k]
        if self.request.min_p > 0:
            kept &= scores - change >= self.order[0] + np.log(self.request.min_p)
        if p < 1:
            # All that may be likelier is, but for the token itself.
            own = np.exp(scores - self.order[0]) * self.mass[1]
            above = self.mass[self._count_above(scores - change, or_equal=True)] - own
            kept &= _changed(above, change) < p
        return kept

    def _count_above(self, limit: Any, *, or_equal: bool = False) -> Any:
        """Return how many scores are above a limit."""
        side = "right" if or_equal else "left"
        return np.searchsorted(-self.order, -limit, side=side)


def _changed(mass: Any, change: float) -> Any:
    """Return a mass whose tokens gain so much on all others, or lose it.

    It is the sum of float32 numbers besides, which rounds as well.
    """
    moved = mass / (mass + (1 - mass) * np.exp(np.clip(-change, -700, 700)))
    own = np.clip(change, -EXCUSED_MARGIN, EXCUSED_MARGIN)
    return np.maximum(moved, mass + own) if change > 0 else np.minimum(moved, mass + own)


def _deviation(passes: Float[np.ndarray, "2 V"]) -> float:
    """Return the standard deviation of the difference of two passes, over likely tokens."""
    narrow, wide = passes
    likeliest = np.argsort(narrow)[-_LIKELIEST:]
    likeliest = likeliest[np.isfinite(narrow[likeliest])]
    return float(np.std((wide - narrow)[likeliest])) if len(likeliest) else math.nan


def _logits_of_passes(
    session: Session, prompt: int, new_tokens: Sequence[int]
) -> Iterator[tuple[int, Float[np.ndarray, "2 V"]]]:
    """Yield the target's logits before each new token, computed in two ways.

    By passes over one token, as in plain decoding, and by passes over several, as in a round.
    """
    plan, params = session.plan, session.model.params
    ids = (*session.prompts[prompt], *new_tokens)
    begin, end = len(session.prompts[prompt]) - 1, len(ids) - 1
    wide = max(_WIDE, plan.widths[-1])
    tokens = np.zeros((1, plan.capacity + wide), np.int32)
    tokens[0, : len(ids)] = ids
    extend = functools.partial(_extend, plan.target)
    with use(session.mesh):
        length = np.array([begin + 1], np.int32)
        cache = _read(plan.target, plan.chunks, plan.capacity, params, tokens, length)
        caches = [cache, jax.tree.map(jnp.copy, cache)]
    for at in range(begin, end, wide):
        stop, logits = min(at + wide, end), []
        for way, width in enumerate((1, wide)):
            parts = []
            for start in range(at, stop, width):
                count = min(width, stop - start)
                with use(session.mesh):
                    caches[way], part = extend(width, params, tokens, start, count, caches[way])
                parts.append(fetch(part)[:count])
            logits.append(np.concatenate(parts).astype(np.float64))
        for index, passes in enumerate(zip(*logits, strict=True), start=at - begin):
            yield index, np.stack(passes)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _read(
    model: LanguageModel,
    chunks: tuple[int, ...],
    capacity: int,
    params: Any,
    tokens: Int[Array | np.ndarray, "1 S"],
    length: Int[Array | np.ndarray, "1"],
) -> KVCache:
    """Return a cache with a prompt but for its last token."""
    cache = model.make_cache(1, capacity)
    return prefill(model, params, tokens, length - 1, cache, chunks)[0]


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=6)
def _extend(
    model: LanguageModel,
    width: int,
    params: Any,
    tokens: Int[Array | np.ndarray, "1 S"],
    start: Int[Array, ""] | int,
    count: Int[Array, ""] | int,
    cache: KVCache,
) -> tuple[KVCache, Float[Array, "T V"]]:
    """Return a cache with `count` tokens more, those from `start` on, and the logits after each."""
    step = jnp.arange(width)[None, :]
    window = jax.lax.dynamic_slice(jnp.asarray(tokens), (0, start), (1, width))
    positions = start + jnp.minimum(step, count - 1)
    causal = jnp.tril(jnp.ones((1, width, width), bool))
    result = model.extend(params, window, positions, cache, model.make_window(1, width), 0, causal)
    return commit(cache, result.window, step, jnp.full(1, count)), result.logits[0]
