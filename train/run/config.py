"""The fields that every training config has, the values that they may hold, and its sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ml_collections import ConfigDict, config_dict

from specjax.cli.mesh_config import (
    DistributedConfig,
    MeshConfig,
    distributed_fields,
    mesh_fields,
)
from specjax.decoding.sampling_params import SEED, TEMPERATURE
from specjax.drafters import DRAFT_TOKENS
from specjax.errors import InputError
from specjax.fields import (
    Choice,
    CrossCheck,
    Fields,
    Flag,
    Items,
    Number,
    PathOrName,
    Whole,
    check_values,
    fields_of,
    optional,
)
from specjax.loading.load import DEFAULT_MODEL
from train.data import shipped
from train.data.sources import DataFolders
from train.run.optimizer import OPTIMIZERS, SCHEDULES, Optimization, Scales, read_scales
from train.run.precision import MULTIPLY
from train.run.start_from import HeadFolder
from train.run.workdir import RunFolder

FEATURES = ("auto", "stored", "online")


@dataclass(frozen=True)
class TargetName:
    """A model that exists, by its path or name; whether it does is not checked."""

    def check(self, name: str, value: Any) -> str:
        """The text; raises InputError for None: a method that trains drafters needs a target."""
        if value is None:
            raise InputError(
                f"{name} is missing: a drafter is trained for a model; pass --config.{name}=NAME, "
                "or a directory"
            )
        return PathOrName().check(name, value)


def training_fields() -> ConfigDict:
    """A config with all common fields, to which a method's config file adds sections of its own."""
    config = ConfigDict()
    config.target = DEFAULT_MODEL
    config.dtype = "auto"  # of products: auto | float32 | bfloat16
    # Directories, with commas; shipped = the small set of the default model's answers.
    config.data = shipped.NAME
    # Target features: those in the data set, or computed in the step; auto takes what is there.
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
    config.schedule = "cosine"  # cosine | linear | constant
    config.decay_steps = config_dict.placeholder(int)  # where the schedule ends; steps
    config.final_fraction = 0.1  # of the rate, at the end
    config.warmup = 50
    config.weight_decay = 0.0
    config.clip = 1.0  # of the gradient's global norm; 0 = none
    # Factors by parameter name, such as head:0.5,layers.0:0.1; the longest name counts.
    config.learning_rate_scales = ""

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


def default_workdir(name: str, size: str) -> str:
    """Where a run of the config file `name`.py keeps its files, unless the user names a folder."""
    return f"build/{name}_{size}" if size else f"build/{name}"


def set_size(config: ConfigDict, size: str) -> None:
    """Change the common fields to those of a size: "debug", "quick", or "" for none.

    "debug" runs everything in seconds and learns nothing. "quick" evaluates before the first step
    and after the last; its number of steps is a method's own. Raises ValueError for another size.
    """
    if size == "debug":
        config.steps = 6
        config.batch_size = 2
        config.row_tokens = 64
        config.row_labels = 32
        config.log_every = 1
        config.checkpoint_every = 3
        config.eval.every = 0
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
class Settings:
    """The checked fields that the loop reads, by the names of the config."""

    optimization: Optimization
    seed: int
    steps: int
    minutes: float | None
    batch_size: int
    accumulate: int
    row_tokens: int
    row_labels: int
    features: str
    remat: bool
    fsdp: bool
    log_every: int
    checkpoint_every: int
    eval_every: int
    eval_at_start: bool
    eval_batches: int
    eval_prompts: int
    eval_new_tokens: int
    eval_num_speculative_tokens: int | None
    eval_temperatures: tuple[float, ...]


DRAFT_VOCAB_SIZE = optional(Whole(1))
"""How many of the target's tokens a head can draft; None = all."""
TRAINING_FIELDS: Fields = {
    "target": TargetName(),
    "dtype": MULTIPLY,
    "data": DataFolders(),
    "features": Choice(FEATURES),
    "workdir": RunFolder(),
    "start_from": optional(HeadFolder()),
    "seed": SEED,
    "steps": Whole(1),
    "minutes": optional(Number(0.0, 1e9, above=True)),
    "batch_size": Whole(1, 1 << 20),
    "accumulate": Whole(1, 1 << 20),
    "row_tokens": Whole(4, 1 << 24),
    "row_labels": Whole(1, 1 << 24),
    "remat": Flag(),
    "optimizer": Choice(OPTIMIZERS),
    "learning_rate": Number(above=True),
    "schedule": Choice(SCHEDULES),
    "decay_steps": optional(Whole(1)),
    "final_fraction": Number(),
    "warmup": Whole(),
    "weight_decay": Number(),
    "clip": Number(),
    "learning_rate_scales": Scales(),
    "log_every": Whole(1),
    "checkpoint_every": Whole(1),
    "eval": {
        "every": Whole(),
        "at_start": Flag(),
        "batches": Whole(),
        "prompts": Whole(),
        "new_tokens": Whole(1),
        "num_speculative_tokens": optional(Whole(1, DRAFT_TOKENS.most)),
        "temperatures": Items(TEMPERATURE),
    },
    "fsdp": Flag(),
    "mesh": fields_of(MeshConfig),
    "distributed": fields_of(DistributedConfig),
}
"""What the fields of `training_fields` may hold; a method adds its own sections."""


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


TRAINING_CHECKS = (
    CrossCheck(("batch_size", "accumulate"), _check_accumulate),
    CrossCheck(("batch_size", "accumulate", "mesh.data"), _check_devices),
)
"""How these fields must fit each other."""

_READ_ELSEWHERE = ("target", "dtype", "data", "workdir", "start_from", "distributed")


def read_settings(config: ConfigDict) -> Settings:
    """The settings of a config; raises InputError for values that make no sense."""
    own = config.to_dict()
    read = {name: kind for name, kind in TRAINING_FIELDS.items() if name not in _READ_ELSEWHERE}
    check_values(read, {name: own[name] for name in read}, cross_checks=TRAINING_CHECKS)
    decay = config.decay_steps or config.steps
    return Settings(
        optimization=Optimization(
            learning_rate=config.learning_rate,
            schedule=config.schedule,
            warmup=config.warmup,
            decay_steps=decay,
            final_fraction=config.final_fraction,
            weight_decay=config.weight_decay,
            clip=config.clip,
            scales=read_scales(config.learning_rate_scales),
            optimizer=config.optimizer,
        ),
        seed=config.seed,
        steps=config.steps,
        minutes=config.minutes,
        batch_size=config.batch_size,
        accumulate=config.accumulate,
        row_tokens=config.row_tokens,
        row_labels=config.row_labels,
        features=config.features,
        remat=config.remat,
        fsdp=config.fsdp,
        log_every=config.log_every,
        checkpoint_every=config.checkpoint_every,
        eval_every=config.eval.every,
        eval_at_start=config.eval.at_start,
        eval_batches=config.eval.batches,
        eval_prompts=config.eval.prompts,
        eval_new_tokens=config.eval.new_tokens,
        eval_num_speculative_tokens=config.eval.num_speculative_tokens,
        eval_temperatures=tuple(config.eval.temperatures),
    )


def record_of(config: ConfigDict) -> dict:
    """The config as it is compared when a run is resumed: JSON-ready, placeholders resolved."""
    fields = config.to_dict()
    fields["learning_rate_scales"] = read_scales(config.learning_rate_scales)
    # Medusa-2's ramp ends there too, and a late weight of the MTP loss begins at a share of it.
    late = config.get("mtp", {}).get("late_loss_weight") is not None
    if config.schedule != "constant" or "joint" in config or late:
        fields["decay_steps"] = config.decay_steps or config.steps
    return fields
