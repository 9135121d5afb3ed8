"""A drafter of known quality: it replays what plain decoding gave, with mistakes at a given rate.

It separates the loop from the drafter: with it the speed-up at an acceptance of 0.8 can be measured
on any weights, and compared with what theory says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from specjax import trees
from specjax.drafters.base import Context, Drafter, Noise, unmoved
from specjax.fields import Items, Number, Whole, check_arguments
from specjax.trees import Draft

_CONTINUATIONS = Items(
    Items(Whole()), least=1, remedy="pass the token ids of a plain run, one list per prompt"
)


def make(
    vocab_size: int,
    *,
    continuations: Annotated[Sequence[Sequence[int]], _CONTINUATIONS],
    acceptance: Annotated[float, Number(0.0, 1.0)] = 0.8,
    mistake_seed: Annotated[int, Whole()] = 0,
) -> Drafter:
    """A drafter that proposes `continuations[i]` for prompt i, each token right at `acceptance`.

    The continuations are the token ids that plain decoding gave, greedy or `coupled` at the same
    seed, in the order of the prompts. Which tokens are wrong depends on `mistake_seed`, the prompt
    and the position alone. Raises InputError for a rate outside [0, 1] or no continuations.
    """
    check_arguments(
        make,
        "drafter.",
        continuations=continuations,
        acceptance=acceptance,
        mistake_seed=mistake_seed,
    )
    longest = max(1, *(len(tokens) for tokens in continuations))
    replay = np.full((len(continuations), longest), -1, np.int32)
    for row, tokens in enumerate(continuations):
        replay[row, : len(tokens)] = tokens
    for row in range(len(replay)):
        wrong = np.random.default_rng((mistake_seed, row)).random(longest) >= acceptance
        replay[row] = np.where(
            wrong & (replay[row] >= 0), (replay[row] + 1) % vocab_size, replay[row]
        )

    def init(params: Any, context: Context, features: dict) -> Int[Array, "B"]:
        del params, features
        return context.length

    def propose(
        params: Any, state: Int[Array, "B"], context: Context, noise: Noise
    ) -> tuple[Draft, Any]:
        del noise
        offset = (context.length - state)[:, None] + jnp.arange(context.num_tokens)[None, :]
        known = params.at[context.index[:, None], offset].get(mode="fill", fill_value=-1)
        count = jnp.minimum((known >= 0).sum(axis=1), context.limit)
        return trees.chain(jnp.maximum(known, 0), count.astype(jnp.int32)), state

    return Drafter(
        "simulated", init, propose, unmoved, num_speculative_tokens=4, params=jnp.asarray(replay)
    )
