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
from specjax.sampling import drafter_noise
from specjax.trees import Draft, is_chain


def make(first: Drafter, second: Drafter) -> Drafter:
    """`first`'s chain in the rows where it proposes one, `second`'s in the others.

    Neither drafts more than its own `num_speculative_tokens`, whatever is asked for. Exact if both
    are: what the first one's choice to draft depends on (tokens that it does not draw,
    distributions, noise of its own) is independent of what the second one draws. Raises InputError
    for a drafter that cannot follow what another one drafted.
    """
    both = (first, second)
    for drafter in both:
        if drafter.follows_own_drafts:
            raise InputError(
                f"drafter {drafter.name!r} only follows drafts that it made itself, so it cannot "
                "take turns: leave it alone, or use a head (medusa, eagle, eagle3)"
            )

    def init(params: Any, context: Context, features: dict[str, Float[Array, "B S D"]]) -> Any:
        return tuple(
            drafter.init(own, _narrowed(context, drafter), features)
            for drafter, own in zip(both, params, strict=True)
        )

    def propose(params: Any, state: Any, context: Context, noise: Noise) -> tuple[Draft, Any]:
        taken, drafts, states = jnp.zeros(context.length.shape, bool), [], []
        for number, drafter in enumerate(both):
            narrowed = _narrowed(context, drafter)
            narrowed = narrowed.replace(limit=jnp.where(taken, 0, narrowed.limit))
            draft, after = drafter.propose(
                params[number], state[number], narrowed, _noise_of(number, noise, context)
            )
            if not is_chain(draft):
                raise ValueError(f"drafter {drafter.name!r} proposes a tree: use one of chains")
            taken |= draft.valid.any(axis=1)
            drafts.append(draft)
            states.append(after)
        return joined(*drafts, context.num_tokens), tuple(states)

    def observe(params: Any, state: Any, context: Context, accepted: Accepted) -> Any:
        return tuple(
            drafter.observe(own, before, _narrowed(context, drafter), accepted)
            for drafter, own, before in zip(both, params, state, strict=True)
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
        lengths=(
            *(first.lengths or (first.num_speculative_tokens,)),
            *(second.lengths or (second.num_speculative_tokens,)),
        ),
    )


def _narrowed(context: Context, drafter: Drafter) -> Context:
    """The context of a drafter that drafts no more than its own number of tokens."""
    length = min(context.num_tokens, drafter.num_speculative_tokens)
    return context.replace(limit=jnp.minimum(context.limit, length), num_tokens=length)


def _noise_of(number: int, noise: Noise, context: Context) -> Noise:
    """Noise that the other drafter does not see; under `coupled` both see the target's own."""
    return drafter_noise(noise, number) if context.needs_logq else noise


def joined(first: Draft, second: Draft, length: int) -> Draft:
    """A chain of `length` nodes: each row's from the first draft that proposes any."""
    distributions = [draft.logq for draft in (first, second) if draft.logq is not None]
    offset = 0 if first.logq is None else first.logq.shape[1]
    second = second.replace(logq_row=jnp.where(second.logq_row < 0, -1, second.logq_row + offset))
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
        logq_row=either("logq_row", -1),
        logq=jnp.concatenate(distributions, axis=1) if distributions else None,
    )
