"""A separate, smaller language model drafts (Leviathan et al. 2211.17192; Chen et al. 2302.01318).

Its cache always holds x_0 .. x_{n-3}, and a round's first window is [x_{n-2}, x_{n-1}]: full
acceptance, where the last draft token was never fed, leaves no hole, and no row is ragged.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from specjax.cache import KVCache, Window, commit
from specjax.drafters.autoregressive import LeastProbability, SampleMethod, draft_chain
from specjax.drafters.base import Accepted, Context, Drafter, Noise
from specjax.fields import check_arguments
from specjax.models.interface import LanguageModel
from specjax.models.masks import causal
from specjax.models.prefill import prefill
from specjax.trees import Draft

_CHUNK = 128


@struct.dataclass
class State:
    """The draft model's committed keys, and those of the round under way (slot 0 = x_{n-2})."""

    cache: KVCache
    window: Window


def make(
    model: LanguageModel,
    params: Any,
    *,
    draft_sample_method: SampleMethod = "probabilistic",
    draft_p_min: LeastProbability = 0.0,
) -> Drafter:
    """A drafter that decodes with a model of its own, which must share the target's tokenizer.

    `probabilistic` draws each token from the model's distribution under the row's own warp, which
    the rules then know exactly; `greedy` takes the likeliest. Where the model gives logits of a
    part of the vocabulary, "draft_ids" among its parameters say which. A row stops drafting where
    the likeliest token has a probability below `draft_p_min`. Raises InputError for bad options.
    """
    check_arguments(
        make, "drafter.", draft_sample_method=draft_sample_method, draft_p_min=draft_p_min
    )

    def init(params: Any, context: Context, features: dict) -> State:
        del features
        batch = context.length.shape[0]
        lengths = jnp.maximum(context.length - 2, 0)
        cache = model.make_cache(batch, context.cache.capacity)
        cache, _ = prefill(model, params, context.tokens, lengths, cache, _CHUNK)
        return State(cache, model.make_window(batch, _slots(context)))

    def propose(params: Any, state: State, context: Context, noise: Noise) -> tuple[Draft, State]:
        slots, last = _slots(context), context.length - 1

        # A row of one token has no x_{n-2}: its slot 0 stays out of sight.
        held = (jnp.arange(slots) > 0)[None, None, :] | (last > 0)[:, None, None]

        def first(token: Int[Array, "B"], window: Window) -> tuple[Float[Array, "B V"], Window]:
            pair = jnp.stack([context.token_at(last - 1), token], axis=1)
            positions = jnp.stack([jnp.maximum(last - 1, 0), last], axis=1)
            # It sees itself all the same: a token that sees nothing is not a number.
            itself = jnp.eye(2, slots, dtype=bool)[None]
            seen = causal(jnp.arange(2), slots) & (held | itself)
            result = model.extend(params, pair, positions, state.cache, window, 0, seen)
            return result.logits[:, 1], result.window

        def step(
            depth: Int[Array, ""] | int, token: Int[Array, "B"], window: Window
        ) -> tuple[Float[Array, "B V"], Window]:
            if isinstance(depth, int):
                return first(token, window)
            seen = causal((depth + 1)[None], slots) & held
            result = model.extend(
                params,
                token[:, None],
                (last + depth)[:, None],
                state.cache,
                window,
                depth + 1,
                seen,
            )
            return result.logits[:, 0], result.window

        draft, window = draft_chain(
            step,
            model.make_window(context.length.shape[0], slots),
            context,
            noise,
            sampled=draft_sample_method == "probabilistic",
            p_min=draft_p_min,
            draft_ids=params.get("draft_ids") if isinstance(params, dict) else None,
        )
        return draft, State(state.cache, window)

    def observe(params: Any, state: State, context: Context, accepted: Accepted) -> State:
        del params
        # Slot 0 holds nothing where the row had one token only.
        skipped = (context.length - accepted.count == 1).astype(jnp.int32)
        slots = jnp.arange(accepted.tokens.shape[1])[None, :] + skipped[:, None]
        count = jnp.maximum(accepted.count - skipped, 0)
        return State(commit(state.cache, state.window, slots, count), state.window)

    return Drafter(
        "draft_model",
        init,
        propose,
        observe,
        num_speculative_tokens=4,
        params=params,
        sampled=draft_sample_method == "probabilistic",
        follows_own_drafts=True,
    )


def _slots(context: Context) -> int:
    """x_{n-2}, the root, and every draft token that is fed again; the first two in any case."""
    return max(context.num_tokens, 1) + 1
