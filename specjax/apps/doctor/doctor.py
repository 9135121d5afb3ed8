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
from specjax.apps.command_line.console import Screen
from specjax.apps.doctor.declared import check_files
from specjax.apps.doctor.diagnose import diagnose
from specjax.apps.run.decode_config import (
    DrafterConfig,
    DrafterFields,
    PromptFields,
    has_chat_template,
    load_target,
    make_config_drafter,
    with_questions,
)
from specjax.core.none import PLAIN_DECODING
from specjax.drafters import TRAINED, LoadedDrafter
from specjax.engine.options import AUTO, DecodeOptions
from specjax.engine.processing import check_unprocessed
from specjax.engine.requests import SamplingParams
from specjax.errors import InputError
from specjax.fields import Inline, read_values
from specjax.loading.model import Model
from specjax.models.layers.quantized import QuantizedKernel

CONFIG = "doctor_smollm2"
FOUND = 1
"""Exit code if a fault lowers acceptance."""


_SETTABLE = ("num_speculative_tokens", "batch_size", "seed")
_OTHERS = tuple(field.name for field in fields(DecodeOptions) if field.name not in _SETTABLE)


@dataclass(frozen=True, kw_only=True)
class DoctorConfig(DrafterFields, PromptFields):
    """The config of `specjax.doctor`; None means that specjax chooses.

    Overlaps are computed at the temperature of `sampling`, or at 1 if that is 0. Raises InputError
    for what cannot be examined.
    """

    options: Annotated[DecodeOptions, Inline(without=_OTHERS)] = DecodeOptions()  # noqa: RUF009
    sampling: SamplingParams = SamplingParams(max_new_tokens=64)  # noqa: RUF009 - frozen

    def __post_init__(self) -> None:
        super().__post_init__()
        check_unprocessed(self.sampling)
        name = self.drafter["name"]
        if len(self.drafters) > 1 or set(name) & set("+|"):
            raise InputError(f"drafter.name={name!r}: one drafter is examined at a time; name one")
        if name == PLAIN_DECODING or self.drafters[0].replays:
            raise InputError(f"drafter.name={name!r}: has nothing to examine; name a drafter")
        if self.turns != "first":
            raise InputError(f"turns={self.turns!r}: first turns are examined; leave it out")
        if (length := self.options.num_speculative_tokens) in (AUTO, 0):
            raise InputError(
                f"num_speculative_tokens={length!r}: drafts of one length are examined; use a "
                "number of at least 1, or fixed"
            )


def read_doctor_config(written: Mapping[str, Any]) -> DoctorConfig:
    """Return the checked config, given the fields of a config file by section.

    Checks that need the model are made later. Raises InputError for an invalid field.
    """
    return with_questions(read_values(DoctorConfig, written))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv`, by default the process's arguments; return its exit code."""
    return command.run_config(
        lambda config, *, verbose: examine(config, verbose=verbose),
        argv,
        default=CONFIG,
        read=read_doctor_config,
        documentation=__doc__,
        source=DoctorConfig,
        flags={"verbose": "show each change and its acceptance"},
    )


def examine(config: DoctorConfig, *, verbose: bool = False) -> int:
    """Examine a config's drafter, print the findings, and return the command's exit code.

    With `verbose` every change and its effect is shown. Raises InputError.
    """
    (drafter,) = config.drafters
    declared = check_files(drafter.name, drafter.path, config.target)
    screen = Screen(Console(width=None if sys.stdout.isatty() else 140))
    with screen.working(f"loading {config.target} and {drafter.name}"):
        model, loaded = _load(config, drafter)
    with screen.working(f"decoding {len(config.questions)} prompt(s)") as note:
        result = diagnose(
            model,
            loaded,
            config.first_prompts(model),
            sampling=config.sampling,
            batch_size=config.options.batch_size,
            seed=config.options.seed,
            other_prompts=_other_prompts(config, model),
            in_float32=_in_float32(config, drafter, model, loaded),
            tell=screen.say if verbose else note,
        )
    result = replace(result, notes=(*declared, *result.notes))
    for line in str(result).splitlines():
        screen.say(line)
    return FOUND if result.findings else 0


def _load(config: DoctorConfig, drafter: DrafterConfig) -> tuple[Model, LoadedDrafter]:
    """Return a config's target and one of its drafters."""
    model = load_target(config, None)
    return model, make_config_drafter(config, drafter, model).loaded


def _other_prompts(config: DoctorConfig, model: Model) -> dict[str, Any]:
    """Return the prompts with the chat template if the config uses none, or without it.

    They are in a dict by the config override that gives them, which is empty for a model without a
    template.
    """
    if not has_chat_template(model):
        return {}
    other = "true" if config.chat == "false" else "false"
    return {f"chat={other}": replace(config, chat=other).first_prompts(model)}


def _in_float32(
    config: DoctorConfig, drafter: DrafterConfig, model: Model, loaded: LoadedDrafter
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
