"""Text files, written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    r"""Replace a file by a text, by way of a temporary file beside it.

    What UTF-8 cannot encode (half of a surrogate pair) is escaped as \udXXX, which JSON reads
    back as it was. Raises OSError where that fails; the earlier file is then still there.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".specjax-", suffix=".tmp")
    try:
        with open(handle, "w", encoding="utf-8", errors="backslashreplace", newline="") as file:
            # mkstemp keeps others out; what we write is an ordinary file.
            mask = os.umask(0)
            os.umask(mask)
            os.fchmod(handle, 0o666 & ~mask)
            file.write(text)
            file.flush()
            os.fsync(handle)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
