"""The features of a pass: hidden states by name, likeliest tokens, experts and queries."""

from __future__ import annotations

import re
from collections.abc import Iterable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.core.top_tokens import wanted_counts
from specjax.errors import InputError
from specjax.models.config import DecoderConfig

EXPERTS = "experts"
"""The name of the feature with each token's experts, for models that have experts."""
QUERIES = "queries"
"""The name of the feature with each token's queries in all L layers with attention, [L, H, C]
flattened."""
LAYER_INPUTS = "layer_inputs"
"""The name of the feature with the inputs of all layers, for passes without a window (training)."""


def check_features(names: Iterable[str], num_layers: int, where: str = "") -> None:
    """Raise InputError for a name that is not a feature of a model with `num_layers` layers.

    `where`, such as "block.taps: ", begins the message.
    """
    for name in names:
        match = re.fullmatch(r"layer_input:(\d+)", name)
        if name not in ("final_norm", "pre_norm") and not (match and int(match[1]) < num_layers):
            raise InputError(
                f"{where}feature {name!r} is unknown: use final_norm, pre_norm or layer_input:i "
                f"with i < {num_layers}"
            )


class Features:
    """The features requested of a pass from layer `first` on.

    Raises InputError for an unknown name, or one of an earlier layer.
    """

    def __init__(self, names: tuple[str, ...], config: DecoderConfig, first: int = 0) -> None:
        self.names = tuple(name for name in names if name != LAYER_INPUTS)
        self._config = config
        self.counts = wanted_counts(names, config.vocab_size)
        """The number of most likely tokens to return, by feature name."""
        others = (*self.counts, EXPERTS, QUERIES)
        of_layers = [name for name in self.names if name not in others]
        check_features(of_layers, config.num_layers)
        self.tapped_layers = {
            name: int(name.partition(":")[2]) for name in names if name.startswith("layer_input:")
        }
        """The layer whose input is the feature, by feature name."""
        earlier = [name for name, layer in self.tapped_layers.items() if layer < first]
        earlier += [name for name in (EXPERTS, QUERIES) if first and name in names]
        if earlier:
            raise InputError(
                f"feature {earlier[0]!r}: the pass begins at layer {first}; run all layers for it"
            )

    def no_experts(self, tokens_shape: tuple[int, int]) -> Int[Array, "M B T K"] | None:
        """Return a zero array for the experts of tokens [B, T] in each of the M sparse layers."""
        if EXPERTS not in self.names:
            return None
        experts = self._config.experts.per_token
        return jnp.zeros((self._config.num_sparse, *tokens_shape, experts), jnp.int32)

    def no_queries(
        self, tokens_shape: tuple[int, int], dtype: jnp.dtype
    ) -> Float[Array, "B T L H C"] | None:
        """Return zeros for the queries of tokens [B, T], if they are requested."""
        if QUERIES not in self.names:
            return None
        config = self._config
        shape = (len(config.layers_with("attention")), config.num_heads, config.head_dim)
        return jnp.zeros((*tokens_shape, *shape), dtype)
