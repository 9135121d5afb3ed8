"""Decode outputs that follow JSON schemas, with and without drafts, and count.

    python scripts/structured_output.py [--target=MODEL] [--drafters=forced,eagle3,forced|eagle3]

For each schema of tests/json_schemas.py the model is asked for an example, greedily, at first by
plain decoding, then with each of `--drafters`. Prints a table: tokens per pass with the grammar,
and of the same drafter for some of the prompts without one; how many answers have the tokens of
plain decoding; and how many parse and are valid (with the package jsonschema). Exit codes: 0; 1 if
an answer is not valid, or has other tokens; 2 for bad input; 130 after Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import json
import runpy
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

import jsonschema

import specjax
from specjax.apps.command_line import command
from specjax.apps.command_line.flags import Listed, run_flags
from specjax.engine.outputs import Output
from specjax.fields import PathOrName, Text, Whole
from specjax.loading.hub import DEFAULT_MODEL

_SCHEMAS = Path(__file__).parents[1] / "tests" / "json_schemas.py"

_EVERY = 5
"""Answers without a grammar are longer, and counted for one prompt in so many."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv`, by default the process's arguments; return its exit code."""
    return run_flags(
        run, Flags, argv, program="python scripts/structured_output.py", documentation=__doc__
    )


@dataclass(frozen=True, kw_only=True)
class Flags:
    """The flags of this script."""

    target: Annotated[str, PathOrName()] = DEFAULT_MODEL
    """The model."""
    drafters: Annotated[tuple[str, ...] | str, Listed(Text())] = "forced,eagle3,forced|eagle3"
    """The drafters that are compared with plain decoding."""
    limit: Annotated[int, Whole(1)] = 1000
    """The number of schemas."""
    max_new_tokens: Annotated[int, Whole(1)] = 120
    """The maximum number of tokens of an answer."""
    batch_size: Annotated[int, Whole(1)] = 8
    """The number of rows that decode together."""


def run(flags: Flags) -> int:
    """Decode and print the table; return the exit code."""
    schemas = runpy.run_path(str(_SCHEMAS))["SCHEMAS"][: flags.limit]
    model = specjax.load_model(flags.target)
    prompts = [
        [{"role": "user", "content": f"Write one JSON value: {name.replace('-', ' ')}."}]
        for name, _ in schemas
    ]
    asked = [
        {"json_schema": schema, "max_new_tokens": flags.max_new_tokens} for _, schema in schemas
    ]
    free = [{"max_new_tokens": flags.max_new_tokens}] * len(prompts[::_EVERY])
    wrong, plain = 0, []
    print("| drafter | tokens per pass | without a grammar | same tokens | valid |")
    print("|---|---|---|---|---|")
    for name in ("none", *flags.drafters):
        outputs = decoded(model, name, prompts, asked, flags.batch_size)
        plain = plain or outputs
        without = decoded(model, name, prompts[::_EVERY], free, flags.batch_size)
        same = sum(one.token_ids == two.token_ids for one, two in zip(outputs, plain, strict=True))
        valid = sum(
            is_valid(one.text, schema) for one, (_, schema) in zip(outputs, schemas, strict=True)
        )
        wrong += 2 * len(schemas) - same - valid
        print(
            f"| {name} | {per_pass(outputs):.2f} | {per_pass(without):.2f} "
            f"| {same} of {len(schemas)} | {valid} of {len(schemas)} |",
            flush=True,
        )
    return int(wrong > 0)


def decoded(
    model: specjax.Model,
    drafter: str,
    prompts: Sequence[Any],
    sampling: Sequence[dict[str, Any]],
    batch_size: int,
) -> list[Output]:
    """Return the outputs for the prompts, each with its own sampling parameters."""
    engine = specjax.Engine(model, drafter=drafter, batch_size=batch_size, max_length=512)
    for number, (prompt, params) in enumerate(zip(prompts, sampling, strict=True)):
        engine.add(prompt, params, id=number)
    found = {delta.id: delta.output for delta in engine if delta.output is not None}
    return [found[number] for number in range(len(prompts))]


def per_pass(outputs: Sequence[Output]) -> float:
    """Return the mean number of tokens per pass of the target."""
    rounds = sum(len(output.rounds.emitted) for output in outputs)
    return sum(len(output.token_ids) for output in outputs) / rounds


def is_valid(text: str, schema: Any) -> bool:
    """Return whether a text is JSON that is valid under a schema."""
    # Multiples of decimals are exact in decimals only.
    exact = {"parse_float": Decimal} if '"multipleOf"' in json.dumps(schema) else {}
    try:
        schema = json.loads(json.dumps(schema), **exact)
        jsonschema.validate(json.loads(text, **exact), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


if __name__ == "__main__":
    command.use_compilation_cache()
    raise SystemExit(main())
