"""Train a target's drafters, from generating answers to exporting heads.

    python scripts/reproduce_heads.py --workdir=W [--responses=DIR,...] [--install]

Stages: the target answers prompts, then questions that it asks itself, its features are stored, the
drafters of the kinds that come with specjax are trained, and their parameters are written in 8 bits
to W/heads. Each stage is a command that resumes where it was stopped and does nothing once it has
finished, so that the same call continues. `--responses` adds existing datasets of answers,
`--nogenerate` uses only those, and `--kinds` names the drafters. `--install` copies the heads to
the folder of bundled heads; their model cards there are edited by hand. `--size=debug` runs
everything in minutes. Works alike on CPU and GPU. Exit codes: 0; 1 if a stage failed; 2 for bad
input; 130 after Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from lib.child_processes import INTERRUPTED, run_child
from lib.recipe import export_head, stages, write_head
from lib.trainers import TRAINERS
from specjax.apps.command_line import command
from specjax.apps.command_line.flags import Listed, run_flags
from specjax.distributed import folder_lock
from specjax.errors import InputError
from specjax.fields import Choice, Flag, OutputFolder, PathOrName, optional
from specjax.methods import find_head


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv`, by default the process's arguments; return its exit code."""
    return run_flags(
        reproduce,
        Flags,
        argv,
        program="python scripts/reproduce_heads.py",
        documentation=__doc__,
        interrupted=INTERRUPTED,
    )


@dataclass(frozen=True, kw_only=True)
class Flags:
    """The flags of this script."""

    workdir: Annotated[Path, OutputFolder()] = "runs/heads"
    """Where all stages keep their files."""
    responses: Annotated[tuple[str, ...] | str, Listed(PathOrName(), empty=True)] = ""
    """Datasets of answers that exist already."""
    generate: Annotated[bool, Flag()] = True
    """Let the target answer prompts."""
    questions: Annotated[bool, Flag()] = True
    """Let it answer questions that it asks itself, too."""
    store_features: Annotated[bool, Flag()] = True
    """Store features; else each step computes them."""
    kinds: Annotated[tuple[str, ...] | str, Listed(Choice(tuple(TRAINERS)))] = (
        "eagle3,draft_model,medusa,dspark"
    )
    """Drafters to train."""
    size: Annotated[str | None, optional(Choice(("debug",)))] = None
    """The size of the run: debug, or by default the real thing."""
    install: Annotated[bool, Flag()] = False
    """Put the heads where specjax looks for them."""

    def __post_init__(self) -> None:
        if not self.generate and not self.responses:
            raise InputError("responses is missing: --nogenerate needs --responses=DIRECTORY")


def reproduce(options: Flags) -> int:
    """Run all stages, then export; return the exit code.

    Raises InputError if another run uses the folder.
    """
    root = options.workdir
    with folder_lock.lock(root, "recipe", f"workdir={str(root)!r}"):
        return _run_stages(options)


def _run_stages(options: Flags) -> int:
    for stage in stages(
        options.workdir,
        options.kinds,
        options.responses,
        size=options.size,
        generate=options.generate,
        questions=options.questions,
        store_features=options.store_features,
    ):
        print(f"python -m {' '.join(stage.command)}", flush=True)
        code = run_child([sys.executable, "-m", *stage.command])
        if code == command.INTERRUPTED:
            raise KeyboardInterrupt
        if code:
            print(
                f"{stage.command[0]} ended with code {code}; the same command resumes it",
                file=sys.stderr,
            )
            return 1
    export(options, options.workdir)
    return 0


def export(options: Flags, root: Path) -> None:
    """Write each head in 8 bits, and print its size."""
    for kind in options.kinds:
        head = export_head(root / kind, root / "heads" / kind)
        if options.install:
            write_head(head, find_head.SHIPPED / head.target.name / head.kind)


if __name__ == "__main__":
    raise SystemExit(main())
