"""Token recycling: the table follows the target's passes, and the tree is looked up in it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoding import PROMPTS, first_state, make_call, observed
from test_decoder import one_pass
from test_drafters import context_of, silence
from tiny_models import bigrams

from specjax import trees
from specjax.core.drafter import TargetPass
from specjax.drafters import TokenRecycling, TreeOptions, take_turns
from specjax.engine.requests import SamplingParams
from specjax.errors import InputError
from specjax.sampling import Coupled
from specjax.testing.drafter_check import decode as decode_rows
from specjax.testing.drafter_check import make_plan

TREE = trees.tree_of_choices([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]])


@pytest.fixture(scope="module")
def target():
    return bigrams(8)


def test_a_tree_is_looked_up():
    drafter = TokenRecycling(9, tree=TREE)
    assert (drafter.num_speculative_tokens, drafter.num_nodes, drafter.num_candidates) == (3, 6, 2)
    table = drafter.init((), 4, 20)
    assert table.shape == (4, 9, 2)
    known = np.array(table)
    for token, after in ((2, [3, 4]), (3, [5, 6]), (5, [2, 7])):
        known[:3, token] = after
    context = context_of([[1, 2], [1, 3], [2], [2]], [3, 3, 1, 3])

    @jax.jit
    def propose(table):
        draft, after = drafter.propose((), table, context, silence)
        assert after is table
        return draft

    draft = propose(known)
    assert draft.topology == TREE.topology
    assert draft.tokens[0].tolist() == [3, 4, 5, 6, 0, 2]
    # Nothing is known of what follows 4 (and 6, in the second row); the third may draft one level.
    assert draft.valid.tolist() == [
        [True, True, True, True, False, True],
        [True, True, True, True, False, True],
        [True, True, False, False, False, False],
        [False] * 6,
    ]
    assert draft.tokens[1].tolist() == [5, 6, 2, 7, 0, 3]
    assert draft.logq is None
    assert (draft.logq_row == -1).all()


def test_the_last_of_equal_tokens_counts():
    drafter = TokenRecycling(5, tree=TREE)
    seen = TargetPass(
        jnp.array([[1, 2, 1, 2], [3, 3, 3, 1]]),
        jnp.array([[0, 0, 1, 2]] * 2),
        jnp.array([[True, True, True, False], [True, True, False, False]]),
        {"top_tokens:2": jnp.arange(16).reshape(2, 4, 2)},
    )
    table = drafter.observe_pass((), drafter.init((), 2, 8), seen)
    assert table[0].tolist() == [[-1, -1], [4, 5], [2, 3], [-1, -1], [-1, -1]]
    assert table[1].tolist() == [[-1, -1], [-1, -1], [-1, -1], [10, 11], [-1, -1]]


def test_prompts_fill_the_table(tiny):
    """The latest position of a token counts, and all but the last token are read."""
    call = make_call(tiny, PROMPTS, drafter=TokenRecycling(61, tree=TREE))
    state = first_state(call)
    table = np.asarray(observed(call, state)[0])
    logits = np.asarray(one_pass(tiny, np.asarray(state.tokens)).logits)
    for row, prompt in enumerate(PROMPTS):
        read = prompt[:-1]
        assert set(np.flatnonzero(table[row, :, 0] >= 0).tolist()) == set(read)
        for token in read:
            last = len(read) - 1 - read[::-1].index(token)
            best = np.argsort(-logits[row, last], kind="stable")[:2]
            assert table[row, token].tolist() == best.tolist()


def test_rounds_fill_the_table(target):
    """With the successors of every token that was committed or drafted, and of no other."""
    model, logits = target
    request = SamplingParams(temperature=1.0)
    drafter = take_turns(TokenRecycling(8, tree=TREE)).drafter
    plan = make_plan(model, drafter, 3, verify=Coupled(), request=request, capacity=24)
    state, _ = decode_rows(plan, (logits, ((),)), [3], request, np.arange(50), 0, 4)
    table = np.asarray(state.drafter[0].drafter)
    right = np.argsort(-np.asarray(logits), axis=1, kind="stable")[:, :2]
    refused = 0
    for row in range(50):
        committed = set(np.asarray(state.tokens[row, : int(state.length[row]) - 1]).tolist())
        known = set(np.flatnonzero(table[row, :, 0] >= 0).tolist())
        assert committed <= known
        refused += len(known - committed)
        for token in known:
            assert table[row, token].tolist() == right[token].tolist()
    assert refused > 20


def test_top_tokens_are_those_of_the_logits(tiny):
    """Also without logits, of which only a few positions are computed at a time."""
    tokens = jnp.asarray(np.random.default_rng(0).integers(61, size=(2, 64)), jnp.int32)
    names = ("top_tokens:3", "final_norm", "top_tokens:5")

    def extend(names, logits):
        decoder = tiny.architecture
        visible = jnp.tril(jnp.ones((1, 64, 64), bool))
        positions = jnp.broadcast_to(jnp.arange(64), tokens.shape)
        cache, window = decoder.make_cache(2, 64), decoder.make_window(2, 64)
        given = (tiny.params, tokens, positions, cache, window, 0, visible)
        return decoder.extend(*given, features=names, logits=logits)

    found, alone = extend(names, True), extend(names[:1], False)
    best = np.argsort(-np.asarray(found.logits), axis=-1, kind="stable")
    assert alone.logits is None
    for count, features in ((3, found.features), (5, found.features), (3, alone.features)):
        assert features[f"top_tokens:{count}"].dtype == jnp.int32
        np.testing.assert_array_equal(features[f"top_tokens:{count}"], best[..., :count])


@pytest.mark.parametrize("name", ["top_tokens:0", "top_tokens:62", "top_tokens:x"])
def test_a_feature_that_there_is_not(name, tiny):
    with pytest.raises(InputError, match=f"feature '{name}': use top_tokens:k with k from 1 to"):
        one_pass(tiny, np.zeros((1, 2), int), features=(name,))


def test_options_of_the_tree():
    usual = TokenRecycling(61)
    assert (usual.num_speculative_tokens, usual.num_nodes, usual.num_candidates) == (5, 32, 8)
    assert dataclasses.replace(usual, num_speculative_tokens=2).shape.depth == 2
    assert dataclasses.replace(usual, num_speculative_tokens=0).num_nodes == 0
    small = TokenRecycling(61, tree=TreeOptions(kind="static", num_nodes=6, depth=3))
    assert (small.num_speculative_tokens, small.num_nodes) == (3, 6)
    line = TokenRecycling(61, num_speculative_tokens=4, tree=TreeOptions(kind="chain"))
    assert line.tree is None
    assert line.shape.topology.is_chain
    assert (line.num_nodes, line.num_candidates) == (4, 1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tree": TREE, "num_speculative_tokens": 4}, "=4: the tree has 3 levels; leave it out"),
        ({"tree": trees.tree_of_choices([[0], [1], [2]])}, "tree.topk=3: the vocabulary has 2"),
        ({}, "tree.topk=8: the vocabulary has 2 tokens; lower it"),
        ({"tree": TreeOptions(kind="dynamic", topk=2)}, "tree.kind=dynamic: .* use static"),
    ],
)
def test_bad_input(options, said):
    with pytest.raises(InputError, match=said):
        TokenRecycling(2, **options)
