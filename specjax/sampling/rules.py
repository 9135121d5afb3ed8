"""Verification rules: values that decide which drafted tokens are accepted.

A rule is a frozen dataclass without arrays, so that equal rules share a compiled program. `RULES`
maps the names of the rules that come with specjax to their values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from specjax.sampling import chain_verification, multipath, tree_verification
from specjax.sampling.chain_verification import Decision, Distributions, Verification
from specjax.sampling.keys import coupled_noise, position_gumbel, split_keys, uniforms
from specjax.sampling.tree_verification import Drafted, Recursion
from specjax.sampling.warp import argmax


class Target(NamedTuple):
    """The target's distributions p for the tokens of one round, as log-probabilities.

    `distributions` maps one slot per row to [B, V] log-probabilities of the given `dtype`, `vocab`
    (V) is the number of tokens, and `positions` are the absolute positions of the tokens after the
    roots.
    """

    distributions: Distributions
    positions: Int[Array, "B"]
    vocab: int
    dtype: jnp.dtype | type = jnp.float32


class Rule:
    """The base class of rules; subclass it or `UniformRule` as a frozen dataclass."""

    name: ClassVar[str] = "own"
    """The rule's name in messages and on the command line."""
    description: ClassVar[str] = ""
    """A short description for help texts and tables."""
    position_noise: ClassVar[bool] = False
    """Whether the rule and the drafters draw with the same noise, fixed by row key and position.

    Otherwise each round has separate keys, and drafters use noise that the rule never sees.
    """
    needs_logq: ClassVar[bool] = True
    """Whether drafters that sample must return the distributions they drew from."""
    greedy_walk: ClassVar[bool] = False
    """Whether greedy rows emit the target's most likely tokens, as they do under exact rules."""
    takes_trees: ClassVar[bool] = False
    """Whether the rule verifies trees as well as chains."""
    exact: ClassVar[bool] = True
    """Whether the output has the target's distribution."""

    def verify(self, keys: Key[Array, "B"], drafted: Drafted, target: Target) -> Verification:
        """Accept a path of each row's tree, and draw the token that follows it.

        `keys` are the row keys if `position_noise` is set; otherwise they are one fresh key per
        row, used only in this call.
        """
        raise NotImplementedError


class UniformRule(Rule):
    """The base class of rules with one uniform per token; subclasses implement `decide`.

    A rule that also implements `decide_tree` sets `takes_trees`. The draws differ from round to
    round, so `position_noise` stays False.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Raise TypeError if a subclass sets `position_noise`, with which uniforms would repeat."""
        super().__init_subclass__(**options)
        if cls.position_noise:
            raise TypeError(f"{cls.__name__}.position_noise: uniforms have a key per round")
        if "decide" in vars(cls) and "greedy_walk" not in vars(cls):
            # A new `decide` may treat greedy rows in another way than the class it inherits from.
            cls.greedy_walk = False
            cls.takes_trees = vars(cls).get("takes_trees", False)
            cls.name = vars(cls).get("name", "own")

    def decide(
        self,
        tokens: Int[Array, "B K"],
        num_valid: Int[Array, "B"],
        target: Distributions,
        draft: Distributions,
        uniforms: Float[Array, "B K"],
    ) -> Decision:
        """Return each row's number of accepted tokens, and the log-probabilities of its next token.

        The first `num_valid[b]` tokens of row b were drafted. `target` and `draft` map one slot per
        row to the distributions of the token after it; slot 0 is the root and slot i the i-th
        drafted token.
        """
        raise NotImplementedError

    def decide_tree(
        self, drafted: Drafted, target: Distributions, uniforms: Float[Array, "B N"]
    ) -> Recursion:
        """Return each row's accepted path of a tree, and the log-probabilities of its next token.

        `target` maps one slot per row to the distribution of the token after it; slot 0 is the root
        and slot i + 1 is node i.
        """
        raise NotImplementedError

    def verify(self, keys: Key[Array, "B"], drafted: Drafted, target: Target) -> Verification:
        """Draw uniforms, call `decide` or `decide_tree`, and draw the next token by another key.

        Raises ValueError if the draft is a tree and the rule takes none.
        """
        if isinstance(drafted.parents, tuple) and not (drafted.is_chain or self.takes_trees):
            raise ValueError(
                f"rule {self.name!r} verifies chains, and parents={drafted.parents} is a tree; use "
                "rejection, block, coupled or typical"
            )
        _, accept, final = split_keys(keys)
        tokens, num_valid = drafted.tokens, drafted.num_valid
        length, vocab, dtype = tokens.shape[1], target.vocab, target.dtype
        draws = uniforms(accept, length, dtype)
        gumbel = position_gumbel(final, jnp.zeros_like(num_valid), vocab, dtype)
        if self.takes_trees and not drafted.is_chain:
            path, accepted, next_logp = self.decide_tree(drafted, target.distributions, draws)
            return Verification(path, accepted, argmax(next_logp + gumbel).astype(jnp.int32))
        draft = drafted.distributions(vocab, dtype)
        decision = self.decide(tokens, num_valid, target.distributions, draft, draws)
        return chain_verification.conclude(decision, gumbel, length)


@dataclass(frozen=True)
class Rejection(UniformRule):
    """Token-wise rejection sampling, exact on chains and trees.

    See `chain_verification.rejection` and `tree_verification.recursion`.
    """

    name: ClassVar[str] = "rejection"
    description: ClassVar[str] = "accept with probability min(1, p/q), else draw from max(0, p - q)"
    greedy_walk: ClassVar[bool] = True
    takes_trees: ClassVar[bool] = True
    decide = staticmethod(chain_verification.rejection)
    decide_tree = staticmethod(tree_verification.recursion)

    def verify(self, keys: Key[Array, "B"], drafted: Drafted, target: Target) -> Verification:
        """Verify the draft as in `UniformRule`.

        Drafts without distributions, whose tokens are deterministic, are compared with tokens drawn
        from the target instead (`tree_verification.walk`).
        """
        if drafted.logq is None:
            return _walk(keys, drafted, target)
        return super().verify(keys, drafted, target)


@dataclass(frozen=True)
class Block(UniformRule):
    """Block verification, exact on chains and trees.

    See `chain_verification.block` and `multipath.multipath_block`.
    """

    name: ClassVar[str] = "block"
    description: ClassVar[str] = "verify the draft as a whole; accepts no fewer tokens on average"
    greedy_walk: ClassVar[bool] = True
    takes_trees: ClassVar[bool] = True
    decide = staticmethod(chain_verification.block)
    decide_tree = staticmethod(multipath.multipath_block)

    def verify(self, keys: Key[Array, "B"], drafted: Drafted, target: Target) -> Verification:
        """Verify the draft as in `UniformRule`.

        Trees without distributions are compared with tokens drawn from the target instead, which
        accepts as many tokens on average and visits fewer slots (`tree_verification.walk`).
        """
        if drafted.logq is None and not drafted.is_chain:
            return _walk(keys, drafted, target)
        return super().verify(keys, drafted, target)


def _walk(keys: Key[Array, "B"], drafted: Drafted, target: Target) -> Verification:
    """Follow the draft along tokens that the target draws, with fresh noise for each of them."""
    final = split_keys(keys).final

    def choose(slots: Int[Array, "B"], depth: Int[Array, "B"]) -> Int[Array, "B"]:
        noise = position_gumbel(final, depth, target.vocab, target.dtype)
        return argmax(target.distributions(slots) + noise)

    return tree_verification.walk(drafted, choose)


@dataclass(frozen=True)
class Coupled(Rule):
    """Accept a draft token if it equals the token that the target draws at that position.

    The noise of that draw depends only on row and position (Daliri et al. 2408.07978), so the
    output equals that of plain decoding with the same keys, whatever was drafted.
    """

    name: ClassVar[str] = "coupled"
    description: ClassVar[str] = "the output depends on seed and prompt only, whatever is drafted"
    position_noise: ClassVar[bool] = True
    needs_logq: ClassVar[bool] = False
    greedy_walk: ClassVar[bool] = True
    takes_trees: ClassVar[bool] = True

    def verify(self, keys: Key[Array, "B"], drafted: Drafted, target: Target) -> Verification:
        """Follow the draft along the tokens that the target draws with the noise of each position.

        `keys` are the row keys.
        """
        noise = coupled_noise(keys, target.positions, target.vocab, target.dtype)
        return tree_verification.walk(
            drafted, lambda slots, depth: argmax(target.distributions(slots) + noise(depth))
        )


@dataclass(frozen=True)
class Typical(Rule):
    """Typical acceptance (Medusa, 2401.10774), which changes the distribution of the output.

    A drafted token x is accepted if p(x) > min(epsilon, delta exp(-H(p))), with the entropy H in
    nats. Greedy rows still emit the target's most likely tokens. See `tree_verification.typical`.
    Raises ValueError unless both numbers are above 0.
    """

    epsilon: float = 0.09
    """The probability above which any token is accepted, by default 0.09."""
    delta: float = 0.3
    """The factor of exp(-H(p)), above which a token is accepted too, by default 0.3."""

    name: ClassVar[str] = "typical"
    description: ClassVar[str] = "lossy: accept tokens that the target finds likely enough"
    needs_logq: ClassVar[bool] = False
    greedy_walk: ClassVar[bool] = True
    takes_trees: ClassVar[bool] = True
    exact: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name in ("epsilon", "delta"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"Typical.{name}={getattr(self, name)!r}: must be above 0")

    def verify(self, keys: Key[Array, "B"], drafted: Drafted, target: Target) -> Verification:
        """Accept the longest path of sufficiently likely tokens, and draw the token after it."""
        final = split_keys(keys).final
        path, accepted, last = tree_verification.typical(
            drafted, target.distributions, self.epsilon, self.delta
        )
        noise = position_gumbel(final, jnp.zeros_like(accepted), target.vocab, target.dtype)
        next_token = argmax(target.distributions(last) + noise)
        return Verification(path, accepted, next_token.astype(jnp.int32))


RULES: dict[str, Rule] = {rule.name: rule for rule in (Rejection(), Block(), Coupled(), Typical())}
"""The rules by name; all but `typical` are exact."""
