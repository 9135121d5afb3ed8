"""Several datasets of conversations, combined into one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int32

from specjax.errors import InputError, Problems
from specjax.fields import Text
from specjax.files.path_checks import input_folder, user_path
from specjax.loading.tokenizers.tokenizer import Tokenizer
from train.data import shipped
from train.data.examples import METADATA, Example
from train.data.responses import Responses, open_responses


@dataclass(frozen=True)
class DataFolders:
    """The field type of a comma-separated list of directories of conversations.

    `shipped.NAME` stands for the dataset that comes with specjax.
    """

    def check(self, name: str, value: Any) -> str:
        """Return `value` unchanged.

        Raises InputError, which names the field `name`, for an empty text and for missing
        directories.
        """
        if value is None:
            raise InputError(
                f"{name} is missing: pass --config.{name}=DIRECTORY, or {shipped.NAME}"
            )
        problems = Problems()
        for folder in split_names(Text().check(name, value)):
            with problems.collect():
                if folder != shipped.NAME:
                    input_folder(name, folder)
        problems.check()
        return value


def split_names(text: str) -> list[str]:
    """Return the directories in a comma-separated text, as strings."""
    return [part.strip() for part in text.split(",")]


@dataclass(frozen=True, eq=False)
class Sources:
    """Several datasets in sequence, as one sequence of conversations like `Responses`."""

    parts: tuple[Responses, ...]
    _starts: np.ndarray = field(repr=False)

    @property
    def feature_names(self) -> tuple[str, ...]:
        """The names of the target features that all datasets contain."""
        return tuple(
            name
            for name in self.parts[0].feature_names
            if all(name in part.feature_names for part in self.parts)
        )

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer that the datasets have in common, for a new model.

        Only datasets of text (`train.corpus`) store one. Raises InputError if a dataset has none,
        or another one than the first.
        """
        found: Tokenizer | None = None
        for part in self.parts:
            own = part.tokenizer
            if own is None:
                raise InputError(
                    f"data={str(part.directory)!r}: keeps no tokenizer for a new model; make it "
                    "with train.corpus, or name a target"
                )
            if found is not None and (difference := found.first_difference(own)) is not None:
                raise InputError(
                    f"data={str(part.directory)!r}: has another tokenizer than "
                    f"{self.parts[0].directory} ({difference}); tokenize both with the same one"
                )
            found = found or own
        assert found is not None, "open_sources finds at least one part"
        return found

    @cached_property
    def lengths(self) -> Int32[np.ndarray, "n"]:
        """The number of tokens of each conversation, prompt included."""
        return np.concatenate([part.lengths for part in self.parts])

    @cached_property
    def num_labels(self) -> Int32[np.ndarray, "n"]:
        """The number of tokens of each conversation that its loss mask selects."""
        return np.concatenate([part.num_labels for part in self.parts])

    @cached_property
    def validation(self) -> Bool[np.ndarray, "n"]:
        """A mask of the held-out conversations."""
        return np.concatenate([part.validation for part in self.parts])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> Example:
        part = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self.parts[part][index - int(self._starts[part])]


def open_sources(
    directories: Sequence[str | Path], target: Mapping[str, object] | None = None
) -> Sources:
    """Open several datasets as one sequence of conversations.

    Each directory is a dataset, or a folder of datasets (`train.features`); `shipped.NAME` is the
    one that comes with specjax. `target` is the metadata of the target that must have written them,
    or None for any. Raises InputError as `open_responses` does, and if a folder has no dataset.
    """
    if not directories:
        raise InputError("data is empty: name a dataset's directory")
    found: list[Path] = []
    for directory in directories:
        if directory == shipped.NAME:
            found.append(shipped.shipped_dataset())
            continue
        path = user_path("data", directory)
        inside = sorted(path.glob(f"*/{METADATA}")) if not (path / METADATA).exists() else []
        inside = [one for one in inside if not one.parent.name.startswith(".")]
        found += [one.parent for one in inside] or [path]
    parts = tuple(open_responses(path, target) for path in found)
    starts = np.cumsum([0, *map(len, parts)])
    return Sources(parts, starts)
