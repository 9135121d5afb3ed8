"""Answers in a work folder, some to a file, each written whole or not at all: a run can resume."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specjax.distributed import processes
from specjax.errors import InputError
from specjax.files import folders
from specjax.files.atomic_writes import replacing
from specjax.files.open_files import open_regular
from train.run.workdir import check_same_run, write_file

_RECORD = "config.json"
_MAY_DIFFER = ("workdir", "output", "minutes", "batch_size", "scan_layers", "mesh.", "distributed.")
"""Fields, and sections followed by a dot, that a resumed run may set anew.

`scan_layers` is in the records of earlier versions.
"""
_PIECE = re.compile(r"(\d{6})\.npz", re.ASCII)


@dataclass(frozen=True)
class Pieces:
    """The answers that are done, as numbered files of a directory; one of no token is none."""

    directory: Path

    def done(self) -> list[int]:
        """The numbers of the files that are there."""
        if not self.directory.is_dir():
            return []
        found = (_PIECE.fullmatch(entry.name) for entry in self.directory.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def write(self, number: int, ids: Sequence[int], responses: Sequence[Sequence[int]]) -> None:
        """Keep some answers: each prompt's number and its response.

        Raises InputError on a full disk.
        """
        path = self.path(number)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with replacing(path) as file:
                np.savez(
                    file,
                    ids=np.array(ids, np.int64),
                    lengths=np.array([len(one) for one in responses], np.int64),
                    tokens=np.concatenate([np.array(one, np.int32) for one in responses]),
                )
        except OSError as error:
            raise InputError(
                f"{path}: cannot be written ({error.strerror or error}); free space, then start "
                "again: finished answers are kept"
            ) from None

    def read(self, number: int) -> Mapping[int, np.ndarray] | None:
        """The responses of a file by the prompts' numbers; None for one that is damaged."""
        try:
            # A damaged archive would be left open by np.load.
            with open_regular(self.path(number)) as file, np.load(file) as stored:
                ids, lengths, tokens = stored["ids"], stored["lengths"], stored["tokens"]
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return None
        if len(ids) != len(lengths) or lengths.sum() != len(tokens):
            return None
        parts = np.split(tokens, np.cumsum(lengths)[:-1])
        return dict(zip(ids.tolist(), parts, strict=True))

    def read_all(self) -> dict[int, np.ndarray]:
        """All responses by the prompts' numbers; a damaged file counts as not there."""
        found: dict[int, np.ndarray] = {}
        for number in self.done():
            found |= self.read(number) or {}
        return found

    def path(self, number: int) -> Path:
        """The file of that number."""
        return self.directory / f"{number:06d}.npz"


def open_pieces(root: Path, record: Mapping[str, Any]) -> Pieces:
    """The answers of a run in its work folder; `record` (JSON-ready) says what the run is.

    The folder is one that `folder_lock` holds for this run. Every process makes the call, the first
    one looks and writes. Raises InputError where finished answers there are of another
    run, naming the fields, and where the folder cannot be written.
    """
    pieces, file = Pieces(root / "answers"), root / _RECORD

    def check() -> None:
        if pieces.done():
            check_same_run(file, record, _MAY_DIFFER)
        if pieces.directory.is_dir():
            folders.delete_temporary(pieces.directory)
        write_file(file, json.dumps(record, indent=1) + "\n")

    processes.together(lambda: check() if processes.is_first() else None)
    return pieces
