"""The site's pages of the API: each public name with its signature, docstring and source.

Signatures are shown as they are written, with the shapes of arrays; docstrings say what goes in and
comes out, in which units, and which errors are raised.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]
_Definition = ast.FunctionDef | ast.ClassDef
_Constant = ast.Assign | ast.AnnAssign


def public_names(module: ModuleType) -> list[str]:
    """Return the names of a public module that are no modules themselves, sorted."""
    names = [name for name in module.__all__ if not inspect.ismodule(getattr(module, name))]
    return sorted(names, key=lambda name: (name.lower(), name))


def api_page(name: str) -> str:
    """Return the page, in Markdown, of a public module by its name."""
    module = importlib.import_module(name)
    entries = [_entry(module, each) for each in public_names(module)]
    return "\n\n".join([f"# {name}", inspect.cleandoc(module.__doc__), *entries]) + "\n"


def constant(module: ModuleType, name: str) -> tuple[Path, _Constant, str] | None:
    """Return a constant's file, definition and docstring; None if `name` is no constant."""
    path = Path(module.__file__)
    files = [path, *_imported_from(path, name)]
    if path.name == "__init__.py":
        files += sorted(path.parent.rglob("*.py"))
    for file in files:
        for statement, text in itertools.pairwise(_body(file)):
            match statement, text:
                case (
                    ast.Assign(targets=[ast.Name(id=found)])
                    | ast.AnnAssign(target=ast.Name(id=found)),
                    ast.Expr(value=ast.Constant(value=str(doc))),
                ) if found == name:
                    return file, statement, doc
    return None


def _imported_from(file: Path, name: str) -> list[Path]:
    """Return the files of the modules from which a file imports a name."""
    return [
        Path(importlib.import_module(statement.module).__file__)
        for statement in _body(file)
        if isinstance(statement, ast.ImportFrom) and statement.module
        if name in {alias.asname or alias.name for alias in statement.names}
    ]


@functools.cache
def _body(file: Path) -> list[ast.stmt]:
    return ast.parse(file.read_text(encoding="utf-8")).body


def _entry(module: ModuleType, name: str) -> str:
    if found := constant(module, name):
        file, node, doc = found
        parts = [_code(file, node.lineno, node.end_lineno), inspect.cleandoc(doc)]
    else:
        value = inspect.unwrap(getattr(module, name))
        file = Path(inspect.getsourcefile(value))
        (node,) = (
            node
            for node in _body(file)
            if isinstance(node, _Definition) and node.name == value.__name__
        )
        parts = _definition(file, node)
        if inspect.isfunction(value) and (options := _options(value, node)):
            parts.append(f"`options` are:\n\n{_fence(options)}")
    path = file.relative_to(ROOT)
    # The page of a module is in docs/api, those of files are where the files are.
    source = f"Source: [{path}, line {node.lineno}](../../{path})"
    return "\n\n".join([f"## {name} {{ #{module.__name__}.{name} }}", *parts, source])


def _definition(file: Path, node: _Definition) -> list[str]:
    """Return the signature and docstring of a function, or of a class and its public methods."""
    if isinstance(node, ast.FunctionDef):
        return [_code(file, node.lineno, node.body[0].lineno - 1), ast.get_docstring(node)]
    parts = [_class_code(file, node), ast.get_docstring(node)]
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and not method.name.startswith("_"):
            parts += [f"### {node.name}.{method.name}", *_definition(file, method)]
    return [part for part in parts if part]


def _options(function: Callable[..., Any], node: ast.FunctionDef) -> str:
    """Return the keywords that a function takes as its `**options`, read from its __signature__."""
    written = {argument.arg for argument in ast.walk(node.args) if isinstance(argument, ast.arg)}
    lines = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name not in written:
            kind = re.sub(
                r"\b(\w+\.)+(?=[A-Z])", "", inspect.formatannotation(parameter.annotation)
            )
            lines.append(f"{name}: {kind} = {parameter.default!r}")
    return "\n".join(lines)


def _class_code(file: Path, node: ast.ClassDef) -> str:
    """Return the first lines of a class, with its decorators, and its public fields.

    The docstring below a field is shown with it.
    """
    start = min(each.lineno for each in [node, *node.decorator_list])
    lines = [_lines(file, start, node.body[0].lineno - 1)]
    for field, after in itertools.pairwise([*node.body, ast.Pass()]):
        named = isinstance(field, ast.AnnAssign) and not field.target.id.startswith("_")
        if named or isinstance(field, ast.Assign):
            end = field
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                end = after
            lines.append(_lines(file, field.lineno, end.end_lineno))
    return _fence("\n".join(lines))


def _code(file: Path, first: int, last: int) -> str:
    return _fence(inspect.cleandoc(_lines(file, first, last)))


def _fence(code: str) -> str:
    return f"```python\n{code}\n```"


def _lines(file: Path, first: int, last: int) -> str:
    lines = file.read_text(encoding="utf-8").splitlines()[first - 1 : last]
    return "\n".join(re.sub(r" +# noqa.*", "", line) for line in lines)
