"""Documents of a user's own files, and TFDS datasets of documents.

A file is one document; a JSON-lines file (.jsonl, .jsonl.gz) holds one per line, as an object with
the key "text" and, if known, "source" and "licence".
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specjax.errors import InputError, Problems, shown
from specjax.fields import Text
from specjax.files import folders
from specjax.files.json_files import read_json_lines
from specjax.files.open_files import open_regular
from specjax.files.paths import output_folder, user_path
from train.data.examples import import_tfds
from train.data.tfds_files import write_records

NAME, SPLIT = "specjax_text", "train"
"""The dataset and its only split, as TFDS calls them."""
TEXT_FIELD = "text"
_NOTES = ("source", "licence")
_JSON_LINES = (".jsonl", ".jsonl.gz")
_LARGEST_FILE = 1 << 30
"""Bytes of a file that is one document."""
_REMEDY = "take it away, or name the files one by one"


@dataclass(frozen=True)
class Document:
    """A text, where it comes from, and under which licence."""

    text: str
    source: str = ""
    licence: str = "unknown"


@dataclass(frozen=True)
class DocumentFiles:
    """Files and folders with documents, separated by commas."""

    def check(self, name: str, value: Any) -> tuple[Path, ...]:
        """The paths; raises InputError listing all that are missing."""
        problems, found = Problems(), []
        for path in Text().check(name, value).split(","):
            with problems.collect():
                found.append(user_path(name, path.strip()))
                if not found[-1].exists():
                    raise InputError(f"{name}={shown(path, 200)}: no such file or folder")
        problems.check()
        return tuple(found)


def read_documents(paths: Sequence[str | Path]) -> Iterator[Document]:
    """The documents of files, and of folders with all files inside but hidden ones, in their order.

    Raises InputError, naming file and line, for one that is not text in UTF-8 or not a document.
    """
    for path in document_files(paths):
        if path.name.endswith(_JSON_LINES):
            for where, row in read_json_lines(path, "files"):
                yield _document(row, where, path.name)
        else:
            yield Document(_read_text(path), path.name)


def document_files(paths: Sequence[str | Path]) -> list[Path]:
    """The files themselves, each folder's sorted by name; raises InputError for an empty folder.

    Hidden files, whose name begins with a dot, are no part of a folder.
    """
    found: list[Path] = []
    for path in map(Path, paths):
        if not path.is_dir():
            found.append(path)
            continue
        inside: list[Path] = []
        for folder, folders_inside, names in os.walk(path):
            folders_inside[:] = [one for one in folders_inside if not one.startswith(".")]
            inside += [Path(folder, name) for name in names if not name.startswith(".")]
        if not inside:
            raise InputError(f"files={shown(str(path), 200)}: an empty folder; put texts there")
        found += sorted(inside)
    return found


def write_documents(directory: str | Path, documents: Iterable[Document]) -> int:
    """Write documents as a TFDS dataset, whole or not at all; returns their number.

    Any TFDS reader opens it; its records hold text, source and licence. An earlier dataset of the
    same kind is replaced. Raises InputError where there is no document, where the directory holds
    anything else, and for a disk that is full.
    """
    path = output_folder("output", directory)
    tfds = import_tfds()
    features = dict.fromkeys((TEXT_FIELD, *_NOTES), tfds.features.Text())
    counted: list[int] = []

    def write(beside: Path) -> None:
        counted.append(
            write_records(
                beside,
                NAME,
                SPLIT,
                features,
                (vars(document) for document in documents),
                description="Documents to train language models on, with source and licence.",
                where=path,
            )
        )
        if not counted[0]:
            raise InputError(f"{path}: there is no document to write; give texts")

    folders.write_folder(path, "corpus", write)
    return counted[0]


def _document(row: Mapping[str, Any], where: str, name: str) -> Document:
    texts = {TEXT_FIELD: None, "source": name, "licence": "unknown"}
    texts |= {field: row[field] for field in texts if field in row}
    for field, text in texts.items():
        if not isinstance(text, str):
            raise InputError(
                f"{where}: {field}={shown(text)} is missing or no text; write an object with text "
                "and perhaps source and licence"
            )
        Text(empty=True).check(f"{where}: {field}", text)
    return Document(**texts)


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
