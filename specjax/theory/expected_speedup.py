"""Closed forms for one round: expected tokens, speed-up, best draft length, break-even."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Float, Int

from specjax.errors import InputError
from specjax.theory.argument_checks import (
    Count,
    Real,
    Result,
    check_broadcast,
    checked,
    checked_count,
    unwrap,
)


def expected_tokens(alpha: Real, k: Count) -> Result:
    """Return the mean number of tokens that a round with k draft tokens emits, bonus included.

    This is (1 - alpha^(k+1)) / (1 - alpha), or k + 1 at alpha = 1 (Leviathan et al. 2023, equation
    1). The bonus token is already counted: do not add one.
    """
    alpha, k = checked("alpha", alpha, high=1.0), checked_count("k", k, 0)
    check_broadcast(alpha=alpha, k=k)
    alpha, k = np.broadcast_arrays(alpha, k)
    # Horner's rule on 1 + alpha + ... + alpha^k stays exact where the quotient cancels.
    tokens = np.ones_like(alpha)
    for power in range(k.max(initial=0)):
        tokens = np.where(power < k, 1.0 + alpha * tokens, tokens)
    return unwrap(tokens)


def acceptance_from_tv(tv: Real) -> Result:
    """Return the probability that a token drafted from q is accepted, given TV(p, q).

    This is 1 - TV(p, q) = sum_x min(p(x), q(x)) (Leviathan et al. 2023, section 3.2). No rule that
    drafts one token and keeps the target's distribution accepts more often.
    """
    return unwrap(1.0 - checked("tv", tv, high=1.0))


def speedup(
    alpha: Real, k: Count, c: Real, *, convention: str = "per_step", verify_cost: Real = 1.0
) -> Result:
    """Return the speed-up of k draft tokens per round over plain decoding.

    Costs are in units of one plain target pass. With the `convention` "per_step", `c` is the cost
    of each of the k draft steps, and expected tokens are divided by k c + 1 (Leviathan et al. 2023,
    theorem 3.8); with "per_draft", `c` is the cost of the whole draft, and they are divided by c +
    1, or by 1 at k = 0. `verify_cost` is T(k+1) / T(1), the cost of a target pass over k + 1
    tokens, and replaces the 1 in these denominators.
    """
    alpha = checked("alpha", alpha, high=1.0)
    check_broadcast(alpha=alpha, k=k, c=c, verify_cost=verify_cost)
    cost = _round_cost(k, c, convention, verify_cost)
    return unwrap(np.asarray(expected_tokens(alpha, k)) / cost)


def optimal_k(
    alpha: Real,
    c: Real,
    *,
    max_k: Count = 32,
    convention: str = "per_step",
    verify_cost: Real | Callable[[int], Real] = 1.0,
) -> int | Int[np.ndarray, "..."]:
    """Return the least k in 0..max_k with the greatest `speedup`; 0 if plain decoding is fastest.

    `verify_cost` may be a function of k, such as measured T(k+1) / T(1). A constant other than 1 is
    the cost for each k > 0, since k = 0 is plain decoding. With "per_draft" and a constant cost,
    more draft tokens cost nothing, so the result is 0 or the largest k that still increases the
    speed-up. So it is with c = 0: each further token still gains a little, and the result is
    `max_k`, the longest draft that is tried.
    """
    max_k = np.asarray(checked_count("max_k", max_k, 0))
    if not callable(verify_cost):
        checked("verify_cost", verify_cost, above=True)
    check_broadcast(alpha=alpha, c=c, max_k=max_k, verify_cost=verify_cost)
    cost_of = verify_cost if callable(verify_cost) else (lambda k: verify_cost if k else 1.0)
    gains = [
        np.where(k <= max_k, speedup(alpha, k, c, convention=convention, verify_cost=cost_of(k)), 0)
        for k in range(max_k.max(initial=0) + 1)
    ]
    best = np.argmax(np.stack(np.broadcast_arrays(*gains)), axis=0)
    return best if best.ndim else int(best)


def break_even_alpha(
    k: Count, c: Real, *, convention: str = "per_step", verify_cost: Real = 1.0
) -> Result:
    """Return the least acceptance probability at which k draft tokens do not slow decoding down.

    This is the alpha in [0, 1] with `speedup` = 1, found by bisection; 0 if a round costs no more
    than a plain pass. For k = 1 it is c (Leviathan et al. 2023, corollary 3.9). Raises InputError
    if a round costs more than the k + 1 plain passes that it can at best replace.
    """
    check_broadcast(k=k, c=c, verify_cost=verify_cost)
    cost, k = np.broadcast_arrays(_round_cost(k, c, convention, verify_cost), k)
    if (dear := cost > k + 1).any():
        c = np.broadcast_to(c, cost.shape)[dear].flat[0]
        raise InputError(
            f"k = {k[dear].flat[0]}, c = {c}: a round costs {cost[dear].flat[0]:.4g} plain passes "
            "and emits at most k + 1 tokens, so no alpha breaks even; give a cheaper draft"
        )
    return unwrap(least_alpha(cost, k))


def least_alpha(cost: Float[np.ndarray, "..."] | float, k: Count) -> Float[np.ndarray, "..."]:
    """Return the least alpha at which k draft tokens emit `cost` tokens per round, by bisection.

    The result is 0 for a cost of at most 1, and inf if no alpha suffices.
    """
    cost, k = np.broadcast_arrays(np.asarray(cost, np.float64), k)
    low, high = np.zeros_like(cost), np.ones_like(cost)
    while ((low < (middle := (low + high) / 2)) & (middle < high)).any():
        pays = np.asarray(expected_tokens(middle, k)) >= cost
        low, high = np.where(pays, low, middle), np.where(pays, middle, high)
    return np.where(cost > k + 1, np.inf, np.where(cost <= 1.0, 0.0, high))


def _round_cost(k: Count, c: Real, convention: str, verify_cost: Real) -> Float[np.ndarray, "..."]:
    """Return the cost of a round with k draft tokens in plain target passes; see `speedup`."""
    k = checked_count("k", k, 0)
    c = checked("c", c)
    verify_cost = checked("verify_cost", verify_cost, above=True)
    if convention not in ("per_step", "per_draft"):
        raise InputError(f"convention = {convention!r}: give 'per_step' or 'per_draft'")
    drafts = k if convention == "per_step" else np.minimum(k, 1)
    return np.asarray(drafts * c + verify_cost)
