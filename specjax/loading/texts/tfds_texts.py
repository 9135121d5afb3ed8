"""The texts of TFDS datasets; TFDS itself is imported on first use."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from specjax.errors import InputError, one_line
from specjax.fields import OutputFolder, Text, optional
from specjax.files.open_files import regular_files


def import_tfds() -> Any:
    """Import TensorFlow Datasets on first use, since that takes a second, and return the module."""
    try:
        import tensorflow_datasets as tfds
        from array_record.python import array_record_module  # noqa: F401
    except ImportError as error:
        raise InputError(f"{error.name} is not installed; pip install 'specjax[train]'") from None
    return tfds


@dataclass(frozen=True, kw_only=True)
class SplitLocation:
    """The location of a dataset's split; a base of configs' sections, which add a field's name."""

    data_dir: Annotated[Path | None, optional(OutputFolder())] = None
    """The folder of TFDS datasets."""
    split: Annotated[str, Text()] = "train"
    """The split of the dataset."""


@dataclass(frozen=True)
class FieldNames:
    """The names, for messages, of the options that give a dataset and its text field.

    `remedy` ends the messages.
    """

    dataset: str
    text: str
    remedy: str


@dataclass(frozen=True, eq=False)
class Texts:
    """The texts of a split of a TFDS dataset, as a sequence of (text, other fields).

    The other fields are the record's other strings, by name. `label` is the name of the dataset,
    and `num_bytes` the size of the split. An index raises InputError for a record that cannot be
    read.
    """

    label: str
    num_bytes: int
    _source: Any = field(repr=False)
    _text_field: str = field(repr=False)
    _name: str = field(repr=False)
    _names: FieldNames = field(repr=False)

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> tuple[str, dict[str, str]]:
        """Return the text and other strings of a record; raise InputError if it cannot be read."""
        if not 0 <= index < len(self):
            raise IndexError(f"text {index} of {len(self)}")
        try:
            record = self._source[index]
        except Exception as error:  # files are read here, and may be damaged
            raise InputError(
                f"{self._names.dataset}={self._name!r}: its records cannot be read "
                f"({one_line(error)[:160]}); prepare the dataset again"
            ) from None
        text = record[self._text_field]
        if not isinstance(text, bytes):
            raise InputError(
                f"{self._names.text}={self._text_field!r}: record {index} of {self.label} holds no "
                "text there; use a field of texts"
            )
        others = {
            name: value.decode(errors="replace")
            for name, value in record.items()
            if isinstance(value, bytes) and name != self._text_field
        }
        return text.decode(errors="replace"), others

    def __iter__(self) -> Iterator[tuple[str, dict[str, str]]]:
        return (self[index] for index in range(len(self)))


def open_texts(
    name: str, data_dir: Path | None, split: str, text_field: str, names: FieldNames
) -> Texts:
    """Open the texts of a TFDS dataset: a directory that has one, or a name that TFDS knows.

    `data_dir` is TFDS's folder of datasets. An unprepared dataset is first prepared as array_record
    files. Raises InputError, using `names`, if that fails, or if a split or field is missing.
    """
    tfds = import_tfds()
    in_folder = Path(name).is_dir()
    try:
        if in_folder:
            regular_files(Path(name), "prepare the dataset again")
            builder = tfds.builder_from_directory(name)
        else:
            builder = _prepared(name, data_dir)
        source = builder.as_data_source(split)
        size = builder.info.splits[split].num_bytes
    except InputError:
        raise
    except Exception as error:  # TFDS and its datasets raise whatever they like
        raise InputError(
            f"{names.dataset}={name!r}: no file, and TFDS says: {one_line(error)[:160]}; give "
            f"{names.remedy}"
        ) from None
    fields = builder.info.features.keys()
    if text_field not in fields:
        raise InputError(
            f"{names.text}={text_field!r}: {name} has no such field; use one of "
            f"{', '.join(sorted(fields))}"
        )
    label = Path(name).name if in_folder else name
    return Texts(label, int(size), source, text_field, name, names)


def _prepared(name: str, data_dir: Path | None) -> Any:
    """Return the TFDS builder of a dataset after preparing it, without showing TFDS's own logs."""
    tfds = import_tfds()
    tfds.disable_progress_bar()
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            builder = tfds.builder(name, data_dir=data_dir, file_format="array_record")
            builder.download_and_prepare()
    finally:
        logger.setLevel(level)
    return builder
