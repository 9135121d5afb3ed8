"""Verification of trees is exact, by enumeration; variants with a known mistake fail the test."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from conftest import slow
from decoding import Deciding
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax import sampling
from specjax.errors import InputError
from specjax.sampling import Drafted, multipath, pick, tree_verification
from specjax.testing import check_rule, enumeration, rule_check
from specjax.trees import DynamicTopology, Topology

TWO, THREE, FORK, PAIRS = (0, 0), (0, 0, 0), (0, 0, 1), (0, 0, 1, 1)
"""Shapes, by parents: siblings, three of them, two of which the first goes on, and with both."""
SHARED = (0, 1, 1)
"""One token, and two after it."""
LATER = (0, 1, 1, 3)
"""The same with a token after the second."""
SHAPES = [
    parents
    for count in (2, 3, 4)
    for parents in itertools.product(*(range(node + 1) for node in range(count)))
    if sorted(parents) == list(parents) != list(range(count))
]
"""Every branching shape of up to four nodes."""


@pytest.mark.parametrize(
    ("rule", "parents", "vocab"),
    [
        ("rejection", FORK, 3),
        ("block", FORK, 3),
        ("coupled", FORK, 3),
        ("coupled", (0, 0, 1, 2, 2), 3),
        *slow(
            ("rejection", THREE, 4),
            ("rejection", PAIRS, 3),
            ("rejection", SHARED, 4),
            *(("block", shape, 3 if len(shape) < 4 else 2) for shape in SHAPES if shape != FORK),
            ("coupled", THREE, 4),
        ),
    ],
)
def test_rules_emit_the_target_distribution(rule, parents, vocab):
    check = check_rule(rule, Topology(parents), vocab=vocab)
    assert check.passed, check.counterexample
    assert check.max_error < 1e-12


@pytest.mark.slow  # enumeration takes seconds for each
@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    rule=st.sampled_from(("rejection", "block")),
    parents=st.sampled_from((FORK, SHARED)),
    seed=st.integers(0, 2**32 - 1),
    kept=st.tuples(*[st.floats(0.2, 1.0)] * 2),
)
def test_rules_are_exact_for_random_distributions(rule, parents, seed, kept):
    """Of whole numbers, so with ties, and with zeros in p and in q."""
    rng, depth = np.random.default_rng(seed), Topology(parents).depth

    def table(depths, kept):
        found = []
        for length in range(depths):
            weights = rng.integers(1, 4, (3**length, 3)) * (rng.random((3**length, 3)) < kept)
            weights[np.arange(3**length), rng.integers(3, size=3**length)] += 1
            found.append(weights / weights.sum(axis=1, keepdims=True))
        return tuple(found)

    pair = rule_check.DistributionPair("random", table(depth + 1, kept[0]), table(depth, kept[1]))
    check = check_rule(rule, Topology(parents), vocab=3, distributions=[pair])
    assert check.passed, check.counterexample
    assert check.max_error < 1e-12


def assert_wrong(check):
    """Its distribution is another one, by far more than rounding, and nothing else is amiss."""
    assert not check.passed
    assert 1e-3 < check.max_error <= 1
    assert check.counterexample


def test_typical_acceptance_is_not_exact():
    check = check_rule("typical", Topology(TWO), vocab=3)
    assert_wrong(check)
    assert not sampling.Typical().exact


def unchanged(drafted, node, vocab, dtype=jnp.float32):
    """What a sibling was drawn from, as if those before it had not been taken out."""
    which = pick(drafted.logq_row, node)
    certain = sampling.one_hot_distributions(drafted.tokens, vocab, dtype)(node)
    return jnp.where((which < 0)[:, None], certain, pick(drafted.logq, jnp.maximum(which, 0)))


def normalised_twice(drafted, node, vocab, dtype=jnp.float32):
    """Divides what the earlier siblings left by its sum, and by it again."""
    left = tree_distribution(drafted, node, vocab, dtype)
    before = jnp.exp(jnp.where(left > -jnp.inf, unchanged(drafted, node, vocab, dtype), -jnp.inf))
    return left - jnp.log(before.sum(axis=-1, keepdims=True))


def softmax_for_certain(drafted, node, vocab, dtype=jnp.float32):
    """A softmax in place of the certainty with which a likeliest child was proposed."""
    logq = tree_distribution(drafted, node, vocab, dtype)
    certain = (pick(drafted.logq_row, node) < 0)[:, None]
    return jnp.where(certain, jnp.where(logq == 0, jnp.log(0.7), jnp.log(0.3 / 2)), logq)


tree_distribution = tree_verification.node_distribution
tree_recursion = sampling.recursion


@dataclasses.dataclass(frozen=True)
class OfTrees(sampling.UniformRule):
    """A user-defined rule of trees, made from a function."""

    function: object
    takes_trees = True
    decide = staticmethod(sampling.block)

    def decide_tree(self, *arguments):
        return self.function(*arguments)


DRAWN, CERTAIN, FIRST_DRAWN, BY_TWO = [0, 0], [-1, -1], [0, -1], [0, 1]
"""Which drafter draws each of two siblings, -1 where none does."""


@pytest.fixture
def only(monkeypatch):
    """Nodes are drawn by the drafters that are given, in place of every way: one is enough."""

    def choose(drafter):
        monkeypatch.setattr(rule_check, "_mixtures", lambda topology: [np.array(drafter)])

    return choose


@pytest.mark.parametrize(
    ("mistake", "drawn"),
    [(normalised_twice, DRAWN), (softmax_for_certain, CERTAIN), *slow((unchanged, DRAWN))],
)
def test_a_wrong_distribution_of_siblings_fails(mistake, drawn, monkeypatch, only):
    only(drawn)
    monkeypatch.setattr(tree_verification, "node_distribution", mistake)
    check = check_rule("rejection", Topology(TWO), vocab=3)
    assert_wrong(check)


def in_order_of_q(drafted, target, uniforms):
    """Tests two drawn siblings in the order of their own probabilities, not as they were drawn."""
    q = pick(drafted.logq, jnp.maximum(drafted.logq_row[:, 0], 0))
    each = jnp.take_along_axis(q, drafted.tokens, axis=1)
    turn = (each[:, 1] > each[:, 0]) & drafted.valid.all(axis=1)
    turn &= (drafted.logq_row >= 0).all(axis=1)
    turned = drafted._replace(
        tokens=jnp.where(turn[:, None], drafted.tokens[:, ::-1], drafted.tokens)
    )
    done = tree_recursion(turned, target, uniforms)
    path = jnp.where(turn[:, None] & (done.path_slots > 0), 3 - done.path_slots, done.path_slots)
    return done._replace(path_slots=path)


def dropped_duplicate(drafted, target, uniforms):
    """Drops a drawn token that a deterministic sibling proposes as well."""
    twice = (drafted.tokens[:, 0] == drafted.tokens[:, 1]) & (drafted.logq_row[:, 1] < 0)
    valid = drafted.valid.at[:, 0].set(drafted.valid[:, 0] & ~twice)
    return tree_recursion(drafted._replace(valid=valid), target, uniforms)


def dropped_drawn_duplicate(drafted, target, uniforms):
    """Drops a token that a second drafter drew as the first did."""
    twice = (drafted.tokens[:, 0] == drafted.tokens[:, 1]) & (drafted.logq_row >= 0).all(axis=1)
    valid = drafted.valid.at[:, 1].set(drafted.valid[:, 1] & ~twice)
    return tree_recursion(drafted._replace(valid=valid), target, uniforms)


def chosen_by_own_probability(drafted, target, uniforms):
    """Keeps the second sibling only if its own token was likely."""
    q = pick(drafted.logq, jnp.maximum(drafted.logq_row[:, 1], 0))
    own = pick(q, drafted.tokens[:, 1])
    keep = (own > jnp.log(0.3)) | (drafted.logq_row[:, 1] < 0)
    valid = drafted.valid.at[:, 1].set(drafted.valid[:, 1] & keep)
    return tree_recursion(drafted._replace(valid=valid), target, uniforms)


@pytest.mark.parametrize(
    ("mistake", "drawn"),
    [
        (dropped_duplicate, FIRST_DRAWN),
        (dropped_drawn_duplicate, BY_TWO),
        (chosen_by_own_probability, DRAWN),
        *slow((in_order_of_q, DRAWN)),
    ],
)
def test_a_wrong_choice_of_siblings_fails(mistake, drawn, only):
    only(drawn)
    assert_wrong(check_rule(OfTrees(mistake), Topology(TWO), vocab=3))


def target_unchanged(logp, logq):
    """Leaves p as it is when a child is refused (lalamo, pull request 307)."""
    return logp


@pytest.mark.parametrize("drawn", [DRAWN, CERTAIN])
def test_siblings_tested_against_an_unchanged_target_fail(drawn, monkeypatch, only):
    only(drawn)
    monkeypatch.setattr(tree_verification, "residual", target_unchanged)
    assert_wrong(check_rule("rejection", Topology(TWO), vocab=3))


def test_an_unchanged_target_gives_the_distribution_that_lalamo_asserts(monkeypatch):
    """Of two likeliest children with a claimed q of .7 and .3; the target has (.45, .35, .15, .05).

    The project's own test of trees expects this distribution of the first token.
    """
    p, q = np.array([0.45, 0.35, 0.15, 0.05]), np.array([0.7, 0.3, 0.0, 0.0])
    pair = rule_check.DistributionPair.constant("lalamo", p, q, 1)
    topology, tokens = Topology(TWO), np.array([[0, 1]], np.int32)
    with np.errstate(divide="ignore"):
        logp, logq = (
            np.log(enumeration.distributions_by_slot(table, topology, tokens))
            for table in (pair.p, pair.q)
        )
    drafts = enumeration.Drafts(
        topology, np.zeros(2, int), tokens, tokens >= 0, logp, logq, np.zeros(1, int), np.ones(1)
    )
    monkeypatch.setattr(tree_verification, "residual", target_unchanged)
    rule = rule_check.decision_function(sampling.Rejection(), topology)
    outcomes = enumeration.decisions(rule, drafts)
    emitted = enumeration.output_distributions(drafts, outcomes, [pair.p])[0]
    first = emitted.reshape(4, 4).sum(axis=1)
    np.testing.assert_allclose(first, [0.747, 0.206, 0.035, 0.012], atol=5e-4)


def once_for_each_path(drafted, target, uniforms):
    """Tests the shared node again for its second path, with another uniform."""
    first = tree_recursion(drafted, target, uniforms)
    again = tree_recursion(drafted, target, uniforms.at[:, 0].set(uniforms[:, 2]))
    better = again.num_accepted > first.num_accepted
    return sampling.Recursion(
        *(
            jnp.where(better.reshape(-1, *[1] * (one.ndim - 1)), two, one)
            for one, two in zip(first, again, strict=True)
        )
    )


def test_draws_for_each_path_fail(only):
    only([0, 0, 0])
    assert_wrong(check_rule(OfTrees(once_for_each_path), Topology(SHARED), vocab=2))


def from_the_root(drafted, target, uniforms):
    """Ends at the first node that passes from the root on, which was not refused below itself."""
    heights = sampling.block_weights(drafted, target)[1]
    passes = drafted.valid & (uniforms < heights[:, 1:])
    return at_slot(
        drafted, target, jnp.where(passes.any(axis=1), 1 + jnp.argmax(passes, axis=1), 0)
    )


def weights_for_heights(drafted, target, uniforms):
    """Tests a node whose children were refused by its weight, as if it had none."""
    logw = sampling.block_weights(drafted, target)[0]
    passes = drafted.valid & (uniforms < jnp.exp(logw[:, 1:]))
    return at_slot(drafted, target, multipath._first_in_postorder(drafted, passes))


def next_from_target(drafted, target, uniforms):
    """Draws the next token from p, although children were refused."""
    done = sampling.multipath_block(drafted, target, uniforms)
    path = jnp.pad(jnp.maximum(done.path_slots, 0), ((0, 0), (1, 0)))
    return done._replace(next_logp=target(pick(path, done.num_accepted)))


def at_slot(drafted, target, last):
    logw = sampling.block_weights(drafted, target)[0]
    after = multipath._over_children(drafted, target, last, pick(logw, last))[2]
    return sampling.Recursion(*tree_verification.path_to(drafted, last), after)


@pytest.mark.parametrize("mistake", [weights_for_heights, next_from_target, *slow(from_the_root)])
def test_broken_block_verification_of_trees_fails(mistake, only):
    only([0, 0, 0])
    assert_wrong(check_rule(OfTrees(mistake), Topology(FORK), vocab=3))


def test_shares_that_follow_the_tokens_fail(monkeypatch, only):
    """A shape that was cut after the tokens were drawn must not say what the first of them take."""

    def by_token(drafted):
        return jnp.broadcast_to(drafted.tokens[:, 2:3] == 0, drafted.tokens.shape)

    only([0, 0, 0])
    monkeypatch.setattr(multipath, "takes_all", by_token)
    assert_wrong(check_rule("block", Topology(SHARED), vocab=3))


def test_shares_are_those_of_the_whole_tree():
    tokens = jnp.zeros((1, 3), jnp.int32)
    cut = Drafted(tokens, tokens == 0, LATER[:3], 2, tokens, None)
    assert multipath.takes_all(cut).tolist() == [[True, True, True]]
    assert multipath.takes_all(cut._replace(whole=LATER)).tolist() == [[True, False, True]]


def num_accepted(rule, parents, vocab):
    """The expected number of accepted tokens of an exact rule, for each pair of distributions."""
    topology = Topology(parents)
    pairs = rule_check.example_distributions(vocab, topology.depth)
    drafter = np.zeros(topology.num_nodes, int)
    drafts, groups = rule_check._drafts(topology, drafter, pairs, None)
    outcomes = enumeration.decisions(rule_check.decision_function(rule, topology), drafts)
    assert rule_check._compare([((drafts, groups), outcomes)]).passed
    weight = outcomes.volume * drafts.weight[outcomes.item]
    counts = np.zeros(len(groups))
    np.add.at(counts, drafts.group[outcomes.item], weight * topology.depths[outcomes.slot])
    return counts


@pytest.mark.parametrize(
    ("parents", "vocab"), [(LATER, 2), *slow(*((shape, 3) for shape in SHAPES))]
)
def test_block_verification_accepts_no_fewer_tokens(parents, vocab, monkeypatch):
    """And more in some cases if a first child has children of its own.

    If every child took all that it can, what a later one could accept would be lost.
    """
    least = num_accepted(sampling.Rejection(), parents, vocab)
    got = num_accepted(sampling.Block(), parents, vocab)
    assert (got > least - 1e-12).all()
    first = {parents.index(parent) + 1 for parent in parents}
    assert (got > least + 1e-3).any() == bool(first & set(parents))
    if vocab == 2:
        takes_all = lambda drafted: jnp.ones(drafted.tokens.shape, bool)  # noqa: E731
        monkeypatch.setattr(multipath, "takes_all", takes_all)
        assert (num_accepted(sampling.Block(), parents, vocab) < least - 1e-3).any()


def random_tree(seed, rows, nodes, vocab, depth=4):
    """Trees, each row of a shape of its own, with distinct tokens, and distributions by slot."""
    rng = np.random.default_rng(seed)
    parents, tokens = np.zeros((rows, nodes), np.int32), np.zeros((rows, nodes), np.int32)
    for row in range(rows):
        depths, left = [0], [rng.permutation(vocab).tolist()]
        for node in range(nodes):
            open_ = [s for s in range(node + 1) if depths[s] < depth and left[s]]
            parent = parents[row, node] = rng.choice(open_)
            tokens[row, node] = left[parent].pop()
            depths.append(depths[parent] + 1)
            left.append(rng.permutation(vocab).tolist())
    topology = DynamicTopology(jnp.asarray(parents), depth)
    logits = 2 * rng.normal(size=(rows, nodes + 1, vocab))
    logp = scipy.special.log_softmax(logits, axis=-1).astype(np.float32)
    valid = jax.jit(topology.close)(rng.uniform(size=(rows, nodes)) < 0.9)
    return topology, jnp.asarray(tokens), valid, jnp.asarray(logp)


def drafted_of(topology, tokens, valid):
    row = jnp.full_like(tokens, -1)
    return Drafted(tokens, valid, topology.row_parents, topology.depth, row, None)


def paths(parents, tokens, valid, choices):
    """The path of one row, by following the target's choices from slot to slot."""
    slot, path = 0, []
    while True:
        children = [
            node + 1
            for node in range(len(tokens))
            if parents[node] == slot and valid[node] and tokens[node] == choices[slot]
        ]
        if not children:
            return path, choices[slot]
        slot = children[0]
        path.append(slot)


def test_a_greedy_walk_follows_the_likeliest_tokens():
    topology, tokens, valid, logp = random_tree(0, 200, 9, 3)
    choices = sampling.argmax(logp)
    drafted = drafted_of(topology, tokens, valid)

    @jax.jit
    def both():
        at_once = sampling.walk_greedy(drafted, choices)
        return at_once, sampling.walk(drafted, lambda slots, depth: pick(choices, slots))

    both_ways = jax.device_get(both())
    lengths = set()
    for row in range(len(tokens)):
        path, after = paths(
            *(np.asarray(a[row]) for a in (topology.row_parents, tokens, valid, choices))
        )
        lengths.add(len(path))
        for done in both_ways:
            assert done.num_accepted[row] == len(path)
            assert done.next_token[row] == after
            assert done.path_slots[row].tolist() == path + [-1] * (topology.depth - len(path))
    assert {0, 1, 2, 3} <= lengths


@pytest.mark.parametrize(
    ("of_chain", "of_tree"),
    [(sampling.rejection, sampling.recursion), (sampling.block, sampling.multipath_block)],
)
def test_a_tree_without_branches_is_verified_as_a_chain(of_chain, of_tree):
    rows, length, vocab = 4000, 3, 5

    @jax.jit
    def both():
        keys = jax.random.split(jax.random.key(0), 3)
        logp = jax.nn.log_softmax(jax.random.normal(keys[0], (rows, length + 1, vocab)))
        logq = jax.nn.log_softmax(jax.random.normal(keys[1], (rows, length, vocab)))
        tokens = jax.random.categorical(keys[2], logq)
        uniforms = jax.random.uniform(jax.random.key(9), (rows, length))
        num_valid = jnp.arange(rows) % (length + 1)
        drafted = sampling.chain_drafted(tokens, num_valid, logq)
        want = of_chain(tokens, num_valid, sampling.by_slot(logp), sampling.by_slot(logq), uniforms)
        return want, of_tree(drafted, sampling.by_slot(logp), uniforms)

    want, got = both()
    np.testing.assert_array_equal(got.num_accepted, want.num_accepted)
    np.testing.assert_allclose(jnp.exp(got.next_logp), jnp.exp(want.next_logp), atol=1e-6)
    step = np.arange(length)[None]
    path = np.where(step < np.asarray(want.num_accepted)[:, None], step + 1, -1)
    np.testing.assert_array_equal(got.path_slots, path)


def test_coupled_tokens_are_those_of_plain_decoding_whatever_was_drafted():
    """The noise goes by depth; by slot the same tree would give other tokens."""
    topology, tokens, valid, _ = random_tree(1, 300, 8, 3)
    rng = np.random.default_rng(0)
    logp = scipy.special.log_softmax(rng.standard_normal((300, 1, 3), np.float32), axis=2)
    logp = np.broadcast_to(logp, (300, 9, 3))
    noise = rng.gumbel(size=(300, 9, 3)).astype(np.float32)
    drawn = np.argmax(logp + noise, axis=2)
    drafted = drafted_of(topology, tokens, valid)

    def emitted(done):
        path = np.asarray(done.path_slots)
        tokens_ = np.asarray(tokens)
        return [
            [*(int(tokens_[row, s - 1]) for s in path[row] if s > 0), int(done.next_token[row])]
            for row in range(300)
        ]

    def wrong(draws):
        return sum(one != drawn[row, : len(one)].tolist() for row, one in enumerate(draws))

    @jax.jit
    def both():
        target, each = sampling.by_slot(jnp.asarray(logp)), jnp.asarray(noise)
        return (
            sampling.walk(
                drafted, lambda slots, depth: sampling.argmax(target(slots) + pick(each, depth))
            ),
            sampling.walk(
                drafted, lambda slots, depth: sampling.argmax(target(slots) + pick(each, slots))
            ),
        )

    by_depth, by_slot = jax.device_get(both())
    assert wrong(emitted(by_depth)) == 0
    assert wrong(emitted(by_slot)) > 20
    assert by_depth.num_accepted.max() > 2


def test_typical_acceptance_takes_the_longest_path_of_likely_tokens():
    topology, tokens, valid, logp = random_tree(2, 200, 8, 4)
    epsilon, delta = 0.3, 0.5
    accept = jax.jit(
        lambda logp: sampling.typical(
            drafted_of(topology, tokens, valid), sampling.by_slot(logp), epsilon, delta
        )
    )
    path, accepted, last = jax.device_get(accept(logp))
    p = np.exp(np.asarray(logp, np.float64))
    lengths = set()
    for row in range(len(tokens)):
        least = np.minimum(epsilon, delta * np.exp((p[row] * np.log(p[row])).sum(axis=-1)))
        parents = np.asarray(topology.row_parents[row])
        depth, chance = {0: 0}, {0: 1.0}
        for node, parent in enumerate(parents):
            token = int(tokens[row, node])
            if parent in depth and valid[row, node] and p[row, parent, token] > least[parent]:
                depth[node + 1] = depth[parent] + 1
                chance[node + 1] = chance[parent] * p[row, parent, token]
        best = max(depth, key=lambda slot: (depth[slot], chance[slot]))
        lengths.add(depth[best])
        assert accepted[row] == depth[best]
        assert chance[int(last[row])] == pytest.approx(chance[best])
        slots, slot = [], int(last[row])
        while slot:
            slots.append(slot)
            slot = int(parents[slot - 1])
        assert path[row].tolist() == slots[::-1] + [-1] * (topology.depth - len(slots))
    assert {0, 1, 2, 3} <= lengths


def test_greedy_rows_keep_their_tokens_under_typical_acceptance():
    _, tokens, _, logits = random_tree(3, 50, 3, 4)
    best = sampling.argmax(logits)
    tokens = jnp.where(jnp.arange(3)[None, :] < jnp.arange(50)[:, None] % 4, best[:, :3], tokens)
    drafted = sampling.chain_drafted(tokens, jnp.full(50, 3))

    @jax.jit
    def both():
        p = sampling.by_slot(sampling.warp(logits, 0.0))
        keys = jax.random.split(jax.random.key(0), 50)
        got = sampling.Typical().verify(keys, drafted, sampling.Target(p, jnp.zeros(50, int), 4))
        return got, sampling.walk_greedy(drafted, best)

    got, want = both()
    for one, two in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, two)


def test_shapes_of_rows_are_those_of_static_trees():
    topology, _, _, _ = random_tree(4, 30, 9, 3)
    valid = jnp.asarray(np.random.default_rng(0).uniform(size=(30, 9)) < 0.7)

    @jax.jit
    def of_rows():
        fewer = topology.first(5).row_ancestors
        return topology.row_ancestors, fewer, topology.row_depths, topology.close(valid)

    ancestors, fewer, depths, closed = jax.device_get(of_rows())
    assert (topology.num_nodes, topology.width, topology.depth) == (9, 10, 4)
    for row in range(30):
        same = Topology(tuple(topology.row_parents[row].tolist()))
        np.testing.assert_array_equal(ancestors[row], same.ancestors)
        np.testing.assert_array_equal(depths[row], same.depths)
        np.testing.assert_array_equal(closed[row], same.close(valid[row : row + 1])[0])
        np.testing.assert_array_equal(fewer[row], same.first(5).ancestors)


def test_bad_input_names_the_remedy():
    with pytest.raises(InputError, match=r"topology=\(0, 0\): own verifies chains; use rejection"):
        check_rule(Deciding(sampling.block), Topology(TWO))
    with pytest.raises(InputError, match="its 6 nodes make more than 1024 drafts of 4 tokens"):
        check_rule("rejection", Topology((0,) * 6))
    with pytest.raises(InputError, match="valid is given"):
        check_rule("rejection", Topology(TWO), valid=lambda tokens, logq: tokens[:, 0])
    with pytest.raises(ValueError, match=r"Typical.epsilon=0: must be above 0"):
        sampling.Typical(epsilon=0)
