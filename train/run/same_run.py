"""Whether a work folder is of the run that is to be resumed in it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specjax.errors import InputError, shown
from specjax.fields import dotted
from specjax.files.json_files import parse_json, read_json_file

_SHOWN = 8


def check_same_run(
    file: Path, record: Mapping[str, Any], may_differ: Sequence[str], remark: str = ""
) -> None:
    """Raise InputError, naming the fields, unless `file` records the same run.

    `may_differ` are fields of the config, or sections where they end with a dot. The remark is
    added where it concerns a field that differs: it begins with that field's name.
    """
    remedy = "restore it, or use another workdir"
    earlier = read_json_file(file, remedy)
    if not isinstance(earlier, dict):
        raise InputError(f"{file} is {shown(earlier)}, not the record of a run; {remedy}")
    was, now = dotted(earlier), dotted(parse_json(json.dumps(record), "the run's record"))
    free = tuple(f"config.{name}" for name in may_differ)
    different = [
        name
        for name in sorted(was.keys() | now.keys())
        if was.get(name) != now.get(name)
        and not any(name == one or (one[-1] == "." and name.startswith(one)) for one in free)
    ]
    if not different:
        return
    listed = "; ".join(
        f"{name.removeprefix('config.')}={was.get(name)!r:.60} then, {now.get(name)!r:.60} now"
        for name in different[:_SHOWN]
    )
    if remark and f"config.{remark.split()[0]}" in different:
        listed += f" ({remark})"
    raise InputError(
        f"workdir={str(file.parent)!r}: another run was begun there: {listed}; "
        "use the same command to resume it, or another workdir"
    )
