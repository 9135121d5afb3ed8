"""Text files, written whole or not at all."""

from __future__ import annotations

from pathlib import Path

from specjax.files.atomic_writes import replacing


def write_text(path: Path, text: str) -> None:
    r"""Replace a file's content by a text, through a temporary file beside it.

    What UTF-8 cannot encode (half of a surrogate pair) is escaped as \udXXX, which JSON reads
    back as it was. Raises OSError where that fails; the earlier file is then still there.
    """
    with replacing(path) as file:
        file.write(text.encode("utf-8", "backslashreplace"))
