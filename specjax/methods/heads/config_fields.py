"""Parts of the tables of heads' fields (`head_fields.HeadPart`) that several layouts share."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any

import numpy as np

from specjax.errors import InputError
from specjax.loading.formats.families import registry
from specjax.loading.formats.families.llama import LLAMA
from specjax.loading.formats.families.schema import Part, Values
from specjax.loading.formats.family import Family
from specjax.loading.formats.unread_fields import Implied, check_unread
from specjax.loading.model import Model
from specjax.loading.typed_fields import Fields
from specjax.loading.user_messages import note
from specjax.methods.heads.head_fields import Export, HeadFields, HeadPart

_LAYER = re.compile(r"layers\.(\d+)\.")


def layers(
    family: Family, fitting: Collection[str], whose: str, most: int | None = None
) -> HeadPart:
    """Return the part for a head's layers, which are a family's; it is the field `decoder`.

    The layers have the target's vocabulary, and are as many as the tensors show, at most `most`. A
    config may state one of the model types `fitting`, or none; `whose` names them in the error.
    Without a field the tensors show whether queries, keys and values have biases. Reading raises
    InputError for a vocabulary smaller than the target's.
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
        say_count(fields, "num_hidden_layers", count)
        fields.read_tokens()
        biased = any(name.endswith(".q_proj.bias") for name in fields.tensors)
        values = {
            "attention_bias": fields.flag("qkv_bias", biased),
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
            **_dtype(export),
        }

    return HeadPart(read, write)


def _dtype(export: Export) -> dict[str, Any]:
    return {"dtype": export.dtype, "torch_dtype": export.dtype}


DTYPE = HeadPart(write=_dtype)


def say_count(fields: Fields, name: str, actual: int) -> None:
    """Log a line if the field `name`, a number, differs from `actual`, the number in the file."""
    stated = fields.get(name)
    if stated not in (None, actual):
        fields.integer(name)
        note(f"{fields.where}: {name}={stated}, and the file has {actual}: these are used")


def shown_by_tensors(
    path: str | None,
    names: tuple[str, ...],
    found: Callable[[Mapping[str, np.ndarray]], Any],
    said: Callable[[Any], str] = "the tensors say {}; repair config.json".format,
) -> Part:
    """Return a part for a value that a file's tensors show.

    `found` returns the value given the tensors. Fields called `names` must agree with it, which
    `said` words. The field `path` of the head's config gets the value, and is written under the
    first name; without a path it is only compared.
    """

    def read(fields: HeadFields, known: Values) -> Values:
        value = found(fields.tensors)
        for name in names:
            if fields.get(name) not in (None, value):
                raise fields.fail(name, said(value))
        return {path: value} if path else {}

    def write(export: Export) -> dict[str, Any]:
        return {names[0]: attrgetter(path)(export.config)} if path else {}

    return HeadPart(read, write)


def unwritten(part: Part) -> Part:
    """Return a part whose fields are only read."""
    return replace(part, write=HeadPart.write)


def ignored(*names: str) -> Part:
    """Return a part for fields without an effect on a stored head, which are not written."""

    def read(fields: Fields, known: Values) -> Values:
        fields.asked |= set(names)
        return {}

    return Part(read)


def section(
    name: str, fields_read: Collection[str], supported: Implied, what: str
) -> Part:
    """Return a part that refuses other fields in a section than those that are read from it.

    `supported` are fields that may be there with these values only; `what` names a head in the
    error.
    """

    def read(fields: HeadFields, known: Values) -> Values:
        inner = fields.file.section(name)
        inner.asked |= set(fields_read)
        check_unread(inner, supported, what)
        fields.asked |= inner.values.keys()
        return {}

    return HeadPart(read)


def only(values: Mapping[str, Any]) -> Part:
    """Return a part for fields that must have these values, or be missing; none are written."""

    def read(fields: Fields, known: Values) -> Values:
        for name, value in values.items():
            fields.only(name, value)
        return {}

    return Part(read)


def _read_width(fields: HeadFields, known: Values) -> Values:
    """Return the width of the target's features, that of the head's layers by default."""
    name, width = "target_hidden_size", fields.target.config.hidden_size
    if fields.count(name, known["decoder"].hidden_size) != width:
        name = name if name in fields.values else "hidden_size"
        raise fields.fail(name, f"{fields.target.name} has {width}; use a head made for it")
    return {"target_hidden_size": width}


TARGET_WIDTH = HeadPart(
    _read_width, lambda export: {"target_hidden_size": export.config.target_hidden_size}
)


def _read_depth(fields: HeadFields, known: Values) -> Values:
    """Raise InputError if a config says that the head's target has another number of layers."""
    depth = fields.target.config.num_layers
    # Some of DeepSpec's configs count the layers that are read.
    if fields.get("num_target_layers") not in (None, depth, len(known["taps"])):
        raise fields.fail(
            "num_target_layers", f"{fields.target.name} has {depth}; use a head made for it"
        )
    return {}


TARGET_DEPTH = HeadPart(
    _read_depth, lambda export: {"num_target_layers": export.head.target.num_layers}
)


def speculators(
    classes: Mapping[str, str], kind: Callable[[Any], str], tokens: Callable[[Any], int]
) -> HeadPart:
    """Return the part for the fields of the speculators library that all of its heads have.

    `classes` are the library's classes of heads by its names of the methods. `kind` returns the
    name of the method for a head's config, and `tokens` the default length of drafts.
    """

    def read(fields: HeadFields, known: Values) -> Values:
        fields.only("speculators_model_type", *classes)
        fields.get("speculators_config")
        fields.get("tie_word_embeddings")
        return {}

    def write(export: Export) -> dict[str, Any]:
        name = kind(export.config)
        proposal = {"proposal_type": "greedy", "speculative_tokens": tokens(export.config)}
        return {
            "architectures": [classes[name]],
            "speculators_model_type": name,
            "speculators_version": "0.9.0",
            "speculators_config": {
                "algorithm": name,
                "proposal_methods": [proposal],
                "default_proposal_method": "greedy",
                "verifier": verifier(export.head.target.name, export.target),
            },
            "tie_word_embeddings": False,
            "torch_dtype": export.dtype,
        }

    return HeadPart(read, write)


def verifier(name: str, target: Model) -> dict[str, Any]:
    """Return the description of a head's target by its `name` and its family.

    The speculators library compares the architectures, those of the target's config.json in
    transformers, with a verifier's; vLLM reads the name alone. A model of a family that specjax
    does not read counts as Llama.
    """
    family = registry.FAMILIES.get(target.config.family, LLAMA)
    return {
        "name_or_path": name,
        "architectures": [family.architecture],
        "model_type": family.model_type,
    }
