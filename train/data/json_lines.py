"""Conversations as JSON lines, as other programs write them: `read_rows`.

Each line is an object with the keys id, category, source, licence, temperature, prompt_token_ids
and response_token_ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from specjax.errors import InputError, shown
from specjax.fields import Text
from specjax.files.json_files import read_json_lines
from specjax.files.paths import input_file
from train.data.examples import Example

_KINDS = {
    "id": int,
    "category": str,
    "source": str,
    "licence": str,
    "temperature": float | int,
    "prompt_token_ids": list,
    "response_token_ids": list,
}
_LARGEST_ID, _LARGEST_TOKEN = 2**63 - 1, 2**31 - 1
_LARGEST_TEMPERATURE = 1e6


def read_rows(path: str | Path) -> Iterator[Example]:
    """The conversations of a file, line by line; raises InputError with file and line."""
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
    for name, kind in _KINDS.items():
        if not isinstance(row.get(name), kind) or isinstance(row[name], bool):
            raise InputError(
                f"{where}: {name}={shown(row.get(name))} is missing or of another type; write "
                f"the keys {', '.join(_KINDS)}"
            )
    if not 0 <= row["id"] <= _LARGEST_ID:
        raise InputError(f"{where}: id={shown(row['id'])}: must be at least 0 and below 2**63")
    if not 0 <= row["temperature"] <= _LARGEST_TEMPERATURE:
        raise InputError(
            f"{where}: temperature={shown(row['temperature'])}: must be at least 0 and at most "
            f"{_LARGEST_TEMPERATURE:g}"
        )
    for name in ("category", "source", "licence"):
        Text(empty=True).check(f"{where}: {name}", row[name])
    prompt, response = row["prompt_token_ids"], row["response_token_ids"]
    for name, ids in (("prompt_token_ids", prompt), ("response_token_ids", response)):
        if not ids or not all(type(i) is int and 0 <= i <= _LARGEST_TOKEN for i in ids):
            raise InputError(
                f"{where}: {name}={shown(ids)}: must be a list of token ids that is not empty"
            )
    mask = np.zeros(len(prompt) + len(response), bool)
    mask[len(prompt) :] = True
    return Example(
        tokens=np.array(prompt + response, np.int32),
        loss_mask=mask,
        category=row["category"],
        temperature=float(row["temperature"]),
        id=row["id"],
        source=row["source"],
        licence=row["licence"],
    )
