"""An EAGLE head drafts from the target's own features (Li et al. 2401.15077 and 2503.01840).

The pair at position t is (x_{t+1}, f_t). The head's cache holds the pairs at 0 .. n-2, all with the
target's true features: `observe` runs the head once over what was committed, and its output at the
last pair is the distribution of the first draft token. Later steps read the head's own outputs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from specjax.cache import KVCache, commit
from specjax.drafters.base import Accepted, Context, LoadedDrafter, Noise
from specjax.drafters.trained import HeadDrafter
from specjax.loading.heads.head import Head
from specjax.loading.model import Model
from specjax.models.heads.eagle import Eagle
from specjax.models.masks import causal
from specjax.trees import Draft


@struct.dataclass
class State:
    """The head's committed keys, and its output at each row's last pair."""

    cache: KVCache
    output: Float[Array, "B D"]


@dataclass(frozen=True, kw_only=True)
class EagleDrafter(HeadDrafter):
    """An EAGLE head as a drafter; its parameters hold "shared" and, for a part of V, "draft_ids".

    Options are those of a draft model. A row of one token has no pair, and drafts nothing in its
    first round. Raises InputError for bad options.
    """

    head: Eagle = field(kw_only=False)

    @classmethod
    def of_head(cls, head: Head, params: Any, target: Model, **options: Any) -> LoadedDrafter:
        """The drafter of a trained head and its complete parameters."""
        return LoadedDrafter(cls(Eagle(head.config, target.dtype), **options), params)

    @property
    def name(self) -> str:
        """Its registered name."""
        return "eagle3" if self.head.config.version == 3 else "eagle"

    @property
    def features(self) -> tuple[str, ...]:
        """The features that the head fuses."""
        return self.head.config.taps

    def init(self, params: Any, batch: int, capacity: int) -> State:
        """No pair yet."""
        del params
        width = self.head.config.decoder.hidden_size
        output = jnp.zeros((batch, width), self.head.dtype)
        return State(self.head.make_cache(batch, capacity), output)

    def propose(
        self, params: Any, state: State, context: Context, noise: Noise
    ) -> tuple[Draft, State]:
        """A chain, the first token from the stored output and later ones from the head's own."""
        slots = max(self.num_speculative_tokens - 1, 1)

        def logits(output: Float[Array, "B D"]) -> Float[Array, "B Vd"]:
            return self.head.logits(params, output[:, None])[:, 0]

        def step(
            depth: Int[Array, ""] | int, token: Int[Array, "B"], carry: tuple
        ) -> tuple[Float[Array, "B Vd"], tuple]:
            output, window = carry
            if isinstance(depth, int):
                return logits(output), carry
            output, window = self.head.extend(
                params,
                token[:, None],
                self.head.next_hidden(params, output[:, None]),
                (context.length - 2 + depth)[:, None],
                state.cache,
                window,
                depth - 1,
                causal((depth - 1)[None], slots),
            )
            return logits(output[:, 0]), (output[:, 0], window)

        # A row of one token has no pair to draft from.
        limit = jnp.where(context.length > 1, context.limit, 0)
        draft, _ = self.draft(
            step,
            (state.output, self.head.make_window(context.length.shape[0], slots)),
            context.replace(limit=limit),
            noise,
            draft_ids=params.get("draft_ids"),
        )
        return draft, state

    def observe(self, params: Any, state: State, context: Context, accepted: Accepted) -> State:
        """The head run over each row's `count` further pairs."""
        del context
        batch, slots = accepted.tokens.shape
        step = jnp.arange(slots)
        output, window = self.head.extend(
            params,
            accepted.tokens,
            self.head.fuse(params, accepted.features),
            state.cache.length[:, None] + step[None, :],
            state.cache,
            self.head.make_window(batch, slots),
            0,
            causal(step, slots),
        )
        last = jnp.clip(accepted.count - 1, 0, slots - 1)[:, None, None]
        latest = jnp.take_along_axis(output, last, axis=1)[:, 0]
        every = jnp.broadcast_to(step[None, :], accepted.tokens.shape)
        return State(
            commit(state.cache, window, every, accepted.count),
            jnp.where((accepted.count > 0)[:, None], latest, state.output),
        )
