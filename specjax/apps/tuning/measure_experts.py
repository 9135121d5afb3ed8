"""Measure how often a target's routers choose each expert on given texts."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from specjax.core.causal_mask import causal
from specjax.core.language_model import LanguageModel
from specjax.distributed.sharding import use
from specjax.errors import InputError
from specjax.loading.model import Model
from specjax.models.features import EXPERTS
from specjax.theory import ExpertUse


def measure_expert_use(
    model: Model, texts: Sequence[Sequence[int]], *, longest: int = 8
) -> ExpertUse:
    """Return how often each expert is used by runs of up to `longest` tokens of texts.

    `texts` are token ids, such as prompts with their answers; those shorter than `longest` are left
    out. Each text is a single pass. Raises InputError for a model without experts, and if no text
    is long enough.
    """
    if model.config.experts is None:
        raise InputError(f"{model.name}: it has no experts; use a model with experts")
    width = max((len(text) for text in texts), default=1)
    chosen = []
    with use(model.mesh):
        for text in texts:
            tokens = np.zeros((1, width), np.int32)
            tokens[0, : len(text)] = text
            experts = _experts(model.architecture, model.params, tokens)
            chosen.append(np.asarray(experts)[: len(text)])
    return ExpertUse.count(chosen, model.config.experts.num_experts, longest=longest)


@functools.partial(jax.jit, static_argnums=0)
def _experts(
    model: LanguageModel, params: dict[str, Any], tokens: Int[Array | np.ndarray, "1 T"]
) -> Int[Array, "T M K"]:
    """Return the experts that each token of a text uses in the M sparse layers."""
    width = tokens.shape[1]
    positions = jnp.arange(width)
    result = model.extend(
        params,
        tokens,
        positions[None],
        None,
        model.make_window(1, width),
        0,
        causal(positions, width),
        features=(EXPERTS,),
        logits=False,
    )
    return result.features[EXPERTS][0]
