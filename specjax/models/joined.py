"""Kernels joined along their outputs, and the parts of which they consist.

Queries, keys and values are one kernel [D, (H + 2 G) C], and the MLP's gate and up one [D, 2 F], so
that a layer multiplies once by each. Outputs are in equal blocks with a section of every part: for
each key/value head its H / G query heads, its key and its value; and one of the gcd(H, F) sections
of gate and of up. A mesh shards outputs between blocks wherever it can shard a decoder
(`build_parameters.can_split`) and has no more devices than key/value heads, so that each device
holds whole heads, and the gates of its own part of up. Biases, and the norms of queries and keys,
are joined likewise, the norms in one block.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.models.config import DecoderConfig
from specjax.models.parameters import Parameter

Path = tuple[str, ...]
PARTS = {
    "qkv": ("query", "key", "value"),
    "qk_norm": ("query_norm", "key_norm"),
    "gate_up": ("gate", "up"),
}
"""What is joined, by the name of the module, in the order of a block's sections."""


class Section(NamedTuple):
    """The outputs of one part: those from `start` to `stop` in each block of `size` outputs."""

    size: int = 1
    start: int = 0
    stop: int = 1

    @property
    def width(self) -> int:
        """The number of outputs of the part in a block."""
        return self.stop - self.start

    def of(self, rows: Any) -> Any:
        """Return the part [blocks, width, ...] of rows [outputs, ...], a view of a host array."""
        return rows.reshape(-1, self.size, *rows.shape[1:])[:, self.start : self.stop]


class Part(NamedTuple):
    """A part of a leaf: the path of the leaf, the part's shape [..., outputs], and its section.

    A leaf that is not joined is a single part with blocks of one output.
    """

    path: Path
    shape: tuple[int, ...]
    section: Section


def gate_up_block(num_heads: int, width: int) -> int:
    """Return the number of gates in a block of joined gate and up kernels of F = `width`."""
    return width // math.gcd(num_heads, width)


def parts(table: dict[str, Any], config: DecoderConfig) -> dict[Path, Part]:
    """Return the parts of all leaves of a parameter table, by path ending in the part's name.

    `table` may also hold arrays. `config` is that of the layers, whichever tree they are in.
    """
    found: dict[Path, Part] = {}
    for steps, entry in jax.tree_util.tree_leaves_with_path(
        table, is_leaf=lambda node: isinstance(node, Parameter)
    ):
        path = tuple(step.key for step in steps)
        *lead, outputs = entry.shape
        module = next((name for name in path if name in PARTS), None)
        if module is None:
            found[path] = Part(path, entry.shape, Section())
            continue
        widths = _widths(module, outputs, config)
        size, start = sum(widths), 0
        for name, width in zip(PARTS[module], widths, strict=True):
            own = tuple(name if step == module else step for step in path)
            section = Section(size, start, start + width)
            found[own] = Part(path, (*lead, outputs // size * width), section)
            start += width
    return found


def _widths(module: str, outputs: int, config: DecoderConfig) -> list[int]:
    """Return the widths of the sections of a joined module's block."""
    width = config.head_dim
    if module == "qkv":
        return [config.num_heads // config.num_kv_heads * width, width, width]
    if module == "qk_norm":
        return [width, width]
    return [gate_up_block(config.num_heads, outputs // 2)] * 2


def in_parts(params: dict[str, Any], config: DecoderConfig) -> dict[str, Any]:
    """Return a tree in which each part of a leaf is a leaf of its own; `with_joined` inverts it."""
    tree: dict[str, Any] = {}
    for path, part in parts(params, config).items():
        leaf = functools.reduce(lambda node, step: node[step], part.path, params)
        *parents, last = path
        node = functools.reduce(lambda node, step: node.setdefault(step, {}), parents, tree)
        blocks = leaf.reshape(*leaf.shape[:-1], -1, part.section.size)
        node[last] = blocks[..., part.section.start : part.section.stop].reshape(part.shape)
    return tree


def with_joined(params: dict[str, Any], table: dict[str, Any], config: DecoderConfig) -> Any:
    """Return the tree of a table from one in which each part is a leaf of its own.

    `table` may also hold arrays. Trees that earlier versions saved have separate axes for heads and
    their width. A tree of another kind is returned as it is.
    """
    known = parts(table, config)
    if len(jax.tree.leaves(params)) != len(known):
        return params
    leaves: dict[Path, list[jax.Array]] = {}
    for path, part in known.items():
        array: Any = params
        for step in path:
            array = array.get(step, {}) if isinstance(array, dict) else {}
        if isinstance(array, dict) or array.size != math.prod(part.shape):
            return params
        sections = (*part.shape[:-1], -1, part.section.width)
        leaves.setdefault(part.path, []).append(array.reshape(sections))
    tree: dict[str, Any] = {}
    for (*parents, last), sections in leaves.items():
        node = functools.reduce(lambda node, step: node.setdefault(step, {}), parents, tree)
        whole = jnp.concatenate(sections, axis=-1)
        node[last] = whole.reshape(*whole.shape[:-2], -1)
    return tree
