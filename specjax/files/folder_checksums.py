"""The marker of a folder made by specjax: the kind of the folder, and checksums of its files.

The marker is a small JSON file named `MARKER`. The folder of a training run gets it before anything
else is written (`folders.claim`). A finished folder, such as a saved model, gets it last (`seal`),
with the size and SHA-256 of every file; without it, the folder is unfinished or was copied
incompletely.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from specjax.errors import InputError, shown
from specjax.files import atomic_writes
from specjax.files.json_files import read_json_file
from specjax.files.open_files import open_regular

Kind = Literal[
    "model",
    "head",
    "drafter",
    "dataset",
    "features",
    "answers",
    "training run",
    "recipe",
    "report",
    "spec-bench run",
    "corpus",
    "corpus index",
    "tokens",
]

MARKER = "specjax_folder.json"
LOCK = "specjax.lock"
"""The file that `distributed.folder_lock` locks; it may remain after its process has ended."""

ORBAX_METADATA, ORBAX_SUCCESS = "_CHECKPOINT_METADATA", "commit_success.txt"
"""Files that Orbax writes into a checkpoint after the marker, which therefore omits them."""

_FORMAT = 1
_UNLISTED = (MARKER, ORBAX_METADATA, ORBAX_SUCCESS)


@dataclass(frozen=True)
class Record:
    """The size of a file in bytes, and the SHA-256 of its content."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Marker:
    """What a folder made by specjax says of itself: its kind, and a record of each of its files.

    `files` are records by relative path; None while the folder still changes.
    """

    kind: str
    files: dict[str, Record] | None


def read_marker(folder: Path) -> Marker | None:
    """Return the marker of a folder, or None if it has none; raise InputError if it is damaged."""
    file = folder / MARKER
    if not file.is_file():
        return None
    content = read_json_file(file, "copy the folder again, whole")
    version = content.get("specjax_folder") if isinstance(content, dict) else None
    if type(version) is int and version != _FORMAT:
        raise InputError(
            f"{file}: format {shown(version)}, and only {_FORMAT} is known; use the version of "
            "specjax that wrote it"
        )
    kind = content.get("kind") if version is not None else None
    if not isinstance(kind, str):
        raise InputError(f"{file}: not what specjax writes; copy the folder again, whole")
    files = content.get("files")
    return Marker(kind, None if files is None else _records(file, files))


def write_marker(folder: Path, marker: Marker) -> None:
    """Write the marker of a folder, replacing an earlier one. Raises OSError if that fails."""
    content: dict[str, Any] = {"specjax_folder": _FORMAT, "kind": marker.kind}
    if marker.files is not None:
        content["files"] = {name: asdict(record) for name, record in marker.files.items()}
    atomic_writes.write_text(folder / MARKER, json.dumps(content, indent=1, sort_keys=True) + "\n")


def seal(folder: Path, kind: Kind) -> None:
    """Write the marker of a finished folder, with a record of every file in it.

    From then on the folder counts as complete. Raises OSError if that fails.
    """
    names = [name for name in contents(folder) if not name.endswith("/")]
    with _hashing(len(names)) as pool:
        records = list(pool.map(record_of, [folder / name for name in names]))
    write_marker(folder, Marker(kind, dict(zip(names, records, strict=True))))


def find_damage(
    folder: Path,
    marker: Marker,
    share: tuple[int, int] | None = (0, 1),
    needed: Iterable[str] = (),
) -> str | None:
    """Return a description of the first file that differs from its record in `marker`, or None.

    `share` is (i, n) to read only the i-th of n parts of the files, or None to compare only their
    sizes. Each file in `needed` must have a record.
    """
    files = marker.files or {}
    for name in needed:
        if name not in files:
            return f"{name} is not listed in {MARKER}"
    for name, record in files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            return f"{name}: {(error.strerror or str(error)).lower()}"
        if size != record.bytes:
            return f"{name} has {size} bytes, {record.bytes} were written"
    if share is None:
        return None
    # Files are assigned in turn, the largest first, so that the shares take similar times.
    names = sorted(files, key=lambda name: (-files[name].bytes, name))[share[0] :: share[1]]
    try:
        with _hashing(len(names)) as pool:
            current = list(pool.map(record_of, [folder / name for name in names]))
    except OSError as error:
        return f"{error.filename}: {error.strerror or error}"
    for name, record in zip(names, current, strict=True):
        if record.sha256 != files[name].sha256:
            return f"{name} is not as it was written: its SHA-256 differs"
    return None


def verify(
    folder: Path, kinds: tuple[Kind, ...], written_by_us: bool, needed: Iterable[str]
) -> None:
    """Raise InputError, naming the file, if a folder changed since specjax saved it.

    `kinds` are the kinds that the folder may have. `needed` are the names of files that will be
    read; the marker must list them. A folder without a suitable marker passes if specjax did not
    write it; `written_by_us` says whether its files show that specjax did. Each process reads all
    files, since the folder may be on a local disk.
    """
    marker = read_marker(folder)
    if marker is None or marker.kind not in kinds or marker.files is None:
        if not written_by_us:
            return
        if marker is not None and marker.kind == "model" and "model" not in kinds:
            wanted = " or a ".join(kinds)
            raise InputError(f"{folder}: holds a model, not a {wanted}; give that of a {wanted}")
        raise InputError(
            f"{folder}: specjax wrote its weights, and {MARKER}, which it writes last, is missing "
            "or of another folder; copy the folder again, whole, or save elsewhere"
        )
    if damage := find_damage(folder, marker, needed=needed):
        raise InputError(f"{folder}: {damage}; copy it again, or save elsewhere")


def record_of(file: Path) -> Record:
    """Return the current size and SHA-256 of a file.

    Raises OSError if it cannot be read, and InputError if it is not a regular file.
    """
    with open_regular(file) as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
        return Record(os.fstat(opened.fileno()).st_size, digest)


def is_kept(file: Path) -> bool:
    """Return whether a file's name is reserved by specjax, or listed in its folder's marker.

    A damaged marker counts as one that lists no files.
    """
    if file.name in (MARKER, LOCK) or atomic_writes.is_temporary(file.name):
        return True
    try:
        marker = read_marker(file.parent)
    except InputError:
        return False
    return marker is not None and file.name in (marker.files or {})


def is_lock(file: Path) -> bool:
    """Return whether `file`, named like a lock, is a regular file and no symbolic link."""
    return file.is_file() and not file.is_symlink()


def contents(folder: Path, temporary_too: bool = False) -> Iterator[str]:
    """Yield the relative paths of all files below a folder, and of empty folders with "/" added.

    The marker, the lock, and files that Orbax writes later are omitted; so are temporary files,
    unless `temporary_too` is set.
    """
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_dir() and not path.is_symlink():
            if not any(path.iterdir()):
                yield f"{name}/"
        elif name in _UNLISTED or (name == LOCK and is_lock(path)):
            continue
        elif temporary_too or not atomic_writes.is_temporary(name):
            yield name


def _records(file: Path, files: Any) -> dict[str, Record]:
    """Return the records by path that a marker `file` lists under its key `files`.

    Raises InputError for a record of another form, and for a path outside the folder.
    """
    records: dict[str, Record] = {}
    for name, record in files.items() if isinstance(files, dict) else ():
        path = PurePosixPath(name)
        inside = name and "\0" not in name and not path.is_absolute() and ".." not in path.parts
        fields = record if isinstance(record, dict) else {}
        size, digest = fields.get("bytes"), fields.get("sha256")
        if not inside or type(size) is not int or not isinstance(digest, str):
            raise InputError(
                f"{file}: {shown(name)} is not listed as specjax lists files; copy the folder "
                "again, whole"
            )
        records[name] = Record(size, digest)
    if not isinstance(files, dict):
        raise InputError(f"{file}: lists no files; copy the folder again, whole")
    return records


def _hashing(files: int) -> ThreadPoolExecutor:
    # Threads suffice, since hashing releases the interpreter's lock.
    return ThreadPoolExecutor(max(1, min(files, os.cpu_count() or 1, 8)))
