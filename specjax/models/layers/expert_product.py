"""Products of tokens with the kernels of their experts as one GPU kernel, in Pallas for Triton.

The rows of a product are arranged in tiles, each with tokens of one expert only (Gale et al.
2211.15841, section 5). A program multiplies a tile by some outputs of its expert's kernel, which it
reads in place. So only experts with tokens are read, and nothing waits for how many they have.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32, Int

_FEWEST_ROWS, _MOST_ROWS = 16, 64
"""The fewest rows of a tile, due to the hardware's smallest product, and the most."""
_OUTPUTS = 64
"""The most outputs that a program computes."""
_INPUTS = 128
"""The most inputs that a program reads at a time."""


class Tiles(NamedTuple):
    """The rows of N tokens with K experts each, in tiles of one expert.

    `expert` is that of each tile, -1 for tiles without rows, and `token` the token of each row;
    rows that fill up a tile have token 0. `row` is the row of each token and expert; experts out of
    range have row 0.
    """

    expert: Int[Array, " tiles"]
    token: Int[Array, " rows"]
    row: Int[Array, "N K"]


def takes(inputs: int, outputs: int) -> bool:
    """Return whether the kernel supports experts' kernels [`inputs`, `outputs`]."""
    return min(_part(inputs, _INPUTS), _part(outputs, _OUTPUTS)) >= _FEWEST_ROWS


def arrange(experts: Int[Array, "N K"], count: int) -> Tiles:
    """Return tiles for tokens with these experts, of `count`; there is room for any choice."""
    per_token, expert = experts.shape[1], experts.reshape(-1)
    routes = len(expert)
    size = pl.next_power_of_2(-(-routes // count))
    size = max(_FEWEST_ROWS, min(_MOST_ROWS, size))
    num_tiles = (routes + min(count, routes) * (size - 1)) // size
    in_range = (expert >= 0) & (expert < count)
    number = jnp.arange(routes)
    is_same = (expert[:, None] == expert[None, :]) & (number[None, :] < number[:, None])
    rank = is_same.sum(axis=1, dtype=jnp.int32)
    counts = (expert[None, :] == jnp.arange(count)[:, None]).sum(axis=1, dtype=jnp.int32)
    ends = jnp.cumsum(-(-counts // size))
    first = jnp.take(ends - -(-counts // size), expert, mode="clip")
    row = jnp.where(in_range, first * size + rank, num_tiles * size)
    token = jnp.zeros(num_tiles * size, jnp.int32)
    token = token.at[row].set(number // per_token, mode="drop")
    tile = jnp.arange(num_tiles)
    of_tile = (ends[None, :] <= tile[:, None]).sum(axis=1, dtype=jnp.int32)
    row = jnp.where(in_range, row, 0).reshape(experts.shape)
    return Tiles(jnp.where(of_tile < count, of_tile, -1), token, row)


def multiply(
    x: Float[Array, "N D"],
    tiles: Tiles,
    kernel: Float[Array, "L E D F"],
    layer: Int[Array, ""] | int,
    *,
    gather: bool,
) -> Float32[Array, "rows F"]:
    """Return the product of each row of the tiles with the kernel of its expert in a layer.

    With `gather`, `x` has the activations of the tokens, otherwise those of the rows. Rows of tiles
    without an expert are zero.
    """
    *_, inputs, outputs = kernel.shape
    num_tiles, num_rows = len(tiles.expert), len(tiles.token)
    rows, part = num_rows // num_tiles, _part(outputs, _OUTPUTS)
    token = tiles.token if gather else jnp.arange(num_rows, dtype=jnp.int32)
    whole = pl.BlockSpec(x.shape, lambda tile, column: (0, 0))
    program = functools.partial(_program, step=_part(inputs, _INPUTS))

    def run(interpret: bool, *operands: jax.Array) -> jax.Array:
        return pl.pallas_call(
            program,
            grid=(num_tiles, outputs // part),
            in_specs=[
                pl.BlockSpec((1,), lambda tile, column: (0,)),
                pl.BlockSpec((1,), lambda tile, column: (tile,)),
                pl.BlockSpec((rows,), lambda tile, column: (tile,)),
                whole,
                pl.BlockSpec((*kernel.shape[:3], part), lambda tile, column: (0, 0, 0, column)),
            ],
            out_specs=pl.BlockSpec((rows, part), lambda tile, column: (tile, column)),
            out_shape=jax.ShapeDtypeStruct((num_rows, outputs), jnp.float32),
            compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=3),
            interpret=interpret,
            name="expert_product",
        )(*operands)

    operands = jnp.asarray(layer, jnp.int32)[None], tiles.expert, token, x, kernel
    return lax.platform_dependent(
        *operands, cpu=functools.partial(run, True), default=functools.partial(run, False)
    )


def _part(size: int, most: int) -> int:
    """Return the largest power of two up to `most` that divides `size`."""
    return min(size & -size, most)


def _program(
    layer_ref: Any,
    expert_ref: Any,
    token_ref: Any,
    x_ref: Any,
    kernel_ref: Any,
    out_ref: Any,
    *,
    step: int,
) -> None:
    layer, expert, token = layer_ref[0], expert_ref[0], token_ref[...]
    inputs = x_ref.shape[1]

    def add(index: jax.Array, total: jax.Array) -> jax.Array:
        column = index * step + lax.iota(jnp.int32, step)
        x = x_ref[token[:, None], column[None, :]]
        weights = kernel_ref[layer, expert, pl.ds(index * step, step), :].astype(x.dtype)
        return total + plgpu.dot(x, weights, allow_tf32=False).astype(jnp.float32)

    steps = (expert >= 0).astype(jnp.int32) * (inputs // step)
    out_ref[...] = lax.fori_loop(0, steps, add, jnp.zeros(out_ref.shape, jnp.float32))
