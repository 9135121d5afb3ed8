"""The state passed from round to round, and the part of it that the host reads."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key

from specjax.core.cache import KVCache, Window, set_rows
from specjax.core.drafter import Sampling
from specjax.distributed.sharding import num_parts

RUNNING, STOPPED, FULL, FAILED, BARRED = 0, 1, 2, 3, 4
"""A row's status: it decodes, or has ended at a stop token or string, at its maximum length,
before a token whose logits are not numbers, or where processors allow no token."""


@struct.dataclass
class RowProperties:
    """The properties of each row that do not change while it decodes.

    `index` is that of the row's prompt in the input, `prompt_length` and `max_length` are in
    tokens, all draws derive from `key`, and `stop_ids` end the output (padded with -1).
    """

    index: Int[Array, "B"]
    prompt_length: Int[Array, "B"]
    key: Key[Array, "B"]
    sampling: Sampling
    max_length: Int[Array, "B"]
    stop_ids: Int[Array, "B stops"]


@struct.dataclass
class Rounds:
    """Raw counts by row, of one round or of several in columns; -1 if the row was inactive.

    `width` is the number of window slots, `drafted` the number of nodes, and `drafter` the index of
    the drafter that proposed them (-1 if nothing was drafted). `overlaps`, if recorded, are sum_x
    min(p, q) at the visited nodes and NaN elsewhere.
    """

    width: Int[Array | np.ndarray, "B *R"]
    drafted: Int[Array | np.ndarray, "B *R"]
    accepted: Int[Array | np.ndarray, "B *R"]
    emitted: Int[Array | np.ndarray, "B *R"]
    drafter: Int[Array | np.ndarray, "B *R"]
    overlaps: Float[Array | np.ndarray, "B *R K"] | None = None


@struct.dataclass
class Tally:
    """Counts per drafter, summed over the rounds and rows of a step.

    `ran` counts the rounds in which each drafter ran, and `further` the passes that it made after
    its first pass of a round. `drafted[i, n]` counts the rounds in which drafter i drafted node n
    in some row, and `accepted[i, n]` the pairs of row and round in which this node was accepted.
    """

    ran: Int[Array | np.ndarray, "drafters"]
    further: Int[Array | np.ndarray, "drafters"]
    drafted: Int[Array | np.ndarray, "drafters N"]
    accepted: Int[Array | np.ndarray, "drafters N"]


@struct.dataclass
class State:
    """The complete state passed from one round to the next.

    `tokens[b, :length[b]]` are committed tokens, prompt first, and `logprobs`, if requested, their
    log-probabilities under the target by position. `round` counts each row's own rounds. `features`
    are those of `LoopPlan.features`, in the layout of `Context.features`. Rows in
    `undrafted` draft no more: their logits after a draft were not finite, and a pass without a
    draft shows whether the row has failed. `processors` are the states of the plan's processors
    after the committed tokens. Every leaf has rows as its first axis, or belongs to a cache or a
    window.
    """

    tokens: Int[Array, "B S"]
    length: Int[Array, "B"]
    status: Int[Array, "B"]
    undrafted: Bool[Array, "B"]
    cache: KVCache
    drafter: Any
    features: dict[str, Float[Array, "B M D"]]
    rows: RowProperties
    round: Int[Array, "B"]
    logprobs: Float[Array, "B S"]
    processors: tuple[Any, ...] = ()

    @property
    def active(self) -> Bool[Array, "B"]:
        """A mask of the rows that still decode."""
        return self.status == RUNNING


@struct.dataclass
class Seen:
    """The results of a step that the host reads: the status, new tokens and counts of each row.

    `tokens[b, i]` is the i-th new token of row b, if it has that many, and `logprobs` its
    log-probability if requested. If caches are pools, all hold the first `cached[b]` tokens.
    """

    status: Int[Array | np.ndarray, "B"]
    tokens: Int[Array | np.ndarray, "B M"]
    logprobs: Float[Array | np.ndarray, "B M"] | None
    rounds: Rounds
    tally: Tally
    cached: Int[Array | np.ndarray, "B"] | None = None


@struct.dataclass
class Packed:
    """The arrays of a tree, all of 32 bits, one after the other as whole numbers.

    Each array that the host reads costs it some 10 us, and twice that when caches are cold.
    """

    numbers: Int[Array, "n"]
    tree: Any = struct.field(pytree_node=False)
    """The structure of the tree."""
    leaves: tuple[tuple[tuple[int, ...], np.dtype], ...] = struct.field(pytree_node=False)
    """The shape and dtype of each of its arrays."""

    @classmethod
    def of(cls, arrays: Any) -> Packed:
        """Return a tree of arrays packed; raise ValueError for an array that is not of 32 bits."""
        leaves, tree = jax.tree.flatten(arrays)
        forms = tuple((leaf.shape, np.dtype(leaf.dtype)) for leaf in leaves)
        if any(dtype.itemsize != 4 for _, dtype in forms):
            raise ValueError(f"{forms}: pack arrays of 32 bits")
        each = [jax.lax.bitcast_convert_type(leaf, jnp.int32).reshape(-1) for leaf in leaves]
        return cls(jnp.concatenate(each), tree, forms)

    def read(self) -> Any:
        """Return the tree with NumPy arrays, once the devices have computed them."""
        numbers, begin, leaves = np.asarray(self.numbers), 0, []
        for shape, dtype in self.leaves:
            end = begin + math.prod(shape)
            leaves.append(numbers[begin:end].view(dtype).reshape(shape))
            begin = end
        return jax.tree.unflatten(self.tree, leaves)


def admit(state: State, slots: Int[Array, "A"], new: State) -> State:
    """Return the state with the A rows of `new` written at `slots`.

    Both states have the same plan. Slots out of range are skipped; earlier contents of the others
    are lost.
    """
    slots = _in_range(state, slots)

    def put(into: Any, rows: Any) -> Any:
        if knows_its_rows(into):
            return into.admit(slots, rows)
        return set_rows(into, slots, rows)

    return jax.tree.map(put, state, new, is_leaf=knows_its_rows)


def lend(state: State, new: State, slots: Int[Array, "A"]) -> State:
    """Return `new` with views of the rows `slots`, in range, for its caches without entries."""

    def view(rows: KVCache, cache: KVCache) -> KVCache:
        if rows.k is not None:
            return rows
        return cache.lend(slots, rows.length, rows.recurrent)

    return _map_caches(view, new, state)


def give_back(state: State, lent: State) -> tuple[State, State]:
    """Return the state with the entries in the views of `lent`, and `lent` without them."""

    def whole(cache: KVCache, rows: KVCache) -> KVCache:
        return cache if rows.pages is None else cache.replace(k=rows.k, v=rows.v)

    def lengths(rows: KVCache) -> KVCache:
        return rows if rows.pages is None else rows.without_entries()

    return _map_caches(whole, state, lent), _map_caches(lengths, lent)


def with_pages(state: State, pages: Int[Array, "B N"] | None) -> State:
    """Return the state with these pages in its caches, which are pools; None for none.

    Each device along a mesh's `data` axis has a pool, of which the pages of its rows are.
    """
    shards = 1 if pages is None else num_parts("batch", len(pages))
    return _map_caches(lambda cache: cache.replace(pages=pages, shards=shards), state)


def with_pools(state: State, pools: Any) -> State:
    """Return the state with the entries of the caches in `pools`, in the same order."""
    made = iter(caches_of(pools))

    def pooled(cache: KVCache) -> KVCache:
        pool = next(made)
        return cache.replace(k=pool.k, v=pool.v)

    return _map_caches(pooled, state)


def cached_lengths(state: State) -> Int[Array, "B"]:
    """Return the number of tokens of each row that all caches hold."""
    return functools.reduce(jnp.minimum, [cache.length for cache in caches_of(state)])


def caches_of(tree: Any) -> list[KVCache]:
    """Return all caches in a tree."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, KVCache))
    return [node for node in nodes if isinstance(node, KVCache)]


def with_cached_lengths(state: State, length: Int[Array, "B"]) -> State:
    """Return the state with caches of these lengths."""
    return _map_caches(lambda cache: cache.replace(length=length), state)


def is_recurrent(tree: Any) -> bool:
    """Return whether a cache in a tree has the state of recurrent layers."""
    return any(cache.recurrent is not None for cache in caches_of(tree))


def cached_states(state: State) -> list[KVCache]:
    """Return the length of each cache, and its state of recurrent layers, without entries.

    With entries of the same rows, `with_cached_states` continues from there.
    """
    return [cache.without_entries() for cache in caches_of(state)]


def with_cached_states(state: State, caches: Sequence[KVCache]) -> State:
    """Return the state with the recurrent states that `cached_states` returned.

    Caches that have some get the lengths to which these belong.
    """
    given = iter(caches)

    def change(cache: KVCache) -> KVCache:
        one = next(given)
        # Other caches have the entries of all tokens, also of those that they had yet to read.
        if one.recurrent is None:
            return cache
        return cache.replace(length=one.length, recurrent=one.recurrent)

    return _map_caches(change, state)


def without_entries(state: State) -> State:
    """Return the state with caches without keys and values."""
    return _map_caches(KVCache.without_entries, state)


def with_entries(state: State, other: State) -> State:
    """Return a state `without_entries`, with the entries of the caches of another one."""
    return _map_caches(lambda cache, full: cache.replace(k=full.k, v=full.v), state, other)


def clear_caches(state: State, slots: Int[Array, "A"]) -> State:
    """Return the state with zeros in the rows `slots`, in range, of its caches."""
    return _map_caches(lambda cache: cache.cleared(slots), state)


def copy_caches(
    state: State, new: State, sources: Int[Array, "A"], slots: Int[Array, "A"]
) -> State:
    """Return the state with the entries of `new`, which are in the rows `sources`, in `slots`."""

    def copied(cache: KVCache, rows: KVCache) -> KVCache:
        return cache.copied(sources, slots, rows.length) if rows.k is None else cache

    return _map_caches(copied, state, new)


def _map_caches(change: Callable[..., KVCache], state: State, *others: State) -> State:
    """Return the state with `change(cache, *others)` in place of each cache."""

    def at(node: Any, *others: Any) -> Any:
        return change(node, *others) if isinstance(node, KVCache) else node

    return jax.tree.map(at, state, *others, is_leaf=knows_its_rows)


def take(state: State, slots: Int[Array, "A"]) -> State:
    """Return the state with only the A rows in `slots`, in that order."""

    def of(part: Any) -> Any:
        return part.take(slots) if knows_its_rows(part) else part[slots]

    return jax.tree.map(of, state, is_leaf=knows_its_rows)


def release(state: State, released: Bool[Array, "B"]) -> State:
    """Return the state with the rows marked in `released` finished and their caches emptied."""
    state = _map_caches(lambda cache: cache.release(released), state)
    return state.replace(
        status=jnp.where(released, STOPPED, state.status),
        length=jnp.where(released, 1, state.length),
        drafter=tuple(
            part.replace(unobserved=jnp.where(released, 0, part.unobserved))
            for part in state.drafter
        ),
    )


def _in_range(state: State, slots: Int[Array, "A"]) -> Int[Array, "A"]:
    """Return `slots` with negative ones moved out of range, since they would count from the end."""
    return jnp.where(slots < 0, len(state.length), slots)


def knows_its_rows(node: Any) -> bool:
    """Return whether a node of a state is a cache or a window.

    These have methods for their rows; all other nodes are arrays with rows as their first axis.
    """
    return isinstance(node, KVCache | Window)
