"""Lookahead decoding: its window and pool are those of a plain computation, drafts are exact."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import slow
from decoding import (
    PROMPTS,
    caught_up,
    coupled,
    first_state,
    greedy,
    make_call,
    rounds,
)
from test_decoder import one_pass
from test_drafters import silence
from tiny_models import bigrams

from specjax.core.round import make_context
from specjax.drafters import Drafter, LoadedDrafter, take_turns
from specjax.engine.requests import SamplingParams
from specjax.errors import InputError
from specjax.methods.lookahead import Lookahead
from specjax.sampling import Rejection
from specjax.testing.drafter_check import decode as decode_rows
from specjax.testing.drafter_check import make_plan
from specjax.trees import Draft, Topology

SMALL = dict(window=4, levels=4, guesses=3)


class ByHand:
    """Window and pool of one row as lists, for a target whose next token follows from the last."""

    def __init__(self, drafter, likeliest, prompt):
        self.rows, self.columns = drafter.levels - 1, drafter.window
        self.guesses, self.size = drafter.guesses, drafter.pool_size
        self.likeliest, self.text = likeliest, list(prompt)
        self.window, self.ngrams = None, []
        self.read_text(1)

    def read_text(self, first):
        """Keep the n-grams that end at the tokens from `first` on."""
        for end in range(max(first, self.rows), len(self.text)):
            self.ngrams.append(tuple(self.text[end - self.rows : end + 1]))

    def fill(self, shift):
        """Move the window by some tokens; fill it from the text."""
        length = len(self.text)
        old = self.window or [[None] * self.columns for _ in range(self.rows)]
        self.window = [(row[shift:] + [None] * shift)[: self.columns] for row in old]
        for row in range(self.rows):
            for column in range(self.columns):
                if self.window[row][column] is None:
                    mixed = (row * self.columns + column + length) * 2654435761 % (1 << 32)
                    self.window[row][column] = self.text[(mixed >> 8) % length]

    def paths(self):
        """All that is drafted: the window's chains, and the latest n-grams after the root."""
        first, *rest = self.window
        columns = [[row[column] for row in rest] for column in range(self.columns)]
        paths = [first[1 : column + 1] + columns[column] for column in range(self.columns)]
        latest = dict.fromkeys(
            ngram[1:] for ngram in self.ngrams[::-1][: self.size] if ngram[0] == self.text[-1]
        )
        paths += [list(ngram) for ngram in list(latest)[: self.guesses]]
        return {tuple(path[:end]) for path in paths for end in range(1, len(path) + 1)}

    def round(self, shift):
        """Draft, verify, improve the window; returns how many nodes there were, and emitted."""
        self.fill(shift)
        paths, emitted = self.paths(), []
        while tuple(emitted) in paths or not emitted:
            emitted.append(self.likeliest[(self.text + emitted)[-1]])
        last = self.window[-1] if self.rows > 1 else [self.text[-1], *self.window[0][1:]]
        following = [self.likeliest[token] for token in last]
        self.window[0][0] = self.text[-1]
        self.ngrams += zip(*self.window, following, strict=True)
        self.window = [*self.window[1:], following]
        self.text += emitted
        self.read_text(len(self.text) - len(emitted))
        return [len(paths), len(emitted)]


@pytest.mark.parametrize(
    "options",
    [SMALL, *slow(dict(window=3, levels=2, guesses=2))],
)
def test_rounds_are_those_of_lists(options):
    drafter, prompt, count = Lookahead(**options, pool_size=64), [3, 1, 3, 1], 14
    model, logits = bigrams(13)
    likeliest = np.argmax(np.asarray(logits), axis=1).tolist()
    by_hand = ByHand(drafter, likeliest, prompt)
    request, turns = SamplingParams(temperature=0.0), take_turns(drafter).drafter
    length = drafter.num_speculative_tokens
    plan = make_plan(model, turns, length, verify=Rejection(), request=request, capacity=96)
    params = (logits, ((),))
    state, counts = decode_rows(plan, params, prompt, request, np.arange(2), 0, count)
    expected, shift = [], drafter.window
    for _ in range(count):
        expected.append(by_hand.round(shift))
        shift = expected[-1][1] - 1
    for row in range(2):
        got = np.stack([counts.drafted[row, :count], counts.emitted[row, :count]], axis=1)
        assert got.tolist() == expected
        assert state.tokens[row, : len(by_hand.text)].tolist() == by_hand.text
    assert max(emitted for _, emitted in expected) > 2
    (known,) = caught_up(plan, params, state)
    assert known.window[0, -1].tolist() == by_hand.window[-1]
    assert known.window[0, :, 1:].tolist() == [row[1:] for row in by_hand.window]
    assert int(known.count[0]) == len(by_hand.ngrams)
    latest = [(number % 64, ngram) for number, ngram in enumerate(by_hand.ngrams)][-64:]
    assert all(tuple(known.pool[0, place].tolist()) == ngram for place, ngram in latest)


@functools.partial(jax.jit, static_argnums=0)
def _proposed(plan, params, state):
    """The drafter's state after it proposed."""
    context = make_context(plan, params[0], state)
    return plan.drafter.parts[0].propose((), state.drafter[0].drafter, context, silence)[1]


def assert_windows_are_the_targets(drafter, tiny):
    """After each round the last row has what the target finds likeliest after text and column."""
    call = make_call(
        tiny, PROMPTS, drafter=drafter, sampling=greedy(max_new_tokens=12), batch_size=8
    )
    before, plan, updated = first_state(call), call.plan.loop, 0
    for after in itertools.islice(rounds(call, before), 4):
        window = np.asarray(_proposed(plan, call.plan.params, before).window)
        new = np.asarray(after.drafter[0].drafter.window)
        sequences, expected = [], []
        for row in np.flatnonzero(np.asarray(after.drafter[0].drafter.length > before.length)):
            text = np.asarray(before.tokens[row, : int(before.length[row])]).tolist()
            for column in range(window.shape[2]):
                ahead = window[row, 0, 1 : column + 1].tolist() + window[row, 1:, column].tolist()
                sequences.append(text + ahead)
                expected.append(int(new[row, -1, column]))
        ends = [len(sequence) - 1 for sequence in sequences]
        padded = np.zeros((len(sequences), 64), int)
        for number, sequence in enumerate(sequences):
            padded[number, : len(sequence)] = sequence
        best = np.argmax(np.asarray(one_pass(tiny, padded).logits), axis=2)
        assert best[np.arange(len(ends)), ends].tolist() == expected
        before, updated = after, updated + len(sequences)
    assert updated > 60


def test_a_column_continues_as_the_target_does(tiny):
    assert_windows_are_the_targets(Lookahead(**SMALL), tiny)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnyParent(Lookahead):
    """Reads the output of a token that is elsewhere in the pass, too."""

    def observe_pass(self, params, state, target_pass):
        class Blind(type(target_pass)):
            def child(self, indices, tokens):
                matches = self.computed[:, None, :] & (self.tokens[:, None] == tokens[:, :, None])
                return jnp.where(matches.any(axis=2), jnp.argmax(matches, axis=2), -1)

        parts = {f.name: getattr(target_pass, f.name) for f in dataclasses.fields(target_pass)}
        return super().observe_pass(params, state, Blind(**parts))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unmoved(Lookahead):
    """Takes what an earlier pass computed for what this one has."""

    def observe_pass(self, params, state, target_pass):
        after = super().observe_pass(params, state, target_pass)
        return after.replace(window=jnp.roll(after.window, 1, axis=2))


@pytest.mark.parametrize("broken", [AnyParent, *slow(Unmoved)])
def test_broken_windows_are_found(broken, tiny):
    with pytest.raises(AssertionError):
        assert_windows_are_the_targets(broken(**SMALL), tiny)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Misplaced(Topology):
    """A tree that is verified by `parents` and was computed as another one."""

    computed: Topology = None
    ancestors = property(lambda self: self.computed.ancestors)
    depths = property(lambda self: self.computed.depths)

    def first(self, num_nodes):
        return self if num_nodes == self.num_nodes else super().first(num_nodes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Knowing(Drafter):
    """Drafts one wrong token, and the two right ones beside it, or in its column of the window."""

    num_speculative_tokens: int = 3
    in_the_window: bool = dataclasses.field(kw_only=False)
    num_nodes = 3

    def propose(self, continuations, state, context, noise):
        rows = continuations[context.index]
        step = (context.length - context.prompt_length)[:, None] + jnp.arange(2)[None, :]
        right = jnp.take_along_axis(rows, step, axis=1, mode="fill", fill_value=0)
        tokens = jnp.concatenate([(right[:, :1] + 1) % 61, right], axis=1)
        beside = Topology((0, 0, 2))
        in_column = Misplaced(beside.parents, computed=Topology((0, 1, 2)))
        tree = in_column if self.in_the_window else beside
        valid = jnp.arange(3)[None, :] < jnp.where(context.limit > 2, 3, 0)[:, None]
        return Draft(tokens, valid, jnp.full(tokens.shape, -1), None, tree), state


def test_an_ngram_that_is_verified_where_the_window_was_computed_is_found(tiny):
    plain = coupled(tiny)
    known = jnp.asarray([[*ids, 0, 0] for ids in plain.token_ids])
    right, wrong = (
        coupled(tiny, LoadedDrafter(Knowing(in_the_window), known))
        for in_the_window in (False, True)
    )
    assert right.accepted.max() == 2
    assert right.token_ids == plain.token_ids
    assert wrong.token_ids != plain.token_ids


def test_sizes():
    usual = Lookahead()
    assert (usual.num_speculative_tokens, usual.num_nodes) == (9, 55)
    assert usual.init((), 1, 256).pool.nbytes == 40_960
    jacobi = Lookahead(levels=2, guesses=0, window=5)
    assert (jacobi.num_speculative_tokens, jacobi.num_nodes, jacobi.branches) == (4, 4, False)
    sizes = []
    for length in range(10):
        shorter = dataclasses.replace(usual, num_speculative_tokens=length)
        sizes.append((shorter.rows, shorter.columns) if length else shorter.num_nodes)
        assert length == 0 or shorter.rows + shorter.columns - 2 == length
    assert sizes[0] == 0
    assert sizes[1:] == [(1, 2), (2, 2), (3, 2), (4, 2), (4, 3), (4, 4), (4, 5), (4, 6), (4, 7)]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"levels": 1}, "drafter.levels=1: use a whole number from 2 to 16"),
        ({"window": 65}, "drafter.window=65: use a whole number from 2 to 64"),
        ({"num_speculative_tokens": 10}, "=10: with window=7 and levels=5 the longest path is 9;"),
    ],
)
def test_bad_input(options, said):
    with pytest.raises(InputError, match=said):
        Lookahead(**options)
