"""The most likely next tokens, also as a feature of the target: `top_tokens:k`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from specjax.distributed.sharding import constrain, num_parts
from specjax.errors import InputError
from specjax.sampling import top_k

_PREFIX = "top_tokens:"
_BLOCK = 32
"""The number of positions whose logits are computed at a time if only top tokens are needed."""


def likeliest(
    logits: Float[Array, "B T V"], count: int
) -> tuple[Float[Array, "B T k"], Int[Array, "B T k"]]:
    """Return the `count` largest logits of each position, in descending order, and their token ids.

    If the vocabulary is sharded, each device first finds the largest of its shard.
    """
    batch, length, vocab = logits.shape
    parts = num_parts("vocab", vocab)
    if parts == 1:
        return top_k(constrain(logits, "batch", None, None), count)
    size = vocab // parts
    split = constrain(logits, "batch", None, "vocab").reshape(batch, length, parts, size)
    best, ids = top_k(constrain(split, "batch", None, "vocab", None), min(count, size))
    ids += size * jnp.arange(parts)[None, None, :, None]
    shape = batch, length, -1
    best, ids = (constrain(array.reshape(shape), "batch", None, None) for array in (best, ids))
    # Equal values are taken from the first part, and so in the order of their ids.
    best, index = lax.top_k(best, count)
    return best, jnp.take_along_axis(ids, index, axis=-1)


def feature_name(count: int) -> str:
    """Return the name of the feature that has the `count` most likely next tokens."""
    return f"{_PREFIX}{count}"


def wanted_counts(features: Iterable[str], vocab_size: int) -> dict[str, int]:
    """Return the k of each feature named `top_tokens:k`, by the name of the feature.

    Raises InputError unless k is from 1 to `vocab_size`.
    """
    counts = {}
    for name in features:
        prefix, colon, number = name.partition(":")
        if prefix + colon != _PREFIX:
            continue
        if not number.isdecimal() or not 1 <= int(number) <= vocab_size:
            raise InputError(
                f"feature {name!r}: use {_PREFIX}k with k from 1 to the {vocab_size} tokens of the "
                "vocabulary"
            )
        counts[name] = int(number)
    return counts


def top_tokens(
    logits: Float[Array, "B T V"], counts: Mapping[str, int]
) -> dict[str, Int[Array, "B T _"]]:
    """Return the target's features `top_tokens:k`, which are token ids, by name.

    `counts` has the k of each feature by its name; `logits` are the target's.
    """
    if not counts:
        return {}
    return _by_name(likeliest(logits, max(counts.values()))[1], counts)


def top_tokens_of_states(
    states: Float[Array, "B T D"],
    project: Callable[[Float[Array, "B T D"]], Float[Array, "B T V"]],
    counts: Mapping[str, int],
) -> dict[str, Int[Array, "B T _"]]:
    """Return the target's features `top_tokens:k`, which are token ids, by name.

    `counts` has the k of each feature by its name, and `project` computes the logits of hidden
    states. Logits of only a few positions exist at a time.
    """
    batch, length, width = states.shape
    most = max(counts.values())
    if length <= _BLOCK or length % _BLOCK:
        return top_tokens(project(states), counts)
    blocks = states.reshape(batch, length // _BLOCK, _BLOCK, width).swapaxes(0, 1)
    best = lax.map(lambda block: likeliest(project(block), most)[1], blocks)
    return _by_name(best.swapaxes(0, 1).reshape(batch, length, most), counts)


def _by_name(best: Int[Array, "B T _"], counts: Mapping[str, int]) -> dict[str, Array]:
    return {name: best[..., :count].astype(jnp.int32) for name, count in counts.items()}
