"""JSON from outside: every way in which a text can fail to be JSON is an InputError."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from specjax.errors import InputError, one_line, shown

_LONGEST_LINE = 64 << 20
"""Bytes: a file without line ends is not read whole."""


def parse_json(text: str | bytes, where: str, remedy: str = "repair it") -> Any:
    """The value of a JSON text; `where` names the file, and the line if there are lines.

    Raises InputError for anything that is not JSON: NaN, numbers of thousands of digits, nesting
    that is too deep, and bytes that are not UTF-8 included.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:  # decoding errors are ValueErrors too
        raise InputError(f"{where} is not JSON ({one_line(error):.160}); {remedy}") from None


def read_json_file(path: Path, remedy: str = "restore it") -> Any:
    """The value of a JSON file; raises InputError, naming the path, where it cannot be read."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error}); {remedy}") from None
    return parse_json(content, str(path), remedy)


def read_json_lines(path: Path, field: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a JSONL file, gzipped or not, each with "FILE, line N"; empty lines are left.

    The file is read line by line. Raises InputError with file and line for a line that is not a
    JSON object, and with `field` for a file that cannot be read.
    """
    number = 0
    try:
        with _opened(path) as lines:
            while line := lines.readline(_LONGEST_LINE + 1):
                number += 1
                where = f"{path}, line {number}"
                if len(line) > _LONGEST_LINE:
                    raise InputError(
                        f"{where}: longer than {_LONGEST_LINE >> 20} MiB; put one object in a line"
                    )
                if not line.strip():
                    continue
                value = parse_json(line, where, "put one JSON object in a line")
                if not isinstance(value, dict):
                    raise InputError(f"{where} is {shown(value)}; put one JSON object in a line")
                yield where, value
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(
            f"{field}={shown(str(path))} cannot be read after line {number}: {one_line(error)}; "
            "give a JSONL file, gzipped or not"
        ) from None


def _opened(path: Path) -> BinaryIO:
    file = path.open("rb")
    # A look ahead, not a second opening: the file may be a pipe.
    return gzip.GzipFile(fileobj=file) if file.peek(2)[:2] == b"\x1f\x8b" else file


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")
