"""Checks of paths that users supply, of files or folders to read or write.

Each function takes the name of the field that held the path, and raises InputError naming field,
value and remedy if the path does not suit the field. Nothing is created or written. `open_files`
checks files inside a folder, whose names users did not supply.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from specjax.errors import InputError, shown

_DEVICES = ("/dev", "/proc", "/sys")
"""Folders whose entries are devices or processes, even where they look like files."""

_SHARED_MEMORY = "/dev/shm"
"""A folder of ordinary files inside /dev."""


def user_path(field: str, value: str | os.PathLike[str]) -> Path:
    """Return an absolute path with `~` expanded; it need not exist.

    Raises InputError for a string that cannot be a path: empty, too long, with a NUL, with `~` of
    an unknown user, below a file, or in a folder without access.
    """
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str):
        raise InputError(f"{field}={shown(value)}: use a path")
    if not text.strip():
        raise InputError(f"{field}={text!r} is empty: name a file or a folder")
    if "\0" in text:
        raise InputError(f"{field}={shown(text, 200)}: a path holds no NUL; write it without")
    try:
        path = Path(text).expanduser().absolute()
    except (RuntimeError, OSError) as error:  # no such user, or no working directory
        raise InputError(
            f"{field}={shown(text, 200)}: {str(error).rstrip('.')}; write the path in full"
        ) from None
    _status(field, text, path)
    return path


def input_file(field: str, value: str | os.PathLike[str], *, pipe: bool = False) -> Path:
    """Return the path of a readable file; raise InputError if there is none.

    With `pipe` it may also be a pipe: one made with mkfifo, or /dev/stdin and /proc/self/fd/N if
    they refer to pipes.
    """
    path = user_path(field, value)
    status = _status(field, value, path)
    if status is None:
        raise _refusal(field, value, ": no such file; check the path")
    if stat.S_ISDIR(status.st_mode):
        raise _refusal(field, value, " is a folder: name a file in it")
    if stat.S_ISFIFO(status.st_mode) and not pipe:
        raise _refusal(field, value, " is a pipe: name a file")
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISFIFO(status.st_mode):
        raise _refusal(field, value, " is a device: name a file")
    if not os.access(path, os.R_OK):
        raise _refusal(field, value, ": you may not read it; change its permissions")
    return path


def input_folder(field: str, value: str | os.PathLike[str]) -> Path:
    """Return the path of a folder whose files can be listed; raise InputError if there is none."""
    path = user_path(field, value)
    status = _status(field, value, path)
    if status is None:
        raise _refusal(field, value, ": no such folder; check the path")
    if not stat.S_ISDIR(status.st_mode):
        raise _refusal(field, value, " is a file: name a folder")
    if not os.access(path, os.R_OK | os.X_OK):
        raise _refusal(field, value, ": you may not read it; change its permissions")
    return path


def output_file(field: str, value: str | os.PathLike[str]) -> Path:
    """Return the path of a file to write, whose folder exists or can be created.

    Links are followed. Raises InputError if the path is a folder, a device, a pipe or anything else
    that a file must not replace.
    """
    path = user_path(field, value)
    # Both spellings: /dev/stdout may be a link to an ordinary file.
    if any(map(_is_device, (Path(os.path.normpath(path)), path.resolve()))):
        raise _refusal(field, value, " is a device: name a file")
    status = _status(field, value, path)
    ends_as_folder = os.path.basename(os.fspath(value)) in ("", ".", "..")
    if ends_as_folder or (status is not None and stat.S_ISDIR(status.st_mode)):
        raise _refusal(field, value, " is a folder: name a file in it")
    if status is not None and not stat.S_ISREG(status.st_mode):
        raise _refusal(field, value, " is no regular file: name another")
    path = path.resolve()
    existing = next(parent for parent in path.parents if parent.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        raise _refusal(field, value, f": {existing} may not be written to; choose another folder")
    return path


def output_folder(field: str, value: str | os.PathLike[str]) -> Path:
    """Return the path of a folder to write into, which exists or can be created.

    Raises InputError if it is a file or cannot be written. `folders` checks whose files it holds.
    """
    path = user_path(field, value)
    status = _status(field, value, path)
    if status is not None and not stat.S_ISDIR(status.st_mode):
        raise _refusal(field, value, " is a file: name a folder")
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        raise _refusal(field, value, f": {existing} may not be written to; choose another folder")
    return path


def cache_folder(part: str) -> Path:
    """Return the folder named `part` among specjax's caches, under XDG_CACHE_HOME or ~/.cache.

    It need not exist. Raises InputError as `output_folder` does.
    """
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return output_folder("XDG_CACHE_HOME", f"{home}/specjax/{part}")


def _is_device(path: Path) -> bool:
    in_memory = path.is_relative_to(_SHARED_MEMORY) and path != Path(_SHARED_MEMORY)
    return not in_memory and any(path.is_relative_to(folder) for folder in _DEVICES)


def _status(field: str, value: str | os.PathLike[str], path: Path) -> os.stat_result | None:
    """Return the status of the file or folder at `path`, following links, or None if absent."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        raise _refusal(
            field, value, ": a part of it is a file, not a folder; check the path"
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise _refusal(field, value, f": {reason}; use another path") from None


def _refusal(field: str, value: str | os.PathLike[str], what: str) -> InputError:
    # The limit is high because the end of a path matters more than its beginning.
    return InputError(f"{field}={shown(str(value), 200)}{what}")
