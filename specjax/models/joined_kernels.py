"""Kernels that are joined along their outputs, so that a layer multiplies once by each.

Queries, keys and values are one kernel [D, (H + 2 G) C], and the MLP's gate and up projections one
[D, 2 F]. The outputs are divided into equal blocks, and each block has a section of every part: for
each key/value head its H / G query heads, its key and its value; and one of gcd(H, F) sections of
the gate and of up. A mesh shards outputs between blocks wherever it can shard a decoder
(`build_parameters.can_split`) and has no more devices than key/value heads, so that each device
holds whole heads, and the gates that belong to its share of up. In recurrent layers a block belongs
to a head: in the delta rule to a key head, with its query, its key, and the values and gates of the
heads that share them; in Mamba-2 to a value head, and in a second kernel to a key head; in a
convolution alone to some channels. Biases are joined likewise, and so are the norms of queries and
keys: in a single block, or like queries and keys if they have a scale for each of a projection's
outputs.
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
    "qkvz": ("query", "key", "value", "gate"),
    "rates": ("share", "decay"),
    "value_gate_decay": ("value", "gate", "decay"),
    "query_key": ("query", "key"),
    "before_after_value": ("before", "after", "value"),
}
"""The parts of each joined module, in the order of a block's sections."""


class Section(NamedTuple):
    """The outputs of one part of a joined kernel: `start` to `stop` in blocks of `size` outputs."""

    size: int = 1
    start: int = 0
    stop: int = 1

    @property
    def width(self) -> int:
        """The number of the part's outputs in each block."""
        return self.stop - self.start

    def of(self, rows: Any) -> Any:
        """Return the part [blocks, width, ...] of `rows` [outputs, ...], a view if from NumPy."""
        return rows.reshape(-1, self.size, *rows.shape[1:])[:, self.start : self.stop]


class Part(NamedTuple):
    """A part of a joined parameter, such as the queries of a joined kernel.

    `path` is that of the whole parameter in the tree, `shape` [..., outputs] that of the part, and
    `section` says where its outputs are. A parameter that is not joined has a single part, with
    blocks of one output.
    """

    path: Path
    shape: tuple[int, ...]
    section: Section


def gate_up_block(num_heads: int, width: int) -> int:
    """Return the number of gates in a block of a joined gate and up kernel.

    The MLP has F = `width`, and attention `num_heads` query heads; see the module.
    """
    return width // math.gcd(num_heads, width)


def parts(table: dict[str, Any], config: DecoderConfig | None) -> dict[Path, Part]:
    """Return the parts of all parameters of a table, by their paths, which end in the part's name.

    `table` may have arrays instead of `Parameter`s. `config` is the config of the layers in it, or
    None if it has none.
    """
    parts_by_path: dict[Path, Part] = {}
    for steps, entry in jax.tree_util.tree_leaves_with_path(
        table, is_leaf=lambda node: isinstance(node, Parameter)
    ):
        path = tuple(step.key for step in steps)
        *lead, outputs = entry.shape
        module = next((name for name in path if name in PARTS), None)
        if module is None:
            parts_by_path[path] = Part(path, entry.shape, Section())
            continue
        assert config is not None
        widths = _widths(module, outputs, config)
        size, start = sum(widths), 0
        for name, width in zip(PARTS[module], widths, strict=True):
            part_path = tuple(name if step == module else step for step in path)
            section = Section(size, start, start + width)
            parts_by_path[part_path] = Part(path, (*lead, outputs // size * width), section)
            start += width
    return parts_by_path


def _widths(module: str, outputs: int, config: DecoderConfig) -> list[int]:
    """Return the widths of the sections in a block of the joined module `module`, in order."""
    width = config.head_dim
    if module == "qkv":
        queries = config.num_heads // config.num_kv_heads * (1 + config.attention.gated)
        return [queries * width, width, width]
    if module == "qk_norm":
        over_heads = config.attention.qk_norm_over == "projection"
        return [config.num_heads // config.num_kv_heads * width if over_heads else width, width]
    if (recurrence := config.recurrence) is not None and module != "gate_up":
        heads, keys = recurrence.value_heads // recurrence.key_heads, recurrence.key_width
        value = recurrence.value_width
        return {
            "qkvz": [keys, keys, heads * value, heads * value],
            "rates": [heads, heads],
            "value_gate_decay": [value, value, 1],
            "query_key": [keys, keys],
            "before_after_value": [value, value, value],
        }[module]
    return [gate_up_block(config.num_heads, outputs // 2)] * 2


def in_parts(params: dict[str, Any], config: DecoderConfig) -> dict[str, Any]:
    """Return the parameters with each part as a separate array; `with_joined` inverts this."""
    tree: dict[str, Any] = {}
    for path, part in parts(params, config).items():
        leaf = functools.reduce(lambda node, step: node[step], part.path, params)
        *parents, last = path
        node = functools.reduce(lambda node, step: node.setdefault(step, {}), parents, tree)
        blocks = leaf.reshape(*leaf.shape[:-1], -1, part.section.size)
        node[last] = blocks[..., part.section.start : part.section.stop].reshape(part.shape)
    return tree


def with_joined(params: dict[str, Any], table: dict[str, Any], config: DecoderConfig) -> Any:
    """Return parameters in the layout of `table`, given a tree with each part as a separate array.

    `table` may have arrays instead of `Parameter`s. Trees saved by earlier versions, with separate
    axes for heads and their width, are accepted. A tree of another kind is returned unchanged.
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
