"""The target's parameters that a trained head uses instead of storing its own."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int


def share(
    target_params: dict[str, Any], draft_ids: Int[Array, "Vd"] | None, *, head: bool
) -> dict[str, Any]:
    """The target's embedding ("embed", or "head" where it is tied), the same arrays.

    With `head` also "draft_head": the target's head, copied to the columns of `draft_ids` if given.
    """
    source = "embed" if "embed" in target_params else "head"
    shared = {source: target_params[source]}
    if head:
        kernel = target_params["head"]["kernel"]
        if draft_ids is not None:
            kernel = jnp.take(kernel, draft_ids, axis=1)
        shared["draft_head"] = {"kernel": kernel}
    return shared


def share_anew(params: dict[str, Any], target_params: dict[str, Any]) -> dict[str, Any]:
    """A head's parameters, those that are its target's taken from other ones of the target."""
    borrows = "draft_head" in params["shared"]
    shared = share(target_params, params.get("draft_ids"), head=borrows)
    return {**params, "shared": shared}
