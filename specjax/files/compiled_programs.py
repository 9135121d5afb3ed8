"""JAX's persistent cache of compiled programs on disk; its errors never stop a run.

JAX warns of each entry that it cannot read and compiles again, but never overwrites an entry: it
would warn of a damaged one in every run. Such entries are deleted here, before JAX writes.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import warnings
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax

from specjax.errors import InputError
from specjax.files import paths

_FOLDER = "JAX_COMPILATION_CACHE_DIR"
_WARNING = r"Error (reading|writing) persistent compilation cache entry for '"


def keep(tell: Callable[[str], Any]) -> None:
    """Keep compiled programs under JAX_COMPILATION_CACHE_DIR or ~/.cache/specjax/xla.

    `tell` takes a line where that folder cannot be used, and one where entries are damaged; such
    entries are replaced, and the run continues in any case.
    """
    named = os.environ.get(_FOLDER)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    if named and "://" in named:  # not on this machine: JAX's own to open
        jax.config.update("jax_compilation_cache_dir", named)
        return
    try:
        folder = paths.output_folder(_FOLDER, named) if named else paths.cache_folder("xla")
        folder.mkdir(parents=True, exist_ok=True)
    except (InputError, OSError) as error:
        reason = str(error) if isinstance(error, InputError) else f"{folder}: {error.strerror}"
        tell(f"compiled programs are not kept: {reason}")
        jax.config.update("jax_compilation_cache_dir", None)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    _mend_entries(folder, tell)


@functools.cache
def keep_in_library() -> None:
    """Keep compiled programs, as command lines do, unless JAX keeps them elsewhere or not at all.

    For calls of the Python API, whose caller may have set up JAX's cache (or switched it off by
    `jax_enable_compilation_cache`); lines of `keep` become warnings.
    """
    if jax.config.jax_enable_compilation_cache and jax.config.jax_compilation_cache_dir is None:
        keep(lambda line: warnings.warn(line, stacklevel=3))


def _mend_entries(folder: Path, tell: Callable[[str], Any]) -> None:
    """Install a warning handler that deletes the damaged entries that JAX warns of."""
    show, shown = warnings.showwarning, set()

    def answer(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: Any = None,
        line: str | None = None,
    ) -> None:
        found = re.match(f"{_WARNING}([^']*)': (.*)", str(message), re.DOTALL)
        if found is None:
            show(message, category, filename, lineno, file, line)
            return
        doing, name, reason = found.groups()
        deleted = _delete_damaged(folder, name, reading=doing == "reading")
        if doing in shown:
            return
        shown.add(doing)
        if doing == "reading" and deleted:
            tell(f"compiled programs in {folder}: damaged entries are replaced")
        else:
            tell(
                f"compiled programs in {folder}: {doing} fails ({' '.join(reason.split()):.160}); "
                f"free space, change its permissions, or name another folder by {_FOLDER}"
            )

    # Python shows a warning once for each text, and two entries may have the same.
    warnings.filterwarnings("always", message=_WARNING, category=UserWarning)
    warnings.showwarning = answer


def _delete_damaged(folder: Path, name: str, *, reading: bool) -> bool:
    """Delete the damaged entries of a program's name, and say whether any went.

    Where an entry could not be read and none is visibly damaged, all of that name are deleted: JAX
    reports the name only, and compiles again what is missing.
    """
    try:
        entries = [path for path in folder.iterdir() if _is_entry(path.name, name)]
    except OSError:  # the folder itself is gone
        return False
    damaged = [path for path in entries if not _is_whole(path)]
    if reading:
        damaged = damaged or entries
    deleted = False
    for path in damaged:
        with suppress(OSError):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
            deleted = True
    return deleted


def _is_entry(file: str, name: str) -> bool:
    """Whether a file's name is that of a program, as JAX names its entries."""
    return re.fullmatch(rf"{re.escape(name)}(-[0-9a-f]+)?-cache", file) is not None


def _is_whole(path: Path) -> bool:
    """Whether an entry can be uncompressed; what another method compressed says nothing."""
    try:
        content = path.read_bytes()
        if content[:1] == b"\x78":
            zlib.decompress(content)
    except (OSError, zlib.error):
        return False
    return bool(content)
