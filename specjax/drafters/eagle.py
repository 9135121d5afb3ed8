"""An EAGLE head drafts from the target's own features (Li et al. 2401.15077 and 2503.01840).

The pair at position t is (x_{t+1}, f_t). The head's cache holds the pairs at 0 .. n-2, all with the
target's true features: `observe` runs the head once over what a round committed, and its output at
the last pair is the distribution of the first draft token. Later steps read the head's own outputs.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Float, Int

from specjax.cache import KVCache, commit
from specjax.drafters.autoregressive import LeastProbability, SampleMethod, draft_chain
from specjax.drafters.base import Accepted, Context, Drafter, Noise
from specjax.fields import check_arguments
from specjax.models.heads.eagle import Eagle
from specjax.models.masks import causal
from specjax.trees import Draft

_CHUNK = 128


@struct.dataclass
class State:
    """The head's committed keys, and its output at each row's last pair."""

    cache: KVCache
    output: Float[Array, "B D"]


def make(
    head: Eagle,
    params: Any,
    *,
    draft_sample_method: SampleMethod = "probabilistic",
    draft_p_min: LeastProbability = 0.0,
) -> Drafter:
    """A drafter of an EAGLE head; `params` also hold "shared" and, for a part of V, "draft_ids".

    Options are those of a draft model. A row of one token has no pair, and drafts nothing in its
    first round. Raises InputError for bad options.
    """
    check_arguments(
        make, "drafter.", draft_sample_method=draft_sample_method, draft_p_min=draft_p_min
    )

    def advance(
        params: Any,
        state: State,
        tokens: Int[Array, "B T"],
        features: dict[str, Float[Array, "B T Dt"]],
        count: Int[Array, "B"],
    ) -> State:
        """The state after each row's first `count` of T further pairs."""
        batch, slots = tokens.shape
        step = jnp.arange(slots)
        output, window = head.extend(
            params,
            tokens,
            head.fuse(params, features),
            state.cache.length[:, None] + step[None, :],
            state.cache,
            head.make_window(batch, slots),
            0,
            causal(step, slots),
        )
        last = jnp.clip(count - 1, 0, slots - 1)[:, None, None]
        latest = jnp.take_along_axis(output, last, axis=1)[:, 0]
        return State(
            commit(state.cache, window, jnp.broadcast_to(step[None, :], tokens.shape), count),
            jnp.where((count > 0)[:, None], latest, state.output),
        )

    def init(params: Any, context: Context, features: dict) -> State:
        batch, capacity = context.length.shape[0], context.cache.capacity
        pairs = jnp.maximum(context.length - 1, 0)
        # Pair t holds x_{t+1}; room for the last chunk to reach past the buffers.
        tokens = jnp.pad(context.tokens[:, 1:], ((0, 0), (0, _CHUNK + 1)))
        features = {
            name: jnp.pad(value, ((0, 0), (0, _CHUNK), (0, 0))) for name, value in features.items()
        }

        def chunk(carry: tuple[Array, State]) -> tuple[Array, State]:
            first, state = carry
            part = lax.dynamic_slice(tokens, (0, first), (batch, _CHUNK))
            taps = {
                name: lax.dynamic_slice(value, (0, first, 0), (batch, _CHUNK, value.shape[2]))
                for name, value in features.items()
            }
            count = jnp.clip(pairs - first, 0, _CHUNK)
            return first + _CHUNK, advance(params, state, part, taps, count)

        width = head.config.decoder.hidden_size
        state = State(head.make_cache(batch, capacity), jnp.zeros((batch, width), head.dtype))
        most = pairs.max()
        return lax.while_loop(lambda carry: carry[0] < most, chunk, (jnp.int32(0), state))[1]

    def propose(params: Any, state: State, context: Context, noise: Noise) -> tuple[Draft, State]:
        slots = max(context.num_tokens - 1, 1)

        def logits(output: Float[Array, "B D"]) -> Float[Array, "B Vd"]:
            return head.logits(params, output[:, None])[:, 0]

        def step(
            depth: Int[Array, ""] | int, token: Int[Array, "B"], carry: tuple
        ) -> tuple[Float[Array, "B Vd"], tuple]:
            output, window = carry
            if isinstance(depth, int):
                return logits(output), carry
            hidden = head.next_hidden(params, output[:, None])
            output, window = head.extend(
                params,
                token[:, None],
                hidden,
                (context.length - 2 + depth)[:, None],
                state.cache,
                window,
                depth - 1,
                causal((depth - 1)[None], slots),
            )
            return logits(output[:, 0]), (output[:, 0], window)

        # A row of one token has no pair to draft from.
        limit = jnp.where(context.length > 1, context.limit, 0)
        draft, _ = draft_chain(
            step,
            (state.output, head.make_window(context.length.shape[0], slots)),
            context.replace(limit=limit),
            noise,
            sampled=draft_sample_method == "probabilistic",
            p_min=draft_p_min,
            draft_ids=params.get("draft_ids"),
        )
        return draft, state

    def observe(params: Any, state: State, context: Context, accepted: Accepted) -> State:
        del context
        return advance(params, state, accepted.tokens, accepted.features, accepted.count)

    return Drafter(
        "eagle3" if head.config.version == 3 else "eagle",
        init,
        propose,
        observe,
        num_speculative_tokens=4,
        params=params,
        features=head.config.taps,
        sampled=draft_sample_method == "probabilistic",
    )
