"""The target's parameters that a trained head uses instead of storing copies."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int

from specjax.models.layers.quantized import QuantizedKernel


def share(
    target_params: dict[str, Any], draft_ids: Int[Array, "Vd"] | None, *, head: bool
) -> dict[str, Any]:
    """Return those of a target's parameters that a head uses.

    The embedding is under "embed", or under "head" if it is tied to the output head; it is not
    copied. If `head` is set, the result also has "draft_head": the target's output head, or a copy
    of its columns `draft_ids`.
    """
    source = "embed" if "embed" in target_params else "head"
    shared = {source: target_params[source]}
    if head:
        kernel = target_params["head"]["kernel"]
        if draft_ids is not None:
            is_quantized = isinstance(kernel, QuantizedKernel)
            kernel = kernel.take(draft_ids) if is_quantized else jnp.take(kernel, draft_ids, axis=1)
        shared["draft_head"] = {"kernel": kernel}
    return shared


def share_anew(params: dict[str, Any], target_params: dict[str, Any]) -> dict[str, Any]:
    """Return a head's parameters with the shared ones replaced by those of `target_params`."""
    shares_head = "draft_head" in params["shared"]
    shared = share(target_params, params.get("draft_ids"), head=shares_head)
    return {**params, "shared": shared}
