"""Block drafters in the loop: confidence, and trees over marginals."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import row_count
from decoding import (
    PROMPTS,
    decode,
    first_state,
    greedy,
    make_call,
    mixed,
    observed,
)
from tiny_models import block_drafter, block_head, small_model

from specjax.core.round import make_context
from specjax.drafters import head_drafter
from specjax.errors import InputError
from specjax.sampling.keys import SharedNoise
from specjax.testing import check_drafter

MARKOV = dict(markov_rank=3, sample_from_anchor=True, confidence=True)


def call_of(tiny, drafter, new_tokens=14):
    options = dict(num_speculative_tokens=3, sampling=mixed(max_new_tokens=new_tokens))
    return make_call(tiny, PROMPTS, drafter=drafter, **options)


def test_confidence_ends_a_draft_before_the_token_is_drawn(tiny):
    """A greater bias of the confidence head makes longer drafts, of the same tokens."""
    head = block_head(tiny, **MARKOV)
    lengths = []
    for bias in (-20.0, 0.0, 20.0):
        head.params["confidence"]["bias"] = jnp.full(1, bias)
        drafter = head_drafter(head, tiny, draft_p_min=0.5)
        got = decode(tiny, PROMPTS, drafter=drafter, sampling=greedy(max_new_tokens=8))
        lengths.append(np.maximum(got.drafted, 0).sum() / (got.emitted > 0).sum())
    assert lengths[0] == 0 < lengths[1] < lengths[2]


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_drafts_that_confidence_ends_are_exact(rule):
    """The estimate for a token depends on the token before it, which was drawn."""
    target = small_model(6)
    head = block_head(target, spread=0.6, block_size=3, **MARKOV)
    drafter = head_drafter(head, target, num_speculative_tokens=2, draft_p_min=0.5)
    check = check_drafter(drafter, target, row_count(8_000), verify=rule)
    assert check.passed, check
    whole = drafter._replace(drafter=dataclasses.replace(drafter.drafter, draft_p_min=0.0))
    longer = check_drafter(whole, target, row_count(8_000), verify=rule)
    assert 1.05 < check.acceptance_length < longer.acceptance_length


def best_first(marginals, count):
    """DDTree's tree: of all paths of ranks, the `count` with the largest products of marginals."""
    ranked = -np.sort(-marginals, axis=1)
    taken, waiting = [], [((rank,), odds) for rank, odds in enumerate(ranked[0])]
    while waiting and len(taken) < count:
        best = max(waiting, key=lambda one: one[1])
        waiting.remove(best)
        taken.append(best)
        path, odds = best
        if len(path) < len(ranked):
            waiting += [((*path, rank), odds * one) for rank, one in enumerate(ranked[len(path)])]
    return taken


def test_a_dynamic_tree_over_marginals_is_the_best_of_all(tiny):
    """The broken variant follows fewer paths."""
    head, tree = block_head(tiny, spread=0.5), {"kind": "dynamic", "depth": 3, "num_nodes": 10}
    whole, narrow = (
        head_drafter(head, tiny, tree={**tree, **more}).drafter for more in ({}, {"topk": 2})
    )
    assert (whole.tree.topk, narrow.tree.topk) == (10, 2)
    call = call_of(tiny, head_drafter(head, tiny))
    state, params = first_state(call), call.plan.params[1][0]
    context = make_context(call.plan.loop, call.plan.params[0], state)

    @jax.jit
    def propose(own):
        block, root = whole.head, context.token_at(context.length - 1)[:, None]
        tokens = jnp.pad(root, ((0, 0), (0, 3)), constant_values=head.config.mask_token_id)
        positions = (context.length - 1)[:, None] + jnp.arange(4)[None]
        states = block.extend(params, tokens, positions, own.cache)[:, 1:]
        drafts = [
            drafter.propose(params, own, context, SharedNoise(lambda _: jnp.zeros((8, 61))))[0]
            for drafter in (whole, narrow)
        ]
        return jax.nn.softmax(block.logits(params, states)), drafts

    def ranks_of(draft, marginals):
        """The ranks of the tokens on the path to each node."""
        paths = [()]
        for parent, token in zip(*draft, strict=True):
            odds = marginals[len(paths[parent])]
            paths.append((*paths[parent], int((odds > odds[token]).sum())))
        return set(paths[1:])

    marginals, drafts = propose(observed(call, state)[0])
    rows, worse = np.flatnonzero(np.asarray(context.limit) >= 3), [0, 0]
    for row in rows:
        wanted = {path for path, _ in best_first(np.asarray(marginals[row], np.float64), 10)}
        for index, draft in enumerate(drafts):
            nodes = draft.topology.row_parents[row].tolist(), draft.tokens[row].tolist()
            worse[index] += ranks_of(nodes, marginals[row]) != wanted
    assert worse[0] == 0 < worse[1]
    assert len(rows) > 4


def test_options_are_checked(tiny):
    for options, says in (
        (dict(block_size=1), "block_size=1: the anchor alone drafts nothing"),
        (dict(taps=()), "taps is empty"),
        (dict(conv_kernel_size=2), "conv_group_size=16: must divide the width 24"),
        (dict(markov_rank=2, selector_rank=2), "selector_rank=2: markov_rank=2 already makes"),
        (dict(confidence=True, selector_rank=2), "confidence=True: .* that selector_rank=2 makes"),
    ):
        with pytest.raises(InputError, match=says):
            block_head(tiny, **options)
    with pytest.raises(InputError, match="feature 'layer_input:7' is unknown"):
        block_drafter(tiny, taps=("layer_input:7",))
    with pytest.raises(InputError, match="dflash drafts at most 3 tokens in a row; lower it"):
        head_drafter(block_head(tiny), tiny, tree={"kind": "dynamic", "depth": 4})
