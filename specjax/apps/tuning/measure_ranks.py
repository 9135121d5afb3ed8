"""Measure the ranks of the target's tokens among a drafter's candidates."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from specjax import sampling
from specjax.core.drafter import Sampling
from specjax.core.plan import LoopPlan
from specjax.core.round import make_context
from specjax.core.state import State
from specjax.core.turn_taking import Turns
from specjax.drafters import LoadedDrafter
from specjax.engine.generate import generate
from specjax.engine.options import DecodeOptions
from specjax.engine.plan import DecodePlan, plan_requests
from specjax.engine.programs import row_arguments, run, start
from specjax.engine.requests import Prompt, Request, SamplingParams, groups
from specjax.errors import InputError
from specjax.loading.model import Model

_CERTAIN = 1e9
"""Noise so large that its token is always drawn."""


@dataclass(frozen=True)
class RankCounts:
    """Counts of the rank of the target's greedy token at each depth of a draft.

    `tested[d]` counts drafts whose tokens before depth d (from 0) were the target's, and `hits[d,
    r]` those among them in which the target's token at depth d was the candidate of rank r.
    """

    tested: Int[np.ndarray, "K"]
    hits: Int[np.ndarray, "K R"]

    @property
    def acceptance(self) -> Float[np.ndarray, "K R"]:
        """The acceptance rate [d, r] of each rank at each depth, from which trees are built."""
        return self.hits / np.maximum(self.tested, 1)[:, None]


def measure_ranks(
    model: Model,
    drafter: LoadedDrafter,
    prompts: Sequence[Prompt],
    *,
    candidates: int = 10,
    max_new_tokens: int = 64,
    batch_size: int = 8,
    tell: Callable[[int, int], Any] = lambda done, total: None,
) -> RankCounts:
    """Return how often the target's greedy tokens have each rank among a drafter's candidates.

    The prompts are decoded greedily, then again with chains of the drafter. Before each round the
    drafter is made to draft the target's own next tokens, whose ranks in its distributions are
    counted; so the rank at each depth is that after a correct path. `candidates` is the number of
    ranks. `tell` is called with the number of finished prompts and the total. Raises InputError for
    a drafter that does not draft token by token.
    """
    together = drafter.drafter
    parts = together.parts if isinstance(together, Turns) else (together,)
    if len(parts) > 1 or not parts[0].sampled or parts[0].branches:
        raise InputError(
            f"drafter {together.name!r}: its tokens are not drawn one after another, and so have "
            "no ranks; use one drafter with distributions, probabilistic, of chains"
        )
    greedy = SamplingParams(max_new_tokens=max_new_tokens)
    answers = generate(model, prompts, sampling=greedy, batch_size=batch_size).token_ids
    plan, requests = plan_requests(
        model,
        prompts,
        drafter=drafter,
        options=DecodeOptions(batch_size=batch_size),
        sampling=greedy,
    )
    (part,) = plan.loop.drafter.parts
    longest = part.num_speculative_tokens
    count = jax.jit(functools.partial(_count, _sampled(plan), candidates))
    tested, hits = np.zeros(longest, int), np.zeros((longest, candidates), int)
    done = 0
    for batch in groups(requests, plan.options.batch_size):
        state = start(plan.loop, plan.params, *row_arguments(plan, batch))
        truth, known = _truth(plan, batch, answers)
        while bool(jnp.any(state.active)):
            new_tested, new_hits = count(plan.params, state, truth, known)
            tested, hits = tested + np.asarray(new_tested), hits + np.asarray(new_hits)
            state, *_ = run(plan.loop, plan.params, state, np.int32(1))
        done += len(batch)
        tell(done, len(prompts))
    return RankCounts(tested, hits)


def _sampled(plan: DecodePlan) -> LoopPlan:
    """Return the loop's plan with sampled rows, so that drafts have distributions."""
    flags = sampling.WarpFlags.of(*(np.array([value]) for value in (1.0, 0, 1.0, 0.0)))
    return replace(plan.loop, flags=flags)


def _truth(
    plan: DecodePlan, requests: Sequence[Request], answers: Sequence[Sequence[int]]
) -> tuple[Int[Array, "B S"], Int[Array, "B"]]:
    """Return each row's prompt followed by its greedy answer, and the number of these tokens."""
    tokens = np.zeros((plan.num_rows, plan.loop.capacity), np.int32)
    known = np.zeros(plan.num_rows, np.int32)
    for row, request in enumerate(requests):
        whole = (*request.prompt, *answers[request.number])
        tokens[row, : len(whole)], known[row] = whole, len(whole)
    return jnp.asarray(tokens), jnp.asarray(known)


def _count(
    loop_plan: LoopPlan,
    candidates: int,
    params: Any,
    state: State,
    truth: Int[Array, "B S"],
    known: Int[Array, "B"],
) -> tuple[Int[Array, "K"], Int[Array, "K R"]]:
    """Return one round's part of `RankCounts`, summed over all rows.

    `truth` and `known` are from `_truth`.
    """
    rows = state.length.shape[0]
    ones = jnp.ones(rows)
    warp = Sampling(ones, jnp.zeros(rows, jnp.int32), ones, jnp.zeros(rows))
    context = make_context(loop_plan, params[0], state).replace(sampling=warp)

    def right(depth: Int[Array, ""] | int) -> Int[Array, "B"]:
        return jnp.take_along_axis(truth, (state.length + depth)[:, None], axis=1, mode="clip")[
            :, 0
        ]

    def certain(depth: Int[Array, ""] | int) -> Float[Array, "B V"]:
        hit = jnp.arange(loop_plan.target.vocab_size)[None, :] == right(depth)[:, None]
        return jnp.where(hit, _CERTAIN, 0.0)

    draft = loop_plan.drafter.propose(
        params[1],
        state.drafter,
        context,
        sampling.SharedNoise(certain),
        loop_plan.drafter.full_limits(),
    ).draft
    longest = draft.tokens.shape[1]
    wanted = jnp.stack([right(depth) for depth in range(longest)], axis=1)
    own = jnp.take_along_axis(draft.logq, wanted[:, :, None], axis=2)
    rank = (draft.logq > own).sum(axis=2)
    there = state.length[:, None] + jnp.arange(longest)[None, :] < known[:, None]
    tested = draft.valid & there & state.active[:, None]
    # A token outside the draft's vocabulary was not drafted, nor were those after it.
    possible = own[:, :, 0] > -jnp.inf
    before: Bool[Array, "B K"] = jnp.cumprod(possible, axis=1, dtype=jnp.int32).astype(bool)
    tested &= jnp.pad(before, ((0, 0), (1, 0)), constant_values=True)[:, :longest]
    hit = (rank[:, :, None] == jnp.arange(candidates)[None, None, :]) & possible[:, :, None]
    return tested.sum(axis=0), (hit & tested[:, :, None]).sum(axis=0)
