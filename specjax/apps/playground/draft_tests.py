"""The draws that decided a round: the tests of its draft tokens, and the next token's draw.

The rule itself has verified the draft. This module recomputes its inputs from the same keys and
distributions, and checks whether its result follows from them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from specjax import sampling
from specjax.sampling import Drafted, Rule, Verification
from specjax.sampling.multipath import pass_weight, takes_all

_SHOWN = 6
"""The number of likeliest tokens of a distribution that a trace lists."""
Likeliest = tuple[tuple[int, float, float | None], ...]
"""Tokens with their probabilities under p and q; q is None if nothing was drawn from it."""
FROM_TARGET, FROM_RESIDUAL = "target", "residual"


@dataclass(frozen=True)
class DraftTest:
    """The test of the draft token in window slot `slot` (1, 2, ...).

    `p` and `q` are the token's probabilities under the target and under the draft; after refused
    siblings, p is the residual. The token was accepted if `uniform` is below `threshold` or, if
    there is no threshold, if it equals `choice`, the target's own draw. Both are None for other
    rules. `weight` is w of block verification, which also keeps a token if one below it passes.
    """

    slot: int
    token: int
    p: float
    q: float | None
    likeliest: Likeliest
    accepted: bool
    uniform: float | None = None
    threshold: float | None = None
    choice: int | None = None
    weight: float | None = None


class Decided(NamedTuple):
    """The tests of a round, and the draw of the next token.

    `next_source` names the distribution of the next token, "target" or "residual", `next_likeliest`
    are its likeliest tokens, and `problems` say which results do not follow from the draws.
    """

    tests: tuple[DraftTest, ...]
    next_source: str
    next_likeliest: Likeliest
    problems: tuple[str, ...]


def decided(
    rule: Rule,
    keys: Key[Array, "1"],
    drafted: Drafted,
    target: Float[Array, "W V"],
    length: Int[Array, "1"],
    verification: Verification,
) -> Decided:
    """Return the tests that led to the verification of one row's draft.

    `target` are the target's log-probabilities by slot, `keys` the keys that the rule was given,
    and `length` the number of committed tokens. For user-defined rules only the results are known.
    """
    accepted = int(verification.num_accepted[0])
    path = [0, *np.asarray(verification.path_slots)[0, :accepted].tolist()]
    next_token, vocab = int(verification.next_token[0]), target.shape[1]
    final = sampling.split_keys(keys).final
    noise = lambda depth: sampling.position_gumbel(final, jnp.full(1, depth), vocab)[0]  # noqa: E731
    drawn = None
    source, next_logp = FROM_TARGET, target[path[-1]]
    walks = drafted.logq is None and not (type(rule) is sampling.Block and drafted.is_chain)
    if type(rule) is sampling.Block and not walks:
        tests, next_logp, source = _by_block(keys, drafted, target, path)
        drawn = next_logp + noise(0)
    elif type(rule) is sampling.Rejection and not walks:
        tests, next_logp, source = _by_ratio(keys, drafted, target, path)
        drawn = next_logp + noise(0)
    elif type(rule) in (sampling.Rejection, sampling.Block, sampling.Coupled):
        if rule.position_noise:
            noise = lambda depth: sampling.position_gumbel(keys, length + depth, vocab)[0]  # noqa: E731
        tests = _by_choice(noise, drafted, target, path)
        drawn = next_logp + noise(accepted)
    else:
        tests = _by_result(drafted, target, path)
    problems = [f"slot {test.slot}: the draws say otherwise" for test in tests if not _agrees(test)]
    if drawn is not None and int(sampling.argmax(drawn)) != next_token:
        problems.append("the next token is not the one drawn")
    return Decided(tests, source, _likeliest(next_logp, None, next_token), tuple(problems))


def _by_ratio(
    keys: Key[Array, "1"], drafted: Drafted, target: Float[Array, "W V"], path: list[int]
) -> tuple[tuple[DraftTest, ...], Float[Array, "V"], str]:
    """Return the tests of token-wise rejection, the next token's log-probabilities, their source.

    Siblings are tested in order, each by p / q and a uniform.
    """
    draws = sampling.uniforms(sampling.split_keys(keys).accept, drafted.tokens.shape[1])[0]
    tests: list[DraftTest] = []
    for depth, slot in enumerate(path):
        logp, source = target[slot], FROM_TARGET
        following = path[depth + 1] if depth + 1 < len(path) else 0
        for child in _children(drafted, slot):
            logq = sampling.node_distribution(drafted, jnp.full(1, child - 1), len(logp))[0]
            token = int(drafted.tokens[0, child - 1])
            test = _tested(child, token, logp, logq, accepted=child == following)
            possible = (
                0.0 if not test.q else float(sampling.acceptance_probability(logp, logq)[token])
            )
            tests.append(replace(test, uniform=float(draws[child - 1]), threshold=possible))
            if child == following:
                break
            logp, source = sampling.residual(logp, logq), FROM_RESIDUAL
    return tuple(tests), logp, source


def _by_block(
    keys: Key[Array, "1"], drafted: Drafted, target: Float[Array, "W V"], path: list[int]
) -> tuple[tuple[DraftTest, ...], Float[Array, "V"], str]:
    """Return the tests of block verification, the next token's log-probabilities and their source.

    Each token is tested by its weight w, its height h and a uniform, after the tokens below it.
    """
    draws = sampling.uniforms(sampling.split_keys(keys).accept, drafted.tokens.shape[1])[0]
    full = takes_all(drafted)
    tests: list[DraftTest] = []

    def visit(slot: int, logw: Float[Array, "1"]) -> tuple[float, Float[Array, "V"]]:
        """Add the tests below a slot; return its height and the distribution after it."""
        logp, height = target[slot][None], jnp.exp(logw)
        for child in _children(drafted, slot):
            logq = sampling.node_distribution(drafted, jnp.full(1, child - 1), target.shape[1])
            token = drafted.tokens[:, child - 1]
            test = _tested(child, int(token[0]), logp[0], logq[0], accepted=child in path)
            passed = pass_weight(logp, jnp.log(height), logq, token, full[:, child - 1])
            index = len(tests)
            tests.append(test)
            threshold, left = visit(child, passed.child_logw)
            weight = float(jnp.exp(passed.child_logw[0]))
            uniform = float(draws[child - 1])
            tests[index] = replace(test, uniform=uniform, threshold=threshold, weight=weight)
            if child in path:
                return float(height[0]), left
            logp, height = passed.logp, passed.weight
        return float(height[0]), logp[0]

    _, next_logp = visit(0, jnp.zeros(1))
    source = FROM_RESIDUAL if _children(drafted, path[-1]) else FROM_TARGET
    return tuple(tests), next_logp, source


def _by_choice(
    noise: Callable[[int], Float[Array, "V"]],
    drafted: Drafted,
    target: Float[Array, "W V"],
    path: list[int],
) -> tuple[DraftTest, ...]:
    """Return the tests that compare draft tokens with the target's own draw at each slot."""
    tests: list[DraftTest] = []
    for depth, slot in enumerate(path):
        choice = int(sampling.argmax(target[slot] + noise(depth)))
        following = path[depth + 1] if depth + 1 < len(path) else 0
        for child in _children(drafted, slot):
            token = int(drafted.tokens[0, child - 1])
            test = _tested(child, token, target[slot], None, accepted=child == following)
            tests.append(replace(test, choice=choice))
            if child == following:
                break
    return tuple(tests)


def _by_result(
    drafted: Drafted, target: Float[Array, "W V"], path: list[int]
) -> tuple[DraftTest, ...]:
    """Return tests with only the result: along the path, each child and whether it was accepted."""
    return tuple(
        _tested(
            child, int(drafted.tokens[0, child - 1]), target[slot], None, accepted=child in path
        )
        for slot in path
        for child in _children(drafted, slot)
    )


def _agrees(test: DraftTest) -> bool:
    """Return whether the result of a test follows from its draws."""
    if test.choice is not None:
        return test.accepted == (test.token == test.choice)
    if test.uniform is None or (test.weight is not None and test.accepted):
        return True
    return test.accepted == (test.uniform < test.threshold)


def _children(drafted: Drafted, slot: int) -> list[int]:
    """Return the slots of the proposed children of a slot, in the order of their tests."""
    parents, valid = np.asarray(drafted.parent_slots)[0], np.asarray(drafted.valid)[0]
    return (1 + np.flatnonzero((parents == slot) & valid)).tolist()


def _tested(
    slot: int,
    token: int,
    logp: Float[Array, "V"],
    logq: Float[Array, "V"] | None,
    *,
    accepted: bool,
) -> DraftTest:
    """Return the test of a token, without the draws that decided it."""
    q = None if logq is None else float(jnp.exp(logq[token]))
    p = float(jnp.exp(logp[token]))
    return DraftTest(slot, token, p, q, _likeliest(logp, logq, token), accepted)


def _likeliest(logp: Float[Array, "V"], logq: Float[Array, "V"] | None, token: int) -> Likeliest:
    """Return a token and the likeliest ones under p and q, by decreasing p."""
    p = np.exp(np.asarray(logp))
    q = None if logq is None else np.exp(np.asarray(logq))
    shown = {token, *np.argsort(-p)[:_SHOWN].tolist()}
    if q is not None:
        shown |= set(np.argsort(-q)[: _SHOWN // 2].tolist())
    return tuple(
        (each, round(float(p[each]), 6), None if q is None else round(float(q[each]), 6))
        for each in sorted(shown, key=lambda each: -p[each])
        if p[each] > 0 or each == token or (q is not None and q[each] > 0)
    )
