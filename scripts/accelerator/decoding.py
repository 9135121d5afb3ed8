"""Rounds of the compiled loop after a given context, measured and predicted."""

from __future__ import annotations

import time
from dataclasses import replace
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from accelerator.sizes import ITEMSIZE, Size, model_shape
from accelerator.synthetic import random_cache
from specjax import metrics
from specjax.apps.tuning import measure_costs
from specjax.core import loop
from specjax.core.cache import KVCache
from specjax.core.initial_state import empty_state
from specjax.core.none import NoDrafter
from specjax.core.state import Rounds, State
from specjax.drafters import LoadedDrafter, take_turns
from specjax.engine.options import DecodeOptions
from specjax.engine.plan import plan_requests
from specjax.engine.programs import row_arguments
from specjax.engine.requests import SamplingParams
from specjax.loading.model import Model
from specjax.methods.simulated import Simulated


class Loop:
    """The compiled loop of one drafter, after a context of random keys and values.

    No row ever finishes, so that every round does the same work; the drafter `none` drafts nothing.
    """

    def __init__(
        self, model: Model, drafter: LoadedDrafter, size: Size, batch: int, context: int
    ) -> None:
        capacity = size.capacity(context)
        drafted = 0 if drafter.name == "none" else size.num_speculative_tokens
        # The prompt is one token: nothing is prefilled here.
        plan, self._requests = plan_requests(
            model,
            [[0]] * batch,
            drafter=drafter,
            options=DecodeOptions(num_speculative_tokens=drafted, batch_size=batch),
            sampling=SamplingParams(max_new_tokens=capacity - 1),
        )
        self.context = context
        self.drafter = take_turns(drafter)
        # Two widths, so that a round chooses between them as in a real run.
        self.loop_plan = replace(
            plan.loop, widths=tuple(sorted({1, drafted + 1})), rounds_per_step=size.reach
        )
        self._plan = replace(plan, loop=self.loop_plan)
        self._run: Any = None

    def state(self, cache: KVCache) -> State:
        """Return the first round's state; each row has a different last token."""
        loop_plan, plan = self.loop_plan, self._plan
        batch = plan.options.batch_size
        _, rows, _, status, rounds, _ = row_arguments(plan, self._requests)
        roots = jnp.arange(batch, dtype=jnp.int32) * 7919 % loop_plan.target.vocab_size
        tokens = jnp.zeros((batch, loop_plan.capacity), jnp.int32)
        length = jnp.full(batch, self.context, jnp.int32)
        tokens = tokens.at[:, self.context - 1].set(roots)
        params = (plan.model.params, self.drafter.params)
        state = empty_state(loop_plan, params, tokens, rows, length, status, rounds)
        rows = rows.replace(prompt_length=length)
        # The loop's state is donated, and no buffer may be given away twice.
        state = jax.tree.map(jnp.copy, state.replace(cache=None, rows=rows))
        return state.replace(cache=cache.replace(length=length - 1))

    def run(self, cache: KVCache, rounds: int) -> tuple[float, State, Rounds]:
        """Run `rounds` rounds; return their seconds, the state after them, and the counts.

        Compiling is excluded. The cache's keys and values are donated; the returned state has them.
        """
        state = self.state(cache)
        params = (self._plan.model.params, self.drafter.params)
        if self._run is None:
            run = jax.jit(loop.run, static_argnums=0, donate_argnums=2)
            self._run = run.lower(self.loop_plan, params, state, np.int32(0)).compile()
        jax.block_until_ready(state)
        begin = time.perf_counter()
        state, counts, _ = jax.block_until_ready(self._run(params, state, np.int32(rounds)))
        return time.perf_counter() - begin, state, counts


def read_bytes(size: Size, model: Model, batch: int, context: int) -> int:
    """Return the bytes that a pass reads: the weights once, and the committed keys and values."""
    shape = model_shape(model.config)
    cached = batch * shape.kv_elements() * size.committed(context)
    return (shape.num_read_params() + cached) * ITEMSIZE[size.dtype]


def measure(size: Size, model: Model, batch: int, context: int) -> dict[str, Any]:
    """Return a row's figures: plain rounds, isolated passes by width, speed-ups by acceptance.

    The simulated drafter and plain decoding run in turn. A speed-up is the tokens per round times
    the ratio of the two rounds' median times.
    """
    # At the mean committed length of a timed run.
    passes = measure_costs.widths_seconds(
        model.architecture,
        model.params,
        size.widths_of(batch),
        batch=batch,
        committed=size.committed(context),
        capacity=size.capacity(context),
    )
    cache = random_cache(
        model.config, model.activation_dtype, batch, size.capacity(context), context - 1
    )
    plain = Loop(model, LoadedDrafter(NoDrafter()), size, batch, context)
    _, state, _ = plain.run(cache, size.reach)
    recorded = np.asarray(state.tokens)[:, context : context + size.reach]

    def replay(acceptance: float, seed: int) -> LoadedDrafter:
        value = Simulated(acceptance=acceptance, mistake_seed=seed)
        return LoadedDrafter(value, value.replay(recorded.tolist(), model.config.vocab_size))

    fast = Loop(model, replay(1.0, 0), size, batch, context)
    _, state, _ = fast.run(state.cache, 1)
    first = fast.state(state.cache)
    draft_s = measure_costs.draft_seconds(
        fast.loop_plan, (model.params, fast.drafter.params), first
    )
    cache, all_plain, speedups = first.cache, [], []
    for acceptance in size.acceptances:
        plain_seconds, seconds, counts, same_rows = [], [], [], 0
        for seed in range(size.runs):
            spent, state, _ = plain.run(cache, size.plain_rounds)
            plain_seconds.append(spent / size.plain_rounds)
            # Mistakes are in the parameters: nothing is compiled again.
            fast.drafter = take_turns(replay(acceptance, seed))
            spent, state, counted = fast.run(state.cache, size.rounds)
            seconds.append(spent / size.rounds)
            cache = state.cache
            counts.append(jax.tree.map(lambda leaf: np.asarray(leaf)[:, : size.rounds], counted))
            same_rows += _same_rows(state, recorded, context)
        all_plain += plain_seconds
        speedup = _speedup(passes, draft_s, plain_seconds, seconds, counts)
        rows = {"same_rows": same_rows, "rows": batch * size.runs}
        speedups.append({"acceptance": acceptance, **speedup, **rows})
    round_s = median(all_plain)
    return {
        "round_s": round_s,
        "round_min_s": min(all_plain),
        "round_max_s": max(all_plain),
        "tokens_per_second": batch / round_s,
        "passes": passes,
        "loop_overhead": (round_s - passes[1]) / round_s,
        "bytes": read_bytes(size, model, batch, context),
        "draft_s": draft_s,
        "speedups": speedups,
    }


def _speedup(
    passes: dict[int, float],
    draft_s: float,
    plain_seconds: list[float],
    seconds: list[float],
    counts: list[Rounds],
) -> dict[str, float]:
    drafted, accepted, emitted, width = (
        np.concatenate([getattr(run, name) for run in counts])
        for name in ("drafted", "accepted", "emitted", "width")
    )
    tokens = metrics.tokens_per_round(emitted)
    plain_round_s, round_s = median(plain_seconds), median(seconds)
    speedup = tokens * plain_round_s / round_s
    predicted = metrics.predicted_speedup(tokens, passes[1], draft_s, width, passes)
    ratios = [tokens * slow / quick for slow, quick in zip(plain_seconds, seconds, strict=True)]
    return {
        "tokens_per_round": tokens,
        "measured_acceptance": float(accepted.sum() / np.minimum(accepted + 1, drafted).sum()),
        "plain_round_s": plain_round_s,
        "round_s": round_s,
        "speedup": speedup,
        "speedup_min": min(ratios),
        "speedup_max": max(ratios),
        "predicted": predicted,
        "measured_over_predicted": speedup / predicted,
    }


def _same_rows(state: State, recorded: np.ndarray, context: int) -> int:
    """Return the number of rows whose new tokens equal the recorded ones of plain decoding."""
    tokens, lengths = np.asarray(state.tokens), np.asarray(state.length)
    return sum(
        bool((row[context:length] == plain[: length - context]).all())
        for row, length, plain in zip(tokens, lengths, recorded, strict=True)
    )
