"""Make a dataset from conversations that the target wrote in another program.

    python -m train.import_responses --input=FILE.jsonl.gz --output=DIR

Each line is an object with the keys id, category, source, licence, temperature, prompt_token_ids
and response_token_ids. Exit codes: 0; 2 for bad input; 130 after Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from specjax.apps.command_line import command
from specjax.apps.command_line.flags import Parser
from specjax.errors import InputError
from specjax.fields import InputFile, OutputFolder, PathOrName, Whole, optional
from specjax.files import folders
from specjax.files.json_files import read_json_file
from specjax.loading.hub import DEFAULT_MODEL
from specjax.loading.load import load_model
from train.data.examples import METADATA, target_metadata
from train.data.json_lines import read_rows
from train.data.write_responses import write_responses


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv`, by default the process's arguments; return its exit code."""

    def act(arguments: list[str]) -> int:
        _import(**parser().read(arguments))
        return 0

    return command.run(
        act, argv, parser().format_help(), interrupted="interrupted; nothing is written"
    )


def parser() -> Parser:
    """Return the parser of the command's flags."""
    flags = Parser("python -m train.import_responses", __doc__)
    flags.add_field("input", InputFile(pipe=True), "a JSONL file, gzipped or not")
    flags.add_field("output", OutputFolder(), "the dataset's directory")
    flags.add_field("limit", optional(Whole(1)), "take the first rows only", default=None)
    flags.add_field("target", PathOrName(), "what wrote the rows", default=DEFAULT_MODEL)
    return flags


def _import(input: Path, output: Path, limit: int | None, target: str) -> None:
    folders.check_replaceable(output, "dataset", str(output), overwrite=False)
    rows = itertools.islice(read_rows(input), limit)
    first = next(rows, None)  # a file that is none is refused before the model is loaded
    if first is None:
        raise InputError(f"input={str(input)!r} holds no rows: one JSON object a line")
    metadata = target_metadata(load_model(target, field="target"))
    examples = itertools.chain([first], rows)
    write_responses(output, examples, metadata, generation={"imported": input.name})
    written = read_json_file(output / METADATA)
    print(
        f"{written['num_records']} conversations, {written['num_tokens']} tokens, "
        f"{written['num_labels']} of them the target's: {output}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
