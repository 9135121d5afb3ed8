"""A model with random weights that is to be trained from scratch, of given sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Key

from specjax.distributed import sharding
from specjax.errors import InputError
from specjax.fields import Flag, Number, Whole
from specjax.loading.formats import build_parameters
from specjax.loading.model import Model
from specjax.loading.tokenizers.tokenizer import Tokenizer
from specjax.models.config import DecoderConfig
from specjax.models.decoder import Decoder, Form
from train.pretraining.expert_sizes import ExpertSizes

NAME = "new"
"""What a model is called that has no name yet."""
_ADDED = (("attention", "output"), ("mlp", "down"), ("experts", "down"), ("shared", "down"))
"""The products that are added to the residual stream."""


@dataclass(frozen=True)
class ModelSizes:
    """The section `model` of a config; the vocabulary is the data's.

    The fields are those of `DecoderConfig`; with `experts`, layers have these in place of an MLP.
    """

    hidden_size: Annotated[int, Whole(1, 1 << 20)]
    intermediate_size: Annotated[int, Whole(1, 1 << 24)]
    num_layers: Annotated[int, Whole(1, 1 << 16)]
    num_heads: Annotated[int, Whole(1, 1 << 16)]
    num_kv_heads: Annotated[int, Whole(1, 1 << 16)]
    head_dim: Annotated[int, Whole(2, 1 << 16)]
    max_positions: Annotated[int, Whole(2, 1 << 30)]
    rope_theta: Annotated[float, Number(1.0, 1e12)]
    tie_word_embeddings: Annotated[bool, Flag()]
    experts: ExpertSizes | None = None

    def config(self, vocab_size: int) -> DecoderConfig:
        """The decoder of these sizes; raises InputError where they do not fit each other."""
        fields = vars(self)
        try:
            if self.experts is not None:
                fields = {**fields, **self.experts.fields(self.num_layers, self.head_dim)}
            return DecoderConfig(vocab_size=vocab_size, **fields)
        except InputError as error:
            raise InputError(f"model.{error}") from None


def new_model(
    config: DecoderConfig, tokenizer: Tokenizer, seed: int, mesh: Mesh | None = None
) -> Model:
    """A model in float32 whose random weights are the same for a seed on every mesh.

    Weights are normal with a standard deviation of 0.02; those of the products that are added to
    the residual stream are divided by sqrt(2 L), so that its spread does not grow with the number
    of layers (Radford et al. 2019, section 2.3). Raises InputError for a mesh that the heads cannot
    be split over.
    """
    form, dtype = Form.for_training(jax.default_backend()), jnp.dtype(jnp.float32)
    shards = sharding.axis_size(mesh, sharding.MODEL)
    placement = None
    if mesh is not None:
        build_parameters.check_shards(config, shards)
        placement = build_parameters.parameter_shardings(config, mesh, shards, form.stacked)
    decoder = Decoder(config, dtype, shards, form)

    def init(key: Key[Array, ""]) -> dict[str, Any]:
        params = nn.meta.unbox(decoder.init(key))
        return jax.tree_util.tree_map_with_path(_scaled, params)

    def _scaled(path: tuple[Any, ...], leaf: Array) -> Array:
        names = tuple(step.key for step in path)
        added = names[-1] == "kernel" and names[-3:-1] in _ADDED
        return leaf * (2 * config.num_layers) ** -0.5 if added else leaf

    with sharding.use(mesh):
        params = jax.jit(init, out_shardings=placement)(jax.random.key(seed))
    return Model(NAME, config, params, tokenizer, dtype, mesh, shards, form)
