"""Files of measured acceptance rates of a drafter's candidates by rank, stored beside heads."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specjax.errors import InputError, shown
from specjax.files.atomic_writes import write_text
from specjax.files.json_files import read_json_file
from specjax.files.path_checks import user_path
from specjax.loading.model import Model
from specjax.methods.find_head import SHIPPED

Acceptance = tuple[tuple[float, ...], ...]
"""Rates [d][r]: the probability that the candidate of rank r at depth d (from 0) is the target's
token, given that its parent is.
"""


def ranks_file(folder: Path, drafter: str) -> Path:
    """Return the path of a drafter's rates in `folder`, which has the heads for one target."""
    return folder / f"{drafter}.ranks.json"


def known_acceptance(
    drafter: str, target: Model, path: str | os.PathLike | Model | None = None
) -> Acceptance | None:
    """Return the measured acceptance rates of a drafter for a target, or None if there are none.

    Without `path` they are the rates that come with specjax; otherwise they are in a file beside
    the head at `path`. Raises InputError for a file without valid rates.
    """
    if isinstance(path, Model):
        return None
    shipped = SHIPPED / target.name
    folder = shipped if path is None else user_path("drafter.path", path).parent
    file = ranks_file(folder, drafter)
    return read_acceptance(file) if file.is_file() else None


def read_acceptance(file: Path) -> Acceptance:
    """Return the rates in a file; raise InputError if it has none."""
    content = read_json_file(file)
    rates = content.get("acceptance") if isinstance(content, dict) else None
    whole = isinstance(rates, list) and rates and all(isinstance(level, list) for level in rates)
    if not whole or not all(
        isinstance(rate, int | float) and 0 <= rate <= 1 for level in rates for rate in level
    ):
        raise InputError(f"{file}: acceptance={shown(rates)}: must be lists of rates from 0 to 1")
    return tuple(tuple(map(float, level)) for level in rates)


def write_acceptance(file: Path, acceptance: Acceptance, measured: Mapping[str, Any]) -> None:
    """Write acceptance rates to a file, with a record `measured` of how they were measured.

    Raises OSError if that fails.
    """
    rows = ",\n    ".join(json.dumps([round(rate, 4) for rate in level]) for level in acceptance)
    rest = "".join(f',\n  "{name}": {json.dumps(value)}' for name, value in measured.items())
    write_text(file, f'{{\n  "acceptance": [\n    {rows}\n  ]{rest}\n}}\n')
