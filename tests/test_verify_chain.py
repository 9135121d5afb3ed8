"""`verify_chain` and the chain functions: keys, noise, shapes and the cases at the edge."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from conftest import slow
from decoding import Deciding

from specjax import sampling
from specjax.sampling.chain_verification import rejection_at_once, rejection_by_slot

VOCAB, LENGTH = 5, 3
ROWS = 64  # one shape for most tests, so that each rule compiles once
RULES = ["rejection", "block", "coupled"]

verify_chain = jax.jit(sampling.verify_chain, static_argnames="rule")
position_gumbel = jax.jit(sampling.position_gumbel, static_argnums=2)


@functools.partial(jax.jit, static_argnums=range(1, 4))
def random_distributions(seed, *shape):
    return jax.nn.log_softmax(1.5 * jax.random.normal(jax.random.key(seed), (*shape, VOCAB)))


@functools.cache
def round_of():
    """Keys, and drafts that are drawn from q, with q and p."""

    @jax.jit
    def made():
        logp, logq = (
            random_distributions(0, ROWS, LENGTH + 1),
            random_distributions(1, ROWS, LENGTH),
        )
        keys = jax.random.split(jax.random.key(2), ROWS)
        return keys, draw_drafts(sampling.split_keys(keys).draft, logq), logq, logp

    return made()


@jax.jit
def draw_drafts(keys, logq):
    rows = logq.shape[0]
    noise = [position_gumbel(keys, jnp.full(rows, depth), VOCAB) for depth in range(logq.shape[1])]
    return sampling.argmax(logq + jnp.stack(noise, axis=1))


def same(one, other):
    one, other = jax.device_get((one, other))
    return jax.tree.all(jax.tree.map(np.array_equal, one, other))


@pytest.mark.parametrize(
    ("rule", "logq"),
    [
        *(("rejection", True), ("block", False), ("coupled", True)),
        *slow(("rejection", False), ("block", True), ("coupled", False)),
    ],
)
def test_a_row_does_not_depend_on_its_neighbours(rule, logq):
    keys, tokens, distributions, logp = round_of()
    distributions = distributions if logq else None
    num_valid, positions = np.arange(ROWS) % (LENGTH + 1), np.arange(ROWS) + 100

    def rows(part):
        return verify_chain(
            keys[part],
            tokens[part],
            None if distributions is None else distributions[part],
            logp[part],
            positions=jnp.asarray(positions[part]),
            rule=rule,
            num_valid=jnp.asarray(num_valid[part]),
        )

    together = jax.device_get(rows(slice(None)))
    assert np.all(together.num_accepted <= num_valid)
    for row in (0, 3, 63):
        alone = rows(slice(row, row + 1))
        assert same(alone, jax.tree.map(lambda x, row=row: x[row : row + 1], together))


@pytest.mark.parametrize("rule", RULES)
def test_tokens_after_the_valid_ones_do_not_matter(rule):
    keys, tokens, logq, logp = round_of()
    two = jnp.full(ROWS, 2)
    verify = functools.partial(verify_chain, positions=jnp.zeros(ROWS, int), rule=rule)
    short = verify(keys, tokens[:, :2], logq[:, :2], logp[:, :3])
    ended = jnp.asarray(np.where(np.arange(LENGTH) < 2, tokens, -1))
    padded = verify(keys, ended, logq, logp, num_valid=two)
    assert same(short[1:], padded[1:])
    assert np.all(padded.path_slots[:, 2] == -1)
    assert np.all(padded.path_slots[:, :2] == short.path_slots)


@pytest.mark.parametrize("shared", [True, False])
def test_coupled_gives_what_plain_decoding_gives(shared):
    rows = ROWS
    keys, tokens, logq, _ = round_of()
    positions = jnp.arange(rows) * 7
    # One distribution whatever came before, so that plain decoding needs no model.
    logp = np.tile(random_distributions(9, rows, 1), (1, LENGTH + 1, 1))
    noise = [np.asarray(position_gumbel(keys, positions + i, VOCAB)) for i in range(LENGTH + 1)]
    noise = np.stack(noise, axis=1)
    plain = np.argmax(logp + noise, axis=2)
    if shared:
        tokens = jnp.argmax(logq + noise[:, :LENGTH], axis=2).astype(jnp.int32)
    verification = verify_chain(
        keys, tokens, logq, jnp.asarray(logp), positions=positions, rule="coupled"
    )
    tokens, verification = jax.device_get((tokens, verification))
    accepted = verification.num_accepted
    slot = np.arange(LENGTH)[None, :]
    stands = slot < accepted[:, None]
    assert np.all(np.where(stands, tokens == plain[:, :LENGTH], True))
    assert np.all(verification.next_token == plain[np.arange(rows), accepted])
    assert np.all(verification.path_slots == np.where(stands, slot + 1, -1))
    # Where a draft was refused, it was not the plain token.
    assert not np.any((slot == accepted[:, None]) & (tokens == plain[:, :LENGTH]))


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_two_tokens_have_the_joint_distribution_of_the_target(rule):
    chi2, threshold = joint_chi2(rule, lambda keys: sampling.split_keys(keys).draft)
    assert chi2 < threshold


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_drafting_from_the_key_of_the_final_token_is_found_out(rule):
    chi2, threshold = joint_chi2(rule, lambda keys: sampling.split_keys(keys).final)
    assert chi2 > threshold


def joint_chi2(rule, draft_keys, rows=100_000):
    """Chi-square of the first two tokens that come out, K = 1, against p, and its 1e-6 quantile."""
    p, q = random_distributions(3, 2), random_distributions(4, 1)
    keys = jax.random.split(jax.random.key(5), rows)
    logq = jnp.broadcast_to(q[None], (rows, 1, VOCAB))
    logp = jnp.broadcast_to(p[None], (rows, 2, VOCAB))
    tokens = draw_drafts(draft_keys(keys), logq)
    verification = verify_chain(keys, tokens, logq, logp, rule=rule)
    tokens, verification = jax.device_get((tokens, verification))
    one = verification.num_accepted == 1
    first = np.where(one, tokens[:, 0], verification.next_token)
    # A row that emitted one token continues as plain decoding does.
    after = np.exp(np.asarray(p[1], np.float64))
    more = np.random.default_rng(6).choice(VOCAB, rows, p=after / after.sum())
    second = np.where(one, verification.next_token, more)
    seen = np.bincount(first * VOCAB + second, minlength=VOCAB**2)
    want = np.exp(np.asarray(p[0])[:, None] + np.asarray(p[1])[None, :]).ravel() * rows
    assert want.min() > 20
    return ((seen - want) ** 2 / want).sum(), scipy.stats.chi2.isf(1e-6, VOCAB**2 - 1)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_draft_from_the_target_distribution_is_accepted_whole(rule):
    keys, tokens, _, logp = round_of()
    logq = logp[:, :LENGTH]
    tokens = draw_drafts(sampling.split_keys(keys).draft, logq)
    verification = verify_chain(keys, tokens, logq, logp, rule=rule)
    assert np.all(verification.num_accepted == LENGTH)


def test_block_accepts_no_fewer_than_rejection():
    rows = 20_000
    logp, logq = random_distributions(0, rows, LENGTH + 1), random_distributions(1, rows, LENGTH)
    tokens = jax.random.categorical(jax.random.key(2), logq)
    uniforms = jax.random.uniform(jax.random.key(3), (rows, LENGTH))
    distributions = sampling.by_slot(logp), sampling.by_slot(logq)

    @functools.partial(jax.jit, static_argnums=0)
    def mean(rule):
        decision = rule(tokens, jnp.full(rows, LENGTH), *distributions, uniforms)
        return decision.num_accepted.mean()

    means = [mean(rule) for rule in (sampling.rejection, sampling.block)]
    assert means[1] > means[0] > 0


@pytest.mark.parametrize("rule", RULES)
def test_an_empty_draft_is_plain_sampling(rule):
    keys, _, logq, logp = round_of()
    none = jnp.zeros((ROWS, 0), jnp.int32)
    for distributions in (None, logq[:, :0]):
        verification = verify_chain(
            keys, none, distributions, logp[:, :1], positions=jnp.arange(ROWS), rule=rule
        )
        source = keys if rule == "coupled" else sampling.split_keys(keys).final
        at = jnp.arange(ROWS) if rule == "coupled" else jnp.zeros(ROWS, int)
        noise = position_gumbel(source, at, VOCAB)
        assert np.all(verification.next_token == sampling.argmax(logp[:, 0] + noise))
        assert verification.path_slots.shape == (ROWS, 0)
        assert not verification.num_accepted.any()


@jax.jit
def greedy_round(tokens, _, logits):
    """Drafts that begin with likeliest tokens, one-hot distributions, and what is to come out."""
    best = sampling.argmax(logits)
    right = jnp.arange(LENGTH)[None, :] < jnp.arange(ROWS)[:, None] % 5
    tokens = jnp.where(right, best[:, :3], tokens)
    num_valid = jnp.arange(ROWS) % 4
    want = sampling.walk_greedy(sampling.chain_drafted(tokens, num_valid), best)
    logq = jnp.where(jax.nn.one_hot(tokens, VOCAB, dtype=bool), 0.0, -jnp.inf)
    return tokens, sampling.warp(logits, 0.0), logq, num_valid, want


@pytest.mark.parametrize("rule", RULES)
def test_greedy_rows_follow_the_argmax(rule):
    keys, *given = round_of()
    tokens, logp, logq, num_valid, want = greedy_round(*given)
    for distributions in (None, logq):
        got = verify_chain(
            keys, tokens, distributions, logp, positions=num_valid, rule=rule, num_valid=num_valid
        )
        assert same(got, want)
    assert set(np.asarray(want.num_accepted).tolist()) == {0, 1, 2, 3}


def test_impossible_tokens_and_extreme_uniforms():
    half = jnp.log(jnp.array([[0.5, 0.5, 0.0]]))
    sure = jnp.log(jnp.array([[0.0, 1.0, 0.0]]))
    top = float(np.nextafter(np.float32(1), np.float32(0)))

    @functools.partial(jax.jit, static_argnums=0)
    def decide(rule, token, p, q, u):
        distributions = [
            sampling.by_slot(jnp.stack([distribution, distribution], axis=1))
            for distribution in (p, q)
        ]
        return rule(token[None, None], jnp.array([1]), *distributions, u[None, None])

    def accepted(rule, token, p, q, u):
        decision = decide(rule, np.int32(token), p, q, np.float32(u))
        assert np.exp(decision.next_logp).sum() == pytest.approx(1)
        return int(decision.num_accepted[0])

    for rule in (sampling.rejection, rejection_at_once, sampling.block):
        assert accepted(rule, 2, half, half, 0.0) == 0  # p = q = 0
        assert accepted(rule, 0, sure, half, 0.0) == 0  # p = 0
        assert accepted(rule, 0, half, half, top) == 1  # p = q
        assert accepted(rule, 0, half, sure, 0.0) == 0  # q = 0 < p: it was not drawn from q
        assert accepted(rule, 1, half, sure, 0.4999) == 1
        assert accepted(rule, 1, half, sure, 0.5) == 0  # u q < p, not <=
    tiny = jnp.array([[-200.0, 0.0, -jnp.inf]])
    assert accepted(sampling.rejection, 0, tiny, half, 0.0) == 1  # p > 0 below float32's range


def test_rejection_at_once_is_that_by_slot():
    """Also of rows with fewer tokens, and of tokens that are certain."""
    _, tokens, logq, logp = round_of()
    rng = np.random.default_rng(1)
    rows = jnp.asarray(rng.integers(-1, LENGTH, (ROWS, LENGTH)), jnp.int32)
    target, draft = sampling.by_slot(logp), sampling.draft_distributions(tokens, rows, logq)
    uniforms = jnp.asarray(rng.random((ROWS, LENGTH)) ** 2, jnp.float32)
    given = tokens, jnp.arange(ROWS) % (LENGTH + 1), target, draft, uniforms
    found, wanted = (decide(*given) for decide in (rejection_at_once, rejection_by_slot))
    np.testing.assert_array_equal(found.num_accepted, wanted.num_accepted)
    assert set(np.asarray(found.num_accepted).tolist()) == {0, 1, 2, 3}
    np.testing.assert_allclose(found.next_logp, wanted.next_logp, rtol=1e-6)


def test_nodes_name_their_distributions():
    tokens = jnp.array([[2, 0, 1]])
    logq = random_distributions(0, 1, 2)
    distributions = sampling.draft_distributions(tokens, jnp.array([[1, -1, 0]]), logq)
    assert np.all(distributions(jnp.array([0])) == logq[:, 1])
    assert np.all(jnp.exp(distributions(jnp.array([1]))) == jax.nn.one_hot(tokens[:, 1], VOCAB))
    assert np.all(distributions(jnp.array([2])) == logq[:, 0])


def test_keys_of_a_round_are_all_different():
    keys = jax.random.split(jax.random.key(0), 3)
    seen = [
        jax.random.key_data(part)[row].tolist()
        for number in (0, 1)
        for part in sampling.round_keys(keys, jnp.array(number))
        for row in range(3)
    ]
    assert len({tuple(key) for key in seen}) == len(seen) == 18
    each = sampling.round_keys(keys, jnp.array([1, 0, 1]))
    assert each.draft[0] == sampling.round_keys(keys, jnp.array(1)).draft[0]


def test_noise_depends_on_key_and_index_alone():
    keys = jax.random.split(jax.random.key(0), 3)
    assert np.all(sampling.uniforms(keys, 5)[:, :2] == sampling.uniforms(keys, 2))
    assert sampling.uniforms(keys, 0).shape == (3, 0)
    together = position_gumbel(keys, jnp.array([4, 5, 6]), VOCAB)
    alone = position_gumbel(keys[1:2], jnp.array([5]), VOCAB)
    assert np.all(together[1:2] == alone)


def test_a_single_key_is_split():
    _, tokens, logq, logp = round_of()
    key = jax.random.key(2)
    one = verify_chain(key, tokens, logq, logp)
    assert same(one, verify_chain(jax.random.split(key, ROWS), tokens, logq, logp))


def test_a_rule_of_ones_own():
    def reject_all(tokens, num_valid, target, draft, uniforms):
        none = jnp.zeros_like(num_valid)
        return sampling.Decision(none, target(none))

    keys, tokens, logq, logp = round_of()
    verification = verify_chain(keys, tokens, logq, logp, rule=Deciding(reject_all))
    assert not verification.num_accepted.any()


@pytest.mark.parametrize("rule", RULES)
def test_the_program_holds_no_copy_of_all_warped_distributions(rule):
    rows, vocab = 2, 1000
    logits, logq = jnp.zeros((rows, LENGTH + 1, vocab)), jnp.zeros((rows, LENGTH, vocab))

    def program(keys):
        at = sampling.by_slot(logits)
        nothing = jnp.zeros((rows, LENGTH), jnp.int32)
        drafted = sampling.chain_drafted(nothing, jnp.full(rows, LENGTH), logq)

        def warped(slots):
            return sampling.warp(at(slots), jnp.ones(rows))

        target = sampling.Target(warped, jnp.zeros(rows, jnp.int32), vocab)
        by_slot = Deciding(rejection_by_slot) if rule == "rejection" else sampling.RULES[rule]
        return by_slot.verify(keys, drafted, target)

    text = str(jax.make_jaxpr(program)(jax.random.split(jax.random.key(0), rows)))
    assert f"f32[{rows},{vocab}] = exp" in text
    assert f"f32[{rows},{LENGTH + 1},{vocab}] = " not in text
    assert f"f32[{rows},{LENGTH},{vocab}] = " not in text


def test_lengths_and_trees_that_a_rule_does_not_take_are_refused():
    tokens, logp = jnp.zeros((2, 3), jnp.int32), jnp.full((2, 4, 5), -jnp.log(5.0))
    with pytest.raises(ValueError, match=r"num_valid=\[3, 7\]: use 0 to 3"):
        sampling.verify_chain(0, tokens, None, logp, num_valid=jnp.asarray([3, 7]))
    tree = sampling.Drafted(
        tokens, jnp.ones((2, 3), bool), (0, 0, 1), 2, jnp.full((2, 3), -1), None
    )
    target = sampling.Target(sampling.by_slot(logp), jnp.zeros(2, jnp.int32), 5, logp.dtype)
    with pytest.raises(ValueError, match=r"rule 'own' verifies chains, and parents=\(0, 0, 1\)"):
        Deciding(sampling.block).verify(jax.random.split(jax.random.key(0), 2), tree, target)
