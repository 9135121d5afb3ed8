"""Train a target's drafters, from generating answers to exporting heads.

    python scripts/reproduce_heads.py --workdir=W [--responses=DIR,...] [--install]

Stages: the target answers prompts, its features are stored, the EAGLE-3 head, the draft model and
the Medusa heads are trained, and their parameters are written in half precision to W/heads. Each
stage is a command that resumes where it was stopped and does nothing once it has finished, so that
the same call continues. `--responses` adds existing datasets of answers, `--nogenerate` uses only
those. `--install` copies the heads to the folder of bundled heads; their model cards there are
edited by hand. `--size=debug` runs everything in minutes. Works alike on CPU and GPU. Exit codes:
0; 1 if a stage failed; 2 for bad input; 130 after Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np

from lib.child_processes import INTERRUPTED, run_child
from lib.trainers import TRAINERS
from specjax.cli import command
from specjax.cli.flags import Listed, Parser
from specjax.distributed import folder_lock
from specjax.errors import InputError
from specjax.fields import Choice, Flag, OutputFolder, PathOrName, optional
from specjax.loading import find_head
from specjax.loading.heads.head import read_head, save_head


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv`, by default the process's arguments; return its exit code."""
    act = lambda arguments: reproduce(_options(arguments))  # noqa: E731
    return command.run(act, argv, interrupted=INTERRUPTED)


def parser() -> Parser:
    """Return the parser of the command's flags."""
    flags = Parser("python scripts/reproduce_heads.py", __doc__)
    add = flags.add_field
    rarer = ("eagle", "mtp", "dflash", "dspark")
    default_kinds = ",".join(kind for kind in TRAINERS if kind not in rarer)
    add("workdir", OutputFolder(), "where all stages keep their files", default="runs/heads")
    answers = "datasets of answers that exist already"
    add("responses", Listed(PathOrName(), empty=True), answers, default="")
    add("generate", Flag(), "let the target answer prompts", default=True)
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
    for arguments in recipe(options, options.workdir):
        print(f"python -m {' '.join(arguments)}", flush=True)
        code = run_child([sys.executable, "-m", *arguments])
        if code == command.INTERRUPTED:
            raise KeyboardInterrupt
        if code:
            print(
                f"{arguments[0]} ended with code {code}; the same command resumes it",
                file=sys.stderr,
            )
            return 1
    export(options, options.workdir)
    return 0


def recipe(options: SimpleNamespace, root: Path) -> list[list[str]]:
    """Return the commands that make the heads, in order, without `python -m`."""
    size = f":{options.size}" if options.size else ""
    commands, data = [], list(options.responses)
    if options.generate:
        output = root / "responses"
        config = f"--config=configs/generate_smollm2.py{size}"
        folders = [f"--config.workdir={root / 'generate'}", f"--config.output={output}"]
        commands.append(["train.generate", config, *folders])
        data.append(str(output))
    if options.store_features:
        answers, data = data, []
        for number, source in enumerate(answers):
            output = root / "features" / str(number)
            commands.append(["train.features", f"--input={source}", f"--output={output}"])
            data.append(str(output))
    for kind in options.kinds:
        folders = [f"--config.data={','.join(data)}", f"--config.workdir={root / kind}"]
        commands.append([*TRAINERS[kind].command(size), *folders])
    return commands


def export(options: SimpleNamespace, root: Path) -> None:
    """Write each head in half precision, and print its size."""
    for kind in options.kinds:
        head = read_head(root / kind / "export")
        half = jax.tree.map(lambda leaf: np.asarray(leaf, np.float16), head.params)
        if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(half)):
            raise InputError(
                f"{root / kind}: a parameter does not fit in half precision; train it anew in "
                "another workdir, at a lower learning_rate"
            )
        head = dataclasses.replace(head, params=half)
        folders = [root / "heads" / kind]
        if options.install:
            folders.append(find_head.SHIPPED / head.target.name / kind)
        for folder in folders:
            save_head(head, folder, overwrite=True)
            size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            print(f"wrote {folder}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    raise SystemExit(main())
