"""Measure what a drafter accepts, teacher-forced and decoded, and find what lowers it.

    python -m specjax.doctor --config.drafter.name=eagle3 --config.drafter.path=DIR

The target answers the prompts; then the drafter drafts at every position of the answers, unchanged
and with one change at a time: other taps, positions, norms, vocabulary map, window, template and
dtype. A change that raises acceptance identifies the fault (docs/doctor.md).

Exit codes: 0 if no fault is found; 1 if there is one; 2 for bad input; 130 after Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

import jax
from rich.console import Console

from specjax.apps.command_line import command
from specjax.apps.command_line.config_file import config_of
from specjax.apps.command_line.console import Screen
from specjax.apps.doctor.declared import check_files
from specjax.apps.doctor.diagnose import diagnose
from specjax.apps.run.decode_config import (
    DecodeConfig,
    DecodeFields,
    DrafterConfig,
    DrafterFields,
    PromptFields,
    TargetFields,
    load_target,
    make_config_drafter,
    read_decode_config,
    turn_prompts,
)
from specjax.core.none import PLAIN_DECODING
from specjax.drafters import TRAINED, LoadedDrafter
from specjax.engine.options import BATCH_SIZE, FIXED
from specjax.engine.requests import SEED, SamplingParams
from specjax.errors import InputError
from specjax.fields import Whole, optional, read_values
from specjax.loading.model import Model
from specjax.models.layers.quantized import QuantizedKernel

CONFIG = "doctor_smollm2"
FOUND = 1
"""Exit code if a fault lowers acceptance."""


@dataclass(frozen=True, kw_only=True)
class DoctorFields(DrafterFields, PromptFields, TargetFields):
    """The fields of a doctor config with their defaults; None means that specjax chooses."""

    num_speculative_tokens: Annotated[int | None, optional(Whole(1, 1024))] = None
    """The length of drafts; by default the drafter's own."""
    batch_size: Annotated[int, BATCH_SIZE] = 8
    """Rows that decode together."""
    sampling: SamplingParams = SamplingParams(max_new_tokens=64)  # noqa: RUF009 - frozen
    """The sampling parameters of the answers. Overlaps are computed at their temperature, or at 1
    if that is 0.
    """
    seed: Annotated[int, SEED] = 0
    """The seed of all draws."""


@dataclass(frozen=True, kw_only=True)
class DoctorConfig(DoctorFields):
    """A checked config of `specjax.doctor`; `decoding` is a decode config with the same fields."""

    decoding: DecodeConfig


def read_doctor_config(written: Mapping[str, Any]) -> DoctorConfig:
    """Return the checked config, given the fields of a config file by section.

    Checks that need the model are made later. Raises InputError for an invalid field.
    """
    given = read_values(DoctorFields, written)
    shared = {field.name for field in fields(DecodeFields)} & written.keys()
    length = FIXED if given.num_speculative_tokens is None else given.num_speculative_tokens
    decoding = read_decode_config(
        {
            **config_of(DecodeFields).to_dict(),
            **{name: written[name] for name in shared},
            "num_speculative_tokens": length,
            "compare": False,
        }
    )
    name = written["drafter"]["name"]
    if len(decoding.drafters) > 1 or set(name) & set("+|"):
        raise InputError(f"drafter.name={name!r}: one drafter is examined at a time; name one")
    if name == PLAIN_DECODING or decoding.drafters[0].replays:
        raise InputError(f"drafter.name={name!r}: has nothing to examine; name a drafter")
    if given.turns != "first":
        raise InputError(f"turns={given.turns!r}: first turns are examined; leave it out")
    return DoctorConfig(**vars(given), decoding=decoding)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv`, by default the process's arguments; return its exit code."""
    return command.run_config(
        lambda config, *, verbose: examine(config, verbose=verbose),
        argv,
        default=CONFIG,
        read=read_doctor_config,
        documentation=__doc__,
        source=DoctorFields,
        flags={"verbose": "show each change and its acceptance"},
    )


def examine(config: DoctorConfig, *, verbose: bool = False) -> int:
    """Examine a config's drafter, print the findings, and return the command's exit code.

    With `verbose` every change and its effect is shown. Raises InputError.
    """
    (drafter,) = config.decoding.drafters
    declared = check_files(drafter.name, drafter.path, config.target)
    screen = Screen(Console(width=None if sys.stdout.isatty() else 140))
    with screen.working(f"loading {config.target} and {drafter.name}"):
        model, loaded = _load(config.decoding, drafter)
    with screen.working(f"decoding {len(config.decoding.questions)} prompt(s)") as note:
        result = diagnose(
            model,
            loaded,
            turn_prompts(config.decoding, model, 0, {}),
            sampling=config.sampling,
            batch_size=config.batch_size,
            seed=config.seed,
            other_prompts=_other_prompts(config.decoding, model),
            in_float32=_in_float32(config.decoding, drafter, model, loaded),
            tell=screen.say if verbose else note,
        )
    result = replace(result, notes=(*declared, *result.notes))
    for line in str(result).splitlines():
        screen.say(line)
    return FOUND if result.findings else 0


def _load(config: DecodeConfig, drafter: DrafterConfig) -> tuple[Model, LoadedDrafter]:
    """Return a config's target and one of its drafters."""
    model = load_target(config, None)
    return model, make_config_drafter(config, drafter, model).loaded


def _other_prompts(config: DecodeConfig, model: Model) -> dict[str, Any]:
    """Return the prompts with the chat template if the config uses none, or without it.

    They are in a dict by the config override that gives them, which is empty for a model without a
    template.
    """
    if model.tokenizer is None or model.tokenizer.chat_template is None:
        return {}
    other = "true" if config.chat == "false" else "false"
    return {f"chat={other}": turn_prompts(replace(config, chat=other), model, 0, {})}


def _in_float32(
    config: DecodeConfig, drafter: DrafterConfig, model: Model, loaded: LoadedDrafter
) -> Callable[[], tuple[Model, LoadedDrafter]] | None:
    """Return a function that loads target and drafter in float32, or None if they already are."""
    leaves = jax.tree.leaves(
        (model.params, loaded.params), is_leaf=lambda node: isinstance(node, QuantizedKernel)
    )
    rounded = any(isinstance(leaf, QuantizedKernel) for leaf in leaves)
    if model.dtype == "float32" and not rounded:
        return None
    exact = {"weights": "float"} if drafter.name in TRAINED else {}
    return lambda: _load(
        replace(config, dtype="float32", weights="float"),
        replace(drafter, options={**drafter.options, **exact}),
    )


if __name__ == "__main__":
    command.use_compilation_cache()
    raise SystemExit(main())
