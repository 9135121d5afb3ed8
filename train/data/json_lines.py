"""A reader of conversations that other programs wrote as JSON lines.

Each line is an object with the keys id, category, source, licence, temperature, prompt_token_ids
and response_token_ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specjax.errors import InputError, shown
from specjax.fields import Number, Text, Whole
from specjax.files.json_files import read_json_lines
from specjax.files.path_checks import input_file
from train.data.examples import Example

_ABOVE_TOKEN_IDS = 2**31


@dataclass(frozen=True)
class TokenIds:
    """The field type of a non-empty list of token ids."""

    def check(self, name: str, value: Any) -> list[int]:
        """Return `value` if it is a non-empty list of token ids.

        Raises InputError, which names the field `name`, otherwise.
        """
        listed = isinstance(value, list) and len(value) > 0
        if not listed or not all(type(i) is int and 0 <= i < _ABOVE_TOKEN_IDS for i in value):
            raise InputError(f"{name}={shown(value)}: use a list of token ids that is not empty")
        return value


_KINDS = {
    "id": Whole(0, 2**63 - 1),
    "category": Text(empty=True),
    "source": Text(empty=True),
    "licence": Text(empty=True),
    "temperature": Number(0.0, 1e6),
    "prompt_token_ids": TokenIds(),
    "response_token_ids": TokenIds(),
}


def read_rows(path: str | Path) -> Iterator[Example]:
    """Yield the conversations in a JSON-lines file.

    Raises InputError, which names file and line, for an invalid line.
    """
    first: dict[int, str] = {}
    for where, row in read_json_lines(input_file("input", path, pipe=True), "input"):
        example = _example(row, where)
        earlier = first.setdefault(example.id, where)
        if earlier is not where:
            raise InputError(
                f"{where}: id={example.id} is taken, by {earlier}; give each row its own"
            )
        yield example


def _example(row: dict[str, Any], where: str) -> Example:
    given = {name: kind.check(f"{where}: {name}", row.get(name)) for name, kind in _KINDS.items()}
    prompt, response = given.pop("prompt_token_ids"), given.pop("response_token_ids")
    tokens = np.array(prompt + response, np.int32)
    return Example(tokens, np.arange(len(tokens)) >= len(prompt), **given)
