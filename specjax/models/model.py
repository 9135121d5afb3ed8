"""A loaded model: parameters, the config that explains them, and the tokenizer that goes with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from specjax.models.config import DecoderConfig
from specjax.models.tokenizer import Tokenizer


@dataclass(frozen=True, eq=False)
class Model:
    """What `load_model` gives; `tokenizer` is None for models of bare token ids."""

    name: str
    config: DecoderConfig
    params: dict[str, Any]
    tokenizer: Tokenizer | None
    dtype: jnp.dtype
