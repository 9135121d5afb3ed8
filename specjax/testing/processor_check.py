"""A test of whether a processor changes p alike in plain and speculative decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from specjax import sampling
from specjax.core.processor import NewRows, Processor, processed
from specjax.engine.processing import ProcessorField, check_shapes
from specjax.errors import InputError, shown
from specjax.fields import Items, Whole
from specjax.testing.enumeration import Drafts, Table, all_tokens, distributions_by_slot
from specjax.testing.rule_check import (
    Check,
    DistributionPair,
    check_input,
    check_outputs,
    example_distributions,
)
from specjax.trees import Topology

_NAMES = ("random", "reduced draft vocabulary")
"""The examples of `check_rule` that are used; zeros in p come from the processor."""


def check_processor(
    processor: Processor,
    topology: str | Topology = "chain",
    vocab: int = 4,
    *,
    rule: str | sampling.Rule = "rejection",
    length: int = 2,
    prompt: Sequence[int] = (0, 1),
    committed: Sequence[int] = (1,),
    requested: Any = (),
) -> Check:
    """Test whether speculative decoding with a processor has the distribution of plain decoding.

    In plain decoding each token is drawn from p after all tokens before it, of which the processor
    is told one after the other. In speculative decoding, rows have the `prompt` and the `committed`
    tokens of earlier rounds, and drafts of up to `length` tokens, or of another `topology`, are
    verified by `rule`; the processor's states are those of the decoding loop. The probability of
    each output is enumerated as in `check_rule`, for targets and drafters that know nothing of the
    processor, and has to be the same to 1e-10. Where `allows` returns False, p has to be 0.

    `requested` are arrays that `init` reads of one row, with an axis of length 1 first. Raises
    InputError for what cannot be tested, and for a processor that allows no token at all after some
    output, where the decoding loop ends a row.
    """
    processor = ProcessorField().check("processor", processor)
    rule, topology = check_input(rule, topology, vocab, length, None, None)
    token = Whole(0, vocab - 1)
    prompt = Items(token, least=1).check("prompt", prompt)
    committed = Items(token).check("committed", committed)
    for leaf in jax.tree.leaves(requested):
        if np.shape(leaf)[:1] != (1,) or np.asarray(leaf).dtype.kind not in "bif":
            raise InputError(f"requested={shown(leaf)}: use arrays of numbers, of one row each")
    check_shapes(processor, 1, len(prompt), vocab, requested)
    row = _Row(processor, prompt, committed, vocab, topology.depth, requested)
    pairs, bases = [], {}
    for pair in example_distributions(vocab, topology.depth):
        if pair.name in _NAMES:
            pairs.append(DistributionPair(pair.name, row.plain(pair.p), pair.q))
            bases[pair.name] = pair.p
    # A third drafter is the target before the processor.
    first, name = pairs[0], "drafted by the target"
    pairs.append(DistributionPair(name, first.p, bases[first.name][:-1]))
    bases[name] = bases[first.name]
    if (found := row.wrongly_forbidden()) is not None:
        return Check(False, float("nan"), found)

    def verified(drafts: Drafts, of_groups: list[DistributionPair]) -> Drafts:
        names = np.array([pair.name for pair in of_groups])[drafts.group]
        logp = np.empty(drafts.logp.shape)
        for name in np.unique(names):
            logp[names == name] = row.verified(topology, drafts.tokens[names == name], bases[name])
        return drafts._replace(logp=logp)

    return check_outputs(rule, topology, pairs, verified=verified)


@dataclass(frozen=True)
class _Row:
    """A row with a processor: its prompt, its committed tokens, and what the processor reads."""

    processor: Processor
    prompt: tuple[int, ...]
    committed: tuple[int, ...]
    vocab: int
    depth: int
    requested: Any

    def start(self, rows: int) -> Any:
        """Return the state after the prompt, for a number of equal rows."""
        capacity = len(self.prompt) + len(self.committed) + self.depth + 1
        tokens = np.zeros((rows, capacity), np.int32)
        tokens[:, : len(self.prompt)] = self.prompt
        lengths = jnp.full(rows, len(self.prompt), jnp.int32)
        requested = jax.tree.map(
            lambda leaf: jnp.repeat(jnp.asarray(leaf), rows, axis=0), self.requested
        )
        return self.processor.init(NewRows(jnp.asarray(tokens), lengths, self.vocab, requested))

    def after(self, tokens: Int[np.ndarray, "I d"]) -> Any:
        """Return the states after committed tokens and `tokens`, each told on its own."""
        committed = np.tile(np.array(self.committed, np.int32), (len(tokens), 1))
        state, one = self.start(len(tokens)), jnp.ones(len(tokens), jnp.int32)
        for column in np.concatenate([committed, tokens], axis=1).T:
            state = self.processor.advance(state, jnp.asarray(column)[:, None], one)
        return state

    def plain(self, table: Table) -> Table:
        """Return p after the processor by context, from those before it.

        It is uniform after what no output has, if no token is allowed there.
        """
        found, possible = [], np.ones(1, bool)
        for depth, base in enumerate(table):
            found.append(self._plain(depth, base, possible))
            possible = (possible[:, None] & (found[-1] > 0)).ravel()
        return tuple(found)

    def _plain(
        self, depth: int, base: Float[np.ndarray, "I V"], possible: Bool[np.ndarray, "I"]
    ) -> Float[np.ndarray, "I V"]:
        tokens = all_tokens(self.vocab, depth)
        with jax.enable_x64(True):
            logits = np.asarray(self.processor.apply(self.after(tokens), _logits(base)))
        none_left = ~np.isfinite(logits.max(axis=1))
        if (none_left & possible).any():
            first = tokens[int(np.argmax(none_left & possible))].tolist()
            raise InputError(
                f"processor: it allows none of {self.vocab} tokens after "
                f"{[*self.prompt, *self.committed, *first]}; use another prompt, or more tokens"
            )
        logits = np.where(none_left[:, None], 0, logits)
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        return weights / weights.sum(axis=1, keepdims=True)

    def verified(
        self, topology: Topology, tokens: Int[np.ndarray, "I N"], base: Table
    ) -> Float[np.ndarray, "I W V"]:
        """Return the log-probabilities after each slot that the decoding loop would verify with."""
        with jax.enable_x64(True):
            # Committed tokens come at once, with others after them that do not count.
            committed = jnp.array([*self.committed, self.vocab - 1, 0], jnp.int32)
            committed = jnp.tile(committed[None], (len(tokens), 1))
            count = jnp.full(len(tokens), len(self.committed), jnp.int32)
            state = self.processor.advance(self.start(len(tokens)), committed, count)
            by_slot = sampling.by_slot(_logits(distributions_by_slot(base, topology, tokens)))
            at = processed([self.processor], [state], by_slot, jnp.asarray(tokens), topology)

            def of_slot(slot: Int[Array, ""]) -> Float[Array, "I V"]:
                logits = at(jnp.full(len(tokens), slot))
                some_left = jnp.isfinite(logits.max(axis=1, keepdims=True))
                return jax.nn.log_softmax(jnp.where(some_left, logits, 0))

            @jax.jit
            def every(slots: Int[Array, "W"]) -> Float[Array, "W I V"]:
                return jax.lax.map(of_slot, slots)

            return np.asarray(every(jnp.arange(topology.width))).transpose(1, 0, 2)

    def wrongly_forbidden(self) -> str | None:
        """Return a message about a token that is not allowed, and yet has a probability."""
        for depth in range(self.depth + 1):
            tokens = all_tokens(self.vocab, depth)
            state = self.after(tokens)
            possible = self.processor.apply(state, jnp.zeros((len(tokens), self.vocab))) > -jnp.inf
            for token in range(self.vocab):
                allowed = self.processor.allows(state, jnp.full(len(tokens), token))
                wrong = np.asarray(possible[:, token] & ~allowed)
                if wrong.any():
                    before = [*self.prompt, *self.committed, *tokens[np.argmax(wrong)].tolist()]
                    return f"allows is False for token {token} after {before}, and p is not 0"
        return None


def _logits(p: Float[np.ndarray, "*I V"]) -> Float[Array, "*I V"]:
    """Return logits with the probabilities p, of a scale that makes some of them positive."""
    with np.errstate(divide="ignore"):
        return jnp.asarray(np.log(p) + 1.5)
