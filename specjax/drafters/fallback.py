"""One drafter where it has something to say, another where it has not.

Prompt lookup costs nothing and is long where a text repeats itself; a head drafts the rest.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from specjax.drafters.base import Accepted, Context, Drafter, Noise
from specjax.errors import InputError
from specjax.trees import Draft, is_chain


def make(first: Drafter, second: Drafter) -> Drafter:
    """`first`'s chain in the rows where it proposes one, `second`'s in the others.

    Neither drafts more than its own `num_speculative_tokens`. Exact as they are: whether a node is
    proposed never depends on its own token, so that choosing by the first one's tells nothing of
    what would be drawn. Raises InputError for a drafter that has to feed every draft itself.
    """
    for drafter in (first, second):
        if drafter.follows_own_drafts:
            raise InputError(
                f"drafter {drafter.name!r} only follows drafts that it made itself, so it cannot "
                "stand beside another: use ngram, medusa, eagle, eagle3 or early_exit"
            )

    def init(params: Any, context: Context, features: dict[str, Float[Array, "B S D"]]) -> Any:
        return tuple(
            drafter.init(own, context, features)
            for drafter, own in zip((first, second), params, strict=True)
        )

    def propose(params: Any, state: Any, context: Context, noise: Noise) -> tuple[Draft, Any]:
        batch, most = context.length.shape[0], context.num_tokens
        taken, drafts, states = jnp.zeros(batch, bool), [], []
        for drafter, own, before in zip((first, second), params, state, strict=True):
            length = min(most, drafter.num_speculative_tokens)
            limit = jnp.where(taken, 0, jnp.minimum(context.limit, length))
            draft, after = drafter.propose(
                own, before, context.replace(limit=limit, num_tokens=length), noise
            )
            if not is_chain(draft):
                raise ValueError(f"drafter {drafter.name!r} proposes a tree: use one of chains")
            taken |= draft.valid.any(axis=1)
            drafts.append(draft)
            states.append(after)
        return joined(*drafts, most), tuple(states)

    def observe(params: Any, state: Any, context: Context, accepted: Accepted) -> Any:
        return tuple(
            drafter.observe(own, before, context, accepted)
            for drafter, own, before in zip((first, second), params, state, strict=True)
        )

    return Drafter(
        f"{first.name}+{second.name}",
        init,
        propose,
        observe,
        num_speculative_tokens=max(first.num_speculative_tokens, second.num_speculative_tokens),
        params=(first.params, second.params),
        features=tuple(dict.fromkeys((*first.features, *second.features))),
        sampled=first.sampled or second.sampled,
    )


def joined(first: Draft, second: Draft, length: int) -> Draft:
    """A chain of `length` nodes: each row's from the first draft that proposes any."""
    laws = [draft.logq for draft in (first, second) if draft.logq is not None]
    offset = 0 if first.logq is None else first.logq.shape[1]
    second = second.replace(law=jnp.where(second.law < 0, -1, second.law + offset))
    here = first.valid.any(axis=1, keepdims=True)

    def either(name: str, filler: int | bool) -> Array:
        return jnp.where(
            here,
            *(
                jnp.pad(
                    getattr(draft, name),
                    ((0, 0), (0, length - draft.tokens.shape[1])),
                    constant_values=filler,
                )
                for draft in (first, second)
            ),
        )

    return Draft(
        tokens=either("tokens", 0),
        parents=np.arange(length),
        valid=either("valid", False),
        law=either("law", -1),
        logq=jnp.concatenate(laws, axis=1) if laws else None,
    )
