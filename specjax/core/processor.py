"""Processors: values that change the target's logits, given the tokens before them.

What comes out after all processors and the warp is the distribution p, in verification as in plain
decoding. A processor's state follows the tokens of a row. The state of a drafted token is that of
the token before it on its path, advanced by it, so that every node of a tree has its own; it is
computed from the row's state when a slot is visited, and never stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from specjax import sampling
from specjax.trees import AnyTopology, Draft


@struct.dataclass
class NewRows:
    """What a processor reads of new rows.

    `tokens[b, :prompt_length[b]]` is the prompt of row b. `requested` are arrays with rows as their
    first axis, made of the rows' sampling parameters; () for a user's own processor.
    """

    tokens: Int[Array, "B S"]
    prompt_length: Int[Array, "B"]
    vocab_size: int = struct.field(pytree_node=False)
    requested: Any = ()


class Processor:
    """The base class of processors; subclass it as a frozen dataclass without arrays.

    The methods are pure functions, which are traced. A state is a tree of arrays with rows as their
    first axis. Equal processors share compiled programs.
    """

    forbids: ClassVar[bool] = True
    """Whether `apply` may leave no token; a row then ends there."""

    def init(self, rows: NewRows) -> Any:
        """Return the state after the prompts of new rows."""
        del rows
        return ()

    def advance(self, state: Any, tokens: Int[Array, "B T"], count: Int[Array, "B"]) -> Any:
        """Return the state after the first `count[b]` of `tokens[b]`; the others are arbitrary.

        Several tokens at once give the state that one after the other does (`one_by_one`).
        """
        del tokens, count
        return state

    def apply(self, state: Any, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        """Return the logits of the token after those that `state` has seen."""
        raise NotImplementedError

    def allows(self, state: Any, tokens: Int[Array, "B"]) -> Bool[Array, "B"]:
        """Return False where `apply` is known to return -inf for a row's token.

        Chosen tokens that are not allowed are not drafted; the output does not depend on it.
        """
        del state
        return jnp.ones(tokens.shape, bool)

    def draft(self, state: Any) -> Int[Array, "B"]:
        """Return a token that is likely to be next in each row, -1 where none is known.

        The method `forced` drafts it; the output does not depend on it.
        """
        return jnp.full(len(jax.tree.leaves(state)[0]), -1)


def one_by_one(
    step: Callable[[Any, Int[Array, "B"]], Any],
    state: Any,
    tokens: Int[Array, "B T"],
    count: Int[Array, "B"],
) -> Any:
    """Return `Processor.advance` for a function `step(state, token [B]) -> state` of one token."""

    def body(at: Int[Array, ""], state: Any) -> Any:
        def chosen(new: Array, old: Array) -> Array:
            return jnp.where((at < count).reshape(-1, *[1] * (old.ndim - 1)), new, old)

        return jax.tree.map(chosen, step(state, tokens[:, at]), state)

    return lax.fori_loop(0, jnp.max(count), body, state) if tokens.shape[1] else state


def states_of(
    processors: Sequence[Processor],
    requested: Sequence[Any],
    tokens: Int[Array, "B S"],
    prompt_length: Int[Array, "B"],
    length: Int[Array, "B"],
    vocab_size: int,
) -> tuple[Any, ...]:
    """Return the states of rows of `length` tokens, of which some may follow the prompt.

    `requested` are the `NewRows.requested` of each processor.
    """
    output = prompt_length[:, None] + jnp.arange(tokens.shape[1])[None, :]
    output = jnp.take_along_axis(tokens, jnp.minimum(output, tokens.shape[1] - 1), axis=1)
    states = tuple(
        processor.init(NewRows(tokens, prompt_length, vocab_size, of_processor))
        for processor, of_processor in zip(processors, requested, strict=True)
    )
    return advanced(processors, states, output, length - prompt_length)


def advanced(
    processors: Sequence[Processor],
    states: Sequence[Any],
    tokens: Int[Array, "B T"],
    count: Int[Array, "B"],
) -> tuple[Any, ...]:
    """Return the states after the first `count[b]` of `tokens[b]`."""
    pairs = zip(processors, states, strict=True)
    return tuple(processor.advance(state, tokens, count) for processor, state in pairs)


def tokens_to(
    topology: AnyTopology, tokens: Int[Array, "B N"], slots: Int[Array, "B"]
) -> tuple[Int[Array, "B P"], Int[Array, "B"]]:
    """Return the tokens on the path from the root to one slot per row, and their number.

    The slot's own token is the last one, and the root's is left out. `tokens` are those of the
    nodes.
    """
    batch, width = len(tokens), topology.width
    ancestors = jnp.broadcast_to(jnp.asarray(topology.row_ancestors), (batch, width, width))
    depths = jnp.broadcast_to(jnp.asarray(topology.row_depths), (batch, width))
    on_path = jnp.take_along_axis(ancestors, slots[:, None, None], axis=1)
    step = jnp.arange(1, topology.depth + 1)[None, :, None]
    at_depth = (on_path & (depths[:, None, :] == step))[:, :, 1:]
    path = jnp.sum(jnp.where(at_depth, tokens[:, None, :], 0), axis=2, dtype=tokens.dtype)
    return path, jnp.take_along_axis(depths, slots[:, None], axis=1)[:, 0]


def processed(
    processors: Sequence[Processor],
    states: Sequence[Any],
    logits_at: sampling.Distributions,
    tokens: Int[Array, "B N"],
    topology: AnyTopology,
) -> sampling.Distributions:
    """Return the function from one slot per row to the logits after all processors.

    `states` are those after the roots, `logits_at` is the function to the target's own logits, and
    `tokens` and `topology` are those of the nodes.
    """
    if not processors:
        return logits_at

    def processed_at(slots: Int[Array, "B"]) -> Float[Array, "B V"]:
        logits = logits_at(slots)
        after = advanced(processors, states, *tokens_to(topology, tokens, slots))
        for processor, state in zip(processors, after, strict=True):
            logits = processor.apply(state, logits)
        return logits

    return processed_at


def largest_logits(
    processors: Sequence[Processor],
    logits_at: sampling.Distributions,
    slots: Int[Array, "B T"],
    accepted: Int[Array, "B"],
) -> Float[Array, "B T"] | None:
    """Return the largest logit after each of the slots of a path: -inf where no token is left.

    The result is None if no processor forbids tokens, and entries after the first `accepted[b]` + 1
    slots may be 0. `logits_at` are processed logits.
    """
    if not any(processor.forbids for processor in processors):
        return None

    def visit(depth: Int[Array, ""], found: Float[Array, "B T"]) -> Float[Array, "B T"]:
        at_depth = lax.dynamic_index_in_dim(slots, depth, axis=1, keepdims=False)
        largest = jnp.max(logits_at(at_depth), axis=1).astype(found.dtype)
        return lax.dynamic_update_index_in_dim(found, largest, depth, axis=1)

    return lax.fori_loop(0, jnp.max(accepted) + 1, visit, jnp.zeros(slots.shape, jnp.float32))


def allowed_nodes(
    processors: Sequence[Processor], states: Sequence[Any], draft: Draft
) -> Bool[Array, "B N"] | None:
    """Return a mask of the nodes of a draft that were drawn, or that all processors allow.

    The result is None if no processor can say.
    """
    asked = [
        (processor, state)
        for processor, state in zip(processors, states, strict=True)
        if type(processor).allows is not Processor.allows
    ]
    if not asked or not draft.topology.num_nodes:
        return None

    def allowed(slots: Int[Array, "B"], tokens: Int[Array, "B"]) -> Bool[Array, "B"]:
        path, count = tokens_to(draft.topology, draft.tokens, slots)
        each = [
            processor.allows(processor.advance(state, path, count), tokens)
            for processor, state in asked
        ]
        return jnp.stack(each).all(axis=0)

    parents = jnp.broadcast_to(jnp.asarray(draft.topology.row_parents), draft.tokens.shape)
    nodes = jnp.moveaxis(parents, 1, 0), jnp.moveaxis(draft.tokens, 1, 0)
    each = lax.map(lambda node: allowed(*node), nodes)
    return (draft.logq_row >= 0) | jnp.moveaxis(each, 0, 1)
