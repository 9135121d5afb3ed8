"""A head's parameters together with those that it shares with its target."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from specjax.loading.heads.head import Head, check_head, parameter_table
from specjax.loading.model import Model
from specjax.models.heads.shared_parameters import share
from specjax.models.parameters import cast


def complete_parameters(head: Head, target: Model) -> dict[str, Any]:
    """The parameters in the target's dtype, with "shared" and, for a part of V, "draft_ids".

    Shared arrays are the target's, not copies. Raises InputError for a head of another target.
    """
    check_head(head, target)
    params = cast(head.params, parameter_table(head.config), target.dtype)
    ids = None if head.draft_ids is None else jnp.asarray(head.draft_ids, jnp.int32)
    params["shared"] = share(target.params, ids, head=head.config.shares_output)
    if ids is not None:
        params["draft_ids"] = ids
    return params
