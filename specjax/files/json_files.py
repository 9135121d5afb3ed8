"""Reading of JSON and JSON Lines files, with one InputError for anything that is not valid JSON."""

from __future__ import annotations

import gzip
import io
import json
import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specjax.errors import InputError, one_line, shown
from specjax.files import open_files

_LONGEST_LINE = 64 << 20
"""The maximum length of a line in bytes, so that a file without line breaks is not read whole."""

_LARGEST_FILE = 256 << 20
"""The maximum size of a JSON file in bytes; its values take many times as much memory."""

_GZIP_BEGINS = b"\x1f"
"""The first byte of a gzip file, with which no JSON text begins."""


def parse_json(
    text: str | bytes, where: str, remedy: str = "repair it", infinity: Any = None
) -> Any:
    """Return the value of a JSON text; raise InputError if it is not JSON.

    `where`, the name of the file and for JSON Lines the line, begins the message, and `remedy` ends
    it. Also rejected are NaN, numbers with thousands of digits or beyond the range of floats,
    excessive nesting, duplicate keys, and invalid UTF-8. `infinity`, unless None, is the value of
    Infinity, which is rejected otherwise.
    """

    def constant(name: str) -> Any:
        if name == "Infinity" and infinity is not None:
            return infinity
        raise ValueError(f"{name} is no number of JSON")

    try:
        # Some editors begin a file with a byte order mark.
        text = text.decode("utf-8-sig") if isinstance(text, bytes) else text.removeprefix("\ufeff")
        return json.loads(
            text, parse_constant=constant, parse_float=_finite, object_pairs_hook=_object
        )
    except (ValueError, RecursionError) as error:  # decoding errors are ValueErrors too
        raise InputError(f"{where} is not JSON ({one_line(error):.160}); {remedy}") from None


def read_json_file(path: Path, remedy: str = "restore it", infinity: Any = None) -> Any:
    """Return the value of a JSON file; raise InputError, naming the path, if it cannot be read.

    A file of more than 256 MiB is rejected. `remedy` ends the error message, and `infinity` is that
    of `parse_json`.
    """
    try:
        with open_files.open_regular(path, remedy) as file:
            content = bytearray()  # in pieces: Python allocates the requested size first
            while len(content) <= _LARGEST_FILE and (piece := file.read(1 << 20)):
                content += piece
        if len(content) > _LARGEST_FILE:
            raise InputError(
                f"{path}: too large: JSON files of at most {_LARGEST_FILE >> 20} MiB are read; "
                "give a smaller file"
            )
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error}); {remedy}") from None
    return parse_json(bytes(content), str(path), remedy, infinity)


def read_json_lines(
    path: Path, field: str, *, unfinished: bool = False
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (where, object) for each line of a JSON Lines file; `where` is "FILE, line N".

    The file may be gzipped, or a pipe; it is read line by line, and empty lines are skipped. With
    `unfinished`, a last line without a line break is skipped, since the process that wrote it was
    killed. Raises InputError that names file and line for a line that is not a JSON object, and one
    that names `field` for an unreadable file.
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
                if not line.strip() or (unfinished and not line.endswith(b"\n")):
                    continue
                value = parse_json(line, where, "put one JSON object in a line")
                if not isinstance(value, dict):
                    raise InputError(f"{where} is {shown(value)}; put one JSON object in a line")
                yield where, value
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(
            f"{field}={shown(str(path), 300)} cannot be read after line {number}: "
            f"{one_line(error)}; give a JSONL file, gzipped or not"
        ) from None


@contextmanager
def _opened(path: Path) -> Iterator[io.BufferedReader | gzip.GzipFile]:
    with path.open("rb") as file:
        # Peeked at, since the file may be a pipe, which cannot be opened twice.
        if file.peek(1)[:1] != _GZIP_BEGINS:
            yield file
            return
        with gzip.GzipFile(fileobj=file) as unpacked:
            yield unpacked


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"the key {shown(twice)} is there twice")
    return value


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text:.40} is too large")
    return value
