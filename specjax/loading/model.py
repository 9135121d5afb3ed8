"""A loaded model: its functions, its parameters, its tokenizer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from specjax.fields import Instance
from specjax.loading.tokenizers.tokenizer import Tokenizer
from specjax.models.config import DecoderConfig
from specjax.models.decoder import DEFAULT_FORM, Decoder, Form


@dataclass(frozen=True, eq=False)
class Model:
    """The result of `load_model`; `tokenizer` is None for models without one.

    `params` is a plain nested dict of arrays. On a `mesh` they are split over `shards` devices, or
    whole on each of them (1). `form` says how its layers are laid out for the backend.
    """

    name: str
    config: DecoderConfig
    params: dict[str, Any] = field(repr=False)
    tokenizer: Tokenizer | None = field(repr=False)
    dtype: jnp.dtype
    mesh: Mesh | None = None
    shards: int = 1
    form: Form = DEFAULT_FORM

    @property
    def architecture(self) -> Decoder:
        """The model as pure functions of its parameters; hashable."""
        return Decoder(self.config, self.dtype, self.shards, self.form)

    @property
    def num_params(self) -> int:
        """Number of parameters, a tied head counted once."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.params))


MODEL_KIND = Instance(Model, "use a model, as specjax.load_model gives it")
