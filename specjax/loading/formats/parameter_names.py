"""The mapping between a file's tensors and the parameter tree.

One table per family and file format serves reading and writing (`families`). The tree is a plain
nested dict; layers are stacked on the first axis, and kernels are matrices [in, out], some of which
combine several of a file's tensors (`models.joined_kernels`).
"""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from specjax.errors import InputError
from specjax.loading.compare_arrays import differences, in_words
from specjax.models.aligned_arrays import aligned_zeros
from specjax.models.config import DecoderConfig
from specjax.models.joined_kernels import Part, Path, Section, parts
from specjax.models.parameter_table import parameter_table

Shape = tuple[int, ...]


def param_shapes(config: DecoderConfig, scan_layers: bool = True) -> dict[str, Any]:
    """Return the shapes of a decoder's parameters as a nested dict."""
    return jax.tree.map(lambda entry: entry.shape, parameter_table(config, scan_layers))


class TensorEntry(NamedTuple):
    """One row of a table: the name of a tensor in files, and its place in the tree.

    `path` is that of a part (`joined_kernels.parts`), such as the queries' kernel, or of a whole
    joined parameter that the file has in the same order. `name` contains
    `{layer}` if there is one tensor per layer, and `{expert}` if there is one per expert; with
    `merged` a single tensor has all experts on its first axis. `paired` marks rows whose rotated
    dimensions are stored as pairs of neighbours instead of half-split. `tied`, unless None, limits
    the row to models whose output head is, or is not, the embedding. `fused` has the names, such as
    "query", of the tree's parts that the file's tensor combines along the outputs, one after the
    other or, if `interleaved`, an output of each in turn. `transposed` marks kernels that are
    stored [in, out]. Numbers in files are those of the tree plus `added`, or with `decay` -exp of
    them. With `flat` a file's tensor may divide the same numbers among other axes. With
    `heads_apart`, value heads that share a key head are apart in the file: the first of each key
    head, then the second of each, and so on.
    """

    name: str
    path: Path
    paired: bool = False
    tied: bool | None = None
    fused: tuple[str, ...] = ()
    transposed: bool = False
    added: int = 0
    merged: bool = False
    interleaved: bool = False
    decay: bool = False
    flat: bool = False
    heads_apart: bool = False


class Location(NamedTuple):
    """One tensor of a checkpoint, and the place in the parameter tree where its values belong.

    `name` is that of the tensor, and `entry` its row of the table. The values are the `section` of
    the leaf at `path`, and have `shape` there, for one layer and one expert. `layer` is None
    outside of layers; `index` is its index among the layers that are stacked with it. `head_dim` is
    the width of a head, and `rotary_width` the number of its rotated dimensions. `before` and
    `after` count the rows of other parts in the file's tensor, and `merged` the experts on its
    first axis. With `apart` (key heads, value heads of each), the value heads are in the order of
    `TensorEntry.heads_apart`.
    """

    name: str
    entry: TensorEntry
    path: Path
    shape: Shape
    section: Section
    head_dim: int
    rotary_width: int
    layer: int | None = None
    index: int = 0
    expert: int | None = None
    before: int = 0
    after: int = 0
    merged: int = 0
    apart: tuple[int, int] | None = None

    def within(self, scan_layers: bool) -> tuple[Path, tuple[int, ...]]:
        """Return the path of the leaf, and the index (layer, expert or neither) on its first axes.

        Without `scan_layers` each layer has separate leaves.
        """
        expert = () if self.expert is None else (self.expert,)
        if self.layer is None:
            return self.path, expert
        if scan_layers:
            return self.path, (self.index, *expert)
        return ("layers", str(self.layer), *self.path[1:]), expert

    @property
    def is_kernel(self) -> bool:
        """Whether the tensor is a matrix that multiplies activations."""
        return self.path[-1] == "kernel"

    @property
    def rows(self) -> Shape:
        """The shape of the tensor's values as rows, one per output: [out, in] for a kernel."""
        return self.shape[::-1] if self.is_kernel else self.shape

    @property
    def leaf_shape(self) -> Shape:
        """The shape of the whole leaf, for one layer and one expert."""
        count, *rest = self.rows
        rows = (count // self.section.width * self.section.size, *rest)
        return rows[::-1] if self.is_kernel else rows

    @property
    def stored_shape(self) -> Shape:
        """The shape of the whole tensor in the file."""
        count, *rest = self.rows
        shape = (self.before + count + self.after, *rest)
        shape = shape[::-1] if self.entry.transposed else shape
        return (self.merged, *shape) if self.merged else shape


def locations(table: Iterable[TensorEntry], config: DecoderConfig) -> Iterator[Location]:
    """Yield the location of each tensor that a checkpoint of this config must have, in order.

    The order is that of `table`. Raises InputError for a parameter without a name in the table.
    """
    known = parts(parameter_table(config), config)
    unnamed = set(known)
    joined = collections.defaultdict(list)
    for path, part in known.items():
        joined[part.path].append(path)
    in_order = []
    for entry in table:
        if entry.tied not in (None, config.tie_word_embeddings):
            continue
        if entry.path[0] != "layers":
            if (part := known.get(entry.path)) is not None:
                unnamed.discard(entry.path)
                in_order += of_entry(entry, part, config)
            continue
        for run in config.runs:
            path = (run.name, *entry.path[1:])
            if (part := known.get(path)) is not None:
                unnamed.discard(path)
            elif path in joined:
                part = _whole([known[one] for one in joined[path]])
                unnamed.difference_update(joined[path])
            else:
                continue
            layer_part = part._replace(shape=part.shape[1:])
            for index, layer in enumerate(run.layers):
                of_layer = entry._replace(name=entry.name.replace("{layer}", str(layer)))
                for location in of_entry(of_layer, layer_part, config):
                    in_order.append(location._replace(layer=layer, index=index))
    if unnamed:
        raise InputError(
            f"family={config.family!r}: it has no name for {'.'.join(min(unnamed))} "
            f"({len(unnamed)} such parameters in all); use the family that has such layers"
        )
    yield from in_order


def _whole(sections: Sequence[Part]) -> Part:
    """Return a joined parameter as one part, given its parts."""
    first = sections[0]
    outputs = sum(part.shape[-1] for part in sections)
    return Part(first.path, (*first.shape[:-1], outputs), Section())


def of_entry(entry: TensorEntry, part: Part, config: DecoderConfig) -> Iterator[Location]:
    """Yield the location of a tensor, or one location per expert if the part has experts."""
    whole = Location(entry.name, entry, *part, config.head_dim, config.rotary_width)
    recurrence = config.recurrence
    if entry.heads_apart and recurrence is not None:
        shared = recurrence.value_heads // recurrence.key_heads
        if shared > 1:
            whole = whole._replace(apart=(recurrence.key_heads, shared))
    if not (entry.merged or "{expert}" in entry.name):
        yield _among_fused(whole, config)
        return
    count, *rest = part.shape
    for expert in range(count):
        name = entry.name.replace("{expert}", str(expert))
        of_expert = whole._replace(name=name, shape=tuple(rest), expert=expert)
        if entry.merged:
            of_expert = of_expert._replace(merged=count)
        yield _among_fused(of_expert, config)


def _among_fused(location: Location, config: DecoderConfig) -> Location:
    """Return a location with the numbers of rows that its file's tensor has before and after it."""
    fused = location.entry.fused
    if not fused:
        return location
    heads = {"query": config.num_heads, "key": config.num_kv_heads, "value": config.num_kv_heads}
    if (recurrence := config.recurrence) is not None and "recurrence" in location.path:
        keys = recurrence.key_heads * recurrence.key_width
        values = recurrence.value_heads * recurrence.value_width
        heads = {"query": keys, "key": keys, "decay": recurrence.value_heads}
        heads |= dict.fromkeys(("value", "gate", "before", "after"), values)
    sizes = [heads.get(name, 1) for name in fused]
    index = next(fused.index(name) for name in reversed(location.entry.path) if name in fused)
    unit = location.rows[0] // sizes[index]
    before, after = (unit * sum(part) for part in (sizes[:index], sizes[index + 1 :]))
    return location._replace(before=before, after=after)


def lookup(tree: dict[str, Any], path: Path) -> Any:
    """Return the leaf at `path`, or None if the tree has no such leaf."""
    for key in path:
        if key not in tree:
            return None
        tree = tree[key]
    return tree


def allocate(table: dict[str, Any], dtype: Any) -> dict[str, Any]:
    """Return zeros for a table, aligned so that a CPU device need not copy them."""
    return jax.tree.map(lambda entry: aligned_zeros(entry.shape, entry.dtype(dtype)), table)


def canonical(
    table: Collection[TensorEntry], names: Collection[str], other: str = ""
) -> dict[str, str]:
    """Return the name in the table for each name of a checkpoint's tensor.

    They may differ in their prefix: some tools omit that of layer names ("model."), or put names of
    wrapping modules before or in place of it ("language_model.model.", "model.language_model.",
    "module."). A norm of the first layer shows which prefix is used; the name of the output head
    may begin with all or some of the wrapping modules. If `other` is not empty, the layers whose
    names begin with it are not the decoder's.
    """
    scales = (entry for entry in table if entry.path[-1] == "scale")
    norm = next(entry.name for entry in scales if entry.path[0] == "layers")
    head = next(entry.name for entry in table if entry.path[0] == "head" and entry.tied is False)
    base, dot, rest = norm.replace("{layer}", "0").partition(".")
    base += dot
    prefixes = {
        name.removesuffix(rest)
        for name in names
        if name == rest or (name.endswith("." + rest) and not (other and name.startswith(other)))
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
    """Return the locations of a decoder's tensors after checking that a checkpoint has them all.

    `found` are the shapes of its tensors by name. Embedding and head may have extra rows (padding,
    which is dropped). The tensors of `others` are required too, and names in `ignored` are
    optional. Raises InputError that begins with `source` and lists missing, unexpected and
    mis-shaped tensors.
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
        if wanted[name].entry.flat and math.prod(have) == math.prod(want):
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
