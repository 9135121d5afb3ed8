"""Measure the seconds of a pass and of a draft, and the speed of copies, on this machine.

Each value is the median of several runs of a compiled loop, without compilation; several
repetitions share one dispatch.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from specjax.core.language_model import LanguageModel
from specjax.core.plan import LoopPlan
from specjax.core.round import different_tokens, propose
from specjax.core.state import State
from specjax.engine.plan import DecodePlan
from specjax.engine.programs import row_arguments, start
from specjax.engine.requests import Request
from specjax.files.log import LOGGER, share_logger
from specjax.models.layers.matmul import full_precision
from specjax.sampling import argmax

_RUNS, _REPEATS = 5, 4


def widths_seconds(
    model: LanguageModel,
    params: Any,
    widths: Sequence[int],
    *,
    batch: int,
    committed: int,
    capacity: int,
) -> dict[int, float]:
    """Return the median seconds T(width) of a pass at each width.

    A pass runs over `batch` rows with `committed` tokens in a cache of `capacity` tokens. Widths
    are timed alternately, so that a slow phase of the machine affects all of them.
    """
    cache = model.make_cache(batch, capacity)
    cache = cache.replace(length=cache.length + committed)

    def once(_: Int[Array, ""], tokens: Int[Array, "B T"], params: Any, cache: Any) -> Array:
        width = tokens.shape[1]
        positions = cache.length[:, None] + jnp.arange(width)[None, :]
        window = model.make_window(batch, width)
        visible = jnp.tril(jnp.ones((1, width, width), bool))
        result = model.extend(params, tokens, positions, cache, window, 0, visible)
        return argmax(result.logits).astype(tokens.dtype)

    def call(width: int) -> Callable[[], Any]:
        tokens = different_tokens(batch, width, model.vocab_size)
        return _loop(once, tokens, params, cache, repeats=_REPEATS)

    LOGGER.info("compiling passes over %s tokens", ", ".join(map(str, widths)))
    seconds = median_seconds(*map(call, widths))
    return {width: spent / _REPEATS for width, spent in zip(widths, seconds, strict=True)}


def propose_seconds(plan: DecodePlan, requests: Sequence[Request]) -> float:
    """Return `draft_seconds` in the state after the prompts of a plan's first batch."""
    first = requests[: plan.options.batch_size]
    state = start(plan.loop, plan.params, *row_arguments(plan, first))
    return draft_seconds(plan.loop, plan.params, state)


def draft_seconds(loop_plan: LoopPlan, params: Any, state: State) -> float:
    """Return the median seconds of observing one token per row and drafting in full.

    `params` are the target's and the drafters' parameters.
    """
    limits = loop_plan.drafter.full_limits()

    def once(turn: Int[Array, ""], tokens: Array, params: Any, state: State) -> Array:
        # Each turn's draft depends on the one before, so that none is moved out of the loop.
        last = state.tokens.at[:, -1].set(tokens[:, -1])
        waiting = loop_plan.drafter.commit(state.drafter, jnp.ones_like(state.length))
        again = state.replace(tokens=last, round=jnp.full_like(state.round, turn), drafter=waiting)
        draft = propose(loop_plan, params, again, limits).draft
        return tokens.at[:, -1].add(draft.tokens.sum(axis=1) % 2)

    return loop_seconds(once, state.tokens, params, state)


def copy_bandwidth(num_bytes: int) -> float:
    """Return the bytes per second of copying `num_bytes` on the device, reads plus writes."""
    # The memory is allocated already, since on a CPU new pages cost more than the copy.
    copy = jax.jit(lambda source, into: jnp.copy(source), donate_argnums=1, keep_unused=True)
    source, into = jnp.ones(num_bytes, jnp.int8), jnp.zeros(num_bytes, jnp.int8)

    def copies() -> jax.Array:
        nonlocal into
        # Copies are dispatched together, so that the device never waits for the host.
        for _ in range(_REPEATS):
            into = copy(source, into)
        return into

    (seconds,) = median_seconds(copies)
    return 2 * num_bytes * _REPEATS / seconds


def matmul_flops(size: int, dtype: Any) -> float:
    """Return the FLOP/s of products of [size, size] matrices of `dtype`, in full precision."""
    left, right = (
        jax.random.normal(jax.random.key(seed), (size, size), dtype) for seed in range(2)
    )
    right = right * jnp.asarray(size**-0.5, dtype)
    multiply = functools.partial(jnp.matmul, precision=full_precision(left.dtype))
    return 2 * size**3 / loop_seconds(lambda _, product, by: multiply(product, by), left, right)


def loop_seconds(
    once: Callable[..., Any], carry: Any, *arguments: Any, repeats: int = _REPEATS
) -> float:
    """Return the median seconds of one turn of a compiled loop.

    A turn is `once(turn, carry, *arguments)`, which returns the next carry; the loop has `repeats`
    turns.
    """
    (seconds,) = median_seconds(_loop(once, carry, *arguments, repeats=repeats))
    return seconds / repeats


def _loop(once: Callable[..., Any], carry: Any, *arguments: Any, repeats: int) -> Callable[[], Any]:
    """Return a function that calls `once` `repeats` times in a compiled loop."""

    @functools.partial(jax.jit, static_argnums=0)
    def run(count: int, carry: Any, *arguments: Any) -> Any:
        return lax.fori_loop(0, count, lambda turn, value: once(turn, value, *arguments), carry)

    return lambda: run(repeats, carry, *arguments)


def median_seconds(*calls: Callable[[], Any]) -> list[float]:
    """Return the median seconds of each call, in the order of `calls`.

    Each is called once to warm up; then they are timed in turn, several times.
    """
    done, log = itertools.count(1), share_logger("timing")
    for call in calls:
        jax.block_until_ready(call())
        log(next(done) / ((1 + _RUNS) * len(calls)))
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(_RUNS):
        for call, spent in zip(calls, seconds, strict=True):
            begin = time.perf_counter()
            jax.block_until_ready(call())
            spent.append(time.perf_counter() - begin)
            log(next(done) / ((1 + _RUNS) * len(calls)))
    return [median(spent) for spent in seconds]
