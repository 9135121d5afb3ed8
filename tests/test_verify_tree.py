"""`verify_tree` and `draw_siblings` on arrays alone, as a notebook calls them."""

import functools

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
import scipy.stats
from decoding import Deciding

from specjax import sampling

ROWS, VOCAB, DRAWS = 3, 6, 40_000
PARENTS = [0, 0, 1, 1, 4]
SHAPES = [PARENTS, [0, 1, 1, 2, 3], [0, 1, 2, 3, 4]]
NODES = len(PARENTS)
KEY = jax.random.key(0)
OF_CHAINS = Deciding(sampling.rejection)
LOGP = jax.nn.log_softmax(jax.random.normal(KEY, (ROWS, NODES + 1, VOCAB)))
LOGQ = jax.nn.log_softmax(jax.random.normal(jax.random.key(1), (ROWS, NODES + 1, VOCAB)))


def drawn(parents, logq, seed=2):
    """Tokens of one tree, drawn without replacement from the rows of their parents."""
    every = sampling.draw_siblings(seed, logq, 3)
    earlier = [parents[:node].count(parent) for node, parent in enumerate(parents)]
    return every[np.array(parents), np.array(earlier)]


TOKENS = jnp.stack([drawn(PARENTS, logq) for logq in LOGQ])


@pytest.mark.parametrize("rule", sampling.RULES)
def test_a_tree_without_branches_is_a_chain(rule):
    tokens = jax.random.categorical(KEY, LOGQ[:, :-1])
    given = {"positions": 5, "rule": rule, "num_valid": jnp.array([5, 3, 0])}
    chain = sampling.verify_chain(KEY, tokens, LOGQ[:, :-1], LOGP, **given)
    tree = sampling.verify_tree(KEY, tokens, range(NODES), LOGQ, LOGP, **given)
    for found, wanted in zip(tree, chain, strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("rule", ["rejection", "block", "coupled", "typical"])
def test_rows_have_shapes_of_their_own(rule):
    keys = jax.random.split(KEY, ROWS)
    tokens = jnp.stack([drawn(*each) for each in zip(SHAPES, LOGQ, strict=True)])
    every = sampling.verify_tree(keys, tokens, SHAPES, LOGQ, LOGP, rule=rule, positions=5)
    for row, parents in enumerate(SHAPES):
        given = keys[row : row + 1], tokens[row], parents, LOGQ[row], LOGP[row]
        one = sampling.verify_tree(*given, rule=rule, positions=5)
        accepted = int(one.num_accepted)
        path = one.path_slots[:accepted].tolist()
        assert path == every.path_slots[row, :accepted].tolist()
        assert [parents[slot - 1] for slot in path] == [0, *path][:accepted]
        emitted = one.tokens(tokens[row]).tolist()
        assert emitted[: accepted + 1] == [
            *(int(tokens[row, slot - 1]) for slot in path),
            int(one.next_token),
        ]
        assert set(emitted[accepted + 1 :]) <= {-1}


P_TABLE = jax.nn.log_softmax(jax.random.normal(jax.random.key(3), (VOCAB, VOCAB)))
Q_TABLE = jax.nn.log_softmax(P_TABLE + 0.7 * jax.random.normal(KEY, (VOCAB, VOCAB)))


def emitted(key, drawn_with, verified_with):
    """The first two tokens that come of a tree, where each token's distribution is its row's."""
    first, second, verify = jax.random.split(key, 3)
    children = sampling.draw_siblings(first, Q_TABLE[0], 2, replace=drawn_with)
    below = sampling.draw_siblings(second, Q_TABLE[children[0]], 2, replace=drawn_with)
    tokens = jnp.concatenate([children, below])
    slots = jnp.concatenate([jnp.zeros(1, int), tokens])
    found = sampling.verify_tree(
        verify, tokens, [0, 0, 1, 1], Q_TABLE[slots], P_TABLE[slots], replace=verified_with
    ).tokens(tokens)
    next_key = jax.random.fold_in(key, 1)
    further = jax.random.categorical(next_key, P_TABLE[found[0]])
    return found[0], jnp.where(found[1] < 0, further, found[1])


def p_value(drawn_with, verified_with):
    """Of a chi-square test of the two tokens against the target."""
    draw = functools.partial(emitted, drawn_with=drawn_with, verified_with=verified_with)
    first, second = jax.jit(jax.vmap(draw))(jax.random.split(jax.random.key(9), DRAWS))
    counts = np.bincount(np.asarray(VOCAB * first + second), minlength=VOCAB**2)
    wanted = np.exp(np.asarray(P_TABLE[0][:, None] + P_TABLE, np.float64)).ravel()
    return scipy.stats.chisquare(counts, DRAWS * wanted / wanted.sum()).pvalue


@pytest.mark.parametrize("replace", [False, True])
def test_the_output_has_the_distribution_of_the_target(replace):
    assert p_value(replace, replace) > 1e-6


def test_siblings_verified_as_others_than_they_were_drawn_do_not():
    assert p_value(True, False) < 1e-9


def test_siblings_are_drawn_in_order_and_without_replacement():
    logq = jnp.tile(jnp.log(jnp.array([0.6, 0.3, 0.1, 0.0])), (DRAWS, 1))
    first, second, third, fourth = sampling.draw_siblings(0, logq, 4).T
    shares = np.bincount(np.asarray(4 * first + second), minlength=16).reshape(4, 4) / DRAWS
    q = np.array([0.6, 0.3, 0.1, 0.0])
    wanted = q[:, None] * (q[None] / (1 - q[:, None])) * (1 - np.eye(4))
    np.testing.assert_allclose(shares, wanted, atol=0.01)
    assert np.all(first + second + third == 3)
    assert np.all(fourth == 3)  # which has no probability, and comes where nothing is left


def test_what_is_left_after_all_candidates_is_refused():
    logq = jnp.log(jnp.array([0.5, 0.5, 0.0]))
    logp = jnp.log(jnp.tile(jnp.array([0.0, 0.0, 1.0]), (4, 1)))
    tokens = sampling.draw_siblings(0, logq, 3)
    result = sampling.verify_tree(0, tokens, [0, 0, 0], jnp.tile(logq, (4, 1)), logp)
    assert int(tokens[2]) == 2
    assert (int(result.num_accepted), int(result.next_token)) == (0, 2)


def test_nodes_that_were_chosen_beside_nodes_that_were_drawn():
    """Of one row, in one call, they are what the recursion makes of them."""
    row, tokens = [0, -1, 1, -1, 4], TOKENS.at[:, 1].set(TOKENS[:, 0])
    found = sampling.verify_tree(KEY, tokens, PARENTS, LOGQ, LOGP, logq_row=row)
    keys = jax.random.split(KEY, ROWS)
    drafted = sampling.Drafted(
        tokens,
        jnp.ones_like(tokens, bool),
        tuple(PARENTS),
        3,
        jnp.tile(jnp.array(row), (ROWS, 1)),
        LOGQ,
    )
    target = sampling.Target(sampling.by_slot(LOGP), jnp.zeros(ROWS, int), VOCAB)
    wanted = sampling.Rejection().verify(keys, drafted, target)
    np.testing.assert_array_equal(found.tokens(tokens), wanted.tokens(tokens))


def test_inside_jit_and_vmap_with_shapes_on_the_device():
    keys = jax.random.split(KEY, ROWS)
    wanted = sampling.verify_tree(keys, TOKENS, PARENTS, LOGQ, LOGP).tokens(TOKENS)

    def emitted(key, tokens, parents, logq, logp):
        return sampling.verify_tree(key, tokens, parents, logq, logp).tokens(tokens)

    parents = jnp.tile(jnp.array(PARENTS), (ROWS, 1))
    found = jax.jit(emitted)(keys, TOKENS, parents, LOGQ, LOGP)
    depth = wanted.shape[1]
    np.testing.assert_array_equal(found[:, :depth], wanted)
    assert np.all(found[:, depth:] == -1)
    assert jax.vmap(emitted)(keys, TOKENS, parents, LOGQ, LOGP).shape == found.shape


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(parents=[0, 0, 1, 5, 1]), r"parents\[3\]=5: a parent is the slot of an earlier node"),
        (dict(parents=[-1, -1, 0, 0, 3]), r"parents\[0\]=-1: .* 0 for the root; use 0 to 0"),
        (dict(parents=[0, 0, 1]), r"parents are int64\[3\] for tokens \[3, 5\]: pass a whole"),
        (dict(parents=np.zeros(5)), r"parents are float64\[5\]"),
        (
            dict(tokens=TOKENS.at[1, 1].set(TOKENS[1, 0])),
            r"nodes 0 and 1 of row 1, children of slot 0, both have token \d: siblings are drawn "
            "without replacement, as draw_siblings does; replace=True",
        ),
        (
            dict(logq=LOGQ[:, :-1]),
            r"logq has shape \(3, 5, 6\): it must be \(3, 6, 6\), one row per slot",
        ),
        (
            dict(logq=jax.nn.log_softmax(LOGQ.at[0, 0, TOKENS[0, 0]].set(-jnp.inf))),
            r"token \d of node 0 of row 0 has probability 0 in row 0 of logq",
        ),
        (dict(logq=jnp.exp(LOGQ)), r"logq\[0, 0\]: its probabilities sum to"),
        (dict(logp=LOGP[:, :-1]), r"logp has shape \(3, 5, 6\) .*: it must be \(3, 6, V\), one .*"),
        (dict(logq_row=[0, 0, 1, 1, 9]), r"logq_row has 9: use 0 to 5, the rows of logq, or -1"),
        (dict(logq_row=[0, 0]), r"logq_row is int64\[2\] for tokens \[3, 5\]"),
        (dict(logq_row=[0, 0, 1, 1, 1], logq=LOGQ[0]), r"logq has shape \(6, 6\): it must be \(3,"),
        (dict(tokens=TOKENS + 0.5), r"tokens are float32\[3, 5\]: pass whole numbers \[N\], or"),
        (dict(num_valid=6), r"num_valid=\[6, 6, 6\]: use 0 to 5"),
        (dict(rule=OF_CHAINS), "rule='own' verifies chains, whose parents are 0, 1, 2, ...: use"),
        (dict(rule="coupled"), "rule='coupled' needs positions"),
        (dict(keys=None), "keys=None: pass a key"),
    ],
)
def test_mistakes_are_named(changes, message, monkeypatch):
    # As for users: without a type checker in front of specjax's own messages.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    given = dict(keys=KEY, tokens=TOKENS, parents=PARENTS, logq=LOGQ, logp=LOGP) | changes
    with pytest.raises(ValueError, match=message):
        sampling.verify_tree(**given)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(count=7), "count=7: use a whole number from 1 to V = 6"),
        (dict(count=1.5), "count=1.5: use a whole number"),
        (dict(logq=jnp.exp(LOGQ)), r"logq\[0, 0\]: its probabilities sum to"),
        (dict(logq=0.0), "logq is one number"),
        (dict(key="k"), "keys='k': pass a key"),
        (dict(key=jax.random.split(KEY, 3)), r"keys are key<fry>\[3\]: pass one key"),
    ],
)
def test_mistakes_in_drawing_are_named(changes, message, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(ValueError, match=message):
        sampling.draw_siblings(**{"key": KEY, "logq": LOGQ, "count": 2, **changes})
