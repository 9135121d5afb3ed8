"""Finding of trained heads: those that come with specjax, checkpoints, and published layouts."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from specjax.errors import InputError
from specjax.files.json_files import read_json_file
from specjax.files.path_checks import user_path
from specjax.loading.load import load_model
from specjax.loading.model import Model
from specjax.loading.storage.checkpoint_directory import (
    CONTENT,
    is_checkpoint,
    metadata_of,
    read_marker,
    read_metadata,
)
from specjax.methods import published_layouts
from specjax.methods.heads.eagle3_layer_ids import Convention
from specjax.methods.heads.head import Head, TargetMetadata
from specjax.methods.registry import HEADS, METHODS
from specjax.methods.saved_heads import read_head

SHIPPED = Path(__file__).parents[1] / "shipped_heads"
"""The heads that come with specjax: a folder per target, with a checkpoint per kind of drafter."""


def shipped_heads() -> dict[str, list[str]]:
    """Return the kinds of heads that come with specjax, such as "eagle3", by target name."""
    kinds_of_target: dict[str, list[str]] = {}
    for folder in sorted(path for path in SHIPPED.iterdir() if path.is_dir()):
        kinds = [kind for kind in HEADS if is_checkpoint(folder / kind)]
        if kinds:
            kinds_of_target[folder.name] = kinds
    return kinds_of_target


def included_heads(target: Model) -> list[str]:
    """Return the kinds of heads that come with specjax for a target; only metadata are read."""
    metadata = TargetMetadata.of(target)
    included = [
        kind
        for name, kinds in shipped_heads().items()
        for kind in kinds
        if _target_of(SHIPPED / name / kind).matches(metadata)
    ]
    return list(dict.fromkeys(included))


def _target_of(directory: Path) -> TargetMetadata:
    """Return the target of a head that comes with specjax."""
    found = metadata_of(directory, read_json_file(directory / CONTENT))
    return TargetMetadata(**found["target"])


def kind_of_head(path: Path) -> str | None:
    """Return the kind of the head in a directory, or None; only metadata and names are read."""
    if is_checkpoint(path):
        with suppress(InputError):  # a model, or damaged, which its reader reports
            return read_metadata(path, "drafter").get("kind")
        return None
    return published_layouts.head_kind(path) if path.is_dir() else None


def open_head(kind: str, path: str | Path | None, target: Model) -> Head:
    """Return the head of the given kind for a target, from `path` or among those of specjax.

    `path` is a checkpoint or a directory in a known layout; None means the head that comes with
    specjax. Raises InputError if there is no head or one of another kind, and if it cannot be read.
    """
    if path is None:
        if (head := shipped_head(kind, target)) is not None:
            return head
        raise InputError(
            f"drafter.path is missing: no {kind} comes with specjax for {target.name}; give what "
            "training exported, or a downloaded head"
        )
    head = read_any_head(path, target, "drafter.path")
    check_kind(head.kind, kind, path)
    return head


def check_kind(kind: str, wanted: str, path: str | Path) -> None:
    """Raise InputError, which names the path of a head, unless its kind is the wanted one."""
    if kind != wanted:
        raise InputError(
            f"drafter.path={str(path)!r}: a head of the kind {kind}; use drafter.name={kind}"
        )


def head_directory(field: str, path: str | Path) -> Path:
    """Return the directory of a head; raise InputError, calling it `field`, if there is none."""
    directory = user_path(field, path)
    if not directory.is_dir():
        raise InputError(
            f"{field}={str(path)!r}: no such directory; give what training exported, or a "
            "downloaded head"
        )
    return directory


def read_any_head(
    path: str | Path, target: Model, field: str, layer_ids: Convention | None = None
) -> Head:
    """Return the head in a directory, of any kind and layout.

    If `path` is a model with MTP modules, the head consists of these. `layer_ids` is as in
    `read_foreign`. Raises InputError, calling the path `field`, if there is no such directory, if a
    model has no modules, or if the head cannot be read.
    """
    typed, path = str(path), head_directory(field, path)
    if is_checkpoint(path):
        if read_marker(path).kind != "model":
            return read_head(path, target.mesh)
        model = load_model(
            path,
            dtype=target.dtype.name,
            mesh=target.mesh,
            replicated=target.shards == 1,
            field=field,
        )
        return _inside(model, f"{field}={typed!r}")
    if is_checkpoint(path / "head"):
        raise InputError(
            f"{field}={str(path)!r}: a target and a head that were trained together; use "
            f"{field}={str(path / 'head')!r} with the target {str(path / 'target')!r}"
        )
    return published_layouts.read_foreign(path, target, layer_ids=layer_ids)


def _inside(model: Model, where: str) -> Head:
    """Return the head that a model holds; raise InputError, beginning with `where`, if none."""
    own_heads = [method.own_head for method in METHODS.values() if method.own_head is not None]
    for own_head in own_heads:
        if (head := own_head.head(model)) is not None:
            return head
    raise InputError(
        f"{where}: a model without {' or '.join(each.what for each in own_heads)}; give a head "
        "that training exported, or a model with modules inside"
    )


def shipped_head(kind: str, target: Model) -> Head | None:
    """Return the head of the given kind that comes with specjax for a target, or None."""
    metadata = TargetMetadata.of(target)
    for name, kinds in shipped_heads().items():
        if kind not in kinds:
            continue
        head = read_head(SHIPPED / name / kind, target.mesh)
        if head.target.matches(metadata):
            return head
    return None
