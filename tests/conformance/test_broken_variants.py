"""Deliberately broken variants in the matrix: each fails the check that it belongs to.

What shows in few tokens only is in test_tree_distribution, and rules alone in enumerations.
"""

import dataclasses
import itertools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance.cells import (
    ROWS,
    Cell,
    Program,
    expected,
    joint_test,
    outputs_of,
    restarted,
    taken,
)
from conformance.checks import FEW, assert_cache, assert_outputs
from conformance.methods import LENGTH, VOCAB, draft_model, drafter, target, target_with
from conformance.passes import assert_remembered
from conftest import slow
from decoding import Deciding, changed, random_distribution
from flax import struct
from test_tree_distribution import OwnTree
from test_turn_taking import Bigrams, says

from specjax import sampling, trees
from specjax.core.drafter import LoadedDrafter
from specjax.core.recurrent_state import RecurrentState
from specjax.core.turn_taking import PartState, joined
from specjax.drafters import Drafter, merge_drafters, take_turns
from specjax.methods.early_exit import EarlyExit
from specjax.methods.sparse_kv import SparseKV
from specjax.models.decoder import Decoder
from specjax.models.layers.recurrence import Ancestors
from specjax.sampling import RULES, Decision


def program_of(method, topology, rule, **functions):
    """Return the program of a cell whose last drafter has other functions."""
    turns, params = drafter(method, topology)
    *before, own = itertools.starmap(LoadedDrafter, zip(turns.parts, params, strict=True))
    loaded = take_turns(*before, changed(own, **functions))
    return Program.of(loaded, RULES[rule] if isinstance(rule, str) else rule)


def one_distribution_late(real, params, state, context, noise):
    """Each node names the distribution of another one."""
    draft, state = real(params, state, context, noise)
    return draft.replace(logq_row=(draft.logq_row + 1) % draft.logq.shape[1]), state


def claimed(real, params, state, context, noise):
    """The likeliest tokens count as drawn from their distributions."""
    draft, state = real(params, state, context, noise)
    rows = jnp.maximum(draft.logq_row, 0)[:, :, None]
    likeliest = jnp.argmax(jnp.take_along_axis(draft.logq, rows, axis=1), axis=2)
    return draft.replace(tokens=likeliest.astype(jnp.int32)), state


def uniformly_drawn(real, params, state, context, noise):
    """Copied tokens count as drawn from a uniform distribution."""
    draft, state = real(params, state, context, noise)
    step = jnp.broadcast_to(jnp.arange(draft.tokens.shape[1]), draft.tokens.shape)
    return draft.replace(logq=jnp.full((*step.shape, VOCAB), -jnp.log(VOCAB)), logq_row=step), state


def shortened(real, params, state, context, noise):
    """A draft ends before a token that turned out to be unlikely."""
    draft, state = real(params, state, context, noise)
    rows = jnp.maximum(draft.logq_row, 0)[:, :, None]
    own = jnp.take_along_axis(draft.logq, rows, axis=1)
    own = jnp.take_along_axis(own, draft.tokens[:, :, None], axis=2)[..., 0]
    likely = jnp.cumprod(own > jnp.log(0.3), axis=1).astype(bool)
    return draft.replace(valid=draft.valid & likely), state


def over_all_keys(real, params, state, context, noise):
    """A draft over few keys counts as drawn from the distributions over all of them."""
    draft, state = real(params, state, context, noise)
    everything = draft_model(num_speculative_tokens=LENGTH).drafter
    claimed, _ = everything.propose(params, state, context, noise)
    return draft.replace(logq=claimed.logq), state


def with_replacement(real, params, state, context, noise):
    """The root's second child is drawn on its own, and may be the first again."""
    draft, state = real(params, state, context, noise)
    again = jnp.argmax(draft.logq[:, 0] + noise(7, [0])[:, 0], axis=1).astype(jnp.int32)
    return draft.replace(tokens=draft.tokens.at[:, 1].set(again)), state


def ranked_by_own_q(real, params, state, context, noise):
    """The root's children are sorted by the probabilities of the tokens that were drawn."""
    draft, state = real(params, state, context, noise)
    drawn = draft.tokens[:, :2]
    order = jnp.argsort(-jnp.take_along_axis(draft.logq[:, 0], drawn, axis=1), axis=1)
    drawn = jnp.take_along_axis(drawn, order, axis=1)
    return draft.replace(tokens=draft.tokens.at[:, :2].set(drawn)), state


def in_the_drafts_own_ids(real, params, state, context, noise):
    """Tokens are the draft model's, not the target's."""
    draft, state = real(params, state, context, noise)
    return draft.replace(tokens=params["columns"][jnp.minimum(draft.tokens, VOCAB - 2)]), state


def claimed_without_the_grammar(real, params, state, context, noise):
    """Tokens are drawn among those that may follow, from what counts as drawn among all."""
    draft, after = real(params, state, context, noise)
    blind = context.replace(processors=(), processor_states=())
    return draft.replace(logq=real(params, state, blind, noise)[0].logq), after


def residual_is_p(tokens, num_valid, target, draft, uniforms):
    accepted, _ = sampling.rejection(tokens, num_valid, target, draft, uniforms)
    return Decision(accepted, target(accepted))


@pytest.mark.parametrize(
    ("method", "topology", "rule", "propose"),
    [
        ("draft_model", "chain", "rejection", one_distribution_late),
        ("draft_model_few_keys", "chain", "rejection", over_all_keys),
        ("translated", "chain", "rejection", in_the_drafts_own_ids),
        ("medusa", "static", "rejection", ranked_by_own_q),
        ("suffix", "dynamic", "rejection", uniformly_drawn),
        ("medusa", "merged", "rejection", one_distribution_late),
        *slow(
            ("medusa", "static", "rejection", one_distribution_late),
            ("corpus", "chain", "rejection", uniformly_drawn),
            ("medusa", "turns", "rejection", one_distribution_late),
            # test_loop_distribution and test_chain_enumeration find these, too.
            ("draft_model", "chain", "block", claimed),
            ("draft_model", "chain", "rejection", shortened),
            ("draft_model", "chain", Deciding(residual_is_p), None),
        ),
    ],
)
def test_other_distributions_are_found(method, topology, rule, propose):
    program = program_of(method, topology, rule, propose=propose)
    found, _ = joint_test(program, FEW)
    assert found.statistic > found.threshold, found


@pytest.mark.parametrize(
    ("method", "topology"), [("medusa", "static"), *slow(("draft_model", "chain"))]
)
def test_a_draft_that_hides_the_grammar_is_found(method, topology):
    with target_with("grammar"):
        program = program_of(method, topology, "rejection", propose=claimed_without_the_grammar)
        found, _ = joint_test(program, FEW)
    assert found.statistic > found.threshold, found


TWO = jnp.log(jnp.full(VOCAB, 1e-4).at[2].set(0.85).at[0].set(0.15))
"""A distribution whose likeliest token is mostly refused, and drawn again."""
TREE_OF_TWO = LoadedDrafter(OwnTree(num_speculative_tokens=LENGTH), TWO)
TWO_THAT_DRAW = merge_drafters(
    *[LoadedDrafter(Bigrams(), jnp.broadcast_to(TWO, (VOCAB, VOCAB)))] * 2
)


def without_any_duplicate(real, params, state, context, noise):
    """Drops what was drawn where a sibling before it has its token."""
    draft, state = real(params, state, context, noise)
    # Any number below 0 says that a node was not drawn.
    merged = trees.merge_duplicates(draft.replace(logq_row=-2 - draft.logq_row))
    return merged.replace(logq_row=-2 - merged.logq_row), state


class OneForAll(sampling.SeparateNoise):
    """Noise that is the same for all drafters."""

    def part(self, number, *, branches):
        return super().part(0, branches=branches)


def same_noise(real, params, state, context, noise):
    return real(params, state, context, OneForAll(noise.keys, noise.vocab))


@pytest.mark.parametrize(
    ("loaded", "propose"),
    [
        (TREE_OF_TWO, None),
        (TREE_OF_TWO, with_replacement),
        (TWO_THAT_DRAW, None),
        (TWO_THAT_DRAW, without_any_duplicate),
        (TWO_THAT_DRAW, same_noise),
    ],
)
def test_siblings_that_are_often_equal(loaded, propose):
    """As they are, they keep the distribution."""
    made = take_turns(changed(loaded, propose=propose) if propose else loaded)
    found, length = joint_test(Program.of(made, RULES["rejection"]), 2 * FEW)
    assert (found.statistic < found.threshold) == (propose is None), found
    assert length > 1.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrawsInSecret(Drafter):
    """A distribution that is not returned: tokens are drawn from it, and the state follows them."""

    num_speculative_tokens: int = 1

    def propose(self, params, state, context, noise):
        token = jnp.argmax(params[None, :] + noise(0), axis=-1).astype(jnp.int32)
        tokens = jnp.broadcast_to(token[:, None], (token.shape[0], self.num_speculative_tokens))
        return trees.chain(tokens, jnp.where(token < VOCAB // 2, context.limit, 0)), state


def in_turns(first, second, propose):
    """Two drafters without a state as one drafter, whose drafts `propose` makes."""
    turns, params = take_turns(first, second)
    pair = turns.limited(LENGTH)

    def together(real, params, state, context, noise):
        return propose(pair, params, context, noise), state

    return take_turns(changed(LoadedDrafter(pair.parts[1], params), propose=together))


def proposed(pair, params, context, noise):
    """What drafters without a state propose."""
    empty = jnp.zeros(context.length.shape, jnp.int32)
    state = tuple(PartState((), empty) for _ in pair.parts)
    return pair.propose(params, state, context, noise, pair.full_limits()).draft


def both_see_the_same_noise(pair, params, context, noise):
    return proposed(pair, params, context, sampling.SharedNoise(noise))


def every_node_was_drawn(pair, params, context, noise):
    """Claims that a copied token, too, was drawn from a distribution."""
    draft = proposed(pair, params, context, noise)
    row = jnp.broadcast_to(jnp.arange(draft.logq_row.shape[1]), draft.logq_row.shape)
    return draft.replace(logq_row=row)


def chooses_by_what_was_drawn(pair, params, context, noise):
    """Takes the copy only where the other one drew something else."""
    copying, drawing = pair.parts
    copied, _ = copying.propose(params[0], (), context, noise)
    drawn, _ = drawing.propose(params[1], (), context, noise)
    other = copied.tokens[:, :1] != drawn.tokens[:, :1]
    copied = copied.replace(valid=copied.valid & other)
    return joined(copied, drawn, pair.num_speculative_tokens)


SECRETIVE = LoadedDrafter(DrawsInSecret(), jnp.zeros(VOCAB))


@pytest.mark.parametrize(
    ("first", "propose"),
    [
        (SECRETIVE, proposed),
        (SECRETIVE, both_see_the_same_noise),
        (says(6, LENGTH), every_node_was_drawn),
        (says(6, LENGTH), chooses_by_what_was_drawn),
    ],
)
def test_turns_of_two_that_draw(first, propose):
    """What the first one drew in secret tells nothing of the second, unless it is broken."""
    loaded = in_turns(first, random_distribution(VOCAB), propose)
    found, length = joint_test(Program.of(loaded, RULES["rejection"]), FEW)
    assert (found.statistic < found.threshold) == (propose is proposed), found
    assert length > 1.05


def features_of_the_position_before(real, params, state, context, accepted):
    moved = {name: jnp.roll(value, 1, axis=1) for name, value in accepted.features.items()}
    return real(params, state, context, accepted.replace(features=moved))


def masks_that_see_refused_pairs(real, params, state, context, accepted):
    """The keys that are kept are right; what comes after them also saw pairs of refused tokens."""
    every = jnp.where(accepted.count > 0, accepted.tokens.shape[1], 0)
    later = real(params, state, context, accepted.replace(count=every))
    return real(params, state, context, accepted).replace(outputs=later.outputs)


def prompts_alone(real, params, state, context, accepted):
    return real(params, state, context, accepted) if accepted.tokens.shape[1] > 9 else state


@pytest.mark.parametrize(
    ("method", "topology", "observe"),
    [
        ("dflash", "chain", features_of_the_position_before),
        ("eagle3", "merged", features_of_the_position_before),
        ("eagle3", "turns", prompts_alone),
        ("peagle", "chain", masks_that_see_refused_pairs),
        *slow(
            *((name, "chain", features_of_the_position_before) for name in ("mtp", "medusa")),
            ("draft_model", "dynamic", prompts_alone),
        ),
    ],
)
def test_states_that_do_not_follow_are_found(method, topology, observe):
    """Tokens are right; rows that are put back draft otherwise than those that stayed."""
    program = program_of(method, topology, "coupled", observe=observe)
    state = program.start(expected()[0])
    assert_outputs(*program.run(state), "coupled")
    for _ in range(3):
        state, _ = program.run(state, 1)
    assert_cache(state)
    _, stayed = program.run(state)
    _, again = program.run(restarted(program, state))
    assert (stayed.accepted != again.accepted).any()


@pytest.mark.parametrize("method", ["token_recycling", "lookahead"])
def test_what_is_kept_of_another_row_is_found(method):
    program = Cell(method, "chain", "coupled").program
    before = program.start(expected()[0])
    after, _ = program.run(before, 1)
    assert_remembered(program, before, after)
    moved = jax.tree.map(lambda leaf: jnp.roll(leaf, 1, axis=0), after.drafter)
    with pytest.raises(AssertionError):
        assert_remembered(program, before, after.replace(drafter=moved))


def shifted(partial):
    """The states of each slot are those of the one before."""
    return dataclasses.replace(partial, states=jnp.roll(partial.states, 1, axis=1))


def without_entries(partial):
    """The keys and values of the layers that were skipped are not kept."""
    empty = jax.tree.map(jnp.zeros_like, partial.window)
    return dataclasses.replace(partial, window=empty)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OtherPartialPass(EarlyExit):
    change: object = None

    def propose(self, params, state, context, noise):
        draft, state = super().propose(params, state, context, noise)
        return draft.replace(partial=self.change(draft.partial)), state


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommitsSkippedLayers(EarlyExit):
    """Verification resumes after a draft that left out a layer, and commits its window."""

    def propose(self, params, state, context, noise):
        without = dataclasses.replace(context.target, skipped=(1,))
        return super().propose(params, state, context.replace(target=without), noise)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommitsFewKeys(SparseKV):
    """Verification resumes after the layers that saw few keys, with its keys."""

    def layers(self, params, context):
        return context.target, context.params, self.model.config.num_layers


@pytest.mark.parametrize(
    "broken",
    [
        OtherPartialPass(3, exit_layer=1, change=shifted),
        OtherPartialPass(3, exit_layer=1, change=without_entries),
        CommitsSkippedLayers(3, exit_layer=3),
        CommitsFewKeys(target().architecture, budget=3, sinks=1),
    ],
    ids=["shifted", "without_entries", "skipped_layers", "few_keys"],
)
def test_keys_of_drafts_that_are_committed_are_found(broken):
    program = Program.of(take_turns(broken), RULES["coupled"])
    state, _ = program.run(program.start(expected()[0]), 1)
    with pytest.raises(AssertionError):
        assert_cache(state)


def of_the_neighbour(real, params, state, context, noise):
    """A row drafts as far as its neighbour's draft has even tokens."""
    draft, state = real(params, state, context, noise)
    even = jnp.cumprod(jnp.roll(draft.tokens, 1, axis=0) % 2 == 0, axis=1).astype(bool)
    return draft.replace(valid=draft.valid & even), state


def test_rows_that_look_at_each_other_are_found():
    program = program_of("draft_model", "chain", "coupled", propose=of_the_neighbour)
    state, counts = program.run(program.start(expected()[0]))
    assert_outputs(state, counts, "coupled")
    order, everyone = np.random.default_rng(1).permutation(ROWS), jnp.ones(ROWS, bool)
    _, other = program.run(program.start(taken(expected()[0], order, everyone)))
    assert (other.drafted != counts.drafted[order]).any()


def one_too_many(state):
    return state.replace(cache=state.cache.replace(length=state.cache.length + 1))


def from_another_slot(state):
    cache, rows, last = state.cache, np.arange(ROWS), state.cache.length - 1
    moved = {
        name: part.at[:, rows, :, last].set(part[:, rows, :, last - 1])
        for name, part in (("k", cache.k), ("v", cache.v))
    }
    return state.replace(cache=cache.replace(**moved))


def an_output_too_long(state):
    tokens = state.tokens.at[jnp.arange(ROWS), state.length].set(0)
    return state.replace(tokens=tokens, length=state.length + 1)


def test_wrong_caches_and_ends_are_found():
    program = Cell("ngram", "chain", "coupled").program
    first = program.start(expected()[0])
    state, _ = program.run(first, LENGTH)
    assert_cache(state)
    for change in (one_too_many, from_another_slot):
        with pytest.raises(AssertionError):
            assert_cache(change(state))
    last, counts = program.run(first)
    assert_outputs(last, counts, "coupled")
    with pytest.raises(AssertionError):
        assert_outputs(an_output_too_long(last), counts, "coupled")
    swapped = last.replace(tokens=jnp.roll(last.tokens, 1, axis=0))
    assert outputs_of(swapped) != outputs_of(last)
    with pytest.raises(AssertionError):
        assert_outputs(jax.block_until_ready(swapped), counts, "coupled")


class SlotBefore(Decoder):
    """Recurrent layers continue from the slot before instead of the parent's."""

    def extend(self, params, tokens, positions, cache, window, start, visible, **options):
        before = jnp.tril(jnp.ones(visible.shape, bool))
        real = Ancestors.of
        with mock.patch.object(Ancestors, "of", lambda _, width: real(before, width)):
            arguments = params, tokens, positions, cache, window, start, visible
            return super().extend(*arguments, **options)


class InputsOfTheNeighbour(Decoder):
    """Convolutions read the committed inputs of another row."""

    def extend(self, params, tokens, positions, cache, window, start, visible, **options):
        recurrent = cache.recurrent
        moved = recurrent.replace(inputs=jnp.roll(recurrent.inputs, 1, axis=1))
        arguments = params, tokens, positions, cache.replace(recurrent=moved), window
        return super().extend(*arguments, start, visible, **options)


@struct.dataclass
class OneTooFar(RecurrentState):
    """A state that advances over one token more than is committed."""

    def advanced(self, window, slots, count):
        return super().advanced(window, slots, jnp.minimum(count + 1, slots.shape[1]))


class CommittedTooFar(Decoder):
    """States are committed one token too far."""

    def make_cache(self, batch, capacity):
        cache = super().make_cache(batch, capacity)
        return cache.replace(recurrent=OneTooFar(cache.recurrent.inputs, cache.recurrent.matrix))


@pytest.mark.parametrize("layers", ["delta", *slow("mamba2")])
@pytest.mark.parametrize(
    ("kind", "topology"),
    [
        # As it is: test_recurrent_targets has it, too.
        *slow((Decoder, "static")),
        (SlotBefore, "static"),
        (InputsOfTheNeighbour, "chain"),
        (CommittedTooFar, "chain"),
    ],
)
def test_states_of_other_tokens_are_found(layers, kind, topology):
    with target_with(layers):
        program = Cell("draft_model", topology, "coupled", layers).program
        model = program.plan.target
        values = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
        plan = dataclasses.replace(program.plan, target=kind(**values))
        program = dataclasses.replace(program, plan=plan)
        found = program.run(program.start(expected()[0]))
        if kind is Decoder:
            assert_outputs(*found, "coupled")
            return
        with pytest.raises(AssertionError):
            assert_outputs(*found, "coupled")
