"""Trees whose siblings have children keep the target's joint distribution, under every rule."""

import dataclasses

import conftest
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from conftest import slow
from decoding import changed, draft_model
from tiny_models import block_head, eagle_head, medusa_head, mtp_head, small_model

from specjax import sampling, trees
from specjax.drafters import (
    Drafter,
    LoadedDrafter,
    TreeOptions,
    head_drafter,
    merge_drafters,
    take_turns,
)
from specjax.errors import InputError
from specjax.methods.early_exit import EarlyExit
from specjax.methods.layer_skip import LayerSkip
from specjax.methods.ngram import Ngram
from specjax.sampling import RULES
from specjax.testing import check_drafter

VOCAB, PROMPT = 3, (1, 2, 0, 1, 2)
CHOICES = ((0,), (1,), (0, 0), (1, 0))
TREE = TreeOptions(kind="static", choices=CHOICES)
RULE_NAMES = [name for name, rule in RULES.items() if rule.exact and rule.takes_trees]
FEW, MANY = 20_000, 400_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnTree(Drafter):
    """A drafter as a user writes it: two tokens from a table of one distribution, with a child."""

    sampled = True
    num_nodes = property(lambda self: len(CHOICES))

    def propose(self, table, state, context, noise):
        logq = context.warp(jnp.broadcast_to(table, (len(context.length), 1, len(table))))
        siblings = jax.lax.top_k(logq + noise(0, [0]), 2)[1][:, 0]
        children = jnp.argmax(logq + noise(1, [1, 2]), axis=2)
        tokens = jnp.concatenate([siblings, children], axis=1).astype(jnp.int32)
        topology = trees.tree_of_choices(CHOICES).topology
        valid = topology.row_depths[:, 1:] <= context.limit[:, None]
        claimed = logq if context.needs_logq else None
        return trees.Draft(tokens, valid, jnp.zeros_like(tokens), claimed, topology), state


def of_head(make, **options):
    return lambda target: head_drafter(make(target, **options), target, tree=TREE)


# Each with the seed of a target and of a size at which shared noise would show.
DRAFTERS = {
    "own": (0, lambda target: LoadedDrafter(OwnTree(), jnp.log(jnp.array([0.6, 0.3, 0.1])))),
    "draft_model": (1, lambda target: draft_model(small_model(VOCAB, 1, seed=1), tree=TREE)),
    "early_exit": (1, lambda target: EarlyExit(2, exit_layer=1, tree=TREE)),
    "layer_skip": (1, lambda target: LayerSkip(2, skipped=(1,), tree=TREE)),
    "eagle": (1, of_head(eagle_head, version=1, spread=0.3)),
    "eagle3": (1, of_head(eagle_head)),
    "medusa": (0, of_head(medusa_head, heads=2, spread=4.0)),
    "mtp": (0, of_head(mtp_head)),
    "dflash": (1, of_head(block_head, spread=0.3)),
    "dspark": (1, of_head(block_head, spread=0.3, markov_rank=2)),
    "merged": (1, lambda target: merge_drafters(drafter("draft_model"), drafter("medusa"))),
    "turns": (0, lambda target: take_turns(Ngram(prompt_lookup_min=3), drafter("medusa"))),
}


def target_of(name):
    return small_model(VOCAB, seed=DRAFTERS[name][0])


def drafter(name):
    return DRAFTERS[name][1](target_of(name))


def check(loaded, name, rule, rows):
    rows = MANY if conftest.full else rows
    return check_drafter(loaded, target_of(name), rows, prompt=PROMPT, verify=rule)


# A tree under `rejection` is in test_limits_distribution.
USUAL = [("own", "block"), ("draft_model", "block")]


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        *USUAL,
        *slow(
            *((name, rule) for name in DRAFTERS for rule in RULE_NAMES if (name, rule) not in USUAL)
        ),
    ],
)
def test_the_distribution_is_the_targets(name, rule):
    found = check(drafter(name), name, rule, FEW)
    assert found.passed, found
    assert found.acceptance_length > 1.5


class OneForADepth(sampling.SeparateNoise):
    """Noise that is the same for the children of all nodes of a depth."""

    def __call__(self, depth, parents=None):
        return super().__call__(depth, None if parents is None else np.zeros(len(parents), int))

    def part(self, number, *, branches):
        return OneForADepth(super().part(number, branches=branches).keys, self.vocab)


@pytest.mark.parametrize("name", ["own", *slow(*sorted(set(DRAFTERS) - {"own", "turns"}))])
def test_shared_noise_is_found_out(name):
    """`block` looks at the children of both siblings, which must then be independent."""

    def propose(real, params, state, context, noise):
        return real(params, state, context, OneForADepth(noise.keys, noise.vocab))

    found = check(changed(drafter(name), propose=propose), name, "block", 5 * FEW)
    assert scipy.stats.chi2.sf(found.chi2, found.degrees) < 1e-30


def test_own_trees_must_say_whose_children_they_draw():
    """Also below a drafter that takes turns, and for merged ones; `coupled` shares the noise."""

    def propose(real, params, state, context, noise):
        noise(0)
        return real(params, state, context, noise) if noise(1) is None else (None, state)

    lazy = changed(drafter("own"), propose=propose)
    with pytest.raises(InputError, match=r"noise\(1\) in a draft that branches.*pass noise\(depth"):
        check(lazy, "own", "block", FEW)


def test_noise_differs_by_row_round_depth_parent_and_drafter():
    keys = jax.vmap(lambda index: sampling.row_key(0, index))(jnp.arange(2))

    def drawn(number, depth, parents):
        noise = sampling.draft_noise(sampling.fold_round(keys, jnp.int32(number)), VOCAB)
        own = [noise.part(part, branches=True) for part in range(2)]
        nested = own[0].part(1, branches=True)
        return [each(depth, parents) for each in (noise, *own, nested)]

    everything = np.stack(
        [drawn(number, depth, [0, 1, 5]) for number in range(2) for depth in range(3)]
    )
    values = everything.reshape(-1, VOCAB)
    assert len(np.unique(values, axis=0)) == len(values)
    # The same slot has the same noise whatever is drawn beside it.
    np.testing.assert_array_equal(drawn(1, 2, [5])[0][:, 0], everything[5, 0][:, 2])
    shared = sampling.SharedNoise(sampling.coupled_noise(keys, jnp.array([4, 9]), VOCAB))
    together = shared.part(3, branches=True)(2, [1, 2])
    np.testing.assert_array_equal(together[:, 0], together[:, 1])
    np.testing.assert_array_equal(
        together[:, 0], sampling.position_gumbel(keys, jnp.array([6, 11]), VOCAB)
    )
