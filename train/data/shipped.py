"""The bundled dataset of conversations, for training without data of your own.

`train/datasets/` has the default model's answers as JSON lines, their provenance, and a card. They
are converted to a dataset in specjax's cache when first opened.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specjax.errors import InputError
from specjax.files import folder_checksums
from specjax.files.atomic_writes import exclusive
from specjax.files.json_files import read_json_file
from specjax.files.path_checks import cache_folder
from train.data.json_lines import read_rows
from train.data.write_responses import write_responses

NAME = "shipped"
"""The name of the bundled conversations in lists of dataset directories."""
ROWS = Path(__file__).parents[1] / "datasets" / "smollm2-135m-instruct.jsonl.gz"
"""The conversations."""
METADATA = ROWS.with_name("smollm2-135m-instruct.json")
"""The metadata of the model that wrote the conversations, and of how they were generated."""


def shipped_dataset(tell: Callable[[str], Any] = print) -> Path:
    """Return the directory of the dataset, writing it on the first call and if it is damaged.

    `tell` is called with a line before it is written. Concurrent processes wait for each other.
    Raises InputError if the cache cannot be written.
    """
    digest = hashlib.sha256(ROWS.read_bytes() + METADATA.read_bytes()).hexdigest()[:8]
    directory = cache_folder("data") / f"smollm2-135m-instruct_{digest}"
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(directory.parent, f"making {directory.name}"):
            if directory.exists() and not _is_whole(directory):
                tell(f"{directory}: this dataset is damaged or incomplete, and is made again")
                shutil.rmtree(directory)
            if not directory.exists():
                metadata = read_json_file(METADATA)
                target, generation = metadata["target"], metadata["generation"]
                write_responses(directory, read_rows(ROWS), target, generation=generation)
    except OSError as error:
        raise InputError(
            f"{directory}: cannot be written ({error.strerror or error}); free "
            "space there, or use another XDG_CACHE_HOME"
        ) from None
    return directory


def _is_whole(directory: Path) -> bool:
    try:
        marker = folder_checksums.read_marker(directory)
    except InputError:  # the marker itself is damaged
        return False
    return bool(marker and marker.files) and folder_checksums.find_damage(directory, marker) is None
