"""The fields of a head's config.json: how parts read and write them, and parts of several layouts.

Where a `schema.Part` suffices, such as `schema.flag`, its path is a name in the head's config.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from specjax.errors import InputError, shown
from specjax.loading.formats.families import registry
from specjax.loading.formats.families.llama import LLAMA
from specjax.loading.formats.families.schema import Part, Values
from specjax.loading.formats.family import Family
from specjax.loading.formats.unread_fields import is_inert
from specjax.loading.model import Model
from specjax.loading.typed_fields import Fields
from specjax.loading.user_messages import note
from specjax.methods.heads.checkpoint import CONFIG, Checkpoint
from specjax.methods.heads.eagle3_layer_ids import Convention
from specjax.methods.heads.head import Head

LAYERS = "transformer_layer_config"
"""The section in which the speculators library has a complete config of a head's layers."""
OF_SPECULATORS = "speculators_model_type"
"""The field by which the speculators library names the method."""
_LAYER = re.compile(r"layers\.(\d+)\.")


class HeadFields(Fields):
    """The fields of a head's config.json and of its sections, as those of one object.

    A null field is missing. `sections` are those of the config. `tensors` are the file's by the
    layout's names, `target` is the model that the head is read for, and `layer_ids` says what the
    ids of layers number. `stated` is the number of tokens that the head was made for, which counts
    padding (`read_tokens`). Raises InputError for a field with two values.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        sections: Collection[str],
        tensors: dict[str, np.ndarray],
        target: Model,
        layer_ids: Convention | None = None,
    ) -> None:
        where, self.sections = str(checkpoint.directory / CONFIG), dict[str, Fields]()
        values = _stated(checkpoint.config)
        for section in sections:
            file = Fields(where, values)
            inner = self.sections[section] = file.section(section)
            stated = _stated(inner.values)
            outer = {name: value for name, value in values.items() if name != section}
            for name, value in stated.items():
                # Both are then configs as tools write them, with fields of no effect.
                apart = section == LAYERS and (is_inert(name) or name == "tie_word_embeddings")
                if not apart and outer.get(name, value) != value:
                    raise file.fail(name, f"{section} has {shown(value)}; repair config.json")
            values = {**outer, **stated}
        super().__init__(where, values)
        self.directory, self.is_ours = checkpoint.directory, checkpoint.is_ours
        self.tensors, self.target, self.layer_ids = tensors, target, layer_ids
        self.stated = target.config.vocab_size

    def read_tokens(self, default: int | None = None) -> None:
        """Read the number of tokens that the head was made for, `default` if it is missing.

        Raises InputError if there are fewer than the target's.
        """
        self.stated, known = self.count("vocab_size", default), self.target.config.vocab_size
        if self.stated < known:
            raise self.misfit("vocab_size", f"{known} tokens")

    def agree(self, name: str, value: int, problem: str) -> None:
        """Raise InputError, which says the problem, unless a field is missing or has this value."""
        typed = self.flag if isinstance(value, bool) else self.integer
        if typed(name, value) != value:
            raise self.fail(name, problem)

    def misfit(self, name: str, actual: object) -> InputError:
        """Return the InputError for a field that is not the target's, which is `actual`."""
        return self.fail(name, f"{self.target.name} has {actual}; use a head made for it")

    def say_count(self, name: str, actual: int) -> None:
        """Log a line if the field `name`, a number, differs from `actual`, that in the file."""
        stated = self.get(name)
        if stated not in (None, actual):
            self.integer(name)
            note(f"{self.where}: {name}={stated}, and the file has {actual}: these are used")


def _stated(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class Export:
    """A head that is written for a target.

    `layer_ids` says what ids of layers are to number. `rows` is the number of tokens that the
    layout states, with or without the target's padding, and `dtype` that of the head's tensors.
    """

    head: Head
    target: Model
    layer_ids: Convention
    rows: int
    dtype: str

    @property
    def config(self) -> Any:
        """The head's config."""
        return self.head.config


def _nothing(*_: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class HeadPart(Part):
    """Fields of config.json whose values depend on more than the head's config.

    `read` returns fields of that config, given those of the file and the values read by earlier
    parts; `write` returns fields of the file.
    """

    read: Callable[[HeadFields, Values], Values] = _nothing
    write: Callable[[Export], Mapping[str, Any]] = _nothing


def layers(
    family: Family, fitting: Collection[str], whose: str, most: int | None = None
) -> HeadPart:
    """Return the part for a head's layers, which are a family's; it is the field `decoder`.

    The layers have the target's vocabulary, and are as many as the tensors show, at most `most`. A
    config may state one of the model types `fitting`, or none; `whose` names them in the error.
    """

    def read(fields: HeadFields, known: Values) -> Values:
        if fields.get("model_type") not in (None, *fitting):
            raise fields.fail("model_type", f"use a head whose {whose}")
        numbers = [int(found[1]) for found in map(_LAYER.match, fields.tensors) if found]
        count, target = max(numbers, default=0) + 1, fields.target.config
        if most is not None and count > most:
            raise InputError(
                f"{fields.where}: the file has {count} layers, and heads of one layer are "
                "supported; use such a head"
            )
        fields.say_count("num_hidden_layers", count)
        fields.read_tokens()
        values = {
            **fields.values,
            "num_hidden_layers": count,
            # The target's value: the field is about its embedding and head.
            "tie_word_embeddings": target.tie_word_embeddings,
        }
        stated = Fields(fields.where, values)
        decoder = family.read(stated, target.vocab_size, target.unused_tokens)
        fields.asked |= stated.asked
        return {"decoder": replace(decoder, family="llama")}

    def write(export: Export) -> dict[str, Any]:
        return {
            "model_type": family.model_type,
            "vocab_size": export.rows,
            **family.write(export.config.decoder),
            "tie_word_embeddings": False,
            "dtype": export.dtype,
            "torch_dtype": export.dtype,
        }

    return HeadPart(read, write)


def unwritten(part: Part) -> Part:
    """Return a part whose fields are only read."""
    return replace(part, write=_nothing)


def ignored(*names: str) -> Part:
    """Return a part for fields without an effect on a stored head, which are not written."""

    def read(fields: Fields, known: Values) -> Values:
        fields.asked |= set(names)
        return {}

    return Part(read)


def _read_width(fields: HeadFields, known: Values) -> Values:
    """Return the width of the target's features, that of the head's layers by default."""
    name, width = "target_hidden_size", fields.target.config.hidden_size
    if fields.count(name, known["decoder"].hidden_size) != width:
        raise fields.misfit(name if name in fields.values else "hidden_size", width)
    return {"target_hidden_size": width}


def _read_depth(fields: HeadFields, known: Values) -> Values:
    """Raise InputError if a config says that the head's target has another number of layers."""
    depth = fields.target.config.num_layers
    # Some of DeepSpec's configs count the layers that are read.
    if fields.get("num_target_layers") not in (None, depth, len(known["taps"])):
        raise fields.misfit("num_target_layers", depth)
    return {}


TARGET_WIDTH = HeadPart(
    _read_width, lambda export: {"target_hidden_size": export.config.target_hidden_size}
)
TARGET_DEPTH = HeadPart(
    _read_depth, lambda export: {"num_target_layers": export.head.target.num_layers}
)


def speculators(
    classes: Mapping[str, str], kind: Callable[[Any], str], tokens: Callable[[Any], int]
) -> HeadPart:
    """Return the part for the fields of the speculators library that all of its heads have.

    `classes` are the library's classes of heads by its names of the methods. `kind` returns the
    name of the method for a head's config, and `tokens` the default length of drafts. The verifier
    is named as in its own config.json: the library compares `architectures`, and vLLM reads the
    name alone. A target of a family that no file names counts as Llama.
    """

    def read(fields: HeadFields, known: Values) -> Values:
        fields.only(OF_SPECULATORS, *classes)
        fields.asked |= {"speculators_config", "tie_word_embeddings"}
        return {}

    def write(export: Export) -> dict[str, Any]:
        name, config = kind(export.config), export.config
        family = registry.FAMILIES.get(export.target.config.family, LLAMA)
        return {
            "architectures": [classes[name]],
            OF_SPECULATORS: name,
            "speculators_version": "0.9.0",
            "speculators_config": {
                "algorithm": name,
                "proposal_methods": [
                    {"proposal_type": "greedy", "speculative_tokens": tokens(config)}
                ],
                "default_proposal_method": "greedy",
                "verifier": {
                    "name_or_path": export.head.target.name,
                    "architectures": [family.architecture],
                    "model_type": family.model_type,
                },
            },
            "tie_word_embeddings": False,
            "torch_dtype": export.dtype,
        }

    return HeadPart(read, write)
