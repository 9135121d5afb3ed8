"""A drafter that is the target with attention to few of the committed keys.

Its keys are copied from the target's cache in each round (MagicDec: Chen et al. 2408.11049): those
of the first tokens and the latest ones (StreamingLLM: Xiao et al. 2309.17453), or those that the
latest tokens attend to most (SnapKV: Li et al. 2404.14469), by the queries of their verification
(Vegas: 2602.07223).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Int

from specjax.core.cache import KVCache
from specjax.core.drafter import Context, LoadedDrafter
from specjax.core.language_model import LanguageModel
from specjax.errors import InputError
from specjax.fields import Instance, Number, Whole
from specjax.loading.model import Model
from specjax.loading.quantize import in_stacked_form, quantized_model
from specjax.methods.heads.own_cache import SINKS
from specjax.methods.method import Method
from specjax.methods.self_drafter import SelfDrafter
from specjax.models.decoder import Decoder
from specjax.models.features import QUERIES
from specjax.models.layers.attention import CACHE_BLOCK, group_queries, most_attended

OBSERVED = 32
"""The latest tokens whose attention chooses earlier ones; they are kept themselves."""
FIRST = 8
"""The tokens after a prompt whose attention makes a row's first choice."""
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
    `keep="recent"` these are the first `sinks` tokens and the latest others. With "scores", each
    head keeps the latest 32 tokens, and those before them to which these attended most when they
    were verified; tokens committed since are added, and after `refresh` of them keys are chosen
    anew. For the first 8 tokens after a prompt it keeps the same as "recent".
    Keys keep their positions. Only verification writes to the target's cache. With `weights`,
    `model` has the layers as functions of quantized parameters. Raises InputError for invalid
    options, and for a model with sliding windows, in which a key is known by its place in the
    cache.
    """

    name: ClassVar[str] = "sparse_kv"
    model: Annotated[Decoder, _DECODER] = field(kw_only=False)
    budget: Annotated[int, Whole(1, 1 << 20)] = 512
    """How many committed keys a draft attends to."""
    ratio: Annotated[float, RATIO] = 0.0
    """The share of a row's keys that it attends to if that is more than the budget."""
    keep: Literal["recent", "scores"] = "recent"
    """Which keys: those of the first and the latest tokens, or those with the most attention."""
    sinks: Annotated[int, SINKS] = 4
    """How many first tokens are among them."""
    refresh: Annotated[int, Whole(1, 1 << 20)] = 64
    """After how many tokens keys are chosen anew by their scores."""
    weights: Literal["int8", "int4"] | None = None
    """The form of a copy of the target that drafts; by default the target itself does."""

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
    def of_target(cls, target: Model, **options: Any) -> LoadedDrafter:
        """Return the drafter for a target; with `weights`, with a quantized copy of its parameters.

        Raises InputError for a target with sliding windows.
        """
        drafter, params = cls(target.architecture, **options), ()
        if drafter.weights is not None:
            stacked, remedy = in_stacked_form(target), "the target's weights, without this option"
            copy = quantized_model(stacked, drafter.weights, field="drafter.weights", remedy=remedy)
            drafter, params = cls(copy.architecture, **options), copy.params
        return LoadedDrafter(drafter, params)

    def layers(self, params: Any, context: Context) -> tuple[LanguageModel, Any, int | None]:
        """Return the target or its quantized copy, and its parameters; all layers run."""
        return self.model, context.params if self.weights is None else params, None

    @property
    def features(self) -> tuple[str, ...]:
        """The target's queries, if keys are chosen by them; they are read when rows are due."""
        return (QUERIES,) if self.keep == "scores" else ()

    def init(self, params: Any, batch: int, capacity: int) -> Chosen | tuple[()]:
        """Return the state of rows whose keys have not been chosen; recent keys need none."""
        del params
        if self.keep == "recent" or capacity <= self.budget:
            return ()
        layers = len(self.model.config.layers_with("attention"))
        heads = self.model.cached_heads
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
            slots = self._latest(_slots(most), cache.length)
            return cache.gathered(slots, jnp.minimum(cache.length, self._kept(cache.length))), state
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

    def _latest(self, index: Int[Array, "#B T"], length: Int[Array, "B"]) -> Int[Array, "B T"]:
        """Return the numbers, in their row, of the `index`-th of a row's first and latest keys."""
        skipped = jnp.maximum(length - self._kept(length), 0)[:, None]
        return jnp.where(index < self.sinks, index, index + skipped)

    def _choose(self, state: Chosen, context: Context) -> Chosen:
        """Return the state after choosing keys in rows that are due, as their lengths tell."""
        length, (_, layers, heads, size) = context.length, state.slots.shape
        due = (state.length > 0) & (length >= state.length + self.refresh) & (context.limit > 0)
        order = jnp.argsort(~due)
        # No queries are known of a prompt: until some are, it is as if the latest had been chosen.
        begun = length - max(self.refresh - FIRST, 0)
        begins = (state.length == 0) & (begun >= self.budget + 2) & (context.limit > 0)
        latest = self._latest(jnp.arange(size)[None, :], begun)
        slots = jnp.where(_of_rows(begins), latest[:, None, None], state.slots)

        def most(rows: Int[Array, "A"], cache: KVCache) -> Int[Array, "A L G K"]:
            queries = context.features[QUERIES]
            count = min(OBSERVED, queries.shape[1])
            positions = (length[rows] - 1)[:, None] - jnp.arange(1, count + 1)[None, :]
            queries = queries[rows[:, None], positions % queries.shape[1]]
            queries = queries.reshape(*positions.shape, layers, -1, self.model.config.head_dim)
            earlier = cache.replace(length=length[rows] - OBSERVED)

            def of_layer(layer: Int[Array, ""]) -> Int[Array, "A G K"]:
                grouped = group_queries(queries[:, :, layer], heads, 1.0)
                return most_attended(grouped, earlier, layer, size)

            return jnp.moveaxis(lax.map(of_layer, jnp.arange(layers)), 0, 1)

        def choose_all(slots: Int[Array, "B L G K"]) -> Int[Array, "B L G K"]:
            return jnp.where(_of_rows(due), most(jnp.arange(len(due)), context.cache), slots)

        def choose_row(
            number: Int[Array, ""], slots: Int[Array, "B L G K"]
        ) -> Int[Array, "B L G K"]:
            row = order[number][None]
            return slots.at[row].set(most(row, context.cache.lend(row, context.cache.length[row])))

        if jax.sharding.get_abstract_mesh().empty:
            slots = lax.fori_loop(0, due.sum(), choose_row, slots)
        else:  # the rows of a mesh are on several devices
            slots = lax.cond(due.any(), choose_all, lambda slots: slots, slots)
        chosen = jnp.where(due, length, jnp.where(begins, begun, state.length))
        return Chosen(slots, chosen)


def _of_rows(rows: Bool[Array, "B"]) -> Bool[Array, "B 1 1 1"]:
    """Return a mask of rows with axes for layers, heads and keys."""
    return rows[:, None, None, None]


def _slots(count: int) -> Int[Array, "1 T"]:
    """Return the slots of a cache for `count` tokens, which attention reads in whole blocks."""
    return jnp.arange(-(-count // CACHE_BLOCK) * CACHE_BLOCK)[None, :]


SPARSE_KV = Method(
    name=SparseKV.name,
    paper="2408.11049",
    drafter=SparseKV,
    of_target=SparseKV.of_target,
    in_all=False,
)
