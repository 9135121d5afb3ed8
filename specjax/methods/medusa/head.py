"""Medusa heads: residual blocks that each predict a token further ahead from the same feature.

Cai et al. 2401.10774. Head i (0-based) reads f_t, the target's `final_norm`, and predicts
x_{t+2+i}; the target itself predicts x_{t+1}. Blocks are x + SiLU(W x + b) with W initialized to
zero. SiLU is bounded below, so a block alone cannot cancel the feature's prediction of x_{t+1}; the
trained output head can, or a projection before the target's frozen head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from specjax.errors import InputError
from specjax.fields import Whole
from specjax.models.head_config import HeadConfig
from specjax.models.layers.matmul import product
from specjax.models.parameters import Parameter, ParameterTable

KIND = "medusa"
"""The kind of head, and the drafter's name."""


@dataclass(frozen=True, kw_only=True)
class MedusaShape:
    """The shape of Medusa heads, apart from the target's sizes."""

    num_heads: Annotated[int, Whole(1, 64)]
    """K, the number of heads, one for each position after the next token."""
    num_layers: Annotated[int, Whole(1, 64)]
    """The number of residual blocks per head."""
    original_lm_head: bool
    """Whether the heads share the target's output layer; otherwise each has one of its own."""
    projection: bool = False
    """Whether each head has a matrix of its own before the target's output layer."""


@dataclass(frozen=True, kw_only=True)
class MedusaConfig(MedusaShape, HeadConfig):
    """The config of Medusa heads, which read features of width `hidden_size`.

    `draft_vocab_size` (Vd) is the number of logits, out of a vocabulary of `vocab_size` (V). Raises
    InputError for inconsistent sizes, and for a projection before trained output heads.
    """

    hidden_size: int
    vocab_size: int
    draft_vocab_size: int

    def __post_init__(self) -> None:
        for field in ("hidden_size", "vocab_size", "num_heads", "num_layers", "draft_vocab_size"):
            if getattr(self, field) < 1:
                raise InputError(f"{field}={getattr(self, field)}: must be at least 1")
        if self.draft_vocab_size > self.vocab_size:
            raise InputError(
                f"draft_vocab_size={self.draft_vocab_size}: must be at most "
                f"vocab_size={self.vocab_size}"
            )
        if self.projection and not self.original_lm_head:
            raise InputError(
                "projection=True: heads of their own hold it already; use it with "
                "original_lm_head=True"
            )

    @property
    def kind(self) -> str:
        """The kind of head."""
        return KIND

    @property
    def target_vocab_size(self) -> int:
        """The number of tokens of the target (V)."""
        return self.vocab_size

    @property
    def features(self) -> tuple[str, ...]:
        """The name of the target's feature that all heads read."""
        return ("final_norm",)

    @property
    def shares_output(self) -> bool:
        """Whether logits are computed with the target's output head, from the heads' features."""
        return self.original_lm_head

    @property
    def is_quantizable(self) -> bool:
        """False: kernels that are stacked over heads stay in floating point."""
        return False

    def parameter_table(self) -> dict[str, Any]:
        """Return the shapes and axes of the heads' parameters, as a nested dict of `Parameter`.

        They are stacked over heads; kernels are [in, out].
        """
        heads, layers, width = self.num_heads, self.num_layers, self.hidden_size
        table: dict[str, Any] = {
            "blocks": {
                "kernel": Parameter(
                    (heads, layers, width, width), (None, None, "embed", None), "zeros"
                ),
                "bias": Parameter((heads, layers, width), (None, None, None), "zeros"),
            }
        }
        if self.projection:
            axes = (None, "embed", None)
            table["projection"] = {"kernel": Parameter((heads, width, width), axes, "identity")}
        if not self.original_lm_head:
            shape = (heads, width, self.draft_vocab_size)
            table["head"] = {"kernel": Parameter(shape, (None, "embed", "vocab"))}
        return table

    def joined(self, params: dict[str, Any]) -> dict[str, Any]:
        """Return the parameters, which have no kernels to be joined."""
        return params

    def without_unused(self) -> MedusaConfig:
        """Return the config, which states no unused token ids."""
        return self


@dataclass(frozen=True)
class Medusa:
    """Medusa heads as pure functions of their parameters; hashable.

    `params` has the heads' own parameters, and under "shared" the target's arrays
    (`shared_parameters.share`), including the columns of its output head with `original_lm_head`.
    """

    config: MedusaConfig
    dtype: jnp.dtype
    multiply: jnp.dtype | None = None

    def init(self, key: Key[Array, ""]) -> dict[str, Any]:
        """Return initial parameters, boxed with the logical names of their axes."""
        return ParameterTable(self.config.parameter_table(), self.dtype).init(key)["params"]

    def states(
        self, params: dict[str, Any], features: Float[Array, "B A D"]
    ) -> Float[Array, "K B A D"]:
        """Return the states of each of the K heads, from which its logits are computed.

        `features` are the target's `final_norm`.
        """

        def states_of_head(head_params: dict[str, Any]) -> jax.Array:
            x, blocks = features.astype(self.dtype), head_params["blocks"]
            for layer in range(self.config.num_layers):
                kernel, bias = blocks["kernel"][layer], blocks["bias"][layer]
                y = product("bad,de->bae", x, kernel, multiply=self.multiply)
                x = x + nn.silu(y + bias[None, None, :].astype(y.dtype))
            if self.config.projection:
                kernel = head_params["projection"]["kernel"]
                x = product("bad,de->bae", x, kernel, multiply=self.multiply)
            return x

        stacked = {name: params[name] for name in ("blocks", "projection") if name in params}

        def params_of_head(head: int) -> dict[str, Any]:
            return jax.tree.map(lambda leaf: leaf[head], stacked)

        heads = range(self.config.num_heads)
        return jnp.stack([states_of_head(params_of_head(head)) for head in heads])

    def logits(
        self, params: dict[str, Any], states: Float[Array, "B A D"], head: int
    ) -> Float[Array, "B A Vd"]:
        """Return the draft logits of head number `head` in float32, given its `states`."""
        if self.config.original_lm_head:
            kernel = params["shared"]["draft_head"]["kernel"]
        else:
            kernel = params["head"]["kernel"][head]
        return product("bad,dv->bav", states, kernel, multiply=self.multiply, out=jnp.float32)
