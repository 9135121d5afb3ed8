"""Compare a run's tokens with plain decoding, excusing near-ties between logits.

Passes of different widths round differently, so a speculative row may depart from plain decoding at
a near-tie and continue with another prefix. From there on the row is no longer compared with plain
decoding: instead, each of its tokens must be the target's choice given the row's own prefix, within
the resolution of the model's dtype.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax.core.cache import KVCache, commit
from specjax.core.cached_entries import relative_step
from specjax.core.language_model import LanguageModel
from specjax.core.plan import LoopPlan
from specjax.core.prefill import prefill
from specjax.core.processor import states_of
from specjax.distributed.sharding import fetch, use
from specjax.engine.plan import DecodePlan
from specjax.engine.programs import row_arguments
from specjax.engine.requests import Request, SamplingParams
from specjax.sampling import position_gumbel

EXCUSED_MARGIN = 1e-4
"""In float32, a difference with a margin below this is a near-tie and not an error."""
_DEVIATIONS = 4.0
"""In a narrower dtype, the resolution in standard deviations of the difference between two passes.
"""
_LEAST_STEPS, _MOST_STEPS = 0.75, 4.0
"""The bounds of that resolution, in relative steps of the dtype times the largest logit.

Two passes of SmolLM2 in bfloat16 over 1, 4, 8 or 64 tokens changed the distance of the two best
logits by 0.09 steps (the median), 0.7 (the 99th percentile) and at most 1.3. Of 1,728 such changes
none was above the resolution that follows from these numbers, 0.93 steps on average.
"""
_LIKELIEST = 64
"""The number of likeliest tokens on which the deviation is measured."""
_WIDE = 8
"""The minimum width of the wide pass, for drafters whose windows are narrower."""
_HALVINGS = 40


@dataclass(frozen=True)
class NearTie:
    """A new token that at least one of two ways to compute the target's logits would not choose.

    `index` counts the row's new tokens from 0. `margin` is the least change of logit differences,
    divided by the temperature, with which the target would choose the token. A margin below
    `resolution` may be due to rounding; a larger one is an error.
    """

    index: int
    margin: float
    resolution: float = EXCUSED_MARGIN

    @property
    def excused(self) -> bool:
        """Whether rounding explains the token; False if the margin is NaN."""
        return self.margin < self.resolution


@dataclass(frozen=True)
class Difference:
    """The near-ties at which a row differs from plain decoding.

    The first entry is the first token that differs, with the larger of its own margin and that of
    plain decoding's token. The others are later tokens that the target would not choose given the
    row's own prefix. Only the last entry may be one that rounding does not explain; tokens after it
    are not checked.
    """

    near_ties: tuple[NearTie, ...]

    @property
    def first(self) -> int:
        """The index, among the row's new tokens, of the first one that differs."""
        return self.near_ties[0].index

    @property
    def excused(self) -> bool:
        """Whether rounding explains the whole row."""
        return all(near_tie.excused for near_tie in self.near_ties)


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Return the first index at which two lists of token ids differ, or None if they are equal.

    If one list begins with the other, this is the length of the shorter one.
    """
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        if mine != other:
            return index
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


def compare_row(
    plan: DecodePlan, request: Request, ours: Sequence[int], plain: Sequence[int]
) -> Difference | None:
    """Return where the row of a request differs from plain decoding, or None if it does not.

    `ours` and `plain` are the new tokens of the row, decoded with the `plan`, and of plain
    decoding.
    """
    first = first_difference(ours, plain)
    if first is None:
        return None
    if first == min(len(ours), len(plain)):
        # Equal tokens end a row at the same length, however their logits are computed.
        return Difference((NearTie(first, math.inf),))
    near_ties, deviations = [], []
    for index, passes in _logits_of_passes(plan, request, ours):
        deviations.append(_deviation(passes))
        if index < first:
            continue
        passes = _processed(plan, replace(request, emitted=tuple(ours[:index])), passes)
        tokens = [ours[index], plain[index]] if index == first else [ours[index]]
        near_tie = _near_tie(plan, request, index, tokens, passes, deviations)
        if index == first or near_tie.margin != 0:
            near_ties.append(near_tie)
        if not near_tie.excused:
            break
    return Difference(tuple(near_ties))


def _processed(
    plan: DecodePlan, request: Request, passes: Float[np.ndarray, "2 V"]
) -> Float[np.ndarray, "2 V"]:
    """Return logits after the plan's processors, for the token after a request's emitted ones."""
    if not plan.loop.processors:
        return passes
    arguments = row_arguments(plan, [request, request], max(plan.num_rows, 2))
    tokens, rows, length, _, _, requested = arguments
    with use(plan.mesh):
        after = _process(plan.loop, requested, tokens, rows.prompt_length, length, passes)
    return fetch(after)[:2].astype(np.float64)


@functools.partial(jax.jit, static_argnums=0)
def _process(
    loop: LoopPlan,
    requested: tuple[Any, ...],
    tokens: Int[Array, "B S"],
    prompt_length: Int[Array, "B"],
    length: Int[Array, "B"],
    passes: Float[Array | np.ndarray, "2 V"],
) -> Float[Array, "B V"]:
    """Return the two rows of logits after all processors, before other rows."""
    rows = requested, tokens, prompt_length, length
    states = states_of(loop.processors, *rows, passes.shape[1])
    logits = jnp.zeros((len(tokens), passes.shape[1]), jnp.float32).at[:2].set(passes)
    for processor, state in zip(loop.processors, states, strict=True):
        logits = processor.apply(state, logits)
    return logits


def _near_tie(
    plan: DecodePlan,
    request: Request,
    index: int,
    tokens: Sequence[int],
    passes: Float[np.ndarray, "2 V"],
    deviations: Sequence[float],
) -> NearTie:
    """Return how close the target is to choosing each of `tokens` as the new token `index`.

    `passes` are the logits there, computed in two ways, and `deviations` the results of
    `_deviation` for the new tokens so far, this one last. The margin is the largest over passes and
    tokens.
    """
    sampling, noise = request.sampling, np.zeros(passes.shape[1])
    largest = max(np.abs(passes.max(axis=1)).max(), np.abs(passes[:, list(tokens)]).max())
    model_step, cache_step = (
        relative_step(dtype) * largest for dtype in (plan.model.dtype, plan.model.cache_dtype)
    )
    # Two passes may happen to agree at one token, so earlier tokens count as well.
    deviation = max(deviations[-1], float(np.sqrt(np.mean(np.square(deviations)))))
    resolution = _DEVIATIONS * math.sqrt(2) * deviation
    largest_resolution = _MOST_STEPS * max(model_step, cache_step)
    resolution = float(np.clip(resolution, _LEAST_STEPS * model_step, largest_resolution))
    if sampling.temperature > 0:
        passes, resolution = passes / sampling.temperature, resolution / sampling.temperature
        key = request.key(plan.options.seed)[None]
        position = jnp.asarray([len(request.prompt) + index])
        noise = np.asarray(position_gumbel(key, position, len(noise))[0], np.float64)
    else:
        sampling = SamplingParams()
    if plan.model.dtype == jnp.float32:
        is_wide = plan.model.cache_dtype == jnp.float32
        resolution = EXCUSED_MARGIN if is_wide else max(EXCUSED_MARGIN, resolution)
    margins = [
        least_change(scores, noise, sampling, token) for scores in passes for token in tokens
    ]
    return NearTie(index, max(margins), resolution)


def least_change(
    scores: Float[np.ndarray, "V"],
    noise: Float[np.ndarray, "V"],
    sampling: SamplingParams,
    token: int,
) -> float:
    """Return the least change of score differences for which `token` is drawn with the given noise.

    `scores` are logits divided by the temperature. After the change, top-k, top-p and min-p keep
    the token, and no other kept token has a larger sum of score and noise. The result is 0 if the
    token is drawn without a change, and inf if no change suffices.
    """
    if not np.isfinite(scores[token]) or not np.isfinite(scores.max()):
        return math.inf
    kept = _Filters.of(scores, sampling)
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
    """The tokens that top-k, top-p and min-p keep if score differences may change a little."""

    sampling: SamplingParams
    order: Float[np.ndarray, "V"]
    """The scores in descending order."""
    mass: Float[np.ndarray, "V+1"]
    """The probability of the first 0, 1, ..., V of them, after top-k."""

    @classmethod
    def of(cls, scores: Float[np.ndarray, "V"], sampling: SamplingParams) -> _Filters:
        order = np.sort(scores)[::-1]
        weights = np.exp(order - order[0])
        if 0 < sampling.top_k < len(order):
            weights[order < order[sampling.top_k - 1]] = 0
        return cls(sampling, order, np.concatenate([[0.0], np.cumsum(weights) / weights.sum()]))

    def maybe(self, score: float, change: float) -> bool:
        """Return whether some change of at most `change` keeps a token with this score."""
        k, p = self.sampling.top_k, self.sampling.top_p
        kept = not 0 < k < len(self.order) or score + change >= self.order[k - 1]
        if self.sampling.min_p > 0:
            kept &= score + change >= self.order[0] + np.log(self.sampling.min_p)
        above = self.mass[self._count_above(score + change)]
        return bool(kept and (p >= 1 or _changed(above, -change) < p))

    def surely(self, scores: Float[np.ndarray, "N"], change: float) -> np.ndarray:
        """Return a mask of the scores that are kept under every change of at most `change`."""
        k, p = self.sampling.top_k, self.sampling.top_p
        kept = np.ones(scores.shape, bool)
        if 0 < k < len(self.order):
            kept &= scores - change > self.order[k]
        if self.sampling.min_p > 0:
            kept &= scores - change >= self.order[0] + np.log(self.sampling.min_p)
        if p < 1:
            # In the worst case, every other token that may become likelier does.
            token_mass = np.exp(scores - self.order[0]) * self.mass[1]
            above = self.mass[self._count_above(scores - change, or_equal=True)] - token_mass
            kept &= _changed(above, change) < p
        return kept

    def _count_above(self, limit: Any, *, or_equal: bool = False) -> Any:
        """Return the number of scores above each limit, or at least the limit with `or_equal`."""
        side = "right" if or_equal else "left"
        return np.searchsorted(-self.order, -limit, side=side)


def _changed(mass: Any, change: float) -> Any:
    """Return the total probability of tokens whose scores rise by `change` relative to all others.

    A negative `change` lowers them. The result also allows for the rounding of a sum in float32.
    """
    moved = mass / (mass + (1 - mass) * np.exp(np.clip(-change, -700, 700)))
    rounded = mass + np.clip(change, -EXCUSED_MARGIN, EXCUSED_MARGIN)
    return np.maximum(moved, rounded) if change > 0 else np.minimum(moved, rounded)


def _deviation(passes: Float[np.ndarray, "2 V"]) -> float:
    """Return the standard deviation of the difference between two passes' logits of likely tokens.

    The result is NaN if none of these logits is finite.
    """
    narrow, wide = passes
    likeliest = np.argsort(narrow)[-_LIKELIEST:]
    likeliest = likeliest[np.isfinite(narrow[likeliest])]
    return float(np.std((wide - narrow)[likeliest])) if len(likeliest) else math.nan


def _logits_of_passes(
    plan: DecodePlan, request: Request, new_tokens: Sequence[int]
) -> Iterator[tuple[int, Float[np.ndarray, "2 V"]]]:
    """Yield the index of each new token with the logits [2, V] before it, computed in two ways.

    The first are from passes over one token, as in plain decoding, the second from passes over
    several tokens, as in a speculative round.
    """
    loop, params = plan.loop, plan.model.params
    ids = (*request.prompt, *new_tokens)
    begin, end = len(request.prompt) - 1, len(ids) - 1
    wide = max(_WIDE, loop.widths[-1])
    tokens = np.zeros((1, loop.capacity + wide), np.int32)
    tokens[0, : len(ids)] = ids
    extend = functools.partial(_extend, loop.target)
    with use(plan.mesh):
        length = np.array([begin + 1], np.int32)
        cache = _read(loop.target, loop.chunks, loop.capacity, params, tokens, length)
        caches = [cache, jax.tree.map(jnp.copy, cache)]
    for at in range(begin, end, wide):
        stop, logits = min(at + wide, end), []
        for way, width in enumerate((1, wide)):
            pass_logits = []
            for start in range(at, stop, width):
                count = min(width, stop - start)
                with use(plan.mesh):
                    caches[way], padded = extend(width, params, tokens, start, count, caches[way])
                pass_logits.append(fetch(padded)[:count])
            logits.append(np.concatenate(pass_logits).astype(np.float64))
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
    """Return a cache of `capacity` tokens with all but the last of `length` tokens read."""
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
    """Return the cache after reading `count` more tokens, and the logits after `width` tokens.

    The tokens begin at index `start`; logits from `count` on are meaningless.
    """
    step = jnp.arange(width)[None, :]
    window = jax.lax.dynamic_slice(jnp.asarray(tokens), (0, start), (1, width))
    positions = start + jnp.minimum(step, count - 1)
    causal = jnp.tril(jnp.ones((1, width, width), bool))
    result = model.extend(params, window, positions, cache, model.make_window(1, width), 0, causal)
    return commit(cache, result.window, step, jnp.full(1, count)), result.logits[0]
