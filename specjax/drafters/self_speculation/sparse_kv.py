"""A drafter that is the target with attention to few of the committed keys.

Its keys are copied from the target's cache in each round (MagicDec: Chen et al. 2408.11049): those
of the first tokens and the latest ones (StreamingLLM: Xiao et al. 2309.17453), or those that the
latest tokens attend to most (SnapKV: Li et al. 2404.14469).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Int

from specjax.cache import KVCache
from specjax.drafters.base import Context, LoadedDrafter
from specjax.drafters.own_cache import SINKS
from specjax.drafters.self_speculation.self_drafter import SelfDrafter
from specjax.errors import InputError
from specjax.fields import Instance, Number, Whole
from specjax.loading.model import Model
from specjax.loading.quantize import in_stacked_form, quantized_model
from specjax.models.causal_mask import causal
from specjax.models.decoder import Decoder
from specjax.models.interface import LanguageModel
from specjax.models.layers.attention import CACHE_BLOCK

OBSERVED = 32
"""The latest tokens whose attention chooses earlier ones; they are kept themselves."""
RATIO = Number(0.0, 0.9)
_DECODER = Instance(Decoder, "use the architecture of a target")


@struct.dataclass
class Chosen:
    """The tokens chosen in each layer and head, and the row's length at that time, or 0."""

    slots: Int[Array, "B L G A"]
    length: Int[Array, "B"]


@dataclass(frozen=True, kw_only=True)
class SparseKV(SelfDrafter):
    """A drafter that runs the target over about `budget` committed keys of each row.

    With a `ratio`, these are that share of a row's keys if it is more (Vegas: 2602.07223). With
    `keep="recent"` these are the first `sinks` tokens and the latest others. With "scores",
    each head keeps those to which the latest 32 tokens attend most, and these 32; tokens committed
    since are added, and after `refresh` of them keys are chosen anew by a pass over 32 tokens. Keys
    keep their positions. Only verification writes to the target's cache. With `weights`, `model`
    has the layers as functions of quantized parameters. Raises InputError for invalid options, and
    for a model with sliding windows, in which a key is known by its place in the cache.
    """

    name: ClassVar[str] = "sparse_kv"
    model: Annotated[Decoder, _DECODER] = field(kw_only=False)
    budget: Annotated[int, Whole(1, 1 << 20)] = 512
    ratio: Annotated[float, RATIO] = 0.0
    keep: Literal["recent", "scores"] = "recent"
    sinks: Annotated[int, SINKS] = 4
    refresh: Annotated[int, Whole(1, 1 << 20)] = 64
    weights: Literal["int8", "int4"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        least, what = self.sinks, f"drafter.sinks={self.sinks}"
        if self.keep == "scores":
            least, what = OBSERVED, f"the latest {OBSERVED} tokens, which are kept"
        if self.budget <= least:
            raise InputError(f"drafter.budget={self.budget}: must exceed {what}")
        if any(self.model.config.windowed):
            raise InputError(
                "drafter=sparse_kv: the target has layers with sliding windows; use another drafter"
            )

    @classmethod
    def load(cls, name: str, target: Model, path: Any = None, **options: Any) -> LoadedDrafter:
        """Return the drafter for a target; with `weights`, with a quantized copy of its parameters.

        Raises InputError for a target with sliding windows.
        """
        del name, path
        drafter, params = cls(target.architecture, **options), ()
        if drafter.weights is not None:
            copy = quantized_model(in_stacked_form(target), drafter.weights)
            drafter, params = cls(copy.architecture, **options), copy.params
        return LoadedDrafter(drafter, params)

    def layers(self, params: Any, context: Context) -> tuple[LanguageModel, Any, int | None]:
        """Return the target or its quantized copy, and its parameters; all layers run."""
        return self.model, context.params if self.weights is None else params, None

    def init(self, params: Any, batch: int, capacity: int) -> Chosen | tuple[()]:
        """Return the state of rows whose keys have not been chosen; recent keys need none."""
        del params
        if self.keep == "recent" or capacity <= self.budget:
            return ()
        layers, heads = self.model.config.num_layers, self.model.cached_heads
        shape = (batch, layers, heads, self._most(capacity) - OBSERVED)
        return Chosen(jnp.zeros(shape, jnp.int32), jnp.zeros(batch, jnp.int32))

    def committed(
        self, params: Any, state: Chosen | tuple[()], context: Context
    ) -> tuple[KVCache, Chosen | tuple[()]]:
        """Return copies of the keys that drafts attend to, and the state."""
        del params
        cache = context.cache
        if cache.capacity <= self.budget:
            return cache, state
        most = self._most(cache.capacity)
        if self.keep == "recent":
            index, kept = _slots(most), jnp.minimum(cache.length, self._kept(cache.length))
            skipped = (cache.length - kept)[:, None]
            slots = jnp.where(index < self.sinks, index, index + skipped)
            return cache.gathered(slots, kept), state
        state = self._choose(state, context)
        # Chosen tokens come first, then all that follow those among which they were chosen.
        index = _slots(most + self.refresh)
        count = jnp.where(state.length > 0, self._kept(state.length) - OBSERVED, 0)
        skipped = jnp.where(state.length > 0, state.length - OBSERVED - count, 0)[:, None]
        padding = index.shape[1] - state.slots.shape[-1]
        chosen = jnp.pad(state.slots, ((0, 0), (0, 0), (0, 0), (0, padding)))
        is_chosen = (index < count[:, None])[:, None, None]
        slots = jnp.where(is_chosen, chosen, (index + skipped)[:, None, None])
        # A row that sleeps may have more; it is due when it drafts again.
        length = jnp.minimum(cache.length - skipped[:, 0], slots.shape[-1])
        return cache.gathered(slots, length), state

    def _most(self, capacity: int) -> int:
        """Return the largest number of keys that a row of `capacity` tokens keeps."""
        return max(self.budget, int(np.ceil(np.float32(self.ratio) * np.float32(capacity))))

    def _kept(self, length: Int[Array, "B"]) -> Int[Array, "B"]:
        """Return the number of keys that rows of `length` tokens keep."""
        share = jnp.ceil(self.ratio * length).astype(jnp.int32)
        return jnp.maximum(share, self.budget)

    def _choose(self, state: Chosen, context: Context) -> Chosen:
        """Return the state after choosing keys in rows that are due, as their lengths tell."""
        due = jnp.where(state.length > 0, state.length + self.refresh, self.budget + 2)
        due = (context.length >= due) & (context.limit > 0)
        first = jnp.maximum(context.length - OBSERVED, 0)
        tokens, index = context.tokens_from(first, OBSERVED), jnp.arange(OBSERVED)

        def attended(rows: Int[Array, "A"], cache: KVCache) -> Int[Array, "A L G K"]:
            result = context.target.extend(
                context.params,
                tokens[rows],
                first[rows][:, None] + index[None, :],
                cache.replace(length=jnp.minimum(cache.length, first[rows])),
                context.target.make_window(len(rows), OBSERVED),
                0,
                causal(index, OBSERVED),
                logits=False,
                num_attended=state.slots.shape[-1],
            )
            return jnp.moveaxis(result.features["attended"], 1, 0)

        def choose_all(state: Chosen) -> Chosen:
            slots = attended(jnp.arange(len(due)), context.cache)
            return Chosen(
                jnp.where(due[:, None, None, None], slots, state.slots),
                jnp.where(due, context.length, state.length),
            )

        def choose_row(number: Int[Array, ""], state: Chosen) -> Chosen:
            row = order[number][None]
            slots = attended(row, context.cache.lend(row, context.cache.length[row]))
            return Chosen(
                state.slots.at[row].set(slots), state.length.at[row].set(context.length[row])
            )

        if not jax.sharding.get_abstract_mesh().empty:
            # The rows of a mesh are on several devices.
            return lax.cond(due.any(), choose_all, lambda state: state, state)
        order = jnp.argsort(~due)
        return lax.fori_loop(0, due.sum(), choose_row, state)


def _slots(count: int) -> Int[Array, "1 T"]:
    """Return the slots of a cache for `count` tokens, which attention reads in whole blocks."""
    return jnp.arange(-(-count // CACHE_BLOCK) * CACHE_BLOCK)[None, :]
