"""The fields that every training config has, and what they are checked for."""

from __future__ import annotations

import math
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
    Fields,
    Flag,
    Items,
    Number,
    OutputFolder,
    PathOrName,
    Text,
    Whole,
    check_values,
    fields_of,
    optional,
)
from specjax.files.paths import input_folder
from specjax.loading.load import DEFAULT_MODEL
from train.run.optimizer import OPTIMIZERS, SCHEDULES, Optimization
from train.run.precision import MULTIPLY

FEATURES = ("auto", "stored", "online")


def training_fields() -> ConfigDict:
    """A config with all common fields; a method's own config adds a section of its own."""
    config = ConfigDict()
    config.target = DEFAULT_MODEL
    config.dtype = "auto"  # of products: auto | float32 | bfloat16
    config.data = config_dict.placeholder(str)  # directories, with commas
    # Target features: those in the data set, or computed in the step; auto takes what is there.
    config.features = "auto"
    config.workdir = config_dict.placeholder(str)
    # A trained head to start from: a directory, or shipped = the one that comes with specjax.
    config.start_from = config_dict.placeholder(str)
    config.seed = 0

    config.steps = 1000  # updates in all
    config.minutes = config_dict.placeholder(float)  # stop after so long, to be resumed
    config.batch_size = 8  # rows an update
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
    config.eval.every = 500  # steps; 0 = never
    config.eval.batches = 16  # of held-out conversations, for the losses
    config.eval.prompts = 4  # of held-out conversations, decoded; 0 = none
    config.eval.new_tokens = 64
    config.eval.num_speculative_tokens = config_dict.placeholder(int)
    config.eval.temperatures = (0.0, 1.0)  # at the end; in between the first one only

    config.fsdp = False  # split the parameters over data, as the optimizer's state always is
    config.mesh = mesh_fields()
    config.distributed = distributed_fields()
    return config


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
    eval_batches: int
    eval_prompts: int
    eval_new_tokens: int
    eval_num_speculative_tokens: int | None
    eval_temperatures: tuple[float, ...]


@dataclass(frozen=True)
class DataFolders:
    """Folders of conversations to read, with commas between them."""

    def check(self, name: str, value: Any) -> str:
        """The text; each of its folders is there."""
        for folder in Text().check(name, value).split(","):
            input_folder(name, folder.strip())
        return value


@dataclass(frozen=True)
class Scales:
    """Factors of the learning rate by parameter name: NAME:FACTOR, with commas."""

    def check(self, name: str, value: Any) -> str:
        """The text, which `read_scales` reads."""
        read_scales(Text(empty=True).check(name, value))
        return value


DRAFT_VOCAB_SIZE = optional(Whole(1))
"""How many of the target's tokens a head drafts from; None = all."""
TRAINING_FIELDS: Fields = {
    "target": PathOrName(),
    "dtype": MULTIPLY,
    "data": optional(DataFolders()),
    "features": Choice(FEATURES),
    "workdir": optional(OutputFolder()),
    "start_from": optional(PathOrName()),
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


_READ_ELSEWHERE = ("target", "dtype", "data", "workdir", "start_from", "mesh", "distributed")


def read_settings(config: ConfigDict, data_devices: int = 1) -> Settings:
    """The settings of a config; raises InputError for values that make no sense."""
    own = config.to_dict()
    read = {name: kind for name, kind in TRAINING_FIELDS.items() if name not in _READ_ELSEWHERE}
    check_values(read, {name: own[name] for name in read})
    if config.batch_size % config.accumulate:
        raise InputError(
            f"accumulate={config.accumulate}: batch_size={config.batch_size} rows cannot be split "
            "into so many micro-batches; use a divisor"
        )
    rows = config.batch_size // config.accumulate
    if rows % data_devices:
        raise InputError(
            f"mesh.data={data_devices}: {rows} rows (batch_size / accumulate) cannot be spread "
            "over so many devices; make batch_size a multiple"
        )
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
    # Medusa-2's ramp ends there too.
    if config.schedule != "constant" or "joint" in config:
        fields["decay_steps"] = config.decay_steps or config.steps
    return fields


def read_scales(text: str) -> dict[str, float]:
    """Factors by dotted parameter name, from NAME:FACTOR with commas; raises InputError."""
    found: dict[str, float] = {}
    for part in text.split(",") if text.strip() else ():
        name, mark, factor = map(str.strip, part.partition(":"))
        if not (name and mark) or name in found:
            raise InputError(
                f"learning_rate_scales={text!r}: use NAME:FACTOR for each name, with commas, such "
                "as head:0.5,layers.0:0.1"
            )
        try:
            found[name] = float(factor)
        except ValueError:
            found[name] = math.nan
        if not 0 <= found[name] < math.inf:
            raise InputError(f"learning_rate_scales.{name}={factor}: use a number of at least 0")
    return found
