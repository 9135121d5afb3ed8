"""A training run whose target does not exist yet: the fields of its config, and the model."""

from __future__ import annotations

from jax.sharding import Mesh
from ml_collections import ConfigDict

from specjax.errors import InputError
from specjax.fields import Fields, OptionalSection, PathOrName, fields_of, optional
from specjax.loading.model import Model
from train.data.sources import Sources
from train.pretraining.new_model import ModelSizes, new_model

NEW_TARGET_FIELDS: Fields = {
    "target": optional(PathOrName()),
    "model": OptionalSection(fields_of(ModelSizes)),
}
"""Of a method that trains its target, beside `TRAINING_FIELDS`: without a target, `model` has the
sizes of a new one."""


def check_new_target(config: ConfigDict) -> None:
    """Raise InputError unless the config has either a target or the sizes of a new one."""
    if config.target is None and "model" not in config:
        raise InputError(
            "target is missing: pass --config.target=NAME, or, for a new model, add its sizes as "
            "the section model to the config file"
        )
    if config.target is not None and "model" in config:
        raise InputError(
            f"target={config.target!r:.80}: the section model has the sizes of a new one; use a "
            "config file without it"
        )


def new_target(config: ConfigDict, data: Sources, mesh: Mesh | None) -> Model:
    """A new model of the sizes `config.model`, with the data's tokenizer and weights by the seed.

    Raises InputError for sizes that do not fit each other or the mesh, and for data that keep no
    tokenizer.
    """
    tokenizer = data.tokenizer()
    shape = ModelSizes(**config.model.to_dict()).config(tokenizer.vocab_size)
    return new_model(shape, tokenizer, config.seed, mesh)
