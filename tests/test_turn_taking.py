"""Two drafters that take turns: which one drafts, from which distribution; who is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from conftest import row_count, slow
from decoding import (
    PROMPTS,
    decode,
    greedy,
    random_distribution,
)
from test_drafters import context_of, silence
from tiny_models import bigrams

import specjax
from specjax import trees
from specjax.core.turn_taking import PartState
from specjax.drafters import Drafter, LoadedDrafter, take_turns
from specjax.methods.ngram import Ngram
from specjax.testing import check_drafter

VOCAB, ROWS = 5, 8_000


@pytest.fixture(scope="module")
def target():
    return bigrams(VOCAB)


def lookup():
    return Ngram(prompt_lookup_min=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bigrams(Drafter):
    """Draws from another table, and has no state."""

    num_speculative_tokens: int = 2
    sampled = True

    def propose(self, params, state, context, noise):
        token, drawn = context.token_at(context.length - 1), []
        for depth in range(self.num_speculative_tokens):
            token, logq = context.draw(params[token], noise, depth)
            drawn.append((token, logq))
        tokens, logq = (jnp.stack(part, axis=1) for part in zip(*drawn, strict=True))
        return trees.chain(tokens, context.limit, logq if context.needs_logq else None), state


def model(target):
    near = target[1] + 0.9 * jax.random.normal(jax.random.key(1), (VOCAB, VOCAB))
    return LoadedDrafter(Bigrams(), near)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Says(Drafter):
    """A drafter that always proposes the same, as long as it may."""

    token: int = dataclasses.field(kw_only=False)
    name = property(lambda self: f"says {self.token}")

    def propose(self, params, state, context, noise):
        shape = (context.length.shape[0], self.num_speculative_tokens)
        return trees.chain(jnp.full(shape, self.token, jnp.int32), context.limit), state


def says(token, length):
    return Says(token, num_speculative_tokens=length)


def proposed(loaded, context, noise, length=None):
    """What drafters propose that have no state, and the states afterwards."""
    turns = loaded.drafter if length is None else loaded.drafter.limited(length)
    empty = jnp.zeros(context.length.shape, jnp.int32)
    state = tuple(PartState((), empty) for _ in turns.parts)
    limits = turns.full_limits()
    return turns.propose(loaded.params, state, context, noise, limits)[:2]


def test_the_second_drafts_where_the_first_has_nothing_to_say():
    rows = [[1, 2, 3, 4, 1, 2], [5, 6, 8], [7, 7, 7], [1, 2, 1, 2]]
    drafter = take_turns(Ngram(), says(9, 3))
    assert drafter.name == "ngram+says 9"
    assert drafter.drafter.num_speculative_tokens == 8
    # The third row is finished, the last one near its end.
    context = context_of(rows, [6, 6, 0, 1])
    draft, state = jax.jit(lambda: proposed(drafter, context, silence, 6))()
    assert [part.drafter for part in state] == [(), ()]
    assert draft.valid.sum(axis=1).tolist() == [6, 3, 0, 1]
    assert draft.tokens[0].tolist() == [3, 4, 1, 2, 3, 4]
    assert draft.tokens[1, :3].tolist() == [9, 9, 9]
    assert draft.tokens[3, 0] == 1
    assert (draft.logq_row == -1).all()
    assert draft.logq is None
    assert draft.topology.is_chain


def test_three_take_turns():
    three = take_turns(take_turns(Ngram(prompt_lookup_min=3), Ngram()), says(9, 2))
    assert len(three.drafter.parts) == 3
    context = context_of([[1, 2, 3, 4, 1, 2], [5, 6, 8]], [4, 4])
    draft, _ = jax.jit(lambda: proposed(three, context, silence, 4))()
    assert draft.tokens[:, 0].tolist() == [3, 9]


def test_two_that_draw_from_distributions(target):
    """Some rows stop before the first token, and the other's distributions come after."""
    first = random_distribution(VOCAB)
    first = first._replace(drafter=dataclasses.replace(first.drafter, num_speculative_tokens=2))
    check = check_drafter(take_turns(first, model(target)), target, row_count(ROWS))
    assert check.passed, check
    assert check.acceptance_length > 1.2


@dataclasses.dataclass(frozen=True, kw_only=True)
class SizedByLength(Drafter):
    """A drafter whose state is as wide as its drafts."""

    num_speculative_tokens: int = 2

    def init(self, params, batch, capacity):
        return jnp.zeros((batch, self.num_speculative_tokens), jnp.int32)

    def propose(self, params, state, context, noise):
        return trees.chain(state, context.limit), state

    def observe(self, params, state, context, accepted):
        return state + self.init(params, len(state), 0)


@pytest.mark.parametrize("most", ["fixed", *slow(0, 3, 16)])
def test_each_drafts_at_most_its_own_number(most, tiny):
    drafter = take_turns(Ngram(), SizedByLength())
    options = dict(sampling=greedy(max_new_tokens=20), batch_size=1)
    plain = decode(tiny, PROMPTS, **options)
    options |= dict(drafter=drafter, every_width=True)
    got = decode(tiny, PROMPTS, num_speculative_tokens=most, **options)
    assert got.token_ids == plain.token_ids
    assert got.drafted.max() == (8 if most == "fixed" else min(most, 8))


def test_by_name(tiny):
    drafter = specjax.make_drafter("ngram+early_exit", tiny, prompt_lookup_min=1, exit_layer=2)
    assert drafter.name == "ngram+early_exit"
    assert drafter.drafter.sampled
    shorter = specjax.make_drafter("ngram+early_exit", tiny, num_speculative_tokens=3)
    assert shorter.drafter.num_speculative_tokens == 3
    assert [part.num_speculative_tokens for part in shorter.drafter.parts] == [3, 3]
