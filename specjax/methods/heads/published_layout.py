"""Heads in the layouts of other tools: one description of a layout serves reading and writing.

A layout is a table of tensors (`TensorEntry`) and of the fields of config.json (`Part`), like that
of a family of models. Methods have the layouts of their heads beside them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from specjax.errors import InputError
from specjax.loading.formats import build_parameters, parameter_names, tensor_layout
from specjax.loading.formats.families.schema import Part
from specjax.loading.formats.families.tensor_names import table
from specjax.loading.formats.parameter_names import Location, Path, Shape, TensorEntry
from specjax.loading.formats.safetensors_files import WEIGHTS
from specjax.loading.formats.unread_fields import check_unread, implied
from specjax.loading.model import Model
from specjax.methods.heads.checkpoint import Checkpoint, match
from specjax.methods.heads.config_fields import Export, HeadFields, HeadPart
from specjax.methods.heads.draft_vocabulary import OFFSETS, DraftVocabulary, VocabularyMap
from specjax.methods.heads.eagle3_layer_ids import Convention
from specjax.methods.heads.head import Head, TargetMetadata
from specjax.methods.heads.shared_with_target import check_copy, target_embedding, target_head
from specjax.models.joined_kernels import parts

Tensors = dict[str, np.ndarray]
_AXES = ("{head}", "{block}")
"""What numbers the first axes of a stacked parameter in the names of its tensors, in order."""
_REPEATED: Mapping[str, Callable[[Any], int]] = {
    "{layer}": lambda config: config.decoder.num_layers,
    "{tap}": lambda config: len(config.taps),
}
"""What numbers parameters of which there are several, and how many there are for a config."""


class Signs(NamedTuple):
    """By what a layout is recognized: patterns of names of tensors, and a key of config.json.

    Some tensor must match each of `names`, and none `without`.
    """

    names: tuple[str, ...] = ()
    without: str | None = None
    key: str | None = None

    def fit(self, config: Mapping[str, Any], names: Collection[str]) -> bool:
        """Return whether a config and the names of tensors have these signs."""

        def some(pattern: str) -> bool:
            return any(re.fullmatch(pattern, name) for name in names)

        if self.key is not None and self.key not in config:
            return False
        return all(map(some, self.names)) and not (self.without and some(self.without))


class Copy(NamedTuple):
    """A tensor that repeats an array of the target, which is compared when it is read.

    `used_by` says in messages what uses the array. It is `written` for some heads. An output head
    has the rows of the draft vocabulary, and belongs to heads without one of their own.
    """

    name: str
    array: Literal["embedding", "head"]
    used_by: str
    written: Callable[[Head], bool] = lambda head: False

    def belongs(self, config: Any) -> bool:
        """Return whether the file of a head with this config may have the tensor."""
        return self.array == "embedding" or config.shares_output

    def own(self, target: Model, draft_ids: np.ndarray | None) -> np.ndarray:
        """Return the target's array, of the tokens that can be drafted."""
        is_head = self.array == "head"
        return target_head(target, draft_ids) if is_head else target_embedding(target)


@dataclass(frozen=True)
class PublishedLayout:
    """A layout called `name` for heads of one `kind`, whose configs are of the class `config`.

    `fields` are the parts of config.json by section; "" is the top. They are read in order, and a
    field that `what` cannot have is refused.
    `tensors` are the parameters: a row applies to heads that have its path, once per layer or tap
    if the path contains `{layer}` or `{tap}`, and once per entry of a stacked parameter if the name
    contains `{head}` or `{block}`; names may contain fields of `{config}`, the head's.
    Parameters at the paths `optional` are zero where a file has none of their tensors. `zeros`
    returns the names and shapes of tensors that the layout has beside them, all zero. `copies` are
    those of the target's arrays. With `pads`, the layout counts the target's padding among the
    tokens, and has rows for it.

    `renamed` returns the table's names for others of a file's names. `prepare` returns a head in
    the form in which the layout, of the name that is its last argument, can hold it; it raises
    InputError if there is none. `finish` returns parameters that are not tensors of the file.
    `weights` is the name of the written file.
    """

    name: str
    kind: str
    config: type
    signs: Signs
    fields: Mapping[str, tuple[Part, ...]]
    tensors: tuple[TensorEntry, ...]
    what: str
    vocabulary: VocabularyMap = OFFSETS
    optional: tuple[Path, ...] = ()
    zeros: Callable[[Any], Mapping[str, Shape]] = lambda config: {}
    copies: tuple[Copy, ...] = ()
    pads: bool = False
    renamed: Callable[[Collection[str]], Mapping[str, str]] = lambda names: {}
    prepare: Callable[[Head, Model, str], Head] = lambda head, target, format: head
    finish: Callable[[HeadFields, Any], dict[str, Any]] = lambda fields, config: {}
    weights: str = WEIGHTS

    def read(
        self,
        checkpoint: Checkpoint,
        target: Model,
        metadata: TargetMetadata,
        training: dict[str, Any],
        layer_ids: Convention | None = None,
    ) -> Head:
        """Return the head in a checkpoint of this layout.

        `metadata` identifies the target, and `training` is stored with the head. `layer_ids` says
        what ids of layers number, where the layout does not. Raises InputError for fields, names
        and shapes that are missing, unknown or inconsistent, and for another target's head.
        """
        other = self.renamed(checkpoint.tensors)
        tensors = {other.get(name, name): value for name, value in checkpoint.tensors.items()}
        if len(tensors) != len(checkpoint.tensors):
            raise InputError(
                f"{checkpoint.directory}: two tensors have the same meaning; delete one of each "
                "pair"
            )
        sections = [name for name in self.fields if name]
        fields = HeadFields(checkpoint, sections, tensors, target, layer_ids)
        known: dict[str, Any] = {}
        for part in itertools.chain(*self.fields.values()):
            known |= part.read(fields, known)
        vocabulary = self.vocabulary.read(fields)
        agreeing = implied(known.get("decoder", target.config))
        check_unread(fields, agreeing, self.what)
        config = self.config(draft_vocab_size=vocabulary.size, **known)
        params = self._read_params(fields, config, vocabulary) | self.finish(fields, config)
        return Head(self.kind, config, params, vocabulary.ids, metadata, training)

    def write(
        self, head: Head, target: Model, layer_ids: Convention
    ) -> tuple[dict[str, Any], Tensors]:
        """Return the config and the tensors of a head that `prepare` returned.

        Raises InputError for values that the layout cannot express.
        """
        padding = target.padding_embeddings if self.pads else None
        rows = head.target.vocab_size + (0 if padding is None else len(padding))
        tensors = self._write_params(head, rows)
        dtype = next(iter(tensors.values())).dtype
        for name, shape in self.zeros(head.config).items():
            tensors[name] = np.zeros(shape, dtype)
        for copy in self.copies:
            if copy.written(head):
                tensors[copy.name] = copy.own(target, head.draft_ids)
        if head.draft_ids is not None:
            tensors |= self.vocabulary.write(head.draft_ids, rows)
        export = Export(head, target, layer_ids, rows, dtype.name)
        sections: dict[str, dict[str, Any]] = {}
        for section, section_parts in self.fields.items():
            values = sections.setdefault(section, {})
            for part in section_parts:
                values |= part.write(export if isinstance(part, HeadPart) else head.config)
        return {**sections.pop(""), **{name: one for name, one in sections.items() if one}}, tensors

    def _locations(self, config: Any) -> Iterator[tuple[Location, bool]]:
        """Yield the place of each tensor in a head's tree, and whether it has a row per token."""
        decoder, leaves = getattr(config, "decoder", None), config.parameter_table()
        widths = (decoder.head_dim, decoder.rotary_width) if decoder else (1, 0)
        known = parts(leaves, decoder)
        for entry in self.tensors:
            repeats = (of(config) for step, of in _REPEATED.items() if step in entry.path)
            for number in range(next(repeats, 1)):
                path = tuple(step.format(layer=number, tap=number) for step in entry.path)
                if (part := known.get(path)) is None:
                    continue
                over_tokens = "vocab" in parameter_names.lookup(leaves, part.path).axes
                count = sum(axis in entry.name for axis in _AXES)
                for index in np.ndindex(*part.shape[:count]):
                    head, block = (*index, None, None)[:2]
                    axes = {"head": head, "block": block, "config": config}
                    name = entry.name.format(layer=number, tap=number, **axes)
                    stored = (part.path, part.shape[count:], part.section, *widths)
                    yield (
                        Location(name, entry, *stored, layer=head, index=head, expert=block),
                        over_tokens,
                    )

    def _read_params(
        self, fields: HeadFields, config: Any, vocabulary: DraftVocabulary
    ) -> dict[str, Any]:
        """Return the parameter tree; raise InputError for tensors that do not fit the config."""
        where, tensors, target = fields.directory, dict(fields.tensors), fields.target
        locations = {}
        for location, over_tokens in self._locations(config):
            name = location.name
            locations[name] = location
            if over_tokens and name in tensors:
                tensors[name] = vocabulary.fit(tensors[name], drafted=location.is_kernel)
        for copy in self.copies:
            if copy.name in tensors.keys() - locations.keys() and copy.belongs(config):
                rows = vocabulary.fit(tensors.pop(copy.name), drafted=copy.array == "head")
                own = copy.own(target, vocabulary.ids)
                rows = np.atleast_1d(rows)[: len(own)]
                check_copy(where, copy.name, rows, own, target, copy.used_by)
        for name in self.zeros(config):
            if np.any(tensors.pop(name, 0)):
                raise InputError(
                    f"{where}: {name} is not zero, and heads with it are not supported"
                )
        dtype = next((tensors[name].dtype for name in locations if name in tensors), None)
        for path in self.optional:
            ours = {name: one for name, one in locations.items() if one.entry.path == path}
            if not ours.keys() & tensors.keys():
                tensors |= {name: np.zeros(one.stored_shape, dtype) for name, one in ours.items()}
        wanted = {name: location.stored_shape for name, location in locations.items()}
        match(where, tensors, wanted, self.vocabulary.names)
        return build_parameters.stored_tree(config.parameter_table(), locations.values(), tensors)

    def _write_params(self, head: Head, rows: int) -> Tensors:
        """Return the tensors of a head's parameters, with `rows` rows where they are per token."""
        params, tensors = jax.tree.map(np.asarray, head.params), {}
        for location, over_tokens in self._locations(head.config):
            path, index = location.within(scan_layers=True)
            leaf = parameter_names.lookup(params, path)[index]
            stored = tensor_layout.to_stored(leaf, location).reshape(location.stored_shape)
            padded = over_tokens and (head.draft_ids is None or not location.is_kernel)
            if padded and len(stored) < rows:
                stored = np.pad(stored, ((0, rows - len(stored)), (0, 0)))
            tensors[location.name] = stored
        return tensors


def decoder_tensors(layer: str, path: Path) -> tuple[TensorEntry, ...]:
    """Return the rows of a decoder's tensors by the names of transformers, without its prefix.

    `layer` begins the names of a layer's tensors, and `path` is that of the layer in the tree.
    """
    names = {"layer": layer, "embed": "embed_tokens", "final_norm": "norm"}
    return tuple(
        entry._replace(path=(*path, *entry.path[1:])) if entry.path[0] == "layers" else entry
        for entry in table("huggingface", names)
        if not entry.tied
    )
