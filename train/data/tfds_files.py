"""Write records as array_record files of a TFDS dataset, and read texts from any dataset."""

from __future__ import annotations

import contextlib
import io
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specjax.errors import InputError, one_line
from specjax.files.open_files import regular_files
from train.data.examples import import_tfds


def write_records(
    folder: Path,
    name: str,
    split: str,
    features: Mapping[str, Any],
    records: Iterable[Mapping[str, Any]],
    *,
    description: str,
    where: Path,
    compress: bool = True,
) -> int:
    """Write records as the only split of a dataset to an empty folder; return their number.

    `features` are TFDS features by name. Any TFDS reader can open the folder, unless there was no
    record. Raises InputError, beginning with `where`, for a full disk.
    """
    tfds = import_tfds()
    from array_record.python.array_record_module import ArrayRecordWriter

    encoder = tfds.features.FeaturesDict(features)
    template = tfds.core.ShardedFileTemplate(
        data_dir=folder, dataset_name=name, split=split, filetype_suffix="array_record"
    )
    # Groups of one record are what random access wants. Float16 features hardly shrink, and
    # unpacking them would take three times as long as reading them.
    options = "group_size:1" if compress else "group_size:1,uncompressed"
    count = num_bytes = 0
    with disk(where):
        file = template.sharded_filepath(shard_index=0, num_shards=1)
        writer = ArrayRecordWriter(os.fspath(file), options)
    try:
        for record in records:
            encoded = encoder.serialize_example(record)
            with disk(where):
                writer.write(encoded)
            count, num_bytes = count + 1, num_bytes + len(encoded)
    finally:
        with disk(where):
            writer.close()
    if not count:
        return 0
    info = tfds.core.SplitInfo(
        name=split, shard_lengths=[count], num_bytes=num_bytes, filename_template=template
    )
    with disk(where):
        tfds.folder_dataset.write_metadata(
            data_dir=folder,
            features=encoder,
            split_infos=[info],
            filename_template=template,
            check_data=False,
            disable_shuffling=True,
            description=description,
        )
    return count


@contextmanager
def disk(where: Path) -> Iterator[None]:
    """Convert disk errors, which array_record raises as RuntimeError, to InputError."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise InputError(
            f"{where}: the dataset cannot be written ({one_line(error)[:120]}); "
            "free space or write elsewhere"
        ) from None


@dataclass(frozen=True)
class FieldNames:
    """Names in errors of the fields for a dataset and its text, with the remedy."""

    dataset: str
    text: str
    remedy: str


@dataclass(frozen=True, eq=False)
class Texts:
    """The texts of a TFDS dataset's split in order, each with the record's other strings by name.

    `label` is the name of the dataset, and `num_bytes` the size of the split.
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
        """Raises InputError for a record that has no text or cannot be read."""
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
    """Open the texts of a TFDS dataset: a directory that holds one, or a name that TFDS knows.

    An unprepared dataset is first prepared as array_record files. Raises InputError if that fails,
    or if a split or field is missing.
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
    """Return the builder of a name, its dataset prepared, without TFDS's own reports of that."""
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
