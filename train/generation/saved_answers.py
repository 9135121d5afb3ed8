"""A file of finished answers, one per line, from which a run resumes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specjax.distributed import processes
from specjax.errors import InputError
from specjax.files.json_files import parse_json
from specjax.files.open_files import open_regular
from train.run.workdir import check_same_run, write_file

_RECORD, _ANSWERS = "config.json", "answers.jsonl"
_MAY_DIFFER = ("workdir", "output", "minutes", "batch_size", "mesh.", "distributed.")
"""Fields, and sections followed by a dot, that may change when a run is resumed."""
_LARGEST = 2**31


@dataclass(frozen=True)
class SavedAnswers:
    """The finished answers of a run, saved as lines of a file.

    Each is the number of a prompt with token ids; no token ids means that the prompt has no answer.
    """

    file: Path

    def add(self, answers: Mapping[int, Sequence[int]]) -> None:
        """Save answers: token ids by the number of the prompt.

        Raises InputError if the disk is full.
        """
        lines = [
            json.dumps({"id": number, "token_ids": list(token_ids)}) + "\n"
            for number, token_ids in answers.items()
        ]
        try:
            with self.file.open("a", encoding="utf-8") as file:
                file.write("".join(lines))
        except OSError as error:
            raise self._unwritable(error) from None

    def read(self) -> dict[int, list[int]]:
        """Return the token ids of each saved answer, by the number of its prompt.

        The result is empty if there is no file yet. Damaged lines are skipped, and of several
        answers to a prompt the last one counts. Raises InputError if the file cannot be read.
        """
        if not self.file.exists():
            return {}
        answers: dict[int, list[int]] = {}
        try:
            with open_regular(self.file) as file:
                for line in file:
                    with suppress(InputError):
                        answers |= _answer(parse_json(line, str(self.file)))
        except OSError as error:
            raise InputError(
                f"{self.file}: cannot be read ({error.strerror or error}); restore it, or delete it"
            ) from None
        return answers

    def _unwritable(self, error: OSError) -> InputError:
        return InputError(
            f"{self.file}: cannot be written ({error.strerror or error}); free space, then start "
            "again: finished answers are kept"
        )


def _answer(row: Any) -> dict[int, list[int]]:
    """Return the answer in a line as a dict with one entry, or an empty dict if it is invalid."""
    match row:
        case {"id": int(number), "token_ids": list(token_ids)} if all(
            type(token) is int and 0 <= token < _LARGEST for token in token_ids
        ):
            return {number: token_ids}
    return {}


def open_answers(root: Path, record: Mapping[str, Any]) -> SavedAnswers:
    """Open the answers of a run in its work folder; `record` (JSON-ready) identifies the run.

    This run must hold the folder's `folder_lock`. Every process must call it; the first one reads
    and writes. Raises InputError if the folder has finished answers of another run, naming the
    differing fields, and if it cannot be written.
    """
    saved, file = SavedAnswers(root / _ANSWERS), root / _RECORD

    def check() -> None:
        if saved.read():
            check_same_run(file, record, _MAY_DIFFER)
            with saved.file.open("a") as lines:
                lines.write("\n")  # ends a line whose writing was interrupted
        write_file(file, json.dumps(record, indent=1) + "\n")

    processes.together(lambda: check() if processes.is_first() else None)
    return saved
