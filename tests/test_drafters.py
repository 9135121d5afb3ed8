"""Each drafter by itself: its proposals, their distributions, and how it observes tokens."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import slow, tiny_config
from decoding import (
    PROMPTS,
    Deciding,
    changed,
    decode,
    drafters,
    first_state,
    greedy,
    make_call,
    mixed,
    observed,
    replay,
    rounds,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from test_decoder import near, one_pass

import specjax
from specjax import sampling, trees
from specjax.core.drafter import Context, Sampling
from specjax.core.round import propose as propose_round
from specjax.drafters import DRAFTERS, TRAINED, Drafter, drafter_options
from specjax.errors import InputError
from specjax.methods.ngram import Ngram, find_matches
from specjax.testing import Tabular


def context_of(rows, limit, vocab=61):
    """A context of committed tokens alone, as the n-gram drafter needs it."""
    batch, width = len(rows), max(map(len, rows)) + 3
    tokens = np.full((batch, width), 59, np.int32)
    for row, ids in enumerate(rows):
        tokens[row, : len(ids)] = ids
    ones, whole = jnp.ones(batch), jnp.zeros(batch, jnp.int32)
    model = Tabular(vocab)
    return Context(
        tokens=jnp.asarray(tokens),
        length=jnp.array([len(ids) for ids in rows], jnp.int32),
        prompt_length=jnp.array([len(ids) for ids in rows], jnp.int32),
        limit=jnp.asarray(limit, jnp.int32),
        index=whole,
        sampling=Sampling(temperature=0 * ones, top_k=whole, top_p=ones, min_p=0 * ones),
        cache=model.make_cache(batch, width),
        params=None,
        target=model,
        flags=sampling.WarpFlags.of(0.0),
        features={},
        needs_logq=False,
        longest_commit=9,
    )


def _draws(depth):
    raise AssertionError("a deterministic drafter draws nothing")


silence = sampling.SharedNoise(_draws)


def matches_by_hand(ids, longest, shortest, latest):
    """The ends of the longest earlier copies of the last tokens, tried length by length."""
    for size in range(min(longest, len(ids) - 1), shortest - 1, -1):
        ends = [
            e for e in range(size - 1, len(ids) - 1) if ids[e - size + 1 : e + 1] == ids[-size:]
        ]
        if ends:
            return ends[::-1] if latest else ends
    return []


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=4, max_size=4),
    bounds=st.sampled_from([(1, 1), (3, 1), (3, 2), (4, 3)]),
    latest=st.booleans(),
    most=st.sampled_from([1, 3]),
)
def test_ngram_matches_as_by_hand(rows, bounds, latest, most):
    longest, shortest = bounds
    tokens = np.full((4, 16), 2, np.int32)
    for row, ids in enumerate(rows):
        tokens[row, : len(ids)] = ids
    length = jnp.array([len(ids) for ids in rows], jnp.int32)
    ends, found = FIND(jnp.asarray(tokens), length, longest, shortest, latest, most)
    for row, ids in enumerate(rows):
        want = matches_by_hand(ids, longest, shortest, latest)[:most]
        assert (found[row] > 0).tolist() == [True] * len(want) + [False] * (most - len(want))
        assert ends[row, : len(want)].tolist() == want


FIND = jax.jit(find_matches, static_argnums=(2, 3, 4, 5))


@functools.partial(jax.jit, static_argnums=0)
def proposed(drafter, context):
    return drafter.propose(None, (), context, silence)[0]


def test_ngram_copies_what_followed_and_continues_in_the_copy():
    rows = [[1, 2, 3, 4, 1, 2], [7, 7], [1, 2, 1, 2], [5, 6, 8]]
    context = context_of(rows, [6, 6, 3, 6])
    drafter = Ngram(prompt_lookup_min=1, num_speculative_tokens=6)
    draft = proposed(drafter, context)
    assert draft.valid.sum(axis=1).tolist() == [6, 6, 3, 0]
    assert draft.tokens[0].tolist() == [3, 4, 1, 2, 3, 4]
    assert draft.tokens[1].tolist() == [7] * 6
    assert draft.tokens[2, :3].tolist() == [1, 2, 1]
    assert (draft.logq_row == -1).all()
    assert draft.logq is None


def test_ngram_takes_the_earliest_or_the_latest():
    context = context_of([[1, 2, 5, 1, 2, 6, 1, 2]], [1])
    for match, token in (("latest", 6), ("earliest", 5)):
        draft = proposed(Ngram(match=match, num_speculative_tokens=1), context)
        assert draft.tokens.tolist() == [[token]]


def test_several_matches_make_a_tree():
    rows = [[1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 6, 1, 2], [1, 2, 3, 4, 1, 2], [1, 2, 7, 1, 2], [5, 6, 8]]
    context = context_of(rows, [3, 3, 1, 3])
    drafter = Ngram(num_speculative_tokens=3, num_matches=3)
    assert drafter.num_nodes == 9
    draft = proposed(drafter, context)
    assert draft.valid.sum(axis=1).tolist() == [8, 3, 1, 0]
    # The latest match first; what follows the other two begins with the same token.
    assert draft.tokens[0, :8].tolist() == [6, 3, 1, 5, 4, 2, 1, 1]
    assert draft.topology.row_parents[0, :8].tolist() == [0, 0, 1, 2, 2, 3, 4, 5]
    assert draft.tokens[1, :3].tolist() == [3, 4, 1]
    assert draft.tokens[2, 0] == 7
    assert draft.logq is None
    # There are fewer positions than matches are asked for.
    many = dataclasses.replace(drafter, num_matches=30)
    assert proposed(many, context).valid.sum(axis=1).tolist() == [8, 3, 1, 0]


@pytest.fixture(scope="module")
def plain(tiny):
    return decode(tiny, PROMPTS, **ALONE)


ALONE = dict(sampling=greedy(max_new_tokens=12), batch_size=1)


def test_a_round_without_a_match_is_a_plain_round(tiny):
    drafter = Ngram(prompt_lookup_min=3, num_speculative_tokens=3)
    request = greedy(max_new_tokens=12)
    got = decode(tiny, [[1, 2, 3]], drafter=drafter, sampling=request, every_width=True)
    participated = got.emitted[0] > 0
    empty = got.drafted[0] == 0
    assert (got.width[0][participated & empty] == 1).all()
    assert (got.width[0][participated & ~empty] > 1).all()
    assert empty[0]


@pytest.mark.parametrize("name", ["similar", *slow("early_exit", "early_exit_p_min")])
def test_drafts_come_from_the_distributions_that_they_name(name, tiny, unrelated, similar):
    """The stored distribution is the drafter's, warped, at that prefix, and can give that token."""
    drafter = drafters(tiny, unrelated, similar)[name]
    options = dict(sampling=mixed(max_new_tokens=9), num_speculative_tokens=3)
    call = make_call(tiny, PROMPTS, drafter=drafter, **options)
    propose, limits = jax.jit(propose_round, static_argnums=0), call.plan.loop.drafter.full_limits()
    # After one-token prompts, and after rounds that ended in many ways.
    states = [first_state(call)]
    states += itertools.islice(rounds(call, states[0]), 2)
    warps = [state.rows.sampling for state in states]
    for state, warp in zip(states, warps, strict=True):
        draft = propose(call.plan.loop, call.plan.params, state, limits).draft
        draft, state, warp = jax.device_get((draft, state, warp))
        limit = np.maximum(np.minimum(3, state.rows.max_length - state.length - 1), 0)
        counts = draft.valid.sum(axis=1)
        assert (counts <= np.where(state.status == 0, limit, 0)).all()
        assert draft.logq_row.tolist() == [[0, 1, 2]] * 8
        paths = state.tokens[:, :64].copy()
        for row, length in enumerate(state.length.tolist()):
            paths[row, length : length + 3] = draft.tokens[row]
        source = {"num_layers": 2} if name.startswith("early_exit") else {}
        logits = one_pass(tiny if source else similar, paths, **source).logits
        positions = (state.length - 1)[:, None] + np.arange(3)[None, :]
        logits = np.take_along_axis(np.asarray(logits), positions[:, :, None], axis=1)
        every = (warp.temperature, warp.top_k, warp.top_p, warp.min_p)
        want = jax.jit(sampling.warp)(logits, *(np.tile(part[:, None], (1, 3)) for part in every))
        valid = draft.valid
        assert valid.any()
        np.testing.assert_allclose(np.exp(draft.logq)[valid], np.exp(want)[valid], atol=2e-5)
        token_logq = np.take_along_axis(draft.logq, draft.tokens[:, :, None], axis=2)[..., 0]
        assert (token_logq[valid] > -np.inf).all()
        if name == "early_exit_p_min":
            confidence = np.asarray(jax.nn.softmax(logits).max(axis=-1))
            assert (confidence[valid] > 0.149).all()
            stopped = (counts < limit) & (state.status == 0)
            assert (confidence[stopped, counts[stopped]] < 0.151).all()


def test_simulated_is_right_as_often_as_it_says(tiny):
    for seed, acceptance in ((0, 0.8), (1, 0.3)):
        options = dict(continuations=[[3] * 400] * 2, acceptance=acceptance, mistake_seed=seed)
        drafter, again = (specjax.make_drafter("simulated", tiny, **options) for _ in range(2))
        right = np.asarray(drafter.params.tokens) == 3
        assert abs(right.mean() - acceptance) < 0.06
        assert (right[0] != right[1]).any()
        assert (drafter.params.tokens == again.params.tokens).all()


def test_simulated_drafts_nothing_after_its_recording(tiny, plain):
    short = [plain.token_ids[0][:5]]
    drafter = specjax.make_drafter("simulated", tiny, continuations=short, acceptance=1.0)
    got = decode(tiny, PROMPTS[:2], drafter=drafter, num_speculative_tokens=4, **ALONE)
    assert got.token_ids == plain.token_ids[:2]
    assert np.maximum(got.drafted, 0).sum(axis=1).tolist() == [4, 0]


def test_a_tree_is_refused_by_rules_of_chains(tiny):
    def propose(real, params, state, context, noise):
        tokens = jnp.zeros((context.length.shape[0], 2), jnp.int32)
        draft = trees.chain(tokens, context.limit)
        return draft.replace(topology=trees.Topology((0, 0))), state

    drafter = changed(Ngram(num_speculative_tokens=2), propose=propose)
    rule = Deciding(sampling.block)
    with pytest.raises(ValueError, match="'changed' proposes a tree: .* build drafts with tr"):
        decode(tiny, [[1]], drafter=drafter, num_speculative_tokens=2, verify=rule)


def test_a_drafter_that_drafts_too_much_is_held_to_its_limit(tiny, plain):
    def propose(real, params, state, context, noise):
        tokens = jnp.zeros((context.length.shape[0], 2), jnp.int32)
        return trees.chain(tokens, jnp.full_like(context.limit, 2)), state

    drafter = changed(Ngram(), propose=propose)
    # There is room for two tokens: for one draft token.
    requests = greedy(max_new_tokens=2)
    got = decode(tiny, PROMPTS[:1], drafter=drafter, sampling=requests, num_speculative_tokens=2)
    assert got.token_ids == [plain.token_ids[0][:2]]
    assert got.drafted[0, 0] == 1


def test_a_hole_in_a_draft_ends_it(tiny, plain):
    """What comes after a node that was never proposed has no parent, and is not verified."""

    def propose(real, params, state, context, noise):
        draft, state = real(params, state, context, noise)
        return draft.replace(valid=draft.valid.at[:, 1].set(False)), state

    drafter = changed(replay(tiny, plain, 1.0), propose=propose)
    got = decode(tiny, PROMPTS, drafter=drafter, num_speculative_tokens=3, **ALONE)
    assert got.token_ids == plain.token_ids
    assert got.drafted.max() == 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Watching(Drafter):
    """A drafter that only watches: it keeps the features that `observe` is given."""

    names: tuple = dataclasses.field(kw_only=False)
    width: int = 24
    num_speculative_tokens: int = 3
    features = property(lambda self: self.names)

    def init(self, params, batch, capacity):
        return {name: jnp.zeros((batch, 64, self.width)) for name in self.names}

    def propose(self, params, state, context, noise):
        root = context.token_at(context.length - 1)
        shape = (root.shape[0], self.num_speculative_tokens)
        return trees.chain(jnp.broadcast_to(root[:, None], shape), context.limit), state

    def observe(self, params, state, context, accepted):
        rows = jnp.arange(context.length.shape[0])[:, None]
        step = jnp.arange(accepted.tokens.shape[1])[None, :]
        first = (context.length - 1 - accepted.count)[:, None]
        where = jnp.where(step < accepted.count[:, None], first + step, 64)
        return {
            name: value.at[rows, where].set(accepted.features[name], mode="drop")
            for name, value in state.items()
        }


def test_features_reach_the_drafter_at_the_right_positions(tiny):
    """At round start they exist for positions 0..n-2, first of the prompt, then of the path."""
    names = ("final_norm", "layer_input:1")
    requests = mixed(max_new_tokens=10)
    call = make_call(tiny, PROMPTS, drafter=Watching(names), sampling=requests)
    assert call.plan.loop.drafter.num_speculative_tokens == 3
    state = first_state(call)
    states = [state, *rounds(call, state)]
    for state in (states[0], states[1], states[-1]):
        wanted = one_pass(tiny, np.asarray(state.tokens), features=names).features
        kept = observed(call, state)[0]
        for name in names:
            for row, length in enumerate(state.length.tolist()):
                near(kept[name][row, : length - 1], wanted[name][row, : length - 1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Own(Ngram):
    path: object = dataclasses.field(kw_only=False)
    name = property(lambda self: f"own-{self.path}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pointing(Drafter):
    """A class in place of a function; its fields are the options."""

    offset: int = 1

    def propose(self, params, state, context, noise):
        tokens = context.tokens_from(context.length - self.offset, self.num_speculative_tokens)
        return trees.chain(tokens, context.limit), state


def make_own(target, path=None, *, step=1):
    """A drafter that the registry finds by module and function."""
    return Own(path, prompt_lookup_min=step)


def test_drafters_by_name(tiny):
    for name in DRAFTERS:
        if name in TRAINED:
            says = f"no {name} comes with|no MTP modules, and none come with"
            with pytest.raises(InputError, match=says):
                specjax.make_drafter(name, tiny)
        elif name == "quantized":
            with pytest.raises(InputError, match="head.kernel has 24 inputs, no multiple of 32"):
                specjax.make_drafter(name, tiny)
        elif name == "corpus":
            with pytest.raises(InputError, match="drafter.corpus is missing: make an index by"):
                specjax.make_drafter(name, tiny)
        elif name != "simulated":
            assert specjax.make_drafter(name, tiny).name == name
    own = specjax.make_drafter("test_drafters:make_own", tiny, "here", step=2)
    assert own.name == "own-here"
    assert own.drafter.num_speculative_tokens == 8
    both = specjax.make_drafter("test_drafters:make_own+early_exit", tiny, step=2, exit_layer=1)
    assert both.name == "own-None+early_exit"
    assert [part.num_speculative_tokens for part in both.drafter.parts] == [8, 4]
    assert both.drafter.parts[0].prompt_lookup_min == 2
    merged = specjax.make_drafter("ngram|test_drafters:make_own", tiny, num_speculative_tokens=2)
    assert (merged.name, merged.drafter.num_nodes) == ("ngram|own-None", 4)
    watching = specjax.make_drafter("test_drafters:Pointing", tiny, offset=3)
    assert watching.drafter == Pointing(offset=3)
    shorter = specjax.make_drafter("ngram", tiny, num_speculative_tokens=3)
    assert shorter.drafter.num_speculative_tokens == 3
    model = specjax.make_drafter("draft_model", tiny, tiny)
    assert model.params is tiny.params
    assert "exit_layer" in drafter_options("early_exit")
    with pytest.raises(InputError, match="returned dict, not a Drafter"):
        specjax.make_drafter("test_drafters:tiny_config_of", tiny)


def tiny_config_of(target):
    return dataclasses.asdict(tiny_config())
