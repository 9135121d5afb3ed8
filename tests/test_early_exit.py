"""Early exit: verification resumes after the layers that drafted, and nothing else changes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import slow, tiny_config
from decoding import (
    PROMPTS,
    first_state,
    greedy,
    make_call,
)

from specjax.core.causal_mask import causal
from specjax.core.round import make_context, noise_keys, proposal_noise
from specjax.drafters import take_turns
from specjax.errors import InputError
from specjax.loading.load import random_model
from specjax.methods.early_exit import EarlyExit
from specjax.methods.ngram import Ngram
from specjax.models.decoder import Decoder
from specjax.models.form import Form
from specjax.trees import DynamicTree, tree_of_choices

NEW = 24
TREE = tree_of_choices(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1)))
CHAIN = EarlyExit(3, exit_layer=2)
TREES = EarlyExit(3, exit_layer=2, tree=TREE)
DYNAMIC = EarlyExit(3, exit_layer=2, tree=DynamicTree(3, 3, 7))


def drafted(call, state):
    """The draft of the first round, as its drafter proposes it."""
    plan, (params, drafter_params) = call.plan.loop, call.plan.params
    noise = proposal_noise(plan, state, noise_keys(plan, drafter_params, state))

    @jax.jit
    def propose(params, drafter_params, state):
        context = make_context(plan, params, state)
        (drafter,) = plan.drafter.parts
        return drafter.propose(drafter_params[0], state.drafter[0].drafter, context, noise)[0]

    return propose(params, drafter_params, state)


def test_it_is_off_beside_other_drafters_and_where_no_width_is_for_no_draft(tiny):
    joined = make_call(tiny, PROMPTS[:2], drafter=take_turns(Ngram(), CHAIN))
    assert not joined.plan.loop.resumes
    call = make_call(tiny, PROMPTS[:2], drafter=DYNAMIC)
    draft = jax.eval_shape(functools.partial(drafted, call), first_state(call))
    assert draft.partial is None
    call = make_call(tiny, PROMPTS[:2], drafter=CHAIN)
    assert call.plan.loop.resumes
    assert not dataclasses.replace(call.plan.loop, widths=call.plan.loop.widths[-1:]).resumes


@pytest.mark.parametrize("drafter", [CHAIN, TREES], ids=["chain", "tree"])
def test_the_partial_pass_is_that_of_the_whole_draft(drafter, tiny):
    """States by slot, and keys and values, as of one pass over all nodes, leaves among them."""
    options = dict(sampling=greedy(max_new_tokens=NEW), num_speculative_tokens=3)
    call = make_call(tiny, PROMPTS, drafter=drafter, **options)
    state = first_state(call)
    draft = drafted(call, state)
    tokens, topology = draft.tokens, draft.topology
    root = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)
    whole = jax.jit(
        lambda tokens, positions: call.plan.loop.target.extend(
            call.plan.params[0],
            tokens,
            positions,
            state.cache,
            call.plan.loop.target.make_window(len(tokens), topology.width),
            0,
            jnp.asarray(topology.row_ancestors),
            features=("pre_norm",),
            logits=False,
            num_layers=2,
        )
    )(
        jnp.concatenate([root, tokens], axis=1),
        (state.length - 1)[:, None] + topology.row_depths,
    )
    valid = np.pad(np.asarray(draft.valid), ((0, 0), (1, 0)), constant_values=True)
    assert valid.all(axis=1).any()
    close = dict(atol=2e-5, rtol=1e-4)
    states, wanted = draft.partial.states, whole.features["pre_norm"]
    np.testing.assert_allclose(states[valid], wanted[valid], **close)
    for kept, expected in ((draft.partial.window.k, whole.window.k),):
        kept, expected = (np.moveaxis(array[:2], 3, 2) for array in (kept, expected))
        np.testing.assert_allclose(kept[:, valid], expected[:, valid], **close)


FORMS = [Form("unrolled", "blocks"), *slow(Form("stacked"), Form("apart"))]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.layers)
@pytest.mark.parametrize("first", [2, 3, *slow(6)])
def test_a_resumed_pass_has_the_logits_of_a_whole_one_and_costs_the_rest(form, first):
    shape = dict(num_layers=6, hidden_size=96, head_dim=24, intermediate_size=256, vocab_size=16)
    model = random_model(tiny_config(**shape), 0, dtype="float32", form=form)
    decoder, width = Decoder(model.config, model.dtype, form=form), 5
    cache = decoder.make_cache(2, 128)
    tokens = jax.random.randint(jax.random.key(1), (2, width), 0, 16)
    positions = jnp.broadcast_to(jnp.arange(width), (2, width))
    window, visible = decoder.make_window(2, width), causal(jnp.arange(width), width)

    def run(params, window, states=None, **options):
        arguments = params, tokens, positions, cache, window, 0, visible
        return decoder.extend(*arguments, states=states, **options)

    def compiled(first, states, last=6):
        def call(params, window, states):
            options = dict(first_layer=first, num_layers=last) if first else {}
            return run(params, window, states if first else None, **options).logits

        return jax.jit(call).lower(model.params, window, states).compile()

    part = run(model.params, window, num_layers=first, features=("pre_norm",))
    states = part.features["pre_norm"]
    whole = compiled(0, states)
    rest = compiled(first, states)
    logits = whole(model.params, window, states), rest(model.params, part.window, states)
    np.testing.assert_allclose(*logits, atol=1e-5, rtol=1e-4)
    if form.layers != "unrolled":  # a loop is counted once, however often it runs
        return
    head = compiled(6, states)
    for unit in ("flops", "bytes accessed"):
        whole_cost, rest_cost, of_head = (
            program.cost_analysis()[unit] for program in (whole, rest, head)
        )
        layers = (rest_cost - of_head) / (whole_cost - of_head)
        print(f"first_layer={first}: {unit} of the layers {layers:.3f} of a whole pass")
        assert layers <= 1.05 * (6 - first) / 6


def test_features_of_layers_that_do_not_run_again_are_refused(tiny):
    decoder = tiny.architecture
    tokens = jnp.zeros((1, 2), jnp.int32)
    window = decoder.make_window(1, 2)
    states = jnp.zeros((1, 2, tiny.config.hidden_size))
    with pytest.raises(InputError, match="layer_input:1': the pass begins at layer 2; run all"):
        decoder.extend(
            tiny.params,
            tokens,
            tokens,
            None,
            window,
            0,
            causal(jnp.arange(2), 2),
            features=("layer_input:1",),
            first_layer=2,
            states=states,
        )
