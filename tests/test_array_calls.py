"""`specjax.sampling` on arrays alone, as a notebook calls it."""

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from specjax import sampling

CHAINS, LENGTH, VOCAB = 4, 3, 7
KEY = jax.random.key(0)
LOGP = jax.nn.log_softmax(jax.random.normal(KEY, (CHAINS, LENGTH + 1, VOCAB)))
LOGQ = jax.nn.log_softmax(jax.random.normal(jax.random.key(1), (CHAINS, LENGTH, VOCAB)))
TOKENS = jax.random.categorical(jax.random.key(2), LOGQ)
KEYS = jax.random.split(KEY, CHAINS)


@pytest.mark.parametrize("rule", sampling.RULES)
def test_one_chain_is_a_batch_of_one(rule):
    every = sampling.verify_chain(KEYS, TOKENS, LOGQ, LOGP, rule=rule, positions=5)
    emitted = every.tokens(TOKENS)
    for chain in range(CHAINS):
        given = KEYS[chain : chain + 1], TOKENS[chain], LOGQ[chain], LOGP[chain]
        one = sampling.verify_chain(*given, rule=rule, positions=5)
        assert one.num_accepted.shape == ()
        np.testing.assert_array_equal(one.tokens(TOKENS[chain]), emitted[chain])
        accepted = int(every.num_accepted[chain])
        wanted = [*TOKENS[chain, :accepted], every.next_token[chain]]
        assert emitted[chain].tolist() == [*map(int, wanted), *[-1] * (LENGTH - accepted)]


@pytest.mark.parametrize(
    "keys", [0, np.int64(0), jax.random.PRNGKey(0), jax.random.key_data(KEYS), KEYS]
)
def test_forms_of_keys(keys):
    """A whole number, old keys and new ones; of one key the chains' own are split."""
    found = sampling.verify_chain(keys, TOKENS, LOGQ, LOGP)
    wanted = sampling.verify_chain(KEY, TOKENS, LOGQ, LOGP)
    np.testing.assert_array_equal(found.next_token, wanted.next_token)


def test_inside_jit_and_vmap():
    wanted = sampling.verify_chain(KEYS, TOKENS, LOGQ, LOGP).tokens(TOKENS)

    def emitted(keys, tokens, logq, logp):
        return sampling.verify_chain(keys, tokens, logq, logp).tokens(tokens)

    np.testing.assert_array_equal(jax.jit(emitted)(KEYS, TOKENS, LOGQ, LOGP), wanted)
    assert jax.vmap(emitted)(KEYS, TOKENS, LOGQ, LOGP).shape == wanted.shape


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(logp=LOGP + 1), r"logp\[0, 0\]: its probabilities sum to 2.718; pass log-prob"),
        (dict(logq=jnp.exp(LOGQ)), r"logq\[0, 0\]: its probabilities sum to .*warp\(logits"),
        (dict(logp=TOKENS), "logp has shape"),
        (dict(logp=LOGP[:, :-1]), r"logp has shape \(4, 3, 7\) .*: it must be \(4, 4, V\)"),
        (dict(logq=LOGQ[:, :-1]), r"logq has shape \(4, 2, 7\): it must be \(4, 3, 7\)"),
        (dict(logp=LOGP.astype(int)), "logp is of int32: pass log-probabilities"),
        (
            dict(keys=KEYS[:3]),
            r"keys are key<fry>\[3\]: pass one key, made by jax.random.key, or 4",
        ),
        (dict(keys=1.5), r"keys are float\[\]: pass one key"),
        (
            dict(tokens=LOGP),
            r"tokens are float32\[4, 4, 7\]: pass whole numbers \[K\], or \[B, K\]",
        ),
        (dict(tokens=TOKENS - 9), r"tokens has -\d: use tokens from 0 to 6, or num_valid"),
        (dict(num_valid=1.5), r"num_valid is float32\[\]: pass a whole number, or 4 of them"),
        (dict(positions=np.arange(3)), r"positions is int32\[3\]: pass a whole number, or 4"),
        (dict(keys="k"), "keys='k': pass a key"),
        (dict(rule=sampling.Rejection), "rule=.*use one of .*or a value of a Rule"),
        (dict(rule="nosuch"), "rule='nosuch' is unknown: use one of rejection, block"),
        (dict(rule="coupled"), "rule='coupled' needs positions"),
    ],
)
def test_mistakes_are_named(changes, message, monkeypatch):
    # As for users: without a type checker in front of specjax's own messages.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    given = {"keys": KEY, "tokens": TOKENS, "logq": LOGQ, "logp": LOGP, **changes}
    with pytest.raises(ValueError, match=message):
        sampling.verify_chain(**given)


@pytest.mark.parametrize("name", ["overlap", "acceptance_probability", "residual"])
def test_functions_of_two_distributions_refuse_probabilities(name):
    function = getattr(sampling, name)
    p, q = jnp.array([[0.5, 0.5]]), jnp.array([[0.25, 0.75]])
    function(jnp.log(p), jnp.log(q))
    with pytest.raises(ValueError, match=r"logp\[0\]: its probabilities sum to 3.297; pass log-p"):
        function(p, jnp.log(q))
    with pytest.raises(ValueError, match=r"logq\[0\]: its probabilities sum to .*log_softmax"):
        function(jnp.log(p), jnp.log(q) - 2)


@pytest.mark.parametrize(
    ("logp", "logq", "message"),
    [
        (LOGP[0], LOGQ[0], r"logp has shape \(4, 7\) and logq \(3, 7\): pass logp\[:3\], without"),
        (LOGP, LOGQ, r"pass logp\[:, :3\], without"),
        (LOGP[0], LOGQ[0, 0], "pass one distribution of each per token"),
        (LOGP[0, 0], LOGQ[0], "pass one distribution of each per token"),
    ],
)
def test_two_distributions_have_one_shape(logp, logq, message, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(ValueError, match=message):
        sampling.residual(logp, logq)


def test_tokens_of_another_draft_are_refused():
    with pytest.raises(ValueError, match="drafted has 2 tokens, and 3 were verified: pass all"):
        sampling.verify_chain(KEYS, TOKENS, LOGQ, LOGP).tokens(TOKENS[:, :2])
