"""The config of training commands: its fields, their defaults and their checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from ml_collections import ConfigDict, config_dict

from specjax.apps.command_line.mesh_config import (
    DistributedConfig,
    MeshConfig,
    distributed_fields,
    mesh_fields,
)
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


def training_fields() -> ConfigDict:
    """Return a config with the fields that all methods have, with their defaults.

    A method's config file adds its own sections.
    """
    config = ConfigDict()
    config.target = DEFAULT_MODEL
    config.dtype = "auto"  # of products: auto | float32 | bfloat16
    # Directories, with commas; shipped = the small set of the default model's answers.
    config.data = shipped.NAME
    # Target features: read from the data set, or computed in the step; auto reads them if present.
    config.features = "auto"
    config.workdir = config_dict.placeholder(str)
    # A trained head to start from: a directory, or a kind, such as eagle3, that comes with specjax.
    config.start_from = config_dict.placeholder(str)
    config.seed = 0

    config.steps = 1000  # updates in all
    config.minutes = config_dict.placeholder(float)  # stop after so long, to be resumed
    config.batch_size = 8  # rows per update
    config.accumulate = 1  # micro-batches that an update is computed in
    config.row_tokens = 1024  # T
    config.row_labels = 512  # A: labels beyond these are dropped
    config.remat = False  # compute activations again in the backward pass

    config.optimizer = "adamw"  # adamw | muon
    config.learning_rate = 1e-3
    config.schedule = "cosine"  # cosine | linear | constant | wsd
    config.stable_fraction = 0.8  # of decay_steps, at the peak; wsd
    config.decay_steps = config_dict.placeholder(int)  # where the schedule ends; steps
    config.final_fraction = 0.1  # of the rate, at the end
    config.warmup = 50
    config.weight_decay = 0.0
    config.average = 0.0  # decay per step of an average of the parameters; 0 = none
    config.clip = 1.0  # of the gradient's global norm; 0 = none
    # Factors by parameter name, such as head:0.5,layers.0:0.1; the longest name counts.
    config.learning_rate_scales = ""
    # Of the biases by which sigmoid routers choose experts; 0 = they stay.
    config.balance_rate = 0.001

    config.log_every = 10
    config.checkpoint_every = 500
    config.eval = ConfigDict()
    config.eval.every = 500  # steps; 0 = at the end only
    config.eval.at_start = False  # before the first step too
    config.eval.batches = 16  # of held-out conversations, for the losses
    config.eval.prompts = 4  # of held-out conversations, decoded; 0 = none
    config.eval.new_tokens = 64
    config.eval.num_speculative_tokens = config_dict.placeholder(int)
    config.eval.temperatures = (0.0, 1.0)  # at the end; in between the first one only

    config.fsdp = False  # split the parameters over data, as the optimizer's state always is
    config.mesh = mesh_fields()
    config.distributed = distributed_fields()
    return config


def new_model_fields() -> ConfigDict:
    """Return a section `model` for a config file: the sizes of a small new model."""
    model = ConfigDict()
    model.hidden_size = 256
    model.intermediate_size = 768
    model.num_layers = 8
    model.num_heads = 4
    model.num_kv_heads = 2
    model.head_dim = 64
    model.max_positions = 2048
    model.rope_theta = 10000.0
    model.tie_word_embeddings = True
    return model


def default_workdir(name: str, size: str) -> str:
    """Return the default work folder of a run: that of the config file `name`.py and its `size`."""
    return f"build/{name}_{size}" if size else f"build/{name}"


def set_size(config: ConfigDict, size: str) -> None:
    """Set the common fields for a size of run: "debug", "quick", or "" for no change.

    "debug" exercises everything in six steps, and learns nothing. "quick" evaluates before the
    first and after the last step; its number of steps depends on the method. Raises ValueError for
    another size.
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

    batch_size: Annotated[int, Whole(1, 1 << 20)]
    """The number of rows per update."""
    accumulate: Annotated[int, Whole(1, 1 << 20)]
    """The number of micro-batches per update."""
    row_tokens: Annotated[int, Whole(4, 1 << 24)]
    """T, the number of tokens per row."""
    row_labels: Annotated[int, Whole(1, 1 << 24)]
    """A, the maximum number of labels per row; further labels are dropped."""


@dataclass(frozen=True)
class LoopConfig:
    """The number of updates, a limit in minutes, and intervals of logging and saving."""

    steps: Annotated[int, Whole(1)]
    """The total number of updates."""
    minutes: Annotated[float | None, optional(Number(0.0, 1e9, above=True))]
    """The number of minutes after which to stop; the same command resumes."""
    log_every: Annotated[int, Whole(1)]
    """The number of steps between lines of the log."""
    checkpoint_every: Annotated[int, Whole(1)]
    """The number of steps between checkpoints."""


@dataclass(frozen=True)
class EvalConfig:
    """The frequency of evaluations and the amount of data that they use."""

    every: Annotated[int, Whole()]
    """The number of steps between evaluations; 0 evaluates at the end only."""
    at_start: bool
    """Whether to evaluate before the first step too."""
    batches: Annotated[int, Whole()]
    """The number of batches of held-out conversations on which losses are computed."""
    prompts: Annotated[int, Whole()]
    """The number of held-out prompts that are decoded; 0 decodes none."""
    new_tokens: Annotated[int, Whole(1)]
    """The number of new tokens per decoded prompt."""
    num_speculative_tokens: Annotated[int | None, optional(Whole(1, DRAFT_TOKENS.most))]
    """The number of draft tokens per round when decoding."""
    temperatures: Annotated[tuple[float, ...], Items(TEMPERATURE)]
    """The temperatures used for decoding at the end; earlier evaluations use the first one only."""


DraftVocabSize = Annotated[int | None, optional(Whole(1))]
"""The number of the target's tokens that a head can draft; None for all."""


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
class TrainingConfig:
    """A checked config of a training command.

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

    target: Annotated[str | None, TargetName()]
    """The model for which the drafter is trained: a name or a directory."""
    model: ModelSizes | None
    """The sizes of a new model, in place of `target`."""
    dtype: Annotated[str, MULTIPLY]
    """The dtype of products."""
    data: Annotated[str, DataFolders()]
    """Directories of training data, separated by commas; shipped is the small bundled set of the
    default model's answers.
    """
    features: Literal["auto", "stored", "online"]
    """Target features: stored in the data, computed online in each step, or auto, which means
    stored if there are any.
    """
    workdir: Annotated[str, RunFolder()]
    """The folder for checkpoints, logs and the exported head."""
    start_from: Annotated[str | None, optional(HeadFolder())]
    """The trained head to start from: a directory, or the kind of a bundled head, such as eagle3.
    """
    seed: Annotated[int, SEED]
    """The seed of initialization, data order and noise."""
    batches: Annotated[BatchConfig, Inline()]
    optimization: Annotated[Optimization, Inline()]
    loop: Annotated[LoopConfig, Inline()]
    eval: EvalConfig
    remat: bool
    """Whether the backward pass computes activations again, to save memory."""
    fsdp: bool
    """Whether parameters are sharded over `mesh.data`, as the optimizer's state always is."""
    mesh: MeshConfig
    distributed: DistributedConfig
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
