"""Prompts read in chunks of two sizes, and in parts, leave what chunks of one size leave."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from conftest import slow
from decoding import draft_model, drafters, make_call
from tiny_models import eagle_drafter, medusa_head, mtp_drafter

from specjax.core import initial_state
from specjax.drafters import head_drafter, take_turns
from specjax.engine.programs import row_arguments
from specjax.methods.token_recycling import TokenRecycling

LENGTHS = (255, 256, 257, 320, 521)
"""Tokens that are read: those of the prompts but for the last one."""


def made(name, tiny, unrelated, similar):
    own = {
        "none": lambda: None,
        "similar+eagle3": lambda: take_turns(draft_model(similar), eagle_drafter(tiny)),
        "eagle": lambda: eagle_drafter(tiny, version=1),
        "eagle3": lambda: eagle_drafter(tiny),
        "mtp": lambda: mtp_drafter(tiny, num_modules=2),
        "medusa": lambda: head_drafter(medusa_head(tiny), tiny),
        "token_recycling": lambda: TokenRecycling(tiny.config.vocab_size),
    }
    return own[name]() if name in own else drafters(tiny, unrelated, similar)[name]


@pytest.mark.parametrize(
    "name",
    [
        "similar+eagle3",
        *slow("eagle3", "turns_model", "none", "eagle", "mtp", "medusa"),
        *slow("token_recycling", "early_exit", "turns_trees"),
    ],
)
def test_states_are_those_of_chunks_of_one_size(name, tiny, unrelated, similar):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(61, size=length + 1).tolist() for length in LENGTHS]
    call = make_call(tiny, prompts, drafter=made(name, tiny, unrelated, similar))
    assert call.plan.loop.chunks == (256, 64)
    one_size = dataclasses.replace(call.plan.loop, chunks=(64,))
    read = {
        plan: jax.jit(functools.partial(initial_state.read_prompts, plan))
        for plan in (call.plan.loop, one_size)
    }
    for prompt, length in enumerate(LENGTHS):
        arguments = row_arguments(call.plan, [call.requests[prompt]], 1)
        empty = initial_state.empty_state(call.plan.loop, call.plan.params, *arguments)
        wanted = read[one_size](call.plan.params, empty, 0, length)
        whole = read[call.plan.loop](call.plan.params, empty, 0, length)
        parts = empty
        for begin in range(0, length, 256):
            end = min(begin + 256, length)
            parts = read[call.plan.loop](call.plan.params, parts, begin, end)
        for state in (whole, parts):
            assert state.cache.length.tolist() == [length]
            jax.tree.map(
                functools.partial(np.testing.assert_allclose, atol=2e-5),
                (state.cache, state.drafter),
                (wanted.cache, wanted.drafter),
            )
