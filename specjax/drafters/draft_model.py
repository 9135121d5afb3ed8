"""A separate, smaller language model drafts (Leviathan et al. 2211.17192; Chen et al. 2302.01318).

Its cache always holds x_0 .. x_{n-3}, and a round's first window is [x_{n-2}, x_{n-1}]: full
acceptance, where the last draft token was never fed, leaves no hole, and no row is ragged. The
window remembers the tokens it was fed: what equals the committed tokens moves into the cache, and
what another drafter drafted, or a prompt brought, is read.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Float, Int

from specjax.cache import KVCache, Window, commit
from specjax.distributed.sharding import constrain
from specjax.drafters.autoregressive import ChainDrafter
from specjax.drafters.base import Accepted, Context, LoadedDrafter, Noise
from specjax.drafters.trained import check_tokenizers, load_head
from specjax.files.paths import user_path
from specjax.loading.heads.find_head import holds_head
from specjax.loading.heads.head import Head
from specjax.loading.load import load_model
from specjax.loading.model import Model
from specjax.models.decoder import Decoder
from specjax.models.heads.draft_decoder import ReducedDecoder
from specjax.models.interface import LanguageModel
from specjax.models.masks import causal
from specjax.trees import Draft

_NOTHING = -1
"""The token of a slot of the window that holds none."""


@struct.dataclass
class State:
    """Committed keys, and the window of the latest round: its keys, and the tokens it was fed.

    Slot s of the window holds the token at position `cache.length + s`, except in a row whose first
    slot is unused (`fed` -1 there): a row of one token has no x_{n-2}.
    """

    cache: KVCache
    window: Window
    fed: Int[Array, "B W"]


@dataclass(frozen=True, kw_only=True)
class DraftModel(ChainDrafter):
    """A drafter that decodes with a model of its own, which must share the target's tokenizer.

    `probabilistic` draws each token from the model's distribution under the row's own warp, which
    the rules then know exactly; `greedy` takes the likeliest. Where the model gives logits of a
    part of the vocabulary, "draft_ids" among its parameters say which. A row stops drafting where
    the likeliest token has a probability below `draft_p_min`. Raises InputError for bad options.
    """

    model: LanguageModel = field(kw_only=False)

    @classmethod
    def load(cls, name: str, target: Model, path: Any = None, **options: Any) -> LoadedDrafter:
        """A head that was distilled, or whatever `load_model` takes, or a loaded model.

        Raises InputError as their readers do, and for a model with another tokenizer.
        """
        if path is None or (
            not isinstance(path, Model) and holds_head(user_path("drafter.path", path))
        ):
            return cls.of_head(*load_head(name, path, target), target, **options)
        if not isinstance(path, Model):
            path = load_model(path, mesh=target.mesh, field="drafter.path")
        check_tokenizers(target, path)
        return LoadedDrafter(cls(path.architecture, **options), path.params)

    @classmethod
    def of_head(cls, head: Head, params: Any, target: Model, **options: Any) -> LoadedDrafter:
        """The drafter of a distilled head and its complete parameters."""
        form = replace(target.form, scan_layers=True, cache_attention="blocks")
        decoder = Decoder(head.config.decoder, target.dtype, form=form)
        return LoadedDrafter(cls(ReducedDecoder(decoder), **options), params)

    @property
    def name(self) -> str:
        """Its registered name."""
        return "draft_model"

    @property
    def _slots(self) -> int:
        """x_{n-2}, the root, and every draft token that is fed again; the first two in any case."""
        return max(self.num_speculative_tokens, 1) + 1

    def init(self, params: Any, batch: int, capacity: int) -> State:
        """Nothing committed, nothing fed."""
        del params
        return State(
            self.model.make_cache(batch, capacity),
            self.model.make_window(batch, self._slots),
            constrain(jnp.full((batch, self._slots), _NOTHING, jnp.int32), "batch", None),
        )

    def propose(
        self, params: Any, state: State, context: Context, noise: Noise
    ) -> tuple[Draft, State]:
        """A chain from the model, whose window also holds what was fed beyond it."""
        slots, last = self._slots, context.length - 1
        # A row of one token has no x_{n-2}: its slot 0 stays out of sight.
        held = (jnp.arange(slots) > 0)[None, None, :] | (last > 0)[:, None, None]

        def first(token: Int[Array, "B"], window: Window) -> tuple[Float[Array, "B V"], Window]:
            pair = jnp.stack([context.token_at(last - 1), token], axis=1)
            positions = jnp.stack([jnp.maximum(last - 1, 0), last], axis=1)
            # It sees itself all the same: a token that sees nothing is not a number.
            itself = jnp.eye(2, slots, dtype=bool)[None]
            seen = causal(jnp.arange(2), slots) & (held | itself)
            result = self.model.extend(params, pair, positions, state.cache, window, 0, seen)
            return result.logits[:, 1], result.window

        def step(
            depth: Int[Array, ""] | int, token: Int[Array, "B"], carry: tuple
        ) -> tuple[Float[Array, "B V"], tuple]:
            window, fed = carry
            if isinstance(depth, int):
                logits, window = first(token, window)
                return logits, (window, fed)
            seen = causal((depth + 1)[None], slots) & held
            result = self.model.extend(
                params,
                token[:, None],
                (last + depth)[:, None],
                state.cache,
                window,
                depth + 1,
                seen,
            )
            fed = lax.dynamic_update_slice(fed, token[:, None], (0, depth + 1))
            return result.logits[:, 0], (result.window, fed)

        batch = context.length.shape[0]
        pair = [jnp.where(last > 0, context.token_at(last - 1), _NOTHING), context.token_at(last)]
        fed = jnp.full((batch, slots), _NOTHING, jnp.int32).at[:, :2].set(jnp.stack(pair, axis=1))
        draft, (window, fed) = self.draft(
            step,
            (self.model.make_window(batch, slots), fed),
            context,
            noise,
            draft_ids=params.get("draft_ids") if isinstance(params, dict) else None,
        )
        return draft, State(state.cache, window, constrain(fed, "batch", None))

    def observe(self, params: Any, state: State, context: Context, accepted: Accepted) -> State:
        """The cache up to x_{n-3}: from the window where it was fed the same, else read."""
        wanted = jnp.maximum(context.length - 2, 0)
        # Where the first slot is unused, the next one holds the position after the cache's.
        skipped = (state.fed[:, 0] == _NOTHING).astype(jnp.int32)
        slots = jnp.arange(state.fed.shape[1])[None, :] + skipped[:, None]
        fed = jnp.take_along_axis(state.fed, slots, axis=1, mode="fill", fill_value=_NOTHING)
        step = jnp.arange(fed.shape[1])[None, :]
        there = context.tokens_from(state.cache.length, fed.shape[1])
        same = (fed == there) & (step < (wanted - state.cache.length)[:, None])
        count = jnp.cumprod(same, axis=1, dtype=jnp.int32).sum(axis=1)
        cache = commit(state.cache, state.window, slots, count)
        cache = lax.while_loop(
            lambda cache: jnp.any(cache.length < wanted),
            lambda cache: self._read(params, cache, context, wanted, accepted.tokens.shape[1]),
            cache,
        )
        nothing = constrain(jnp.full_like(state.fed, _NOTHING), "batch", None)
        return State(cache, state.window, nothing)

    def _read(
        self, params: Any, cache: KVCache, context: Context, wanted: Int[Array, "B"], chunk: int
    ) -> KVCache:
        """The cache with up to `chunk` more of each row's committed tokens."""
        batch, step = cache.length.shape[0], jnp.arange(chunk)
        result = self.model.extend(
            params,
            context.tokens_from(cache.length, chunk),
            cache.length[:, None] + step[None, :],
            cache,
            self.model.make_window(batch, chunk),
            0,
            causal(step, chunk),
            logits=False,
        )
        count = jnp.clip(wanted - cache.length, 0, chunk)
        return commit(cache, result.window, jnp.broadcast_to(step, (batch, chunk)), count)
