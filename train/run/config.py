"""The config of training commands: its fields, their defaults and their checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from ml_collections import ConfigDict

from specjax.apps.command_line.mesh_config import DeviceFields
from specjax.drafters import DRAFT_TOKENS
from specjax.engine.requests import SEED, TEMPERATURE
from specjax.errors import InputError
from specjax.fields import (
    CrossCheck,
    Inline,
    Items,
    Number,
    PathOrName,
    Whole,
    optional,
    read_values,
)
from specjax.loading.hub import DEFAULT_MODEL
from train.data import shipped
from train.data.combined_datasets import DataFolders
from train.pretraining.new_model import ModelSizes
from train.run.optimizer import Optimization
from train.run.precision import MULTIPLY
from train.run.start_from import HeadFolder
from train.run.workdir import RunFolder


@dataclass(frozen=True)
class TargetName:
    """The field type of a model's path or name; the model need not exist."""

    def check(self, name: str, value: Any) -> str:
        """Return `value`, the path or name of a model.

        Raises InputError, which names the field `name`, for None, since a drafter is trained for a
        target.
        """
        if value is None:
            raise InputError(
                f"{name} is missing: a drafter is trained for a model; pass --config.{name}=NAME, "
                "or a directory"
            )
        return PathOrName().check(name, value)


def default_workdir(name: str, size: str) -> str:
    """Return the default work folder of a run: that of the config file `name`.py and its `size`."""
    return f"build/{name}_{size}" if size else f"build/{name}"


def set_size(config: ConfigDict, size: str) -> None:
    """Set the common fields for a size of run: "debug", "quick", or "" for no change.

    "debug" exercises everything in six steps, and learns nothing. "quick" evaluates before the
    first and after the last step, on the shipped conversations; its number of steps depends on the
    method. Raises ValueError for another size.
    """
    if size == "debug":
        config.steps = 6
        config.batch_size = 2
        config.row_tokens = 64
        config.row_labels = 32
        config.log_every = 1
        config.checkpoint_every = 3
        config.eval.every = 0
        config.eval.batches = 2
        config.eval.prompts = 1
        config.eval.new_tokens = 8
        config.eval.temperatures = (0.0,)
    elif size == "quick":
        config.row_labels = 384  # answers are most of these conversations
        config.warmup = 20
        config.checkpoint_every = 50
        config.eval.every = 0
        config.eval.at_start = True
        config.eval.batches = 4
        config.eval.prompts = 8
        config.eval.new_tokens = 48
    elif size:
        raise ValueError(f"size {size!r} is unknown: use debug, quick, or leave it out")


@dataclass(frozen=True)
class BatchConfig:
    """The number of rows and of micro-batches per update, and of tokens and labels per row."""

    batch_size: Annotated[int, Whole(1, 1 << 20)] = 8
    """The number of rows per update."""
    accumulate: Annotated[int, Whole(1, 1 << 20)] = 1
    """The number of micro-batches that an update is computed in."""
    row_tokens: Annotated[int, Whole(4, 1 << 24)] = 1024
    """T, the number of tokens per row."""
    row_labels: Annotated[int, Whole(1, 1 << 24)] = 512
    """A, the maximum number of labels per row; further labels are dropped."""


@dataclass(frozen=True)
class LoopConfig:
    """The number of updates, a limit in minutes, and intervals of logging and saving."""

    steps: Annotated[int, Whole(1)] = 1000
    """The total number of updates."""
    minutes: Annotated[float | None, optional(Number(0.0, 1e9, above=True))] = None
    """The number of minutes after which to stop; the same command resumes."""
    log_every: Annotated[int, Whole(1)] = 10
    """The number of steps between lines of the log."""
    checkpoint_every: Annotated[int, Whole(1)] = 500
    """The number of steps between checkpoints."""


@dataclass(frozen=True)
class EvalConfig:
    """The frequency of evaluations and the amount of data that they use."""

    every: Annotated[int, Whole()] = 500
    """The number of steps between evaluations; 0 evaluates at the end only."""
    at_start: bool = False
    """Whether to evaluate before the first step too."""
    batches: Annotated[int, Whole()] = 16
    """The number of batches of held-out conversations on which losses are computed."""
    prompts: Annotated[int, Whole()] = 4
    """The number of held-out prompts that are decoded; 0 decodes none."""
    new_tokens: Annotated[int, Whole(1)] = 64
    """The number of new tokens per decoded prompt."""
    num_speculative_tokens: Annotated[int | None, optional(Whole(1, DRAFT_TOKENS.most))] = None
    """The number of draft tokens per round when decoding; by default the drafter's own."""
    temperatures: Annotated[tuple[float, ...], Items(TEMPERATURE)] = (0.0, 1.0)
    """The temperatures used for decoding at the end; earlier evaluations use the first one only."""


@dataclass(frozen=True, kw_only=True)
class DraftVocabulary:
    """The part of the target's vocabulary that a head drafts; a base of methods' sections."""

    draft_vocab_size: Annotated[int | None, optional(Whole(1))] = None
    """The number of tokens that are drafted, the most common ones of the data; all by default."""


def _check_accumulate(batch_size: int, accumulate: int) -> None:
    if batch_size % accumulate:
        raise InputError(
            f"accumulate={accumulate}: batch_size={batch_size} rows cannot be split into so many "
            "micro-batches; use a divisor"
        )


def _check_devices(batch_size: int, accumulate: int, data_devices: int) -> None:
    rows = batch_size // accumulate
    if batch_size % accumulate == 0 and rows % data_devices:
        raise InputError(
            f"mesh.data={data_devices}: {rows} rows (batch_size / accumulate) cannot be spread "
            "over so many devices; make batch_size a multiple"
        )


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(DeviceFields):
    """The checked config of a training command; a config file sets what differs from the defaults.

    A method's config inherits from it and adds its sections, consistency checks of their fields in
    `CHECKS`, and in `DEFAULT` the name of the default config file. A run has either a target, or
    the sizes `model` of a new one. `decay_steps` defaults to all steps. Raises InputError for both
    a target and sizes, or neither.
    """

    DEFAULT: ClassVar[str]
    CHECKS: ClassVar[tuple[CrossCheck, ...]] = (
        CrossCheck(("batch_size", "accumulate"), _check_accumulate),
        CrossCheck(("batch_size", "accumulate", "mesh.data"), _check_devices),
    )

    target: Annotated[str | None, TargetName()] = DEFAULT_MODEL
    """The model for which the drafter is trained: a name or a directory."""
    model: ModelSizes | None = None
    """The sizes of a new model, in place of `target`."""
    dtype: Annotated[str, MULTIPLY] = "auto"
    """The dtype of products."""
    data: Annotated[str, DataFolders()] = shipped.NAME
    """Directories of training data, separated by commas; shipped is the small bundled set of the
    default model's answers.
    """
    features: Literal["auto", "stored", "online"] = "auto"
    """Target features: stored in the data, computed online in each step, or auto, which means
    stored if there are any.
    """
    workdir: Annotated[str, RunFolder()]
    """The folder for checkpoints, logs and the exported head."""
    start_from: Annotated[str | None, optional(HeadFolder())] = None
    """The trained head to start from: a directory, or the kind of a bundled head, such as eagle3.
    """
    seed: Annotated[int, SEED] = 0
    """The seed of initialization, data order and noise."""
    batches: Annotated[BatchConfig, Inline()]
    optimization: Annotated[
        Optimization, Inline({"warmup": 50, "decay_steps": None, "learning_rate_scales": ""})
    ]
    loop: Annotated[LoopConfig, Inline()]
    eval: EvalConfig
    remat: bool = False
    """Whether the backward pass computes activations again, to save memory."""
    fsdp: bool = False
    """Whether parameters are sharded over `mesh.data`, as the optimizer's state always is."""
    written: Mapping[str, Any] = field(default_factory=dict)
    """The values of the config file and the command line as they were given, by section."""

    def __post_init__(self) -> None:
        if self.target is None and self.model is None:
            raise InputError(
                "target is missing: pass --config.target=NAME, or, for a new model, add its sizes "
                "as the section model to the config file"
            )
        if self.target is not None and self.model is not None:
            raise InputError(
                f"target={self.target!r:.80}: the section model has the sizes of a new one; use a "
                "config file without it"
            )
        if self.optimization.decay_steps is None:
            whole = replace(self.optimization, decay_steps=self.loop.steps)
            object.__setattr__(self, "optimization", whole)

    @property
    def reads_decay_steps(self) -> bool:
        """Whether the run depends on where the schedule of the learning rate ends."""
        return self.optimization.schedule != "constant"

    @property
    def record(self) -> dict[str, Any]:
        """Return the config, JSON-ready and with defaults; a resumed run must have the same."""
        fields = dict(self.written)
        fields["learning_rate_scales"] = self.optimization.learning_rate_scales
        if self.reads_decay_steps:
            fields["decay_steps"] = self.optimization.decay_steps
        return fields


OwnConfig = TypeVar("OwnConfig", bound=TrainingConfig)
"""The config class of a method's command."""


def read_training_config(kind: type[OwnConfig], written: Mapping[str, Any]) -> OwnConfig:
    """Return the checked config of class `kind`, given the fields of a config file by section.

    Raises one InputError that lists all problems.
    """
    return replace(read_values(kind, written, kind.CHECKS), written=written)
