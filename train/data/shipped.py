"""The small set of conversations that comes with specjax, for training without data of one's own.

`train/datasets/` holds the answers of the default model as JSON lines, what is known of their
origin, and a card. They are written as a dataset into specjax's cache where they are first opened.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specjax.files.json_files import read_json_file
from specjax.files.paths import cache_folder
from train.data.dataset_cache import prepared
from train.data.json_lines import read_rows
from train.data.writing import write_responses

NAME = "shipped"
"""What stands for these conversations where directories of datasets are expected."""
ROWS = Path(__file__).parents[1] / "datasets" / "smollm2-135m-instruct.jsonl.gz"
"""The conversations."""
METADATA = ROWS.with_name("smollm2-135m-instruct.json")
"""Of the model that wrote them, and how they were made."""


def shipped_dataset(tell: Callable[[str], Any] = print) -> Path:
    """The directory of the dataset, made at the first call; `tell` takes a line where it is mended.

    Raises InputError where the cache cannot be written.
    """
    digest = hashlib.sha256(ROWS.read_bytes() + METADATA.read_bytes()).hexdigest()[:8]
    directory = cache_folder("data") / f"smollm2-135m-instruct_{digest}"
    return prepared(directory, lambda: _write(directory), "XDG_CACHE_HOME", tell)


def _write(directory: Path) -> None:
    metadata = read_json_file(METADATA)
    write_responses(
        directory, read_rows(ROWS), metadata["target"], generation=metadata["generation"]
    )
