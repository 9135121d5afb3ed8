"""The mapping between a file's tensors and the parameter tree.

One table per family and file format serves reading and writing (`families`). The tree is a plain
nested dict; layers are stacked on the first axis, heads have their own axis, and kernels are
[in..., out...].
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax.errors import InputError
from specjax.loading.compare_arrays import differences, in_words
from specjax.models.config import DecoderConfig
from specjax.models.layers.quantized import GROUP, QuantizedKernel
from specjax.models.parameter_table import parameter_table

Path = tuple[str, ...]
Shape = tuple[int, ...]

_ALIGNMENT = 64  # bytes; XLA's CPU client copies a host array that starts anywhere else


def param_shapes(config: DecoderConfig, scan_layers: bool = True) -> dict[str, Any]:
    """Return the nested dict of parameter shapes of a decoder with this config."""
    return jax.tree.map(lambda entry: entry.shape, parameter_table(config, scan_layers))


class TensorEntry(NamedTuple):
    """One row of a table: a tensor's name in the file and its location in the tree.

    `name` contains `{layer}` for a tensor per layer, and `{expert}` for one per expert; with
    `merged` one tensor holds all experts on a first axis. `in_axes` is the number of axes of a
    kernel that the product sums over; 0 marks a scale, a bias or an embedding. `paired` marks
    rotated dimensions stored as adjacent pairs instead of half-split. `tied` limits the entry to
    models with, or without, a tied head. `part` is (index, count) if the file's tensor concatenates
    several of the tree's along the outputs. `transposed` marks kernels stored [in, out]. The file's
    numbers are the tree's plus `added`.
    """

    name: str
    path: Path
    in_axes: int = 0
    paired: bool = False
    tied: bool | None = None
    part: tuple[int, int] = (0, 1)
    transposed: bool = False
    added: int = 0
    merged: bool = False


class Location(NamedTuple):
    """One tensor of one checkpoint: its file name, entry, layer, and unstacked tree shape.

    `run` is the name of the layer's stacked run and its first layer; `expert` is the expert's index
    in a merged tensor. `rotary_width` is the number of rotated dimensions of a head.
    """

    name: str
    entry: TensorEntry
    layer: int | None
    shape: Shape
    rotary_width: int = 0
    run: tuple[str, int] = ("layers", 0)
    expert: int | None = None

    def within(self, scan_layers: bool) -> tuple[Path, tuple[int, ...]]:
        """Return the leaf it belongs to, and its index (layer, expert or none) on the first axes.

        Without `scan_layers` each layer has its own leaves.
        """
        expert = () if self.expert is None else (self.expert,)
        if self.layer is None:
            return self.entry.path, expert
        _, *rest = self.entry.path
        if scan_layers:
            name, first = self.run
            return (name, *rest), (self.layer - first, *expert)
        return ("layers", str(self.layer), *rest), expert

    @property
    def is_plain(self) -> bool:
        """Whether its rows in the file equal the tree's, number by number."""
        return not (self.entry.paired or self.entry.transposed or self.entry.added)

    @property
    def rows(self) -> Shape:
        """The shape [out, in] of a kernel's own rows, or that of another tensor."""
        axes = self.entry.in_axes
        if axes:
            return (math.prod(self.shape[axes:]), math.prod(self.shape[:axes]))
        if self.entry.path[-1] == "bias":
            return (math.prod(self.shape),)
        return self.shape

    @property
    def stored_shape(self) -> Shape:
        """The shape of the whole tensor in the file."""
        first, *rest = self.rows
        count = self.entry.part[1]
        shape = (count, first, *rest) if self.entry.merged else (count * first, *rest)
        return shape[::-1] if self.entry.transposed else shape


def locations(table: Iterable[TensorEntry], config: DecoderConfig) -> Iterator[Location]:
    """Yield every part of a tensor that a checkpoint of this config must hold, in table order.

    Raises InputError for a parameter without a name in the table.
    """
    shapes = param_shapes(config)
    unnamed = {
        tuple(step.key for step in path)
        for path, _ in jax.tree_util.tree_flatten_with_path(
            shapes, is_leaf=lambda node: isinstance(node, tuple)
        )[0]
    }
    found = []
    for entry in table:
        if entry.tied not in (None, config.tie_word_embeddings):
            continue
        if entry.path[0] != "layers":
            shape = lookup(shapes, entry.path)
            if shape is not None:
                unnamed.discard(entry.path)
                found.append(Location(entry.name, entry, None, shape, config.rotary_width))
            continue
        for run in config.runs:
            path = (run.name, *entry.path[1:])
            shape = lookup(shapes, path)
            if shape is None:
                continue
            unnamed.discard(path)
            for layer in range(run.first, run.first + run.count):
                of_layer = entry._replace(name=entry.name.replace("{layer}", str(layer)))
                for location in of_entry(of_layer, shape[1:], config.rotary_width):
                    found.append(location._replace(layer=layer, run=(run.name, run.first)))
    if unnamed:
        raise InputError(
            f"family={config.family!r}: it has no name for {'.'.join(min(unnamed))} "
            f"({len(unnamed)} such parameters in all); use the family that has such layers"
        )
    yield from found


def of_entry(entry: TensorEntry, shape: Shape, rotary_width: int) -> Iterator[Location]:
    """Yield the locations of a tensor, or of each expert's.

    `shape` is that of the leaf in one layer.
    """
    if not (entry.merged or "{expert}" in entry.name):
        yield Location(entry.name, entry, None, shape, rotary_width)
        return
    count, *rest = shape
    for expert in range(count):
        own = entry._replace(part=(expert, count)) if entry.merged else entry
        name = entry.name.replace("{expert}", str(expert))
        yield Location(name, own, None, tuple(rest), rotary_width, expert=expert)


def lookup(tree: dict[str, Any], path: Path) -> Any:
    """Return the leaf at `path`, or None if the tree has no such leaf."""
    for key in path:
        if key not in tree:
            return None
        tree = tree[key]
    return tree


def allocate(config: DecoderConfig, dtype: np.dtype, scan_layers: bool = True) -> dict[str, Any]:
    """Return the uninitialized parameter tree, aligned so that a CPU device can adopt it."""
    return jax.tree.map(
        lambda entry: _empty(entry.shape, entry.dtype(dtype)), parameter_table(config, scan_layers)
    )


def empty_quantized(rows: Shape, bits: int) -> QuantizedKernel:
    """Return an uninitialized, aligned kernel of `bits` with the shape `rows` [*L, F, D]."""
    *lead, width = rows
    groups = (*lead, width // GROUP)
    if bits == 8:
        return QuantizedKernel(_empty(rows, np.int8), _empty(groups, np.float32), None)
    values = _empty((*lead, width // 2), np.uint8)
    return QuantizedKernel(values, _empty(groups, np.float32), _empty(groups, np.float32))


def _empty(shape: Shape, dtype: Any) -> np.ndarray:
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    first = -raw.ctypes.data % _ALIGNMENT
    return raw[first : first + size].view(dtype).reshape(shape)


def canonical(table: Collection[TensorEntry], names: Collection[str]) -> dict[str, str]:
    """Return the table's name of each tensor of a checkpoint whose name differs only in its prefix.

    Some tools omit the prefix of layer names ("model."), or put names of wrapping modules before or
    in place of it ("language_model.model.", "model.language_model.", "module."). The first layer's
    norm tells which; a head may have all or some of the wrapping modules.
    """
    names_of = {entry.path: entry.name for entry in table}
    norm = names_of["layers", "attention_norm", "scale"]
    head = next(entry.name for entry in table if entry.path[0] == "head" and entry.tied is False)
    base, dot, rest = norm.replace("{layer}", "0").partition(".")
    base += dot
    prefixes = {
        name.removesuffix(rest) for name in names if name == rest or name.endswith("." + rest)
    }
    prefix = base if base in prefixes or not prefixes else min(prefixes, key=len)
    modules = prefix.split(".")[:-1]
    heads = {".".join([*modules[:count], head]) for count in range(len(modules) + 1)}
    return {
        name: head
        if name in heads
        else base + name.removeprefix(prefix)
        if name.startswith(prefix)
        else name
        for name in names
    }


def match(
    source: str,
    table: Iterable[TensorEntry],
    config: DecoderConfig,
    found: dict[str, Shape],
    *,
    others: Iterable[Location] = (),
    ignored: Collection[str] = (),
) -> list[Location]:
    """Return the locations of a decoder's tensors, after checking that a checkpoint is complete.

    Embedding and head may have extra rows (padding, which is dropped). Raises InputError listing
    what is missing, unexpected or mis-shaped; the tensors of `others` are required too, and
    `ignored` names are optional.
    """
    if config.num_layers > len(found):
        raise InputError(
            f"{source}: the config asks for {config.num_layers} layers, the file holds only "
            f"{len(found)} tensors; one of the two is another model's, or the file is cut off"
        )
    expected = list(locations(table, config))
    wanted = {location.name: location for location in (*expected, *others)}
    shapes = dict(found)
    for name in wanted.keys() & found.keys():
        want, have = wanted[name].stored_shape, found[name]
        padded = wanted[name].entry.path[0] in ("embed", "head") and len(have) == 2
        if padded and have[1] == want[1] and have[0] > want[0]:
            shapes[name] = want
    stored_shapes = {name: location.stored_shape for name, location in wanted.items()}
    problems = differences(shapes, stored_shapes, ignored)
    if listed := in_words(problems):
        raise InputError(
            f"{source}: the tensors do not fit the config ({listed}); "
            f"{_remedy(config, problems['missing'], problems['unexpected'])}"
        )
    return expected


def _remedy(config: DecoderConfig, missing: list[str], unexpected: list[str]) -> str:
    """Return the remedy for a checkpoint whose tensors do not match its config."""
    if any(_ADAPTER.search(name) for name in unexpected):
        return "merge the adapter into the model first (merge_and_unload in peft)"
    if any(_QUANTISED.search(name) for name in unexpected):
        return "its weights are quantised; use the model in bfloat16 or float32, or a GGUF of it"
    if not unexpected and missing and all(name.startswith("lm_head.") for name in missing):
        return "if the embedding is the head, set tie_word_embeddings to true in config.json"
    if missing and not unexpected:
        return "download the file again if it is cut off; otherwise the config is another model's"
    return (
        f"the family {config.family!r} is read as transformers and llama.cpp write it, and by the "
        "sizes in the config: one of the two is of another kind"
    )


_ADAPTER = re.compile(r"\.(lora_\w+|base_layer)\.")
_QUANTISED = re.compile(r"\.(qweight|qzeros|scales|absmax|\w+_scale(_inv)?|g_idx)$|quant_state")
