"""Make the small dataset that training reads by default.

    python scripts/data/make_training_data.py --input=FILE.jsonl.gz --output=DIR

Reads the conversations of a JSONL file as `train.import_responses` does, keeps those to prompts of
one licence, and draws about as many response tokens from each category and temperature. Writes the
conversations of `train/datasets/` and what is known of them, not their card. The same file and
flags give the same bytes.
Exit codes: 0; 2 for bad input; 130 after Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import gzip
import json
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from specjax.cli import command
from specjax.cli.flags import Parser
from specjax.errors import InputError
from specjax.fields import InputFile, OutputFolder, PathOrName, Text, Whole
from specjax.loading.load import DEFAULT_MODEL, load_model
from train.data import shipped
from train.data.examples import Example, target_metadata
from train.data.json_lines import read_rows, row_of


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""

    def act(arguments: list[str]) -> int:
        _make(**parser().read(arguments))
        return 0

    return command.run(act, argv, parser().format_help())


def parser() -> Parser:
    """The flags."""
    flags = Parser("python scripts/data/make_training_data.py", __doc__)
    flags.add_field("input", InputFile(pipe=True), "a JSONL file, gzipped or not")
    flags.add_field("output", OutputFolder(), "the folder of both files")
    flags.add_field("licence", Text(), "of the prompts to take", default="CC0")
    flags.add_field("tokens", Whole(1), "response tokens in all, about", default=300_000)
    flags.add_field("seed", Whole(), "of the choice", default=0)
    flags.add_field("target", PathOrName(), "what wrote the rows", default=DEFAULT_MODEL)
    return flags


def choose(rows: Iterable[Example], licence: str, tokens: int, seed: int) -> list[Example]:
    """Conversations of a licence, balanced over categories and temperatures, in order of their ids.

    Each pair of category and temperature gives conversations in a random order that depends on
    `seed` and their ids only, until it has given its equal share of the response tokens. Raises
    InputError where no conversation has the licence, or a pair has too few tokens.
    """
    cells: dict[tuple[str, float], list[Example]] = defaultdict(list)
    for row in rows:
        if row.licence == licence:
            cells[row.category, row.temperature].append(row)
    if not cells:
        raise InputError(f"licence={licence!r}: no row has it; name one that the file has")
    share = tokens / len(cells)
    chosen: list[Example] = []
    for (category, temperature), members in sorted(cells.items()):
        members.sort(key=lambda row: row.id)
        random.Random(f"{seed}:{category}:{temperature}").shuffle(members)
        count = 0
        while count < share:
            if not members:
                raise InputError(
                    f"tokens={tokens}: {category} at temperature {temperature:g} has {count} "
                    f"response tokens, and its share is {share:.0f}; lower tokens"
                )
            chosen.append(members.pop())
            count += int(chosen[-1].loss_mask.sum())
    return sorted(chosen, key=lambda row: row.id)


def _make(input: Path, output: Path, licence: str, tokens: int, seed: int, target: str) -> None:
    chosen = choose(read_rows(input), licence, tokens, seed)
    metadata = {
        "target": target_metadata(load_model(target, field="target")),
        "generation": {"imported": input.name, "licence": licence, "seed": seed},
    }
    lines = [json.dumps(row_of(row), separators=(",", ":")) + "\n" for row in chosen]
    output.mkdir(parents=True, exist_ok=True)
    rows, about = (output / file.name for file in (shipped.ROWS, shipped.METADATA))
    # Without a time stamp, so that the same rows are the same bytes.
    rows.write_bytes(gzip.compress("".join(lines).encode(), 9, mtime=0))
    about.write_text(json.dumps(metadata, indent=1) + "\n", encoding="utf-8")
    responses = sum(int(row.loss_mask.sum()) for row in chosen)
    print(
        f"{len(chosen)} conversations, {responses} response tokens, "
        f"{rows.stat().st_size / 1e3:.0f} kB: {rows}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
