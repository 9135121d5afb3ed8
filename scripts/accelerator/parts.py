"""Folders packed into files of a limited size, to be carried between machines and joined again."""

from __future__ import annotations

import hashlib
import json
import shutil
import tarfile
from collections.abc import Sequence
from pathlib import Path

from specjax.errors import InputError
from specjax.files.json_files import read_json_file

LIST = "parts.json"
"""The file with the number of the call and the digest of each part."""
_INCOMING = "incoming"


def pack(root: Path, names: Sequence[Path], folder: Path, name: str, most: int) -> list[Path]:
    """Write files and folders of `root` to `folder` as NAME.tar.gz.000, ...; return the parts.

    `names` are relative to `root`, and a part has at most `most` bytes. Joined in order, the parts
    are the archive.
    """
    whole, parts = folder / f"{name}.tar.gz", []
    with tarfile.open(whole, "w:gz", compresslevel=1) as archive:
        for path in names:
            archive.add(root / path, path)
    with whole.open("rb") as file:
        while data := file.read(most):
            parts.append(folder / f"{whole.name}.{len(parts):03d}")
            parts[-1].write_bytes(data)
    whole.unlink()
    return parts


def write_list(parts: Sequence[Path], folder: Path, call: int) -> None:
    """Write the list of the parts with which call number `call` ended."""
    digests = {path.name: _digest(path) for path in parts}
    (folder / LIST).write_text(json.dumps({"call": call, "parts": digests}, indent=1) + "\n")


def read_list(folder: Path) -> tuple[int, dict[str, str]]:
    """Return the number of the call that wrote a folder, and its parts' digests by name.

    Raises InputError if the folder has no such list.
    """
    remedy = (
        "copy the folder that the last call wrote again, whole (the call that finishes all stages "
        "writes no list: its report.txt says that none need follow)"
    )
    content = read_json_file(folder / LIST, remedy)
    match content:
        case {"call": int(call), "parts": dict(parts)}:
            return call, parts
    raise InputError(f"{folder / LIST}: not what a call wrote; {remedy}")


def unpack(folder: Path, root: Path) -> list[str]:
    """Unpack the listed parts of a folder in `root`; return the names of missing parts, if any.

    Parts that are there are then kept in `root`, so that other calls may bring the others. Raises
    InputError for a damaged part.
    """
    _, digests = read_list(folder)
    incoming = root / _INCOMING
    incoming.mkdir(exist_ok=True)
    for name, digest in digests.items():
        if (folder / name).exists():
            if _digest(folder / name) != digest:
                raise InputError(f"{folder / name}: damaged; copy it again")
            shutil.copy(folder / name, incoming / name)
    # Parts of an earlier call may have been kept there.
    kept = [path.name for path in incoming.iterdir() if _digest(path) == digests.get(path.name)]
    missing = [name for name in digests if name not in kept]
    if not missing:
        whole = incoming / "whole"
        with whole.open("wb") as file:
            for name in digests:
                file.write((incoming / name).read_bytes())
        with tarfile.open(whole) as archive:
            archive.extractall(root, filter="data")
        shutil.rmtree(incoming)
    return missing


def groups(parts: Sequence[Path], most: int) -> list[list[Path]]:
    """Return the parts in groups of at most `most` bytes, in order."""
    found: list[list[Path]] = []
    room = 0
    for part in parts:
        size = part.stat().st_size
        if size > room or not found:
            found.append([])
            room = most
        found[-1].append(part)
        room -= size
    return found


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
