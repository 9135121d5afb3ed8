"""The folder of a checkpoint: the files beside the arrays, and their checks.

Orbax stores the arrays of models and of training runs, and a safetensors file those of drafters.
The metadata is a JSON file. A marker (`files.folder_checksums`), written last, lists the files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from specjax.errors import InputError, one_line
from specjax.files import folder_checksums
from specjax.files.json_files import parse_json, read_json_file
from specjax.files.open_files import regular_files

Kind = Literal["model", "drafter"]

CONTENT = "specjax_checkpoint.json"
"""The name of the file with a checkpoint's metadata."""
ARRAYS = "params"
"""The name of the folder with the arrays, if Orbax stores them."""
TOKENIZER = "tokenizer"
"""The name of the folder with a model's tokenizer."""
INDEX = (f"{ARRAYS}/manifest.ocdbt", f"{ARRAYS}/_METADATA")
"""The names of the files in which Orbax describes the arrays."""
REMEDY = "copy the checkpoint again, or save elsewhere"
"""The end of messages about a file that cannot be read."""
_FORMAT = 1
_READERS = {"model": "specjax.load_model", "drafter": "specjax.loading.checkpoints.load_drafter"}


def is_checkpoint(directory: Path) -> bool:
    """Return whether a directory has a checkpoint, complete or not."""
    if any((directory / name).is_file() for name in (CONTENT, INDEX[0])):
        return True
    with suppress(InputError):
        marker = folder_checksums.read_marker(directory)
        return marker is not None and CONTENT in (marker.files or ())
    return False


def read_metadata(
    directory: Path,
    kind: Kind,
    needed: Iterable[str] = (),
    share: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """Return the metadata of a checkpoint of this kind, after comparing its files with the marker.

    The marker must list those in `needed`. `share` is that of `folder_checksums.find_damage`, by
    default only for sizes. Raises InputError if there is no complete checkpoint of that kind in a
    known format.
    """
    marker = read_marker(directory, kind)
    regular_files(directory, REMEDY)
    needed = (CONTENT, *needed)
    if damage := folder_checksums.find_damage(directory, marker, share, needed):
        raise damaged(directory, damage)
    return metadata_of(directory, read_json_file(directory / CONTENT, REMEDY))


def read_marker(directory: Path, kind: Kind | None = None) -> folder_checksums.Marker:
    """Return the marker of a checkpoint of this kind; raise InputError if there is none."""
    if not directory.is_dir():
        raise InputError(f"{directory}: no such directory; give one that specjax saved")
    if not is_checkpoint(directory):
        raise InputError(f"{directory}: holds no checkpoint; give a directory that specjax saved")
    try:
        marker = folder_checksums.read_marker(directory)
    except InputError as error:
        raise damaged(directory, str(error)) from None
    if marker is None or marker.files is None:
        raise InputError(
            f"{directory}: lacks {folder_checksums.MARKER}, which specjax writes last: not saved "
            "by specjax, or damaged; copy it again, whole, or save elsewhere"
        )
    if kind not in (None, marker.kind):
        reader = _READERS.get(marker.kind)
        raise InputError(
            f"{directory}: holds a {marker.kind}, not a {kind}; give another directory"
            f"{f', or read it with {reader}' if reader else ''}"
        )
    return marker


def damaged(directory: Path, how: str) -> InputError:
    """Return the InputError for a checkpoint whose files changed after it was saved.

    `how` describes the change.
    """
    return InputError(
        f"{directory}: the checkpoint is damaged or truncated ({how}); copy it again, or save "
        "elsewhere"
    )


def content_text(directory: Path, params: dict[str, Any], metadata: dict[str, Any]) -> str:
    """Return the JSON text of the metadata, to be written beside the arrays.

    Raises InputError if the arrays or the metadata cannot be saved; the message names `directory`.
    """
    _check_params(directory, params)
    try:
        content = {"specjax_checkpoint": _FORMAT, "metadata": metadata}
        text = json.dumps(content, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"{directory}: the metadata are not JSON ({one_line(error):.160}); use dicts, lists, "
            "text, finite numbers, true, false and null"
        ) from None
    parse_json(text, f"{directory}: the metadata")
    return text + "\n"


def metadata_of(directory: Path, content: Any) -> dict[str, Any]:
    """Return the metadata in `content`, the value of a checkpoint's JSON file.

    Raises InputError, naming `directory`, if the content is invalid.
    """
    fields = content if isinstance(content, dict) else {}
    version, metadata = fields.get("specjax_checkpoint"), fields.get("metadata")
    if type(version) is int and version != _FORMAT:
        raise InputError(
            f"{directory}: checkpoint format {version!r:.40}, and only {_FORMAT} is known; "
            "use the version of specjax that saved it"
        )
    if type(version) is not int or not isinstance(metadata, dict):
        raise damaged(directory, f"{CONTENT} is not what specjax writes")
    return metadata


def _check_params(directory: Path, params: dict[str, Any]) -> None:
    leaves = jax.tree.leaves_with_path(params)
    for path, leaf in leaves or [((), params)]:
        keys = [getattr(key, "key", None) for key in path]
        # Names are joined by dots.
        named = all(isinstance(key, str) and key and "." not in key for key in keys)
        numeric = isinstance(leaf, jax.Array | np.ndarray) and leaf.size
        if numeric:
            numeric = jnp.issubdtype(leaf.dtype, jnp.number) or leaf.dtype == bool
        if not named or not numeric:
            raise InputError(
                f"{directory}: params{jax.tree_util.keystr(path)} is {type(leaf).__name__}"
                f"{list(np.shape(leaf))}: a checkpoint holds a nested dict of arrays of numbers, "
                "none empty, by names without dots; put others into the metadata"
            )
