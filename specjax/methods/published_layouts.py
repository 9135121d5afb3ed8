"""Heads in directories of other tools, in the layouts of all methods."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from specjax.errors import InputError, shown
from specjax.files import folder_checksums, folders
from specjax.files.json_files import parse_json
from specjax.files.path_checks import output_folder, user_path
from specjax.loading.dataclass_json import read_dataclass
from specjax.loading.formats.safetensors_files import write_tensors
from specjax.loading.model import Model
from specjax.loading.tokenizers.huggingface_tokenizer import read_json, write_json
from specjax.methods.block import layout as block
from specjax.methods.eagle import layout as eagle
from specjax.methods.heads import eagle3_layer_ids
from specjax.methods.heads.checkpoint import CONFIG, Checkpoint, read_checkpoint, tensor_names
from specjax.methods.heads.head import Head, TargetMetadata, check_head, check_same
from specjax.methods.heads.published_layout import PublishedLayout
from specjax.methods.medusa import layout as medusa
from specjax.methods.peagle import layout as peagle

LAYOUTS: tuple[PublishedLayout, ...] = (
    *medusa.LAYOUTS,
    *eagle.LAYOUTS,
    *peagle.LAYOUTS,
    *block.LAYOUTS,
)
FORMATS = tuple(dict.fromkeys(layout.name for layout in LAYOUTS))
_NOTES = "specjax"


@dataclasses.dataclass(frozen=True)
class _Notes:
    """The contents of the header that specjax writes into a head's file."""

    target: TargetMetadata
    training: dict
    layer_ids: eagle3_layer_ids.Convention


def read_foreign(
    directory: str | Path, target: Model, *, layer_ids: eagle3_layer_ids.Convention | None = None
) -> Head:
    """Return the head in a directory of any layout in `FORMATS`.

    The layout is detected from the config and the names of tensors. `layer_ids` says whether the
    config's layer ids number inputs or outputs of layers (`eagle3_layer_ids`). Parameters keep
    their stored dtype. If specjax wrote the head, the target and tokenizer in its header are
    checked. Raises InputError for anything missing, unexpected, out of range or made for another
    target.
    """
    eagle3_layer_ids.check_convention(layer_ids)
    checkpoint = read_checkpoint(user_path("directory", directory))
    layout = detect(checkpoint)
    metadata, training, written = _notes(checkpoint, target, layout.name)
    if written is not None and layer_ids not in (None, written):
        raise InputError(
            f"{checkpoint.directory}: layer_ids={layer_ids!r}, and the export says {written!r}; "
            "leave it out"
        )
    metadata.check(str(checkpoint.directory), target)
    try:
        head = layout.read(checkpoint, target, metadata, training, written or layer_ids)
    except InputError as error:
        if str(checkpoint.directory) in str(error):
            raise
        raise InputError(f"{checkpoint.directory}: {error}") from None
    check_head(head, target, str(checkpoint.directory))
    return head


def write_foreign(
    head: Head,
    directory: str | Path,
    format: str,
    target: Model,
    *,
    layer_ids: eagle3_layer_ids.Convention = "input",
) -> None:
    """Write a head in another tool's layout, atomically, in place of an earlier export.

    Tensors keep the head's dtype; Medusa's projections are multiplied out in float32, and EAGLE-3's
    columns of the target's output head are written in the target's dtype. `layer_ids`
    says whether the config's ids number inputs (EAGLE, vLLM) or outputs of layers (SpecForge,
    SGLang). The new directory is read back and compared bit by bit before it replaces another.
    Raises InputError for a head that the layout cannot express, a head of another target, and a
    directory that has other files.
    """
    path = output_folder("directory", directory)
    layout = check_format(head, format)
    eagle3_layer_ids.check_convention(layer_ids)
    check_head(head, target, "head")
    head = layout.prepare(head, target, format)
    config, tensors = layout.write(head, target, layer_ids)
    noted = _Notes(head.target, head.training, layer_ids)
    notes = {_NOTES: json.dumps(dataclasses.asdict(noted))}
    with folders.replacing(path, "head") as new:
        write_json(new / CONFIG, config)
        write_tensors(tensors, new / layout.weights, notes)
        folder_checksums.seal(new, "head")
        check_same(head, read_foreign(new, target, layer_ids=layer_ids), str(path))


def check_format(head: Head, format: str) -> PublishedLayout:
    """Return the layout called `format` of a head; raise InputError unless there is one."""
    if format not in FORMATS:
        raise InputError(f"format={format!r} is unknown; use {', '.join(FORMATS)}")
    fitting = {layout.name: layout for layout in LAYOUTS if layout.kind == head.kind}
    if format not in fitting:
        names = " or ".join(name for name in FORMATS if name in fitting)
        remedy = f"use {names}" if names else "no other tool has a layout for it"
        raise InputError(f"format={format!r}: this head is {head.kind}; {remedy}")
    return fitting[format]


def head_kind(directory: Path) -> str | None:
    """Return the kind of the head in a directory, or None if there is no head.

    Only the config and the names of tensors are read.
    """
    try:
        layout = _fitting(read_json(directory / CONFIG), tensor_names(directory))
    except InputError:  # reported by whatever reads the directory
        return None
    return None if layout is None else layout.kind


def detect(checkpoint: Checkpoint) -> PublishedLayout:
    """Return the layout of a checkpoint; raise InputError if it is unknown."""
    names = checkpoint.tensors.keys()
    if (layout := _fitting(checkpoint.config, names)) is not None:
        return layout
    some = ", ".join(sorted(names)[:4]) or "none"
    raise InputError(
        f"{checkpoint.directory}: its tensors ({some}, ...) are in no known layout; use Medusa's "
        "medusa_lm_head, EAGLE's, the speculators library's, DFlash's or DSpark's"
    )


def _fitting(config: Mapping[str, Any], names: Collection[str]) -> PublishedLayout | None:
    """Return the layout whose signs a config and names of tensors have.

    A sign in the config comes before those of tensors, whose names several tools share.
    """
    fitting = [layout for layout in LAYOUTS if layout.signs.fit(config, names)]
    return next((one for one in fitting if one.signs.key), fitting[0] if fitting else None)


def _notes(
    checkpoint: Checkpoint, target: Model, form: str
) -> tuple[TargetMetadata, dict[str, Any], eagle3_layer_ids.Convention | None]:
    """Return the target, training metadata and layer-id convention in a header by specjax.

    For a file of another tool, they are those of `target`, a note of the import, and None.
    """
    if not checkpoint.is_ours:
        imported = {"format": form, "path": str(checkpoint.directory)}
        return TargetMetadata.of(target), {"imported": imported}, None
    try:
        notes = parse_json(checkpoint.notes.get(_NOTES, ""), f"{_NOTES} in the header")
        if not isinstance(notes, dict):
            raise InputError(f"{shown(notes)} where an object is expected")
        noted = read_dataclass("notes", _Notes, notes)
    except ValueError as error:  # InputError is one
        raise InputError(f"{checkpoint.directory}: its notes cannot be read ({error})") from None
    return noted.target, noted.training, noted.layer_ids
