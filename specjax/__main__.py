"""`python -m specjax`, or `specjax`: list the commands, or run one by its name."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

COMMANDS = (
    "decode",
    "bench",
    "spec_bench",
    "report",
    "doctor",
    "export",
    "serve",
    "corpus_index",
    "train.corpus",
    "train.generate",
    "train.import_responses",
    "train.features",
    "train.medusa",
    "train.eagle",
    "train.peagle",
    "train.distill",
    "train.block",
    "train.layerskip",
    "train.mtp",
)
"""The commands, in the order in which a newcomer is likely to use them."""


def module_of(command: str) -> str:
    """Return the module that `python -m` runs for a command."""
    return command if command.startswith("train.") else f"specjax.{command}"


def hiding_file() -> str | None:
    """Return the path of a user's module `train` that shadows specjax's package, or None."""
    spec = importlib.util.find_spec("train")
    ours = Path(__file__).parents[1] / "train" / "__init__.py"
    return None if spec is None or spec.origin == str(ours) else spec.origin


def summary(command: str) -> str:
    """Return the first line of a command's docstring, without importing the command."""
    if command.startswith("train.") and (file := hiding_file()):
        return f"Hidden by {file}."
    module = _source(module_of(command))
    for node in module.body:
        # The module of an application's command has only its `main`.
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "main":
            module = _source(node.module)
    return (ast.get_docstring(module) or "").splitlines()[0]


def _source(module: str) -> ast.Module:
    """Return the parsed source of a module, without importing it."""
    spec = importlib.util.find_spec(module)
    with open(spec.origin, encoding="utf-8") as file:
        return ast.parse(file.read())


def usage() -> str:
    """Return the text of `python -m specjax`: each command with the first line of its docstring."""
    width = max(map(len, COMMANDS))
    lines = [f"  {command:<{width}}  {summary(command)}" for command in COMMANDS]
    return "\n".join(
        [
            "usage: specjax COMMAND [--config=FILE] [--config.FIELD=VALUE ...]",
            "",
            *lines,
            "",
            "specjax COMMAND --help shows the options of a command.",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the first argument names; return the exit code."""
    command, *arguments = (sys.argv[1:] if argv is None else argv) or [""]
    if command in ("", "-h", "--help"):
        try:
            print(usage(), flush=True)
        except BrokenPipeError:  # Python would write again when it exits
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        print(f"error: no command {command!r}: {hint}use {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    if command.startswith("train.") and (file := hiding_file()):
        print(
            f"error: {command}: Python finds {file} in place of specjax's package train; run "
            f"python -P -m {command}, which leaves the working directory out, or rename that file",
            file=sys.stderr,
        )
        return 2
    sys.argv = [command, *arguments]
    runpy.run_module(module_of(command), run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
