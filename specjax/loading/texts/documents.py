"""Documents in users' files.

Each file is a document, except that a JSON-lines file (.jsonl, .jsonl.gz) has one per line: an
object with the key "text" and optionally "source" and "licence". For readers of tokens, a line may
instead have the tokens of a conversation: "prompt_token_ids" and "response_token_ids".
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32

from specjax.errors import InputError, Problems, shown
from specjax.fields import INT32_MAX, Text
from specjax.files.json_files import read_json_lines
from specjax.files.open_files import open_regular
from specjax.files.path_checks import user_path

_JSON_LINES = (".jsonl", ".jsonl.gz")
_TOKENS = ("prompt_token_ids", "response_token_ids")
_LARGEST_FILE = 1 << 30
"""The maximum size in bytes of a file that is a single document."""
_REMEDY = "remove it, or name the files one by one"


@dataclass(frozen=True)
class DocumentFiles:
    """The field type of a comma-separated list of files and folders of documents."""

    def check(self, name: str, value: Any) -> tuple[Path, ...]:
        """Return the paths in a comma-separated text.

        Raises one InputError, which names the field `name` and lists all missing paths.
        """
        problems, paths = Problems(), []
        for path in Text().check(name, value).split(","):
            with problems.collect():
                paths.append(user_path(name, path.strip()))
                if not paths[-1].exists():
                    raise InputError(f"{name}={shown(path, 200)}: no such file or folder")
        problems.check()
        return tuple(paths)


@dataclass(frozen=True)
class Documents:
    """The documents in `files`, in order.

    Iterating yields pairs (text, information), where information is a dict that may have "source"
    and "licence". Iterating raises InputError, which names the file and line, for text that is not
    UTF-8 and for a line that is not a valid document.
    """

    files: tuple[Path, ...]
    label: str = "text"
    """What messages call the documents."""

    @property
    def num_bytes(self) -> int:
        """The total size of the files in bytes."""
        return sum(file.stat().st_size for file in self.files)

    def __len__(self) -> int:
        """Return the number of documents, which takes a pass over all files."""
        return sum(1 for _ in iter(self))

    def __iter__(self) -> Iterator[tuple[str, dict[str, str]]]:
        for file in self.files:
            if file.name.endswith(_JSON_LINES):
                for where, row in read_json_lines(file, "files"):
                    yield _document(row, where, file.name)
            else:
                yield _read_text(file), {"source": file.name}


def texts_or_tokens(files: Sequence[Path]) -> Iterator[str | Int32[np.ndarray, "T"]]:
    """Yield each document: its text, or the token ids of a line that has a conversation.

    Raises InputError, naming file and line, as `Documents` does, and for values that are not token
    ids.
    """
    for file in files:
        if not file.name.endswith(_JSON_LINES):
            yield _read_text(file)
            continue
        for where, row in read_json_lines(file, "input"):
            if "text" not in row and _TOKENS[1] in row:
                yield np.concatenate([_token_ids(row, name, where) for name in _TOKENS])
            else:
                yield _document(row, where, file.name)[0]


def num_documents(files: Sequence[Path]) -> int:
    """Return the number of documents in `files`.

    Every line of a JSON-lines file counts, whether or not it is a valid document.
    """
    lines = [file for file in files if file.name.endswith(_JSON_LINES)]
    count = sum(1 for file in lines for _ in read_json_lines(file, "input"))
    return count + len(files) - len(lines)


def document_files(paths: Sequence[str | Path], field: str = "files") -> list[Path]:
    """Return the files among `paths` and, sorted by name, the files in folders among them.

    Hidden files, whose names begin with a dot, are skipped in folders. Raises InputError, naming
    `field`, for a folder without files.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        if not path.is_dir():
            files.append(path)
            continue
        inside: list[Path] = []
        for folder, folders_inside, names in os.walk(path):
            folders_inside[:] = [
                folder_name for folder_name in folders_inside if not folder_name.startswith(".")
            ]
            inside += [Path(folder, name) for name in names if not name.startswith(".")]
        if not inside:
            raise InputError(f"{field}={shown(str(path), 200)}: an empty folder; put texts there")
        files += sorted(inside)
    return files


def _document(row: Mapping[str, Any], where: str, name: str) -> tuple[str, dict[str, str]]:
    document = {"text": None, "source": name}
    document |= {field: row[field] for field in ("text", "source", "licence") if field in row}
    for field, text in document.items():
        Text(empty=True).check(f"{where}: {field}", text)
    return document.pop("text"), document


def _token_ids(row: Mapping[str, Any], name: str, where: str) -> Int32[np.ndarray, "T"]:
    listed = row.get(name, [])
    try:
        ids = np.array(listed, np.int32 if listed == [] else None)
    except (ValueError, OverflowError):  # lists of several lengths
        ids = np.array("none")
    if ids.ndim != 1 or ids.dtype.kind != "i" or not ((ids >= 0) & (ids <= INT32_MAX)).all():
        raise InputError(f"{where}: {name}={shown(listed)}: use a list of token ids")
    return ids.astype(np.int32)


def _read_text(path: Path) -> str:
    try:
        with open_regular(path, _REMEDY) as file:
            content = file.read(_LARGEST_FILE + 1)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error}); {_REMEDY}") from None
    if len(content) > _LARGEST_FILE:
        raise InputError(f"{path}: larger than {_LARGEST_FILE >> 30} GiB; split it into documents")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: not text in UTF-8 (byte {error.start} is {content[error.start]:#04x}); "
            f"convert it, or {_REMEDY}"
        ) from None
