"""What a layout's fields are read from and written for: a head's config.json, and an export."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from specjax.errors import shown
from specjax.loading.formats.families.schema import Part, Values
from specjax.loading.model import Model
from specjax.loading.typed_fields import Fields
from specjax.methods.heads.checkpoint import CONFIG, Checkpoint
from specjax.methods.heads.eagle3_layer_ids import Convention
from specjax.methods.heads.head import Head

LAYERS = "transformer_layer_config"
"""The section in which the speculators library has the config of a head's layers."""


class HeadFields(Fields):
    """The fields of a head's config.json and of its sections, as those of one object.

    A null field is missing. `file` has them as they are stored. `tensors` are the file's by the layout's names, `target` is the model
    that the head is read for, and `layer_ids` says what the ids of layers number. `stated` is the
    number of tokens that the head was made for, which counts padding (`read_tokens`). Raises
    InputError for a field with two values.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        sections: Collection[str],
        tensors: dict[str, np.ndarray],
        target: Model,
        layer_ids: Convention | None = None,
    ) -> None:
        self.file = Fields(str(checkpoint.directory / CONFIG), checkpoint.config)
        super().__init__(self.file.where, _in_one(self.file, sections))
        self.directory, self.is_ours = checkpoint.directory, checkpoint.is_ours
        self.tensors, self.target, self.layer_ids = tensors, target, layer_ids
        self.stated = target.config.vocab_size

    def read_tokens(self, default: int | None = None) -> None:
        """Read the number of tokens that the head was made for, `default` if it is missing.

        Raises InputError if there are fewer than the target's.
        """
        self.stated, known = self.count("vocab_size", default), self.target.config.vocab_size
        if self.stated < known:
            raise self.fail(
                "vocab_size", f"{self.target.name} has {known} tokens; use a head made for it"
            )


def _in_one(file: Fields, sections: Collection[str]) -> dict[str, Any]:
    """Return the fields of a config and of its sections by name, without null ones."""
    values = _stated({name: file.values[name] for name in file.values if name not in sections})
    for section in sections:
        inner = _stated(file.section(section).values)
        if section == LAYERS:
            # A complete config of its own: common fields of both need not agree.
            values = {**inner, **values, "model_type": inner.get("model_type")}
            continue
        for name, value in inner.items():
            if values.get(name, value) != value:
                raise file.fail(name, f"{section} has {shown(value)}; repair config.json")
        values |= inner
    return _stated(values)


def _stated(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class Export:
    """A head that is written for a target, in the layout called `format`.

    `layer_ids` says what ids of layers are to number. `rows` is the number of tokens that the
    layout states, with or without the target's padding, and `dtype` that of the head's tensors.
    """

    head: Head
    target: Model
    format: str
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
    parts; `write` returns fields of the file. Where a `Part` suffices, such as `schema.flag`, its
    paths are names of the config's fields.
    """

    read: Callable[[HeadFields, Values], Values] = _nothing
    write: Callable[[Export], Mapping[str, Any]] = _nothing
