"""The chain rules are exact, by enumeration; rules with a known mistake fail the test."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import slow
from decoding import Deciding

from specjax import sampling
from specjax.errors import InputError
from specjax.sampling import Decision, excess, log_ratio, pick, rejection
from specjax.sampling.chain_verification import rejection_at_once, rejection_by_slot
from specjax.testing import DistributionPair, check_rule


@pytest.mark.parametrize(("vocab", "length"), [(3, 3), *slow((2, 1), (4, 3), (5, 2))])
@pytest.mark.parametrize("rule", ["rejection", "block", "coupled"])
def test_rules_emit_the_target_distribution(rule, vocab, length):
    check = check_rule(rule, vocab=vocab, length=length)
    assert check.passed, check.counterexample
    assert check.max_error < 1e-12
    assert check.counterexample is None


@pytest.mark.parametrize("decide", [rejection_at_once, rejection_by_slot])
def test_rejection_is_exact_on_every_platform(decide):
    """Accelerators decide all tokens at once, and a CPU only those that are reached."""
    check = check_rule(Deciding(decide), vocab=3, length=2)
    assert check.passed, check.counterexample
    assert check.max_error < 1e-12


def plain_resample(tokens, num_valid, target, draft, uniforms):
    """Draws from p after a rejection, where only the residual of p is left."""
    accepted, _ = rejection(tokens, num_valid, target, draft, uniforms)
    return Decision(accepted, target(accepted))


def residual_bonus(tokens, num_valid, target, draft, uniforms):
    """Draws from a residual after the last token too, as if there had been a rejection."""
    accepted, _ = rejection(tokens, num_valid, target, draft, uniforms)
    return Decision(accepted, sampling.residual(target(accepted), draft(accepted)))


def unwarped_draft(tokens, num_valid, target, draft, uniforms):
    """Takes q as it was before temperature 0.5, not what the tokens were drawn from."""
    return rejection(
        tokens, num_valid, target, lambda slots: jax.nn.log_softmax(draft(slots) / 2), uniforms
    )


def softmax_for_certain(tokens, num_valid, target, draft, uniforms):
    """Accepts by a softmax although the token was sure to be proposed."""

    def softened(slots):
        distribution = draft(slots)
        certain = jnp.max(distribution, axis=-1, keepdims=True) == 0
        return jnp.where(
            certain,
            jnp.log(jnp.where(distribution == 0, 0.7, 0.3 / (distribution.shape[-1] - 1))),
            distribution,
        )

    return rejection(tokens, num_valid, target, softened, uniforms)


def one_uniform(tokens, num_valid, target, draft, uniforms):
    """Uses one uniform for every token of a row."""
    shared = jnp.broadcast_to(uniforms[:, :1], uniforms.shape)
    return rejection(tokens, num_valid, target, draft, shared)


def blind_to_length(tokens, num_valid, target, draft, uniforms):
    """Takes undrafted tokens for drafted ones."""
    every = jnp.full_like(num_valid, tokens.shape[1])
    accepted, distribution = rejection(tokens, every, target, draft, uniforms)
    beyond = accepted > num_valid
    return Decision(
        jnp.minimum(accepted, num_valid),
        jnp.where(beyond[:, None], target(num_valid), distribution),
    )


def odds_by_slot(tokens, num_valid, target, draft):
    """p / q of each drafted token in logarithms, -inf where none was drafted."""
    columns = []
    for slot in range(tokens.shape[1]):
        at = jnp.full_like(num_valid, slot)
        token = tokens[:, slot]
        odds = log_ratio(pick(target(at), token), pick(draft(at), token))
        columns.append(jnp.where(slot < num_valid, odds, -jnp.inf))
    return jnp.stack(columns, axis=1)


def longest_accepted(tokens, num_valid, target, draft, uniforms):
    """Accepts up to the last token that passes its own test, in spite of an earlier rejection."""
    odds = odds_by_slot(tokens, num_valid, target, draft)
    passes = jnp.log(uniforms) < odds
    last = jnp.max(jnp.where(passes, jnp.arange(1, tokens.shape[1] + 1)[None, :], 0), axis=1)
    last = last.astype(num_valid.dtype)
    left = sampling.residual(target(last), draft(last))
    return Decision(last, jnp.where((last < num_valid)[:, None], left, target(last)))


def block_with(stop_at_first=False, inner_end=False, unweighted=False):
    """Block verification written with plain sums, with mistakes to choose from."""

    def rule(tokens, num_valid, target, draft, uniforms):
        odds = odds_by_slot(tokens, num_valid, target, draft)
        weight = [jnp.zeros(num_valid.shape)]
        for slot in range(tokens.shape[1]):
            alive = (odds[:, slot] > -jnp.inf) & (weight[-1] > -jnp.inf)
            step = jnp.minimum(weight[-1] + jnp.where(alive, odds[:, slot], 0), 0)
            weight.append(jnp.where(alive, step, -jnp.inf))
        accepted, ok = jnp.zeros_like(num_valid), jnp.ones(num_valid.shape, bool)
        for slot in range(1, tokens.shape[1] + 1):
            at = jnp.full_like(num_valid, slot)
            left = jnp.exp(excess(target(at) + weight[slot][:, None], draft(at))).sum(axis=-1)
            lost = 1 - jnp.exp(weight[slot])
            height = jnp.where(lost > 0, left / jnp.where(lost > 0, left + lost, 1), 1)
            last = slot == (tokens.shape[1] if inner_end else num_valid)
            height = jnp.where(last, jnp.exp(weight[slot]), height)
            stands = (uniforms[:, slot - 1] < height) & (slot <= num_valid)
            ok &= stands
            accepted = jnp.where(ok if stop_at_first else stands, slot, accepted)
        logw = pick(jnp.stack(weight, axis=1), accepted)
        logp = target(accepted)
        scaled = logp if unweighted else logp + logw[:, None]
        left = excess(scaled, draft(accepted))
        mass = jax.scipy.special.logsumexp(left, axis=-1, keepdims=True)
        after = jnp.where(mass > -jnp.inf, left - jnp.where(mass > -jnp.inf, mass, 0), logp)
        return Decision(accepted, jnp.where((accepted < num_valid)[:, None], after, logp))

    return rule


BROKEN = {
    "plain_resample": plain_resample,
    "residual_bonus": residual_bonus,
    "unwarped_draft": unwarped_draft,
    "softmax_for_certain": softmax_for_certain,
    "blind_to_length": blind_to_length,
    "longest_accepted": longest_accepted,
    "block_stops_at_first": block_with(stop_at_first=True),
    "block_inner_end": block_with(inner_end=True),
    "block_unweighted_residual": block_with(unweighted=True),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_variants_fail(name):
    check = check_rule(Deciding(BROKEN[name]), vocab=3, length=2)
    assert not check.passed
    assert check.counterexample


def test_the_broken_variants_fail_for_their_mistake_alone():
    check = check_rule(Deciding(block_with()), vocab=3, length=2)
    assert check.passed, check.counterexample


def test_one_uniform_for_two_tokens_is_refused():
    check = check_rule(Deciding(one_uniform), vocab=3, length=2)
    assert not check.passed
    assert "use each uniform once" in check.counterexample


def test_accepting_more_than_was_drafted_is_refused():
    def greedy(tokens, num_valid, target, draft, uniforms):
        every = jnp.full_like(num_valid, tokens.shape[1])
        return Decision(every, target(every))

    check = check_rule(Deciding(greedy), vocab=2, length=2)
    assert not check.passed
    assert check.counterexample == "num_accepted is 2 where 0 tokens were drafted"


UNEVEN = [DistributionPair.constant("uneven", np.array([0.5, 0.5]), np.array([0.9, 0.1]), 1)]


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_dropping_a_draft_by_its_own_probability_is_biased(rule):
    def keep_if_likely(tokens, logq):
        own = np.take_along_axis(logq, tokens[:, :, None], axis=2)[..., 0]
        return (own[:, 0] > np.log(0.5)).astype(int)

    check = check_rule(rule, distributions=UNEVEN, valid=keep_if_likely)
    assert not check.passed
    # Kept with 0.9 and then accepted with 5/9; dropped with 0.1 and then drawn from p: 0.55.
    assert check.max_error == pytest.approx(0.05)
    assert "[0] with probability 0.55, and should with 0.5" in check.counterexample
    assert "q after [] = [0.9, 0.1]" in check.counterexample


def stop_at_flat_distribution(tokens, logq):
    flat = logq.max(axis=-1) < np.log(0.6)
    return np.where(flat.any(axis=1), flat.argmax(axis=1), tokens.shape[1])


def stop_after_token_one(tokens, logq):
    stop = tokens == 1
    return np.where(stop.any(axis=1), stop.argmax(axis=1) + 1, tokens.shape[1])


@pytest.mark.parametrize(
    ("rule", "valid"),
    [
        ("block", stop_after_token_one),
        ("coupled", stop_at_flat_distribution),
        *slow(
            ("rejection", stop_at_flat_distribution),
            ("rejection", stop_after_token_one),
            ("block", stop_at_flat_distribution),
            ("coupled", stop_after_token_one),
        ),
    ],
)
def test_stopping_by_what_came_before_is_exact(rule, valid):
    check = check_rule(rule, vocab=3, valid=valid)
    assert check.passed, check.counterexample


def test_bad_input_names_the_remedy():
    for rule, options, says in (
        ("typicl", {}, "rule='typicl' is unknown: use rejection, block"),
        ("block", dict(topology="ring"), "topology='ring' is unknown"),
        ("block", dict(vocab=50), "vocab=50"),
        ("block", dict(length=9), "length=9"),
    ):
        with pytest.raises(InputError, match=says):
            check_rule(rule, **options)


@pytest.mark.parametrize(
    ("decide", "message"),
    [
        (lambda self, *arguments: None, "decide returns Decision"),
        (lambda self, *arguments: {}["x"], "KeyError"),
    ],
)
def test_a_rule_that_is_none(decide, message):
    """What a rule of a user's own returns is checked before drafts are enumerated."""
    kind = type("Mine", (sampling.UniformRule,), {"decide": decide})
    with pytest.raises(InputError, match=message):
        check_rule(dataclasses.dataclass(frozen=True)(kind)())
