"""Write docs/api.md: every public name with its arguments and the first sentence of its docstring.

python scripts/write_api_reference.py
"""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import re
from pathlib import Path
from types import ModuleType
from typing import Any

from absl import app

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
    "specjax.tuning",
    "specjax.diagnosis",
)
_HEAD = """\
# API reference

Each public name with its arguments (`=`: may be left out; after `*`: by name) and the first
sentence of its docstring; `help(name)` has shapes, units and errors. [tutorial.md](tutorial.md)
uses them together, and the [glossary](glossary.md) explains the words. This page is written by
`python scripts/write_api_reference.py`.
"""
_SHOWN = 10
"""Arguments of a function that are shown: decoding has twenty options (docs/support.md)."""


def reference() -> str:
    """The page, as Markdown."""
    sections = [_section(importlib.import_module(name)) for name in MODULES]
    return "\n".join([_HEAD, *sections])


def _section(module: ModuleType) -> str:
    names = [name for name in module.__all__ if not inspect.ismodule(getattr(module, name))]
    rows = [_row(module, name) for name in sorted(names, key=lambda name: (name.lower(), name))]
    lines = [f"## {module.__name__}", "", _sentence(module.__doc__), "", "| name | |", "|---|---|"]
    return "\n".join([*lines, *rows, ""])


def _row(module: ModuleType, name: str) -> str:
    value = getattr(module, name)
    if (constant := _constant(module, name)) is not None:
        return f"| `{name}` | {constant} |"
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


def _constant(module: ModuleType, name: str) -> str | None:
    """The first sentence of the text below a constant's definition; None for anything else."""
    path = Path(module.__file__)
    files = sorted(path.parent.rglob("*.py")) if path.name == "__init__.py" else [path]
    for file in files:
        body = ast.parse(file.read_text(encoding="utf-8")).body
        for statement, text in itertools.pairwise(body):
            match statement, text:
                case (
                    ast.Assign(targets=[ast.Name(id=found)])
                    | ast.AnnAssign(target=ast.Name(id=found)),
                    ast.Expr(value=ast.Constant(value=str(doc))),
                ) if found == name:
                    return _sentence(doc)
    return None


def _sentence(docstring: str) -> str:
    """The first sentence, as a cell of a table."""
    paragraph = inspect.cleandoc(docstring).partition("\n\n")[0].replace("\n", " ")
    return re.split(r"(?<=\.) (?=[A-Z`])", paragraph)[0].replace("|", "\\|")


def main(argv: list[str]) -> None:
    """Write the page."""
    del argv
    PAGE.write_text(reference(), encoding="utf-8")
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    app.run(main)
