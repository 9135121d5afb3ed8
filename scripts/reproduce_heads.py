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
from pathlib import Path
from types import SimpleNamespace

from lib.child_processes import INTERRUPTED, run_child
from lib.recipe import export_head, stages, write_head
from lib.trainers import TRAINERS
from specjax.apps.command_line import command
from specjax.apps.command_line.flags import Listed, Parser
from specjax.distributed import folder_lock
from specjax.errors import InputError
from specjax.fields import Choice, Flag, OutputFolder, PathOrName, optional
from specjax.methods import find_head


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv`, by default the process's arguments; return its exit code."""
    act = lambda arguments: reproduce(_options(arguments))  # noqa: E731
    return command.run(act, argv, interrupted=INTERRUPTED)


def parser() -> Parser:
    """Return the parser of the command's flags."""
    flags = Parser("python scripts/reproduce_heads.py", __doc__)
    add = flags.add_field
    default_kinds = "eagle3,draft_model,medusa,dspark"
    add("workdir", OutputFolder(), "where all stages keep their files", default="runs/heads")
    answers = "datasets of answers that exist already"
    add("responses", Listed(PathOrName(), empty=True), answers, default="")
    add("generate", Flag(), "let the target answer prompts", default=True)
    add("questions", Flag(), "let it answer questions that it asks itself, too", default=True)
    add("store_features", Flag(), "else each step computes them", default=True)
    add("kinds", Listed(Choice(tuple(TRAINERS))), "drafters to train", default=default_kinds)
    add("size", optional(Choice(("debug",))), "debug, or else the real thing", default=None)
    add("install", Flag(), "put the heads where specjax looks for them", default=False)
    return flags


def _options(argv: Sequence[str]) -> SimpleNamespace:
    values = SimpleNamespace(**parser().read(argv))
    if not values.generate and not values.responses:
        raise InputError("responses is missing: --nogenerate needs --responses=DIRECTORY")
    return values


def reproduce(options: SimpleNamespace) -> int:
    """Run all stages, then export; return the exit code.

    Raises InputError if another run uses the folder.
    """
    root = options.workdir
    with folder_lock.lock(root, "recipe", f"workdir={str(root)!r}"):
        return _run_stages(options)


def _run_stages(options: SimpleNamespace) -> int:
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


def export(options: SimpleNamespace, root: Path) -> None:
    """Write each head in 8 bits, and print its size."""
    for kind in options.kinds:
        head = export_head(root / kind, root / "heads" / kind)
        if options.install:
            write_head(head, find_head.SHIPPED / head.target.name / head.kind)


if __name__ == "__main__":
    raise SystemExit(main())
