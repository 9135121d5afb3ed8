"""The templates of prompts and the words that fill them, read from prompt_templates.json."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

from specjax.files.json_files import read_json_file

_DATA = read_json_file(Path(__file__).with_suffix(".json"))
TEMPLATES: dict[str, list[str]] = _DATA["templates"]
"""Prompts by kind, with fields in braces; those about a given text have its fields."""
_WORDS: dict[str, list[str]] = _DATA["words"]
"""What the fields of templates are filled with, beside numbers."""
_SAME_WORDS = {"other": "name", "second": "topic"}
_NUMBERS: dict[str, Callable[[random.Random], int]] = {
    "few": lambda rng: rng.randint(2, 9),
    "some": lambda rng: rng.randint(11, 48),
    "many": lambda rng: 10 * rng.randint(6, 60),
    "tens": lambda rng: 10 * rng.randint(1, 9),
    "percent": lambda rng: 5 * rng.randint(1, 15),
}


def fill(template: str, rng: random.Random) -> str:
    """Return a template with its fields replaced by words and numbers that `rng` chooses.

    No word is chosen twice.
    """
    drawn: dict[str, str] = {}
    for field, kind in re.findall(r"(\{([a-z]+)\d*\})", template):
        if field in drawn:
            continue
        if kind in _NUMBERS:
            drawn[field] = str(_NUMBERS[kind](rng))
        else:
            words = _WORDS[_SAME_WORDS.get(kind, kind)]
            drawn[field] = rng.choice([word for word in words if word not in drawn.values()])
    whole = re.sub(r"\{[a-z]+\d*\}", lambda match: drawn[match[0]], template)
    return whole[0].upper() + whole[1:]
