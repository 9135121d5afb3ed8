"""Tensor names of GGUF and Hugging Face, with their location and shape in the parameter tree.

One table per file format serves reading and writing. The tree is a plain nested dict; layers are
stacked on the first axis, head axes are their own dimension, kernels are [in..., out...].
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Shaped

from specjax.errors import InputError
from specjax.models.config import DecoderConfig
from specjax.models.decoder import parameter_table

Path = tuple[str, ...]
Shape = tuple[int, ...]

_ALIGNMENT = 64  # bytes; XLA's CPU client copies a host array that starts anywhere else


def param_shapes(config: DecoderConfig, scan_layers: bool = True) -> dict[str, Any]:
    """The nested dict of parameter shapes that a decoder of this config has."""
    return jax.tree.map(lambda entry: entry.shape, parameter_table(config, scan_layers))


class Slot(NamedTuple):
    """One row of a table: a tensor's name in the file and its location in the tree.

    `name` holds `{layer}` for a tensor that exists once a layer. `in_axes` counts the axes of a
    kernel that the product sums over; 0 marks a scale, a bias or the embedding. `paired` marks
    rows stored in the pair order of rotated neighbours (GGUF) instead of half-split. `tied` limits
    the row to models whose head is, or is not, the embedding.
    """

    name: str
    path: Path
    in_axes: int = 0
    paired: bool = False
    tied: bool | None = None


def _table(names: dict[str, str], *, paired: bool) -> tuple[Slot, ...]:
    """A format's table. Both store the same matrices, [out, in], in other names and row orders."""
    layer = ("layers",)
    slots = [
        Slot(names["embed"] + ".weight", ("head", "kernel"), 1, tied=True),
        Slot(names["embed"] + ".weight", ("embed", "embedding"), tied=False),
        Slot(names["head"] + ".weight", ("head", "kernel"), 1, tied=False),
        Slot(names["final_norm"] + ".weight", ("final_norm", "scale")),
        Slot(names["attention_norm"] + ".weight", (*layer, "attention_norm", "scale")),
        Slot(names["mlp_norm"] + ".weight", (*layer, "mlp_norm", "scale")),
    ]
    for block, part, in_axes in (
        ("attention", "query", 1),
        ("attention", "key", 1),
        ("attention", "value", 1),
        ("attention", "output", 2),
        ("mlp", "gate", 1),
        ("mlp", "up", 1),
        ("mlp", "down", 1),
    ):
        turned = paired and part in ("query", "key")
        path = (*layer, block, part)
        slots.append(Slot(names[part] + ".weight", (*path, "kernel"), in_axes, turned))
        slots.append(Slot(names[part] + ".bias", (*path, "bias"), 0, turned))
    return tuple(slots)


HUGGING_FACE = _table(
    {
        "embed": "model.embed_tokens",
        "final_norm": "model.norm",
        "head": "lm_head",
        "attention_norm": "model.layers.{layer}.input_layernorm",
        "mlp_norm": "model.layers.{layer}.post_attention_layernorm",
        "query": "model.layers.{layer}.self_attn.q_proj",
        "key": "model.layers.{layer}.self_attn.k_proj",
        "value": "model.layers.{layer}.self_attn.v_proj",
        "output": "model.layers.{layer}.self_attn.o_proj",
        "gate": "model.layers.{layer}.mlp.gate_proj",
        "up": "model.layers.{layer}.mlp.up_proj",
        "down": "model.layers.{layer}.mlp.down_proj",
    },
    paired=False,
)
GGUF = _table(
    {
        "embed": "token_embd",
        "final_norm": "output_norm",
        "head": "output",
        "attention_norm": "blk.{layer}.attn_norm",
        "mlp_norm": "blk.{layer}.ffn_norm",
        "query": "blk.{layer}.attn_q",
        "key": "blk.{layer}.attn_k",
        "value": "blk.{layer}.attn_v",
        "output": "blk.{layer}.attn_output",
        "gate": "blk.{layer}.ffn_gate",
        "up": "blk.{layer}.ffn_up",
        "down": "blk.{layer}.ffn_down",
    },
    paired=True,
)


class Location(NamedTuple):
    """One tensor of one checkpoint: its file name, slot, layer, and unstacked tree shape."""

    name: str
    slot: Slot
    layer: int | None
    shape: Shape

    def within(self, scan_layers: bool) -> tuple[Path, int | None]:
        """The leaf it belongs to, and its index on that leaf's first axis if layers are stacked."""
        if self.layer is None or scan_layers:
            return self.slot.path, self.layer
        first, *rest = self.slot.path
        return (first, str(self.layer), *rest), None

    @property
    def stored_shape(self) -> Shape:
        """The tensor's shape in the file."""
        axes = self.slot.in_axes
        if axes:
            return (math.prod(self.shape[axes:]), math.prod(self.shape[:axes]))
        if self.slot.path[-1] == "bias":
            return (math.prod(self.shape),)
        return self.shape


def locations(table: Iterable[Slot], config: DecoderConfig) -> Iterator[Location]:
    """Every tensor that a checkpoint of this config must hold, in table order."""
    shapes = param_shapes(config)
    for slot in table:
        shape = lookup(shapes, slot.path)
        if shape is None or slot.tied not in (None, config.tie_word_embeddings):
            continue
        if slot.path[0] == "layers":
            for layer in range(config.num_layers):
                yield Location(slot.name.format(layer=layer), slot, layer, shape[1:])
        else:
            yield Location(slot.name, slot, None, shape)


def from_stored(stored: Shaped[np.ndarray, "..."], location: Location) -> Shaped[np.ndarray, "..."]:
    """The tree's array of one tensor in the file's layout; a view where that is possible."""
    if location.slot.paired:
        stored = _unpair(stored, _head_width(location))
    return (stored.T if location.slot.in_axes else stored).reshape(location.shape)


def stored_view(value: Shaped[np.ndarray, "..."], location: Location) -> Shaped[np.ndarray, "..."]:
    """The tree's array in the axes of the file, still with half-split rows; a view."""
    rows, *rest = location.stored_shape
    return value.reshape(*rest, rows).T if location.slot.in_axes else value.reshape(rows, *rest)


def to_stored(value: Shaped[np.ndarray, "..."], location: Location) -> Shaped[np.ndarray, "..."]:
    """The inverse of `from_stored`."""
    stored = stored_view(value, location)
    return _pair(stored, _head_width(location)) if location.slot.paired else stored


def _head_width(location: Location) -> int:
    return location.shape[-1]


def _unpair(stored: Shaped[np.ndarray, "..."], width: int) -> Shaped[np.ndarray, "..."]:
    """Rows 0, 1, 2, 3, ... of each head, where (0, 1) is a pair, to 0, 2, ..., 1, 3, ..."""
    split = stored.reshape(-1, width // 2, 2, *stored.shape[1:])
    return split.swapaxes(1, 2).reshape(stored.shape)


def _pair(stored: Shaped[np.ndarray, "..."], width: int) -> Shaped[np.ndarray, "..."]:
    split = stored.reshape(-1, 2, width // 2, *stored.shape[1:])
    return split.swapaxes(1, 2).reshape(stored.shape)


def lookup(tree: dict[str, Any], path: Path) -> Any:
    """The leaf at `path`, or None where the tree has no such leaf."""
    for key in path:
        if key not in tree:
            return None
        tree = tree[key]
    return tree


def allocate(config: DecoderConfig, dtype: np.dtype, scan_layers: bool = True) -> dict[str, Any]:
    """The parameter tree, uninitialised, each leaf aligned so that a CPU device can adopt it."""

    def empty(shape: Shape) -> np.ndarray:
        size = math.prod(shape) * dtype.itemsize
        raw = np.empty(size + _ALIGNMENT, np.uint8)
        first = -raw.ctypes.data % _ALIGNMENT
        return raw[first : first + size].view(dtype).reshape(shape)

    def fill(node: dict[str, Any] | Shape) -> dict[str, Any] | np.ndarray:
        if isinstance(node, dict):
            return {key: fill(child) for key, child in node.items()}
        return empty(node)

    return {key: fill(child) for key, child in param_shapes(config, scan_layers).items()}


def match(
    source: str,
    table: Iterable[Slot],
    config: DecoderConfig,
    found: dict[str, Shape],
    *,
    ignored: Collection[str] = (),
) -> list[Location]:
    """The locations of a checkpoint's tensors, after comparing them with what its config asks for.

    Embedding and head may have more rows than the vocabulary (padding, which is dropped). Raises
    InputError listing what is missing, unexpected or mis-shaped; `ignored` names may be there.
    """
    if config.num_layers > len(found):
        raise InputError(
            f"{source}: the config asks for {config.num_layers} layers, the file holds only "
            f"{len(found)} tensors; use an intact checkpoint"
        )
    expected = list(locations(table, config))
    wanted = {location.name: location for location in expected}
    missing = [name for name in wanted if name not in found]
    unexpected = [name for name in found if name not in wanted and name not in ignored]
    wrong = []
    for name in wanted.keys() & found.keys():
        want, have = wanted[name].stored_shape, found[name]
        padded = wanted[name].slot.path[0] in ("embed", "head") and len(have) == 2
        if have != want and not (padded and have[1] == want[1] and have[0] > want[0]):
            wrong.append(f"{name} {list(have)}, not {list(want)}")
    problems = [
        f"{label}: {_some(names)}"
        for label, names in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("mis-shaped", sorted(wrong)),
        )
        if names
    ]
    if problems:
        raise InputError(
            f"{source}: the tensors do not fit the config ({'; '.join(problems)}); "
            "use an intact Llama-family checkpoint"
        )
    return expected


def _some(names: list[str], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
