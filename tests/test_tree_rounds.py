"""A rule and a drafter of one's own that branch: the loop carries trees."""

import dataclasses

import jax.numpy as jnp
import pytest
from conftest import slow
from decoding import PROMPTS, decode, greedy

from specjax import sampling
from specjax.drafters import Drafter, LoadedDrafter
from specjax.sampling import Verification, argmax
from specjax.trees import Draft, Topology

TREE = Topology((0, 0, 1, 2, 3))
"""Two tokens after the root; below each of them one more; and one below the first's."""


@dataclasses.dataclass(frozen=True)
class GreedyWalk(sampling.Rule):
    """Steps to the child that is the target's likeliest token, until there is none."""

    takes_trees = True

    def verify(self, keys, drafted, target):
        batch = len(drafted.tokens)
        slot = jnp.zeros(batch, jnp.int32)
        walking, count, path = jnp.ones(batch, bool), slot, []
        parents = drafted.parent_slots
        for _ in range(drafted.depth):
            choice = argmax(target.distributions(slot))
            child = (parents == slot[:, None]) & drafted.valid
            child &= drafted.tokens == choice[:, None]
            walking &= child.any(axis=1)
            slot = jnp.where(walking, 1 + jnp.argmax(child, axis=1), slot).astype(jnp.int32)
            path.append(jnp.where(walking, slot, -1))
            count = count + walking
        next_token = argmax(target.distributions(slot)).astype(jnp.int32)
        slots = jnp.stack(path, axis=1) if path else jnp.zeros((batch, 0), jnp.int32)
        return Verification(slots, count, next_token)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Branching(Drafter):
    """The right tokens, of a plain run, on one of the tree's branches and wrong ones on others."""

    num_speculative_tokens: int = TREE.depth
    num_nodes = TREE.num_nodes

    def propose(self, params, state, context, noise):
        plain, right = params
        wrong = (context.tokens_from(context.length - 1, 1) + 7) % 61
        offset = context.length - context.prompt_length
        tokens = jnp.broadcast_to(wrong, (len(offset), TREE.num_nodes))
        for step in range(TREE.depth):
            token = plain.at[context.index, offset + step].get(mode="fill", fill_value=0)
            tokens = tokens.at[:, right[step] - 1].set(token, mode="drop")
        row = jnp.full_like(tokens, -1)
        return Draft(tokens, jnp.ones(tokens.shape, bool), row, None, TREE), state


@pytest.mark.parametrize("right", [(1, 3, 5), (2,), *slow(((2, 4),), ((),))])
def test_a_path_of_a_tree_is_committed(right, tiny):
    """Greedy tokens are those of plain decoding, whichever branch was right."""
    plain = decode(tiny, PROMPTS, sampling=greedy(max_new_tokens=12), batch_size=1)
    tokens = jnp.asarray(plain.token_ids, jnp.int32)
    # A number beyond the last node stands for none.
    nodes = [*right, *[TREE.num_nodes + 1] * (TREE.depth - len(right))]
    got = decode(
        tiny,
        PROMPTS,
        drafter=LoadedDrafter(Branching(), (tokens, jnp.asarray(nodes))),
        sampling=greedy(max_new_tokens=12),
        verify=GreedyWalk(),
    )
    assert got.token_ids == plain.token_ids
    assert got.accepted.max() >= len(right)
    assert got.accepted[got.emitted > 0].min() <= len(right)
