"""A token that no draft distribution has is not accepted: what comes out is drawn from p."""

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import slow
from decoding import PROMPTS, RandomDistribution, decode, mixed

from specjax import sampling
from specjax.drafters import LoadedDrafter
from specjax.sampling import tree_verification
from specjax.testing import DistributionPair, check_rule, rule_check
from specjax.trees import Topology

CHAIN, SIBLINGS, FORK = (0, 1), (0, 0), (0, 0, 1)
VOCAB = 3


def empty_somewhere():
    """Distributions p and q, of which q has no tokens at the root, after it, or at both."""
    rng, pairs = np.random.default_rng(0), []
    for name, contexts in (("root", [0]), ("later", [1, 2]), ("root and later", [0, 1])):
        p = tuple(rng.dirichlet(np.ones(VOCAB), VOCAB**depth) for depth in range(3))
        root, later = (rng.dirichlet(np.ones(VOCAB), count) for count in (1, VOCAB))
        root[[one for one in contexts if one == 0]] = 0
        later[[one - 1 for one in contexts if one > 0]] = 0
        pairs.append(DistributionPair(name, p, (root, later)))
    one_hot = DistributionPair("one-hot", p, (np.eye(VOCAB)[:1], np.eye(VOCAB)))
    return [*pairs, one_hot]


def check(monkeypatch, rule, parents):
    """`check_rule` of drafts that have a node also where nothing is left to draw it from."""
    weights = rule_check.draw_weights

    def every_node(*arguments):
        weight, possible = weights(*arguments)
        return weight, np.ones_like(possible)

    monkeypatch.setattr(rule_check, "draw_weights", every_node)
    topology = Topology(parents)
    pairs = empty_somewhere()
    if topology.depth == 1:
        pairs = [DistributionPair(one.name, one.p[:2], one.q[:1]) for one in pairs]
    return check_rule(rule, topology, distributions=pairs)


CASES = [
    ("rejection", CHAIN),
    ("block", CHAIN),
    ("rejection", SIBLINGS),
    *slow(("rejection", FORK)),
]


@pytest.mark.parametrize(("rule", "parents"), CASES)
def test_the_target_distribution_comes_out(rule, parents, monkeypatch):
    found = check(monkeypatch, rule, parents)
    assert found.passed, found.counterexample


@pytest.mark.parametrize(("rule", "parents"), CASES)
def test_accepting_such_a_token_for_certain_fails(rule, parents, monkeypatch):
    """As if p / q were large and not infinite where q is 0."""

    def log_ratio(logp, logq):
        return jnp.minimum(ratio(logp, logq), 1e30)

    ratio = sampling.log_ratio
    monkeypatch.setattr(sampling.chain_verification, "log_ratio", log_ratio)
    monkeypatch.setattr(tree_verification, "log_ratio", log_ratio)
    found = check(monkeypatch, rule, parents)
    assert not found.passed
    assert found.max_error > 1e-3


@pytest.mark.parametrize("rule", ["rejection", *slow("block")])
def test_what_is_drawn_from_no_distribution_is_no_draft(rule, tiny):
    """Sampled rows are those of plain decoding, up to the first depth with a distribution."""
    requests = mixed(max_new_tokens=12)
    sampled = [row for row, one in enumerate(requests) if one.temperature > 0]
    options = dict(sampling=requests, verify=rule)
    plain = decode(tiny, PROMPTS, **options).token_ids
    options |= dict(num_speculative_tokens=3)
    for value in (-np.inf, np.nan):
        table = jnp.full((16, tiny.config.vocab_size), value)
        for first, longest in ((value, 0), (0.0, 1)):
            drafter = LoadedDrafter(RandomDistribution(), table.at[0].set(first))
            got = decode(tiny, PROMPTS, drafter=drafter, **options)
            assert got.drafted[sampled].max() == longest
            if not longest:
                assert [got.token_ids[row] for row in sampled] == [plain[row] for row in sampled]
