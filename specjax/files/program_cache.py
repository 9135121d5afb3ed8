"""JAX's persistent compilation cache on disk, set up so that its errors never stop a run.

JAX warns about an entry that it cannot read and compiles the program again, but does not overwrite
the entry, so that it would warn in every run. Such entries are deleted here before JAX writes.
"""

from __future__ import annotations

import functools
import glob
import os
import re
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax

from specjax.errors import InputError
from specjax.files import path_checks

_FOLDER = "JAX_COMPILATION_CACHE_DIR"
_WARNING = r"Error (reading|writing) persistent compilation cache entry for '"


def keep(tell: Callable[[str], Any]) -> None:
    """Cache compiled programs under JAX_COMPILATION_CACHE_DIR or ~/.cache/specjax/xla.

    If the folder cannot be used, or entries are damaged, `tell` is called with a line that says so,
    and the run continues. Damaged entries are replaced.
    """
    named = os.environ.get(_FOLDER)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    if named and "://" in named:  # remote storage, which JAX opens itself
        jax.config.update("jax_compilation_cache_dir", named)
        return
    try:
        folder = (
            path_checks.output_folder(_FOLDER, named) if named else path_checks.cache_folder("xla")
        )
        folder.mkdir(parents=True, exist_ok=True)
    except (InputError, OSError) as error:
        reason = str(error) if isinstance(error, InputError) else f"{folder}: {error.strerror}"
        tell(f"compiled programs are not kept: {reason}")
        jax.config.update("jax_compilation_cache_dir", None)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    _replace_damaged_entries(folder, tell)


@functools.cache
def keep_in_library() -> None:
    """Turn on the cache of compiled programs for users of the Python API, with its default folder.

    Does nothing if the caller has set up JAX's cache, or disabled it by
    `jax_enable_compilation_cache`. Problems are reported as warnings.
    """
    if jax.config.jax_enable_compilation_cache and jax.config.jax_compilation_cache_dir is None:
        keep(lambda line: warnings.warn(line, stacklevel=3))


def _replace_damaged_entries(folder: Path, tell: Callable[[str], Any]) -> None:
    """Install a warning handler that deletes the cache entries that JAX cannot read.

    `tell` is called with a line about the first entries that cannot be read or written.
    """
    show_warning, told = warnings.showwarning, set()

    def replace_or_show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: Any = None,
        line: str | None = None,
    ) -> None:
        match = re.match(f"{_WARNING}([^']*)': (.*)", str(message), re.DOTALL)
        if match is None:
            show_warning(message, category, filename, lineno, file, line)
            return
        doing, program, reason = match.groups()
        deleted = doing == "reading" and _delete_entries(folder, program)
        if doing in told:
            return
        told.add(doing)
        if deleted:
            tell(f"compiled programs in {folder}: damaged entries are replaced")
        else:
            tell(
                f"compiled programs in {folder}: {doing} fails ({' '.join(reason.split()):.160}); "
                f"free space, change its permissions, or name another folder by {_FOLDER}"
            )

    # By default Python shows equal warnings once, and two entries may have the same text.
    warnings.filterwarnings("always", message=_WARNING, category=UserWarning)
    warnings.showwarning = replace_or_show


def _delete_entries(folder: Path, program: str) -> bool:
    """Delete the cache entries of all programs with this name; return whether there were any.

    JAX reports only the name of a damaged entry's program; undamaged entries are compiled again.
    """
    deleted = False
    for path in folder.glob(f"{glob.escape(program)}-*"):
        if re.fullmatch(rf"{re.escape(program)}(-[0-9a-f]+)?-cache", path.name):
            with suppress(OSError):
                path.unlink()
                deleted = True
    return deleted
