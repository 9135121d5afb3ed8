"""The parameters of a head, together with those that it shares with its target."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from specjax import sampling
from specjax.distributed.sharding import fetch
from specjax.errors import InputError
from specjax.loading.model import Model
from specjax.loading.quantize import quantized_head_params
from specjax.methods.heads.head import Head, check_head
from specjax.methods.heads.shared_parameters import share
from specjax.models.parameters import cast


def complete_parameters(head: Head, target: Model, weights: str = "auto") -> dict[str, Any]:
    """Return a head's parameters in the target's dtype, with the target's arrays under "shared".

    Shared arrays are not copied. For a draft vocabulary, "draft_ids" are its token ids. "digest" is
    a hash of the head's own parameters (`HeadDrafter.text_digests`). `weights` is the storage of
    kernels (`DRAFT_WEIGHTS`), unless the head's stay in floating point. Raises InputError for a
    head of another target, and for a storage that the head does not support.
    """
    check_head(head, target)
    table = head.config.parameter_table()
    params = cast(head.params, table, target.dtype)
    if head.config.is_quantizable:
        params = quantized_head_params(table, params, target, weights)
    elif weights not in ("auto", "float"):
        raise InputError(
            f"drafter.weights={weights!r}: {head.kind} has float weights; leave it out"
        )
    ids = None if head.draft_ids is None else jnp.asarray(head.draft_ids, jnp.int32)
    params["shared"] = share(target.params, ids, head=head.config.shares_output)
    if ids is not None:
        params["draft_ids"] = ids
    return with_digest(params)


def with_digest(params: dict[str, Any], after: Any = None) -> dict[str, Any]:
    """Return a head's parameters with a hash of all but the shared ones as their "digest".

    With `after`, the digest of the parameters that these replace, it is a hash of both.
    """
    own = {name: part for name, part in params.items() if name not in ("shared", "digest")}
    arrays = jax.tree.leaves(own) if after is None else [*jax.tree.leaves(own), after]
    return {**params, "digest": jnp.asarray(sampling.array_digest(fetch(arrays)))}
