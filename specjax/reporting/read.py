"""Reading the JSON reports of `specjax.decode` and `specjax.bench` back, every field checked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any

from specjax.decoding.prompts import LARGEST_ID
from specjax.errors import InputError, one_line, shown
from specjax.files.json_files import read_json_file
from specjax.reporting.runs import Bench, Row, Run, Timing, summarize

_NUMBER = (int, float)
_LARGEST, _MOST_COUNTS, _DEEPEST = 2**53, 1 << 26, 20
"""Whole numbers above the first are not exact as floats; the second bounds a table of counts."""
_SUMMARY = {"drafter": (str,), "device": (str,), "dtype": (str,), "prompts": (str,)}
_CONFIG = {"target": (str,), "batch_size": (int,), "drafter": (dict,), "sampling": (dict,)}
_MAY_BE = {
    "versions": (dict, NoneType),
    "interrupted": (bool, NoneType),
    "refused": (str, NoneType),
    "lossy": (bool, NoneType),
}
_CONFIG_MAY_BE = {"distributed": (dict,)}
_SAMPLING = {"temperature": _NUMBER, "max_new_tokens": (int,)}
_ROW = {
    "question_id": (int, str),
    "category": (str,),
    "text": (str,),
    "token_ids": (list,),
    "new_tokens": (int,),
    "accept_lengths": (list,),
    "rounds": (dict,),
    "prefill_s": _NUMBER,
    "decode_s": _NUMBER,
    "batch": (int,),
    "identical": (bool, NoneType),
    "margin_at_difference": (*_NUMBER, NoneType),
    "plain": (dict, NoneType),
}
_ROW_MAY_BE = {"resolution_at_difference": (*_NUMBER, NoneType), "first_round": (int,)}
_COUNTS = {"drafted": (list,), "accepted": (list,), "width": (list,)}
_MOST_ROUNDS = 1_000_000
_PLAIN = {"new_tokens": (int,), "prefill_s": _NUMBER, "decode_s": _NUMBER}
_COMPARISON = {
    "drafter": (str,),
    "batch": (int,),
    "acceptance_length": _NUMBER,
    "tokens_per_second": _NUMBER,
    "plain_tokens_per_second": _NUMBER,
    "speedup": _NUMBER,
    "speedup_min": _NUMBER,
    "speedup_max": _NUMBER,
    "predicted": _NUMBER,
    "efficiency": _NUMBER,
    "identical": (bool,),
}
_REMEDY = "give a file that `python -m specjax.decode --config.report=FILE` wrote"


def read_report(path: str | Path) -> Run | Bench:
    """`read_reports` of a file with one drafter. Raises InputError for other files."""
    found = read_reports(path)
    if len(found) > 1:
        raise InputError(
            f"{str(path)!r} has runs of {len(found)} drafters: give the report of one drafter"
        )
    return found[0]


def read_reports(path: str | Path) -> tuple[Run | Bench, ...]:
    """What a file of `specjax.decode` says of each drafter, or one of `specjax.bench`.

    Raises InputError for another file.
    """
    path = Path(path)
    content = read_json_file(path, _REMEDY)
    try:
        if isinstance(content, dict) and "comparisons" in content:
            comparisons = _list(content, "comparisons", "the report")
            for index, comparison in enumerate(comparisons):
                _check(comparison, _COMPARISON, f"comparisons[{index}]")
            return (Bench(path, tuple(comparisons), bool(content.get("interrupted"))),)
        if not isinstance(content, dict) or "runs" not in content:
            return (_run(path, content),)
        runs = _list(content, "runs", "the report")
        if not runs:
            raise _Misfit("it holds no runs")
        return tuple(_run(path, run) for run in runs)
    except _Misfit as misfit:
        raise InputError(f"{str(path)!r} is not a report: {misfit}; {_REMEDY}") from None


def is_report(path: Path) -> bool:
    """Whether a file has a report's structure, finished or not; its fields are not checked.

    Raises OSError where it cannot be read.
    """
    with path.open("rb") as file:
        if not file.read(1 << 10).lstrip().startswith(b"{"):
            return False  # a binary file, such as a model
    try:
        content = read_json_file(path, _REMEDY)
    except InputError:
        return False
    if not isinstance(content, dict):
        return False
    decoded = {"rows": list, "summary": dict}
    measured = {"rounds": list, "comparisons": list}
    runs = content.get("runs")
    if isinstance(runs, list) and runs:
        return all(_has(run, decoded) for run in runs)
    return _has(content, decoded) or _has(content, measured)


def _has(content: Any, outline: Mapping[str, type]) -> bool:
    return isinstance(content, dict) and all(
        isinstance(content.get(name), kind) for name, kind in outline.items()
    )


class _Misfit(Exception):
    """How a file differs from a report."""


def _run(path: Path, content: Any) -> Run:
    if not isinstance(content, dict) or not {"rows", "summary"} <= content.keys():
        raise _Misfit('it has no "rows" and "summary"')
    summary = content["summary"]
    _check(summary, {"config": (dict,), **_SUMMARY}, "summary")
    _check(summary["config"], _CONFIG, "summary.config")
    _check(summary["config"]["sampling"], _SAMPLING, "summary.config.sampling")
    for part, kinds in ((summary, _MAY_BE), (summary["config"], _CONFIG_MAY_BE)):
        _check(part, {name: kinds[name] for name in kinds if name in part}, "summary")
    if _deeper(summary["config"], _DEEPEST):
        raise _Misfit(f"summary.config has more than {_DEEPEST} levels")
    rows = tuple(
        _row(row, f"rows[{index}]")
        for index, row in enumerate(_list(content, "rows", "the report"))
    )
    if not rows:
        raise _Misfit("it holds no rows")
    if len(rows) * max(len(row.emitted) for row in rows) > _MOST_COUNTS:
        raise _Misfit("one row has so many rounds that a table of all rows is too large")
    run = Run(path, rows, summary)
    try:
        summarize(rows)
    except ValueError as error:
        raise _Misfit(f"its counts do not fit together ({one_line(error)})") from None
    return run


def _row(row: Any, where: str) -> Row:
    _check(row, _ROW, where)
    _check(row, {name: _ROW_MAY_BE[name] for name in _ROW_MAY_BE if name in row}, where)
    _check(row["rounds"], _COUNTS, f"{where}.rounds")
    counts = {"emitted": row["accept_lengths"], **row["rounds"]}
    for name, values in counts.items():
        least = -1 if name == "drafter" else 0
        if not isinstance(values, list) or not all(
            type(value) is int and least <= value <= _LARGEST for value in values
        ):
            raise _Misfit(f"{where}: {name} must hold whole numbers of at least {least}")
        if len(values) != len(row["accept_lengths"]):
            raise _Misfit(f"{where}: {name} must have one entry per round")
    if sum(row["accept_lengths"]) != row["new_tokens"]:
        raise _Misfit(f"{where}: accept_lengths do not add up to new_tokens")
    if not all(type(token) is int and 0 <= token <= _LARGEST for token in row["token_ids"]):
        raise _Misfit(f"{where}: token_ids must hold whole numbers of at least 0")
    if type(row.get("turn", 0)) is not int:
        raise _Misfit(f"{where}.turn is {shown(row['turn'])}")
    if not 0 <= row.get("first_round", 0) <= _MOST_ROUNDS:
        raise _Misfit(f"{where}.first_round is {shown(row['first_round'])}")
    plain = row["plain"]
    if plain is not None:
        _check(plain, _PLAIN, f"{where}.plain")
        plain = Timing(*(plain[name] for name in _PLAIN))
    return Row(
        question_id=row["question_id"],
        category=row["category"],
        turn=row.get("turn", 0),
        text=row["text"],
        token_ids=tuple(row["token_ids"]),
        batch=row["batch"],
        ours=Timing(row["new_tokens"], row["prefill_s"], row["decode_s"]),
        plain=plain,
        identical=row["identical"],
        margin=row["margin_at_difference"],
        resolution=row.get("resolution_at_difference"),
        **{name: tuple(counts[name]) for name in ("drafted", "accepted", "emitted", "width")},
        drafter=tuple(counts.get("drafter", ())),
        first_round=row.get("first_round", 0),
    )


def _deeper(content: Any, levels: int) -> bool:
    """Whether objects are nested deeper than that; a config's names are joined recursively."""
    if not isinstance(content, dict):
        return False
    return not levels or any(_deeper(part, levels - 1) for part in content.values())


def _check(content: Any, fields: Mapping[str, tuple[type, ...]], where: str) -> None:
    if not isinstance(content, dict):
        raise _Misfit(f"{where} is not an object")
    for name, kinds in fields.items():
        if name not in content:
            raise _Misfit(f"{where} has no {name!r} (another version of specjax?)")
        # In Python a bool is an int; here it is refused.
        if type(content[name]) not in kinds:
            raise _Misfit(f"{where}.{name} is {shown(content[name])}")
        largest = LARGEST_ID if name == "question_id" else _LARGEST
        if isinstance(content[name], _NUMBER) and abs(content[name]) > largest:
            raise _Misfit(f"{where}.{name} is {shown(content[name])}, which is not a valid value")


def _list(content: Mapping[str, Any], name: str, where: str) -> list:
    if not isinstance(content[name], list):
        raise _Misfit(f"{where}: {name} is not a list")
    return content[name]
