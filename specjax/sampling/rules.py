"""Verification rules as values: what each rule requires, and how it verifies a draft.

A rule is a frozen dataclass without arrays, so that equal rules share a compiled program. `RULES`
maps names to the rules that come with specjax.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from specjax.sampling import chain_verification, tree_verification
from specjax.sampling.chain_verification import Decision, Distributions, Verification
from specjax.sampling.keys import coupled_noise, position_gumbel, split_keys, uniforms
from specjax.sampling.tree_verification import Drafted
from specjax.sampling.warp import argmax


class Target(NamedTuple):
    """The target's distributions p by slot, over `vocab` tokens, as log-probabilities in `dtype`.

    `positions` are the absolute positions of the tokens that follow the roots.
    """

    distributions: Distributions
    positions: Int[Array, "B"]
    vocab: int
    dtype: jnp.dtype | type = jnp.float32


class Rule:
    """The base class of rules; subclass it or `UniformRule` as a frozen dataclass."""

    name: ClassVar[str] = "own"
    """Its name in messages and on the command line."""
    description: ClassVar[str] = ""
    """A phrase for help texts and tables."""
    position_noise: ClassVar[bool] = False
    """Whether its draws, and those of drafters, use only the row's key and the absolute position.

    Otherwise every round has keys of its own, and drafters draw from noise that the rule never
    sees.
    """
    needs_logq: ClassVar[bool] = True
    """Whether a drafter that samples has to return the distributions it drew from."""
    greedy_walk: ClassVar[bool] = False
    """Whether it emits the target's likeliest tokens where p is one-hot, as exact rules do."""
    takes_trees: ClassVar[bool] = False
    """Whether it verifies every topology, rather than chains only."""
    exact: ClassVar[bool] = True
    """Whether the output has the target's distribution."""

    def verify(self, keys: Key[Array, "B"], drafted: Drafted, target: Target) -> Verification:
        """Accept a path of each row's tree, and draw the token that follows it.

        `keys` are the row keys if `position_noise` is set, and otherwise one key per row for this
        call only.
        """
        raise NotImplementedError


class UniformRule(Rule):
    """A rule on chains that uses one uniform per drafted token; implement `decide`.

    Its draws differ from round to round, so `position_noise` stays False.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Raise TypeError if `position_noise` is set, with which uniforms would repeat."""
        super().__init_subclass__(**options)
        if cls.position_noise:
            raise TypeError(f"{cls.__name__}.position_noise: uniforms have a key per round")
        if "decide" in vars(cls) and "greedy_walk" not in vars(cls):
            # A new `decide` may treat greedy rows in another way than the class it inherits from.
            cls.greedy_walk = False
            cls.name = vars(cls).get("name", "own")

    def decide(
        self,
        tokens: Int[Array, "B K"],
        num_valid: Int[Array, "B"],
        target: Distributions,
        draft: Distributions,
        uniforms: Float[Array, "B K"],
    ) -> Decision:
        """Return each row's number of accepted tokens, and log-probabilities of the next token."""
        raise NotImplementedError

    def verify(self, keys: Key[Array, "B"], drafted: Drafted, target: Target) -> Verification:
        """Call `decide` with uniforms, and draw the next token with a key of its own.

        Raises ValueError for a tree.
        """
        if isinstance(drafted.parents, tuple) and not drafted.is_chain:
            raise ValueError(
                f"rule {self.name!r} verifies chains, and parents={drafted.parents} is a tree; use "
                "rejection, coupled or typical"
            )
        _, accept, final = split_keys(keys)
        tokens, num_valid = drafted.tokens, drafted.num_valid
        length, vocab, dtype = tokens.shape[1], target.vocab, target.dtype
        draft = drafted.distributions(vocab, dtype)
        decision = self.decide(
            tokens, num_valid, target.distributions, draft, uniforms(accept, length, dtype)
        )
        gumbel = position_gumbel(final, jnp.zeros_like(num_valid), vocab, dtype)
        return chain_verification.conclude(decision, gumbel, length)


@dataclass(frozen=True)
class Rejection(UniformRule):
    """Token-wise rejection sampling; see `chain_verification.rejection`."""

    name: ClassVar[str] = "rejection"
    description: ClassVar[str] = (
        "accept with probability min(1, p/q), else draw from what p has left"
    )
    greedy_walk: ClassVar[bool] = True
    takes_trees: ClassVar[bool] = True
    decide = staticmethod(chain_verification.rejection)

    def verify(self, keys: Key[Array, "B"], drafted: Drafted, target: Target) -> Verification:
        """Verify a chain by `decide` and a tree by `tree_verification.recursion`.

        Deterministic drafts are compared with the target's draws (`tree_verification.walk`).
        """
        _, accept, final = split_keys(keys)
        if drafted.logq is None:

            def choose(slots: Int[Array, "B"], depth: Int[Array, "B"]) -> Int[Array, "B"]:
                noise = position_gumbel(final, depth, target.vocab, target.dtype)
                return argmax(target.distributions(slots) + noise)

            return tree_verification.walk(drafted, choose)
        if drafted.is_chain:
            return super().verify(keys, drafted, target)
        draws = uniforms(accept, drafted.tokens.shape[1], target.dtype)
        decision = tree_verification.recursion(drafted, target.distributions, draws)
        zero_depth = jnp.zeros_like(decision.num_accepted)
        noise = position_gumbel(final, zero_depth, target.vocab, target.dtype)
        next_token = argmax(decision.next_logp + noise).astype(jnp.int32)
        return Verification(decision.path_slots, decision.num_accepted, next_token)


@dataclass(frozen=True)
class Block(UniformRule):
    """Block verification; see `chain_verification.block`."""

    name: ClassVar[str] = "block"
    description: ClassVar[str] = "verify the draft as a whole; accepts no less than rejection"
    greedy_walk: ClassVar[bool] = True
    decide = staticmethod(chain_verification.block)


@dataclass(frozen=True)
class Coupled(Rule):
    """Accept a draft token if it equals the target's own draw at its position.

    The noise of that draw depends on row and position only (Daliri et al. 2408.07978), so the
    output equals that of plain decoding with the same keys, whatever was drafted.
    """

    name: ClassVar[str] = "coupled"
    description: ClassVar[str] = "the output depends on seed and prompt only, whatever is drafted"
    position_noise: ClassVar[bool] = True
    needs_logq: ClassVar[bool] = False
    greedy_walk: ClassVar[bool] = True
    takes_trees: ClassVar[bool] = True

    def verify(self, keys: Key[Array, "B"], drafted: Drafted, target: Target) -> Verification:
        """Walk along the draft with the noise of each position."""
        noise = coupled_noise(keys, target.positions, target.vocab, target.dtype)
        return tree_verification.walk(
            drafted, lambda slots, depth: argmax(target.distributions(slots) + noise(depth))
        )


@dataclass(frozen=True)
class Typical(Rule):
    """Medusa's typical acceptance, which changes the output distribution.

    A drafted token is accepted if p(x) > min(epsilon, delta exp(-H(p))), with H in nats. Greedy
    rows keep their tokens. See `tree_verification.typical`. Raises ValueError unless both numbers
    are above 0.
    """

    epsilon: float = 0.09
    delta: float = 0.3

    name: ClassVar[str] = "typical"
    description: ClassVar[str] = "lossy: accept what is likely enough, whatever it was drawn from"
    needs_logq: ClassVar[bool] = False
    greedy_walk: ClassVar[bool] = True
    takes_trees: ClassVar[bool] = True
    exact: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name in ("epsilon", "delta"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"Typical.{name}={getattr(self, name)!r}: must be above 0")

    def verify(self, keys: Key[Array, "B"], drafted: Drafted, target: Target) -> Verification:
        """Accept the longest path of sufficiently likely tokens, and draw the next token."""
        final = split_keys(keys).final
        path, accepted, last = tree_verification.typical(
            drafted, target.distributions, self.epsilon, self.delta
        )
        noise = position_gumbel(final, jnp.zeros_like(accepted), target.vocab, target.dtype)
        next_token = argmax(target.distributions(last) + noise)
        return Verification(path, accepted, next_token.astype(jnp.int32))


RULES: dict[str, Rule] = {rule.name: rule for rule in (Rejection(), Block(), Coupled(), Typical())}
"""The rules by name; all but `typical` are exact."""
