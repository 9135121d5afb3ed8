"""Conversion of a report's Markdown to a single HTML file that includes the pictures."""

from __future__ import annotations

import base64
import html
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

_STYLE = """\
body { font-family: system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; }
table { border-collapse: collapse; display: block; margin: 1rem 0; overflow-x: auto; }
th, td { border: 1px solid #ccc; padding: .25rem .6rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
th { background: #f3f3f3; }
img { max-width: 100%; }
"""
_TYPES = {"png": "image/png", "svg": "image/svg+xml"}
_PICTURE = re.compile(r"!\[(.*)\]\((.*)\)")
_CELL_END = re.compile(r"(?<!\\)\|")


def page(markdown: str, pictures: Mapping[str, bytes]) -> str:
    """Return the HTML page of a report written by `tables.markdown`.

    It may have headings, tables, pictures on lines of their own, and paragraphs with bold text.
    `pictures` are the contents of picture files by name; formats other than PNG and SVG are
    omitted.
    """
    title = markdown.partition("\n")[0].lstrip("# ")
    blocks = [block for block in re.split(r"\n{2,}", markdown.strip()) if block]
    body = "\n".join(element for block in blocks for element in _elements(block, pictures))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<title>{_inline(title)}</title>\n<style>\n{_STYLE}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def _elements(block: str, pictures: Mapping[str, bytes]) -> Iterator[str]:
    """Yield the HTML elements of a block of Markdown, which has no empty lines."""
    for kind, lines in itertools.groupby(block.split("\n"), _kind):
        lines = list(lines)
        if kind == "table":
            yield _table(lines)
        elif kind == "text":
            yield f"<p>{_inline(' '.join(lines))}</p>"
        else:
            yield from (_line(line, pictures) for line in lines)


def _kind(line: str) -> str:
    """Return the kind of a line: "table", "text", or "line" for a heading or a picture."""
    if line.startswith("| "):
        return "table"
    return "line" if line.startswith("#") or _PICTURE.fullmatch(line) else "text"


def _line(line: str, pictures: Mapping[str, bytes]) -> str:
    """Return the HTML element of a heading or a picture."""
    if picture := _PICTURE.fullmatch(line):
        title, name = picture.groups()
        kind = _TYPES.get(name.rpartition(".")[2])
        if kind is None or name not in pictures:
            return ""
        data = base64.b64encode(pictures[name]).decode()
        return f'<img alt="{_inline(title)}" src="data:{kind};base64,{data}">'
    level = len(line) - len(line.lstrip("#"))
    return f"<h{level}>{_inline(line.lstrip('# '))}</h{level}>"


def _table(lines: Sequence[str]) -> str:
    """Return the HTML of a Markdown table."""
    head, _, *rows = ([cell.strip() for cell in _CELL_END.split(line)[1:-1]] for line in lines)
    elements = [_row("th", head), *(_row("td", cells) for cells in rows)]
    return "<table>\n" + "\n".join(elements) + "\n</table>"


def _row(element: str, cells: Sequence[str]) -> str:
    """Return the HTML of a table row whose cells are `element`, th or td."""
    inside = "".join(f"<{element}>{_inline(cell)}</{element}>" for cell in cells)
    return f"<tr>{inside}</tr>"


def _inline(text: str) -> str:
    """Return the HTML of a line's text, with bold parts marked and Markdown's escapes removed."""
    bold = re.sub(r"(?<!\\)\*\*(.+?)(?<!\\)\*\*", r"<b>\1</b>", html.escape(text))
    return re.sub(r"\\(\W)", r"\1", bold)
