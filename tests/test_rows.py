"""Rows that are admitted while others decode give what they give alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import slow
from decoding import PROMPTS, batch_arguments, decode, drafters, make_call, mixed, replay
from tiny_models import block_drafter, eagle_drafter, medusa_head, mtp_drafter

from specjax.core import initial_state, loop
from specjax.core.cache import KVCache, Window
from specjax.core.state import RUNNING, STOPPED, admit, release
from specjax.drafters import head_drafter, take_turns
from specjax.methods.ngram import Ngram

NEW, SLOT = 20, 1
# Filters of rows that come and go are in test_engine.
REQUESTS = mixed(max_new_tokens=NEW, top_k=0, top_p=1.0, min_p=0.0)
NAMES = (
    # Two drafters, one of them a model; modules that have caches.
    "turns_model",
    "mtp",
    "similar",
    "random_distribution",
    "eagle3",
    "dspark",
    "medusa",
    "simulated",
    "ngram",
    "early_exit",
    "layer_skip",
    "ngram+eagle3",
)


def drafter_of(name, tiny, unrelated, similar):
    if name == "eagle3":
        return eagle_drafter(tiny, spread=0.3)
    if name == "dspark":
        return block_drafter(tiny, spread=0.3, markov_rank=3, sample_from_anchor=True)
    if name == "mtp":
        return mtp_drafter(tiny, num_modules=2, spread=0.3)
    if name == "medusa":
        return head_drafter(medusa_head(tiny), tiny)
    if name == "ngram+eagle3":
        return take_turns(Ngram(prompt_lookup_min=1), eagle_drafter(tiny, spread=0.3))
    if name == "simulated":
        return replay(tiny, plain_rows(tiny), 0.7)
    return drafters(tiny, unrelated, similar)[name]


def plain_rows(tiny):
    return decode(tiny, PROMPTS, sampling=REQUESTS, verify="coupled")


def call_for(tiny, drafter, rule):
    return make_call(
        tiny,
        PROMPTS,
        drafter=drafter,
        num_speculative_tokens=3,
        verify=rule,
        sampling=REQUESTS,
        batch_size=4,
    )


def finish(run, params, state, counts=()):
    """The state at the end, and the counts of its rounds, `counts` before them."""
    counts = list(counts)
    while bool((state.status == RUNNING).any()):
        state, new, _ = run(params, state, jnp.int32(1))
        counts.append(jax.tree.map(lambda part: part[:, :1], new))
    return state, jax.tree.map(lambda *parts: np.concatenate(parts, axis=1), *counts)


def emitted(ended, row, first=0):
    """The tokens of a row, and its raw counts from round `first` of the batch on."""
    state, counts = ended
    length = int(state.length[row])
    parts = [part[row, first:] for part in jax.tree.leaves(counts)[1:]]
    parts = [part[parts[2] >= 0].tolist() for part in parts]
    return np.asarray(state.tokens)[row, :length].tolist(), parts


CASES = [
    (NAMES[0], "rejection", 7),
    *slow(*((name, "rejection", 7) for name in NAMES[1:])),
    *slow(*((name, rule, 2) for name in NAMES for rule in ("block", "coupled"))),
    *slow(*((name, "rejection", 5) for name in NAMES)),
]
"""The prompts admitted have 33 tokens, 40 and one."""


@pytest.mark.parametrize(("name", "rule", "prompt"), CASES)
def test_a_row_admitted_in_a_later_round_decodes_as_alone(
    name, rule, prompt, tiny, unrelated, similar
):
    call = call_for(tiny, drafter_of(name, tiny, unrelated, similar), rule)
    start = jax.jit(functools.partial(initial_state.start, call.plan.loop))
    run = jax.jit(functools.partial(loop.run, call.plan.loop))
    params = call.plan.params
    strangers = start(params, *batch_arguments(call, [0, 1, 2, 3]))
    late = start(params, *batch_arguments(call, [prompt]))
    alone = finish(run, params, late)
    state, counts, _ = run(params, strangers, jnp.int32(6))
    counts = [jax.tree.map(lambda part: part[:, :6], counts)]
    state = release(state, jnp.arange(4) == SLOT)
    assert int(state.status[SLOT]) == STOPPED
    state = jax.jit(admit)(state, jnp.array([SLOT, 9, -1, 9]), late)
    ended = finish(run, params, state, counts)
    together, counts = emitted(ended, SLOT, first=6)
    wanted, wanted_counts = emitted(alone, 0)
    assert together == wanted
    # Widths are the batch's; what a row drafted, had accepted and emitted is its own.
    assert counts == wanted_counts
    untouched = finish(run, params, strangers)
    for row in (0, 2, 3):
        assert emitted(ended, row) == emitted(untouched, row)


def test_every_leaf_has_rows_first_or_belongs_to_a_cache(tiny, unrelated, similar):
    call = call_for(tiny, drafter_of("turns_model", tiny, unrelated, similar), "rejection")
    state = jax.eval_shape(
        functools.partial(initial_state.start, call.plan.loop),
        call.plan.params,
        *batch_arguments(call, [0]),
    )
    leaves = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, KVCache | Window))
    assert sum(isinstance(leaf, KVCache) for leaf in leaves) == 2
    for leaf in leaves:
        assert isinstance(leaf, KVCache | Window) or leaf.shape[0] == 4


def test_a_released_slot_holds_nothing(tiny, similar, unrelated):
    call = call_for(tiny, drafter_of("similar", tiny, unrelated, similar), "rejection")
    state = initial_state.start(
        call.plan.loop, call.plan.params, *batch_arguments(call, [0, 1, 2, 3])
    )
    state = release(state, jnp.arange(4) == 2)
    assert state.cache.length.tolist()[2] == 0
    assert state.drafter[0].drafter.cache.length.tolist()[2] == 0
    assert state.status.tolist() == [RUNNING, RUNNING, STOPPED, RUNNING]
