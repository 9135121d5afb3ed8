"""Recorded rows: the tokens of finished requests and the target's features at them, on devices."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from specjax.distributed.sharding import Placement, constrain, spread


@struct.dataclass
class RecordedRows:
    """The latest R finished requests of an engine, with up to L tokens each, the last ones if more.

    Row r has `length[r]` tokens, 0 if it is unused, from the position `first[r]` of its text on;
    those from index `output[r]` on are output. `features[name][r, t]` is the target's feature at
    token t, and 0 at the last token, which the target has not read.
    """

    tokens: Int[Array, "R L"]
    length: Int[Array, "R"]
    first: Int[Array, "R"]
    output: Int[Array, "R"]
    features: dict[str, Float[Array, "R L D"]]

    @classmethod
    def empty(
        cls, names: Sequence[str], width: int, dtype: Any, rows: int, tokens: int, where: Placement
    ) -> RecordedRows:
        """Return `rows` unused rows of `tokens` tokens, for features [`width`] of these names.

        On a mesh each device has all of them.
        """

        def unused(*shape: int, dtype: Any = jnp.int32) -> Array:
            return spread(jnp.zeros((rows, *shape), dtype), where)

        features = {name: unused(tokens, width, dtype=dtype) for name in names}
        return cls(unused(tokens), unused(), unused(), unused(), features)


@functools.partial(jax.jit, donate_argnums=0)
def with_row(
    recorded: RecordedRows,
    at: Int[Array, ""],
    texts: Int[Array, "B S"],
    kept: dict[str, Float[Array, "B M D"]],
    row: Int[Array, ""],
    begin: Int[Array, ""],
    output: Int[Array, ""],
    end: Int[Array, ""],
) -> RecordedRows:
    """Return recorded rows in which row `at` is row `row` of a state.

    `texts` and `kept` are the state's tokens, and its features of the recorded names. The row's
    text has `end` tokens, of which those from `output` on are output; the features at those before
    `begin` are unknown, and these tokens are left out.
    """
    size = recorded.tokens.shape[1]
    first = jnp.maximum(begin, end - size)
    positions = first + jnp.arange(size)
    tokens = jnp.where(positions < end, texts[row].at[positions].get(mode="clip"), 0)

    def put(into: Array, new: Array) -> Array:
        return constrain(into.at[at].set(new), *[None] * into.ndim)

    features = {}
    for name, into in recorded.features.items():
        new = kept[name][row][positions % kept[name].shape[1]]
        features[name] = put(into, jnp.where((positions < end - 1)[:, None], new, 0))
    return RecordedRows(
        tokens=put(recorded.tokens, tokens),
        length=put(recorded.length, jnp.maximum(end - first, 0)),
        first=put(recorded.first, first),
        output=put(recorded.output, jnp.maximum(output - first, 0)),
        features=features,
    )
