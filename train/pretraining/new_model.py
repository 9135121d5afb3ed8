"""A new model with random weights and given sizes, to be trained from scratch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

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
from specjax.models.config import Attention, DecoderConfig, Experts
from specjax.models.decoder import Decoder
from specjax.models.form import Form

NAME = "new"
"""The name of a model that has none yet."""
_ADDED = (("attention", "output"), ("mlp", "down"), ("experts", "down"), ("shared", "down"))
"""The products that are added to the residual stream."""


@dataclass(frozen=True)
class ExpertSizes:
    """The section `model.experts` of a config: a mixture of experts after some dense layers.

    `scoring_func` is the sigmoid of GLM and DeepSeek-V3, with a selection bias per expert
    (2408.15664), or the softmax of Qwen3; it determines the family of the layers. Raises InputError
    for inconsistent sizes.
    """

    num_experts: Annotated[int, Whole(1, 1 << 16)] = 16
    """The number of experts per layer."""
    num_experts_per_tok: Annotated[int, Whole(1, 1 << 16)] = 4
    """The number of experts that read a token."""
    moe_intermediate_size: Annotated[int, Whole(1, 1 << 24)] = 192
    """The width of an expert."""
    n_shared_experts: Annotated[int, Whole(0, 1 << 8)] = 1
    """The number of experts that read every token."""
    first_k_dense_replace: Annotated[int, Whole(0, 1 << 16)] = 1
    """The number of dense layers before the first layer with experts."""
    n_group: Annotated[int, Whole(1, 1 << 16)] = 1
    """The number of groups of experts."""
    topk_group: Annotated[int, Whole(1, 1 << 16)] = 1
    """The number of groups among which a token's experts are chosen."""
    scoring_func: Literal["sigmoid", "softmax"] = "sigmoid"
    """The function that turns scores into weights: sigmoid, with a balancing bias, or softmax."""
    norm_topk_prob: bool = True
    """Whether the weights of the chosen experts sum to one."""
    routed_scaling_factor: Annotated[float, Number(1e-6, 1e6)] = 1.0
    """A factor by which the weights are multiplied."""

    def __post_init__(self) -> None:
        count, groups = self.num_experts, self.n_group
        if count % groups or (groups > 1 and count == groups):
            raise InputError(
                f"model.experts.n_group={groups}: num_experts={count} cannot be split into so many "
                "groups of two or more; use a smaller divisor"
            )
        if self.topk_group > groups:
            raise InputError(
                f"model.experts.topk_group={self.topk_group}: there are n_group={groups} groups; "
                "use at most that many"
            )
        chosen_from = self.topk_group * count // groups
        if self.num_experts_per_tok > chosen_from:
            raise InputError(
                f"model.experts.num_experts_per_tok={self.num_experts_per_tok}: a token chooses "
                f"from {chosen_from} experts; use at most that many, or more experts or topk_group"
            )

    def fields(self, num_layers: int, head_dim: int) -> dict[str, Any]:
        """Return the fields of `DecoderConfig` for a model with these experts.

        The model has `num_layers` layers with heads of width `head_dim`. Raises InputError if all
        layers are dense.
        """
        if self.first_k_dense_replace >= num_layers:
            raise InputError(
                f"experts.first_k_dense_replace={self.first_k_dense_replace}: none of "
                f"num_layers={num_layers} layers has experts; use fewer, or leave the section out"
            )
        sigmoid = self.scoring_func == "sigmoid"
        attention = Attention(qk_norm=True)
        if sigmoid:
            attention = Attention(output_bias=False, rotary_width=head_dim)
        return {
            "experts": Experts(
                num_experts=self.num_experts,
                per_token=self.num_experts_per_tok,
                intermediate_size=self.moe_intermediate_size,
                router=self.scoring_func,
                normalize=self.norm_topk_prob,
                scale=self.routed_scaling_factor,
                selection_bias=sigmoid,
                groups=self.n_group,
                groups_per_token=self.topk_group,
                shared_size=self.n_shared_experts * self.moe_intermediate_size,
                num_dense=self.first_k_dense_replace,
            ),
            "family": "glm4_moe" if sigmoid else "qwen3_moe",
            "attention": attention,
        }


@dataclass(frozen=True)
class ModelSizes:
    """The section `model` of a config: the sizes of a new model, named as in `DecoderConfig`.

    The size of the vocabulary is that of the data's tokenizer. With `experts`, layers have experts
    in place of MLPs.
    """

    hidden_size: Annotated[int, Whole(1, 1 << 20)] = 256
    """D: the width of the residual stream."""
    intermediate_size: Annotated[int, Whole(1, 1 << 24)] = 768
    """The width of the MLPs."""
    num_layers: Annotated[int, Whole(1, 1 << 16)] = 8
    """The number of layers."""
    num_heads: Annotated[int, Whole(1, 1 << 16)] = 4
    """The number of query heads per layer."""
    num_kv_heads: Annotated[int, Whole(1, 1 << 16)] = 2
    """The number of key/value heads per layer."""
    head_dim: Annotated[int, Whole(2, 1 << 16)] = 64
    """The width of a head."""
    max_positions: Annotated[int, Whole(2, 1 << 30)] = 2048
    """The maximum length of a text, in tokens."""
    rope_theta: Annotated[float, Number(1.0, 1e12)] = 10000.0
    """The base of the rotary embeddings."""
    tie_word_embeddings: Annotated[bool, Flag()] = True
    """Whether the output layer uses the embeddings."""
    experts: ExpertSizes | None = None
    """A mixture of experts in place of the MLPs."""

    def config(self, vocab_size: int) -> DecoderConfig:
        """Return a decoder config of these sizes; raise InputError if they are inconsistent."""
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
    """Return a model in float32 with random weights, which depend on `seed` but not on the mesh.

    Weights are normal with a standard deviation of 0.02; kernels whose products are added to the
    residual stream are divided by sqrt(2 L), so that its scale does not grow with the number of
    layers (Radford et al. 2019, section 2.3). Raises InputError for a mesh over which the heads
    cannot be sharded.
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
