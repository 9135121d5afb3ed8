"""Checks of the arguments of functions on arrays, such as `verify_chain`.

Every check raises ValueError with one line that names the argument, its value and the remedy.
Shapes and dtypes are always checked; values only if the arrays are not being traced by JAX.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

_NORMALISED = 1e-2
"""The tolerance for sums of probabilities, wide enough for half precision."""


def is_traced(*arrays: Any) -> bool:
    """Return whether any of the arrays is a JAX tracer, whose values cannot be read."""
    return any(isinstance(array, jax.core.Tracer) for array in arrays)


def check_shapes(
    tokens: Array, logq: Array | None, logp: Array, rows_of_logq: int | None, letter: str
) -> None:
    """Raise ValueError unless the arrays' shapes agree and `tokens` are integers.

    `tokens` is [length] or [B, length]; `letter`, "K" for a chain or "N" for a tree, names that
    length in messages. `logp` needs length + 1 distributions per sequence, and `logq`, unless it is
    None, `rows_of_logq` of them, or any number if `rows_of_logq` is None.
    """
    if tokens.ndim not in (1, 2) or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(
            f"tokens are {tokens.dtype}{list(tokens.shape)}: pass whole numbers [{letter}], or "
            f"[B, {letter}]"
        )
    *batch, length = tokens.shape
    if logp.ndim != tokens.ndim + 1 or logp.shape[:-1] != (*batch, length + 1):
        wanted = ", ".join(map(str, (*batch, length + 1, "V")))
        each = "token and one for the next" if letter == "K" else "slot, the root's first"
        raise ValueError(
            f"logp has shape {logp.shape} for tokens {tokens.shape}: it must be ({wanted}), one "
            f"distribution per {each}"
        )
    if logq is None:
        return
    vocab, rows = logp.shape[-1], rows_of_logq
    if rows is None and logq.ndim == logp.ndim:
        rows = logq.shape[-2]
    if logq.shape != (*batch, rows, vocab):
        wanted = ", ".join(map(str, (*batch, "Q" if rows is None else rows, vocab)))
        each = "distribution for each token"
        if letter == "N":
            each = "row per slot, which its children were drawn from; logq_row names other rows"
        raise ValueError(f"logq has shape {logq.shape}: it must be ({wanted}), one {each}")


def check_log_probabilities(name: str, values: Array) -> None:
    """Raise ValueError unless each row of `values` [..., V] is a normalized log-distribution.

    `name` is the argument's name in messages. Rows in which every entry is -inf are accepted too.
    """
    if not jnp.issubdtype(values.dtype, jnp.floating):
        raise ValueError(f"{name} is of {values.dtype}: pass log-probabilities, such as warp(...)")
    if is_traced(values) or not values.size:
        return
    with np.errstate(over="ignore"):
        mass = np.exp(np.asarray(values).astype(np.float32)).sum(axis=-1)
    off = ~((np.abs(mass - 1) < _NORMALISED) | (mass == 0))
    if off.any():
        index = tuple(np.argwhere(off)[0].tolist())
        entry = f"[{', '.join(map(str, index))}]" if index else ""
        raise ValueError(
            f"{name}{entry}: its probabilities sum to {mass[index]:.4g}; "
            "pass log-probabilities, such as warp(logits, temperature) or jax.nn.log_softmax"
        )


def check_two_distributions(logp: Array, logq: Array) -> None:
    """Raise ValueError unless both are log-distributions [..., V] of the same shape."""
    if logp.shape != logq.shape:
        *batch, count, _ = (1, *logq.shape)
        longer = logp.ndim == logq.ndim > 1 and logp.shape[-2] == count + 1
        rows = ":, " * (len(batch) - 1) + f":{count}"
        remedy = f"pass logp[{rows}], without the distribution of the token after the draft"
        raise ValueError(
            f"logp has shape {logp.shape} and logq {logq.shape}: "
            + (remedy if longer else "pass one distribution of each per token")
        )
    check_log_probabilities("logp", logp)
    check_log_probabilities("logq", logq)


def one_per_row(name: str, values: Any, batch: int) -> Int[Array, "B"]:
    """Return `values`, one integer or an array of `batch` integers, as an int32 array [B].

    `name` is the argument's name in messages. Raises ValueError for any other dtype or shape.
    """
    values = jnp.asarray(values)
    if not jnp.issubdtype(values.dtype, jnp.integer) or values.shape not in ((), (batch,)):
        raise ValueError(
            f"{name} is {values.dtype}{list(values.shape)}: pass a whole number, or {batch} of them"
        )
    return jnp.broadcast_to(values.astype(jnp.int32), batch)


def one_key_per_row(keys: Any, batch: int) -> Key[Array, "B"]:
    """Return `keys` as one typed JAX key per row.

    `keys` is one key or `batch` keys: typed, legacy uint32 keys, or for a single key an integer
    seed. A single key is split. Raises ValueError for any other value.
    """
    original = keys
    if isinstance(keys, str) or keys is None:
        raise ValueError(f"keys={keys!r}: pass a key, made by jax.random.key, or a whole number")
    if isinstance(keys, int | np.integer) and not isinstance(keys, bool):
        keys = jax.random.key(keys)
    keys = jnp.asarray(keys)
    if keys.dtype == jnp.uint32 and keys.shape[-1:] == jax.random.PRNGKey(0).shape:
        keys = jax.random.wrap_key_data(keys)
    if not jnp.issubdtype(keys.dtype, jax.dtypes.prng_key) or keys.shape not in ((), (batch,)):
        kind = getattr(original, "dtype", type(original).__name__)
        several = f", or {batch} of them, made by jax.random.split" if batch > 1 else ""
        raise ValueError(
            f"keys are {kind}{list(jnp.shape(original))}: pass one key, made by jax.random.key"
            f"{several}"
        )
    return keys if keys.ndim else jax.random.split(keys, batch)


def check_tokens(tokens: Int[Array, "B N"], num_valid: Int[Array, "B"], vocab: int) -> None:
    """Raise ValueError unless `num_valid` is in 0..N and each drafted token in 0..vocab - 1."""
    if is_traced(tokens, num_valid):
        return
    lengths, most = np.asarray(num_valid), tokens.shape[1]
    if np.any((lengths < 0) | (lengths > most)):
        raise ValueError(f"num_valid={lengths.tolist()}: use 0 to {most}, the number of tokens")
    tokens = np.asarray(tokens)
    unknown = _drafted(lengths, most) & ((tokens < 0) | (tokens >= vocab))
    if unknown.any():
        raise ValueError(
            f"tokens has {tokens[unknown][0]}: use tokens from 0 to {vocab - 1}, or num_valid for "
            "drafts that are shorter"
        )


def check_parents(parents: Any, tokens: Array) -> None:
    """Raise ValueError unless the parent of each node is the root or an earlier node.

    `parents` is an array of slots, [N] or of the shape of `tokens`.
    """
    if not jnp.issubdtype(parents.dtype, jnp.integer) or (
        parents.shape not in (tokens.shape, tokens.shape[-1:])
    ):
        raise ValueError(
            f"parents are {parents.dtype}{list(parents.shape)} for tokens {list(tokens.shape)}: "
            "pass a whole number per node, [N] where all rows have one shape, or [B, N]"
        )
    if is_traced(parents):
        return
    parents = np.asarray(parents)
    wrong = np.argwhere((parents < 0) | (parents > np.arange(parents.shape[-1])))
    if len(wrong):
        index = tuple(wrong[0].tolist())
        raise ValueError(
            f"parents[{', '.join(map(str, index))}]={parents[index]}: a parent is the slot of an "
            f"earlier node, i + 1 for node i, or 0 for the root; use 0 to {index[-1]}"
        )


def check_rows(row: Any, tokens: Array, logq: Array | None) -> None:
    """Raise ValueError unless each entry of `row` is -1 or the index of a row of `logq`.

    `row` is the argument `logq_row`: for each node the row of `logq` that it was drawn from, [N] or
    of the shape of `tokens`.
    """
    if not jnp.issubdtype(row.dtype, jnp.integer) or (
        row.shape not in (tokens.shape, tokens.shape[-1:])
    ):
        raise ValueError(
            f"logq_row is {row.dtype}{list(row.shape)} for tokens {list(tokens.shape)}: pass a "
            "whole number per node, [N] or [B, N]"
        )
    if is_traced(row) or logq is None:
        return
    row, count = np.asarray(row), logq.shape[-2]
    wrong = row[(row < -1) | (row >= count)]
    if wrong.size:
        raise ValueError(
            f"logq_row has {wrong[0]}: use 0 to {count - 1}, the rows of logq, or -1 for nodes "
            "that were chosen, not drawn"
        )


def check_drawn(
    tokens: Int[Array, "B N"],
    num_valid: Int[Array, "B"],
    parents: Int[Array | np.ndarray, "#B N"],
    logq_row: Int[Array, "B N"],
    logq: Float[Array, "B Q V"],
) -> None:
    """Raise ValueError if some drafted node cannot have been drawn from its row of `logq`.

    Each such token needs a probability above 0, and siblings from one row must differ, since they
    are drawn without replacement.
    """
    if is_traced(tokens, num_valid, parents, logq_row, logq) or not tokens.size:
        return
    tokens, row, logq = np.asarray(tokens), np.asarray(logq_row), np.asarray(logq)
    count = tokens.shape[1]
    drawn = _drafted(np.asarray(num_valid), count) & (row >= 0)
    parents = np.broadcast_to(np.asarray(parents), tokens.shape)
    earlier = np.tri(count, k=-1, dtype=bool)[None] & drawn[:, :, None] & drawn[:, None, :]
    for numbers in (parents, row):
        earlier = earlier & (numbers[:, :, None] == numbers[:, None, :])
    twice = np.argwhere(earlier & (tokens[:, :, None] == tokens[:, None, :]))
    if len(twice):
        batch, second, first = twice[0].tolist()
        raise ValueError(
            f"nodes {first} and {second}{_of_row(batch, tokens)}, children of slot "
            f"{parents[batch, first]}, both have token {tokens[batch, first]}: siblings are drawn "
            "without replacement, as draw_siblings does; replace=True is for independent draws"
        )
    each_row = np.maximum(row, 0)
    logq_of_token = logq[np.arange(len(tokens))[:, None], each_row, tokens * drawn]
    candidates = np.take_along_axis((logq > -np.inf).sum(axis=-1), each_row, axis=1)
    # Once earlier siblings have used up a distribution, later draws are never accepted.
    impossible = drawn & (logq_of_token == -np.inf) & (earlier.sum(axis=-1) < candidates)
    if impossible.any():
        batch, node = np.argwhere(impossible)[0].tolist()
        raise ValueError(
            f"token {tokens[batch, node]} of node {node}{_of_row(batch, tokens)} has probability "
            f"0 in row {row[batch, node]} of logq: pass the distribution that it was drawn from, "
            "or logq=None for tokens that were chosen"
        )


def _drafted(num_valid: Int[np.ndarray, "B"], count: int) -> Bool[np.ndarray, "B N"]:
    return np.arange(count)[None, :] < num_valid[:, None]


def _of_row(batch: int, tokens: Int[np.ndarray, "B N"]) -> str:
    return f" of row {batch}" if len(tokens) > 1 else ""
