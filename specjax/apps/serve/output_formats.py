"""The fields by which requests ask for a form of the output, under OpenAI's and vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specjax.engine.requests import GRAMMARS
from specjax.errors import InputError, shown
from specjax.fields import unknown_name

_GUIDED = {"guided_regex": "regex", "guided_json": "json_schema", "guided_choice": "choice"}
_STRUCTURED = {"regex": "regex", "json": "json_schema", "choice": "choice"}
_ANY_OBJECT = {"type": "object"}
FORMAT_FIELDS = ("response_format", "structured_outputs", *_GUIDED)
"""The fields that `sampling_fields` reads."""


def sampling_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters that the format fields of a request's body stand for.

    All of `GRAMMARS` are in it if one is. Raises InputError, which names the field.
    """
    found = [{field: values[name]} for name, field in _GUIDED.items() if name in values]
    if "structured_outputs" in values:
        found += _structured(values["structured_outputs"])
    if "response_format" in values:
        found += _of_response_format(values["response_format"])
    found += [{name: values[name]} for name in GRAMMARS if name in values]
    if not found:
        return {}
    asked = [fields for fields in found if fields]
    if len(asked) > 1:
        first, second = (next(iter(fields)) for fields in asked[:2])
        raise InputError(
            f"the body asks for {first} and for {second}: leave one of the two out"
            if first != second
            else f"the body asks for {first} twice: leave one of the two out"
        )
    return dict.fromkeys(GRAMMARS) | (asked[0] if asked else {})


def _structured(value: Any) -> list[dict[str, Any]]:
    """Return each of the sampling parameters of vLLM's `structured_outputs`."""
    if not isinstance(value, Mapping):
        raise InputError(f"structured_outputs={shown(value)}: use an object")
    found = []
    for name, part in value.items():
        if part is None or (name == "json_object" and part is False):
            continue
        if name == "json_object" and part is True:
            found.append({"json_schema": _ANY_OBJECT})
        elif name in _STRUCTURED:
            found.append({_STRUCTURED[name]: part})
        else:
            known = dict.fromkeys((*_STRUCTURED, "json_object"))
            raise InputError(unknown_name("structured_outputs.", name, part, known))
    return found


def _of_response_format(value: Any) -> list[dict[str, Any]]:
    """Return the sampling parameter of OpenAI's `response_format`; an empty one for any text."""
    remedy = (
        'use {"type": "text"}, {"type": "json_object"}, or {"type": "json_schema", "json_schema": '
        '{"name": ..., "schema": ...}}'
    )
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return [{}]
    if kind == "json_object":
        return [{"json_schema": _ANY_OBJECT}]
    inner = value.get("json_schema") if kind == "json_schema" else None
    if not isinstance(inner, Mapping) or not isinstance(inner.get("schema"), Mapping):
        raise InputError(f"response_format={shown(value)}: {remedy}")
    return [{"json_schema": inner["schema"]}]
