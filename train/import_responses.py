"""Make a dataset from conversations that the target wrote in another program.

    python -m train.import_responses --input=FILE.jsonl.gz --output=DIR

Each line is an object with the keys id, category, source, licence, temperature, prompt_token_ids
and response_token_ids. Exit codes: 0; 2 for bad input; 130 after Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from specjax.apps.command_line.flags import run_flags
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
    return run_flags(
        lambda flags: _import(**vars(flags)),
        Flags,
        argv,
        program="python -m train.import_responses",
        documentation=__doc__,
        interrupted="interrupted; nothing is written",
    )


@dataclass(frozen=True, kw_only=True)
class Flags:
    """The flags of `train.import_responses`."""

    input: Annotated[Path, InputFile(pipe=True)]
    """A JSONL file, gzipped or not."""
    output: Annotated[Path, OutputFolder()]
    """The dataset's directory."""
    limit: Annotated[int | None, optional(Whole(1))] = None
    """The number of rows, from the first one; by default all."""
    target: Annotated[str, PathOrName()] = DEFAULT_MODEL
    """The model that wrote the rows."""


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
