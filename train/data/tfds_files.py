"""A writer of records as array_record files of a TFDS dataset."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specjax.errors import InputError, one_line
from specjax.loading.texts.tfds_texts import import_tfds


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

    `features` are TFDS features by name, and `description` is stored with the dataset. Any TFDS
    reader can open the folder, unless it has no record. With `compress` the files are smaller.
    Raises InputError, whose message begins with `where`, if the disk is full.
    """
    tfds = import_tfds()
    from array_record.python.array_record_module import ArrayRecordWriter

    encoder = tfds.features.FeaturesDict(features)
    template = tfds.core.ShardedFileTemplate(
        data_dir=folder, dataset_name=name, split=split, filetype_suffix="array_record"
    )
    # Random access needs groups of one record. Float16 features hardly shrink, and
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
    """Turn errors of the disk in the context into InputError, which begins with `where`.

    array_record raises them as RuntimeError.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise InputError(
            f"{where}: the dataset cannot be written ({one_line(error)[:120]}); "
            "free space or write elsewhere"
        ) from None
