"""Train a target's drafters, from answers to exports: `python scripts/reproduce_heads.py`.

    python scripts/reproduce_heads.py --workdir=W [--minutes=M] [--responses=DIR,...] [--install]

Stages: the target answers prompts, its features are stored, the EAGLE-3 head, the draft model and
the Medusa heads are trained, and their parameters written in half precision to W/heads. Each stage
resumes where it was stopped, so that the same command continues; after the minutes, Ctrl-C or
SIGTERM the running stage saves its work, and the remaining ones are listed. `--responses` adds
datasets of answers that exist already, `--nogenerate` uses only those. `--install` copies the heads
to the folder of shipped heads, with a model card each. `--size=debug` runs everything in minutes.
Works alike on CPU and GPU. Exit codes: 0, also where the minutes were over; 1 where a stage failed;
2 for bad input; 130 after Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

from lib.child_processes import INTERRUPTED
from lib.model_cards import TRAINERS, card
from lib.stages import Stage, run_stages
from specjax.cli import command
from specjax.cli.flags import Listed, Parser
from specjax.distributed import folder_lock
from specjax.errors import InputError
from specjax.fields import Choice, Flag, Number, OutputFolder, PathOrName, optional
from train.run.workdir import write_file


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    act = lambda arguments: reproduce(_options(arguments))  # noqa: E731
    return command.run(act, argv, interrupted=INTERRUPTED)


def parser() -> Parser:
    """The flags."""
    flags = Parser("python scripts/reproduce_heads.py", __doc__)
    add, listed = flags.add_field, Listed
    usual = ",".join(kind for kind in TRAINERS if kind not in ("eagle", "mtp"))
    add("workdir", OutputFolder(), "where all stages keep their files", default="runs/heads")
    add("minutes", optional(Number(0.1, 1e9)), "stop cleanly after so long", default=None)
    there = "datasets of answers that exist already"
    add("responses", listed(PathOrName(), empty=True), there, default="")
    add("generate", Flag(), "let the target answer prompts", default=True)
    add("store_features", Flag(), "else each step computes them", default=True)
    add("kinds", listed(Choice(tuple(TRAINERS))), "drafters to train", default=usual)
    add("size", optional(Choice(("debug",))), "debug, or else the real thing", default=None)
    add("install", Flag(), "put the heads where specjax looks for them", default=False)
    return flags


def _options(argv: Sequence[str]) -> SimpleNamespace:
    values = SimpleNamespace(**parser().read(argv))
    if not values.generate and not values.responses:
        raise InputError("responses is missing: --nogenerate needs --responses=DIRECTORY")
    return values


def reproduce(options: SimpleNamespace) -> int:
    """Run what is left of the recipe; returns the exit code."""
    until = math.inf if options.minutes is None else time.monotonic() + 60 * options.minutes
    root = options.workdir
    with folder_lock.lock(root, "recipe", f"workdir={str(root)!r}"):
        code = run_stages(recipe(options, root), root, "export", until)
        if code is None:
            export(options, root)
    return code or 0


def recipe(options: SimpleNamespace, root: Path) -> list[Stage]:
    """The stages that make what is exported, in order."""
    python, size = [sys.executable, "-m"], f":{options.size}" if options.size else ""
    stages, answers = [], list(options.responses)
    if options.generate:
        output = root / "responses"
        config = f"--config=configs/generate_smollm2.py{size}"
        folders = [f"--config.workdir={root / 'generate'}", f"--config.output={output}"]
        stages.append(Stage("generate", [*python, "train.generate", config, *folders]))
        answers.append(str(output))
    data = answers
    if options.store_features:
        data = []
        for number, source in enumerate(answers):
            output = root / "features" / str(number)
            command = [*python, "train.features", f"--input={source}", f"--output={output}"]
            stages.append(Stage(f"features {number}", command))
            data.append(str(output))
    for kind in options.kinds:
        command = [
            *python,
            *TRAINERS[kind].command(size),
            f"--config.data={','.join(data)}",
            f"--config.workdir={root / kind}",
        ]
        stages.append(Stage(kind, command))
    return stages


def export(options: SimpleNamespace, root: Path) -> None:
    """Write each head in half precision, and print their size in all."""
    import jax
    import numpy as np

    from specjax.loading.find_head import SHIPPED
    from specjax.loading.heads.head import read_head, save_head

    total = 0
    for kind in options.kinds:
        head = read_head(root / kind / "export")
        half = jax.tree.map(lambda leaf: np.asarray(leaf, np.float16), head.params)
        if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(half)):
            raise InputError(
                f"{root / kind}: a parameter does not fit in half precision; train it anew in "
                "another workdir, at a lower learning_rate"
            )
        head = dataclasses.replace(head, params=half)
        folder = root / "heads" / kind
        save_head(head, folder, overwrite=True)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        total += size
        print(f"{folder}: {size / 1e6:.1f} MB")
        if options.install:
            shipped = SHIPPED / head.target.name / kind
            save_head(head, shipped, overwrite=True)
            write_file(shipped.with_name(f"{kind}.md"), card(head))
            print(f"installed: {shipped}")
    print(f"together {total / 1e6:.1f} MB")


if __name__ == "__main__":
    raise SystemExit(main())
