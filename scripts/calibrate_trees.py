"""Measure the acceptance rates from which trees are built, by rank and depth of candidates.

    python scripts/calibrate_trees.py --drafters=NAMES --out=DIR [--prompts=FILE.jsonl] [--limit=N]
    python scripts/calibrate_trees.py --drafters=NAME --path=HEAD --out=DIR
    python scripts/calibrate_trees.py --drafters=NAMES --out=DIR --pictures=docs --nomeasure

Decodes prompts greedily, and counts how often the target's token is the likeliest candidate of a
drafter, the second likeliest, and so on, at each depth of a draft (`specjax.tuning`). Prompts are
read from a JSONL file in Spec-Bench's format; by default they are 36 bundled ones that are in no
training data, since rates on data that a drafter was trained on are too high. DIR gets a file
NAME.ranks.json for each drafter. If it stands beside the head, `tree.kind=static` and `auto` use
it; so for a head of your own, DIR is the folder that contains HEAD. The tree of --num_nodes nodes
is printed with its expected acceptance, and drawn into the folder --pictures, each node with the
probability that it is accepted. A file NAME.ranks.json that has no rates is not replaced. Exit
codes: 0; 2 for bad input; 130 after Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from specjax.apps.command_line import command
from specjax.apps.command_line.flags import Listed, run_flags
from specjax.apps.tuning.measure_ranks import measure_ranks
from specjax.drafters import DRAFT_TOKENS, make_drafter
from specjax.engine.requests import Prompt
from specjax.errors import InputError
from specjax.fields import Flag, InputFile, OutputFolder, PathOrName, Text, Whole, optional
from specjax.files.atomic_writes import write_text
from specjax.loading.hub import DEFAULT_MODEL
from specjax.loading.load import load_model
from specjax.loading.texts.questions import read_questions
from specjax.methods.acceptance_rates import (
    Acceptance,
    ranks_file,
    read_acceptance,
    write_acceptance,
)
from specjax.trees import RankedTree, best_tree, draw, svg

PROMPTS = Path(__file__).parents[1] / "train" / "datasets" / "calibration_prompts.jsonl"
"""Prompts of Spec-Bench's tasks, written for specjax (CC0)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv`, by default the process's arguments; return its exit code."""
    return run_flags(
        run, Flags, argv, program="python scripts/calibrate_trees.py", documentation=__doc__
    )


@dataclass(frozen=True, kw_only=True)
class Flags:
    """The flags of this script."""

    drafters: Annotated[tuple[str, ...] | str, Listed(Text())]
    """Drafters with distributions, by name."""
    out: Annotated[Path, OutputFolder()]
    """The folder of the files."""
    path: Annotated[str | None, optional(PathOrName())] = None
    """A head of your own, of a single drafter."""
    target: Annotated[str, PathOrName()] = DEFAULT_MODEL
    """The model."""
    prompts: Annotated[Path, InputFile()] = PROMPTS
    """A JSONL file in Spec-Bench's format."""
    limit: Annotated[int, Whole(1)] = 100
    """The number of prompts."""
    depth: Annotated[int, DRAFT_TOKENS] = 6
    """The levels of a tree, for drafters without a number of their own."""
    candidates: Annotated[int, Whole(1)] = 10
    """The number of ranks."""
    max_new_tokens: Annotated[int, Whole(1)] = 96
    """The maximum number of tokens of an answer."""
    batch_size: Annotated[int, Whole(1)] = 8
    """Rows that decode together."""
    num_nodes: Annotated[int, Whole(1)] = 32
    """The nodes of the tree that is shown."""
    pictures: Annotated[Path | None, optional(OutputFolder())] = None
    """A folder for SVG files."""
    measure: Annotated[bool, Flag()] = True
    """Measure; else draw what was measured before."""


def run(flags: Flags) -> int:
    """Measure each drafter, and show its tree; return the exit code."""
    if flags.measure:
        _check_replaceable(flags)
    if flags.pictures is not None:
        flags.pictures.mkdir(parents=True, exist_ok=True)
    if flags.measure:
        _measure(flags)
    for name in flags.drafters:
        acceptance = read_acceptance(ranks_file(flags.out, name))
        tree = best_tree(acceptance, flags.num_nodes)
        expected = tree.expected_tokens(acceptance)
        print(f"{name}\n{draw(tree)}\ntokens per round: {expected:.2f}")
        if flags.pictures is not None:
            title = f"{name}: {flags.num_nodes} nodes, {expected:.2f} tokens per round expected"
            write_text(flags.pictures / f"tree_{name}.svg", _picture(tree, acceptance, title))
    return 0


def _picture(tree: RankedTree, acceptance: Acceptance, title: str) -> str:
    """Return an SVG of a tree, each node with its rank and the probability that it is accepted."""
    chances = [
        math.prod(acceptance[depth][rank] for depth, rank in enumerate(path))
        for path in tree.choices
    ]
    labels = [
        f"{rank + 1}: {100 * chance:.1f} %"
        for rank, chance in zip(tree.ranks, chances, strict=True)
    ]
    colours = ["#1a7f37" if chance >= 0.1 else "#59636e" for chance in chances]
    return svg(tree, labels, colours=colours, title=title)


def _check_replaceable(flags: Flags) -> None:
    """Raise InputError if a file to be written exists and has no rates."""
    for name in flags.drafters:
        file = ranks_file(flags.out, name)
        if not file.exists():
            continue
        try:
            read_acceptance(file)
        except InputError:
            raise InputError(
                f"{file}: is there and holds no rates; move it away, or give another --out"
            ) from None


def _measure(flags: Flags) -> None:
    """Measure the rates of each drafter. Raises InputError for one path and several drafters."""
    if flags.path is not None and len(flags.drafters) > 1:
        raise InputError(
            f"path={str(flags.path)!r}: --drafters names {len(flags.drafters)}; give the one that "
            "it is of"
        )
    model = load_model(flags.target)
    prompts = _prompts(flags)
    flags.out.mkdir(parents=True, exist_ok=True)
    for name in flags.drafters:
        length = None if name == "medusa" else flags.depth
        drafter = make_drafter(name, model, flags.path, num_speculative_tokens=length)
        print(f"{name}: compiling", flush=True)
        counts = measure_ranks(
            model,
            drafter,
            prompts,
            candidates=flags.candidates,
            max_new_tokens=flags.max_new_tokens,
            batch_size=flags.batch_size,
            tell=lambda done, total, name=name: print(
                f"{name}: {done} of {total} prompts", flush=True
            ),
        )
        acceptance = tuple(map(tuple, counts.acceptance.tolist()))
        file = ranks_file(flags.out, name)
        measured = {"target": model.name, "tested": counts.tested.tolist(), **_settings(flags)}
        write_acceptance(file, acceptance, measured)
        print(file)


def _settings(flags: Flags) -> dict[str, Any]:
    return {
        "prompts": f"{min(flags.limit, len(_prompts(flags)))} of {Path(flags.prompts).name}",
        "max_new_tokens": flags.max_new_tokens,
        "temperature": 0.0,
    }


def _prompts(flags: Flags) -> list[Prompt]:
    questions = list(read_questions(flags.prompts))[: flags.limit]
    return [question.first_turn for question in questions]


if __name__ == "__main__":
    command.use_compilation_cache()
    raise SystemExit(main())
