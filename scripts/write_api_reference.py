"""Write docs/api.md: every public name with its arguments and the first sentence of its docstring.

python scripts/write_api_reference.py
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

from absl import app

from lib.api_pages import constant, public_names

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
MODULES = (
    "specjax",
    "specjax.drafters",
    "specjax.sampling",
    "specjax.trees",
    "specjax.testing",
    "specjax.metrics",
    "specjax.theory",
    "specjax.controllers",
    "specjax.processors",
    "specjax.tuning",
    "specjax.diagnosis",
)
_HEAD = """\
# API reference

Each public name with its arguments (`=`: may be left out; after `*`: by name) and the first
sentence of its docstring; `help(name)` and the pages of the site (`make docs`) have shapes, units
and errors. [tutorial.md](tutorial.md) uses them together, and the [glossary](glossary.md) explains
the words. This page is written by `python scripts/write_api_reference.py`.
"""
_SHOWN = 10
"""The maximum number of a function's arguments that are shown; decoding has twenty options."""


def reference() -> str:
    """Return the page, as Markdown."""
    sections = [_section(importlib.import_module(name)) for name in MODULES]
    return "\n".join([_HEAD, *sections])


def _section(module: ModuleType) -> str:
    rows = [_row(module, name) for name in public_names(module)]
    lines = [f"## {module.__name__}", "", _sentence(module.__doc__), "", "| name | |", "|---|---|"]
    return "\n".join([*lines, *rows, ""])


def _row(module: ModuleType, name: str) -> str:
    value = getattr(module, name)
    if found := constant(module, name):
        return f"| `{name}` | {_sentence(found[2])} |"
    shown = f"{name}({', '.join(_arguments(value))})" if inspect.isfunction(value) else name
    return f"| `{shown}` | {_sentence(inspect.getdoc(value))} |"


def _arguments(function: Any) -> list[str]:
    shown, by_name = [], False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not by_name:
            shown, by_name = [*shown, "*"], True
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
        by_name |= parameter.kind is parameter.VAR_POSITIONAL
        optional = "" if parameter.default is parameter.empty else "="
        shown.append(f"{stars.get(parameter.kind, '')}{parameter.name}{optional}")
    return [*shown[:_SHOWN], "..."] if len(shown) > _SHOWN else shown


def _sentence(docstring: str) -> str:
    """Return the first sentence of a docstring, as a cell of a table."""
    paragraph = inspect.cleandoc(docstring).partition("\n\n")[0].replace("\n", " ")
    return re.split(r"(?<=\.) (?=[A-Z`])", paragraph)[0].replace("|", "\\|")


def main(argv: list[str]) -> None:
    """Write the page."""
    del argv
    PAGE.write_text(reference(), encoding="utf-8")
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    app.run(main)
