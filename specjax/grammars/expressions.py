"""How regular expressions are put together.

Each function returns an expression that can be put beside others as it is: alternatives are in a
group.
"""

from __future__ import annotations

import re

_TOKEN = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|.", re.DOTALL)


def literal(text: str) -> str:
    """Return the expression of one text."""
    return re.sub(r"[\\.^$*+?{}\[\]|()]", r"\\\g<0>", text)


def either(texts: list[str]) -> str:
    """Return the expression of one of `texts`."""
    texts = list(dict.fromkeys(texts))
    return texts[0] if len(texts) == 1 else f"(?:{'|'.join(texts)})"


def optional(text: str) -> str:
    """Return the expression of `text` or nothing."""
    return f"{_one(text)}?" if text else ""


def repeat(text: str, least: int, most: int | None) -> str:
    """Return the expression of `least` to `most` times `text`; any number of times if None."""
    if most == 0:
        return ""
    counts = {(0, None): "*", (1, None): "+", (0, 1): "?", (1, 1): ""}
    end = "" if most is None else str(most)
    count = counts.get((least, most), f"{{{least}}}" if least == most else f"{{{least},{end}}}")
    return f"{_one(text)}{count}"


def _one(text: str) -> str:
    """Return an expression that can be repeated: in a group, unless it is one or a class."""
    depth = 0
    for token in _TOKEN.finditer(text):
        depth += {"(": 1, ")": -1}.get(token[0], 0)
        if not depth:
            return text if token.end() == len(text) else f"(?:{text})"
    raise ValueError(text)
