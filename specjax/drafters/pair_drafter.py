"""Heads that read pairs of a token and a hidden state draft from the target's own features.

EAGLE (Li et al. 2401.15077 and 2503.01840) and multi-token prediction (DeepSeek-V3, 2412.19437).
Module k has a cache of its own with the committed pairs at 0 .. n-2-k, all made of committed tokens
and the target's true features: `observe` runs each module once over what was committed. The last
output of module 0, at n-2, is the distribution of the first draft token. Draft token i < D comes
from module i at the same position; module D-1 continues on its own outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from specjax.cache import KVCache, Window, commit
from specjax.distributed.sharding import constrain_rows
from specjax.drafters.base import Accepted, Context, LoadedDrafter, Noise
from specjax.drafters.growth.level import Level
from specjax.drafters.head_drafter import HeadDrafter
from specjax.loading.formats.build_parameters import can_split
from specjax.loading.heads.head import Head
from specjax.loading.model import Model
from specjax.models.heads.pair_head import PairHead
from specjax.models.heads.shared_parameters import share_anew
from specjax.models.masks import causal
from specjax.trees import Draft


@struct.dataclass
class State:
    """Each module's committed keys, and its output at each row's last pair; zeros before one."""

    caches: tuple[KVCache, ...]
    outputs: Float[Array, "B M D"]


@struct.dataclass
class Carry:
    """What a draft step hands to the next, for each of the T tokens of its level.

    `tokens` are the first ones on the way to it from the root, which modules after the first read;
    `outputs` are those of the latest module there, the latest position last, or those of the last
    module at the tokens themselves. `window` is the last module's.
    """

    tokens: Int[Array, "B T M"]
    outputs: Float[Array, "B T _ D"]
    window: Window


@dataclass(frozen=True, kw_only=True)
class PairDrafter(HeadDrafter):
    """A head of pairs as a drafter; its parameters hold "shared" and, for a part of V, "draft_ids".

    Options are those of a draft model. A row of one token has no pair, and drafts nothing in its
    first round. Raises InputError for bad options.
    """

    head: PairHead = field(kw_only=False)
    head_class: ClassVar[type[PairHead]]

    @classmethod
    def of_head(cls, head: Head, params: Any, target: Model, **options: Any) -> LoadedDrafter:
        """The drafter of a trained head and its complete parameters.

        Its caches are split over devices as the target's, where its heads can be, and read in its
        form.
        """
        shards = target.shards if can_split(head.config.decoder, target.shards) else 1
        functions = cls.head_class(
            head.config,
            target.activation_dtype,
            target.multiply,
            shards=shards,
            form=target.form,
        )
        return LoadedDrafter(cls(functions, **options), params)

    @property
    def features(self) -> tuple[str, ...]:
        """The target's features that the first module reads."""
        return self.head.config.taps

    def for_target(self, params: Any, target_params: Any) -> Any:
        """Its own parameters, and the target's new embedding and output projection."""
        return share_anew(params, target_params)

    def init(self, params: Any, batch: int, capacity: int) -> State:
        """No pair yet."""
        del params
        modules, width = self.head.config.num_modules, self.head.config.decoder.hidden_size
        caches = tuple(self.head.make_cache(batch, capacity) for _ in range(modules))
        outputs = jnp.zeros((batch, modules, width), self.head.dtype)
        return State(caches, constrain_rows(outputs))

    def propose(
        self, params: Any, state: State, context: Context, noise: Noise
    ) -> tuple[Draft, State]:
        """A chain or a tree: a level of each module, and further ones of the last module."""
        modules, longest = self.head.config.num_modules, self.num_speculative_tokens
        batch, last = context.length.shape[0], modules - 1
        own = [self.head.module(params, index) for index in range(modules)]
        # The last module's window: the ways to all tokens of its first level, `last` slots each,
        # then one slot for each token of further levels.
        sizes = (*self.level_sizes, *[0] * modules)
        shared, ways = sum(sizes[: last + 1]), last * sizes[last]
        slots = max(ways + sum(sizes[last + 1 :]), 1)

        def exist(index: int, count: int, slots: int) -> Bool[Array, "B W"]:
            """Which of a window's pairs exist; those on the ways to `count` tokens come first."""
            at = np.tile(np.arange(index), count)
            exists = (context.length - 1 - index)[:, None] + at[None, :] >= 0
            return jnp.pad(exists, ((0, 0), (0, slots - len(at))), constant_values=True)

        def next_module(index: int) -> Callable[[Carry], tuple[Float[Array, "B T Vd"], Carry]]:
            """Module `index` over the ways to a level's tokens, up to position n-2."""

            def run(carry: Carry) -> tuple[Float[Array, "B T Vd"], Carry]:
                count, width = carry.tokens.shape[1], state.outputs.shape[2]
                # Its committed pairs end `index` positions earlier, for want of tokens.
                known = state.outputs[:, None, index - 1 : index]
                known = jnp.broadcast_to(known, (batch, count, 1, width))
                before = jnp.concatenate([known, carry.outputs[:, :, : index - 1]], axis=2)
                which, at = np.divmod(np.arange(count * index), index)
                window = carry.window
                if index < last:
                    window = self.head.make_window(batch, len(at))
                seen = (which[:, None] == which) & (at[:, None] >= at)
                output, window = self._extend(
                    own[index],
                    carry.tokens[:, :, :index].reshape(batch, -1),
                    self.head.next_hidden(own[index - 1], before.reshape(batch, -1, width)),
                    (context.length - 1 - index)[:, None] + at[None, :],
                    state.caches[index],
                    window,
                    0,
                    _padded(seen[None], window.k.shape[3]),
                    exist(index, count, window.k.shape[3]),
                )
                output = output.reshape(batch, count, index, width)
                carry = carry.replace(outputs=carry.outputs.at[:, :, :index].set(output))
                if index == last:
                    carry = carry.replace(window=window)
                return self.head.logits(own[index], output[:, :, -1]), carry

            return run

        def recursion(level: Level, carry: Carry) -> tuple[Float[Array, "B T Vd"], Carry]:
            """The last module over further tokens, with its own outputs at their parents."""
            latest = max(last - 1, 0)
            way = level.visible[:, :, shared - sizes[last] : shared]
            seen = [jnp.repeat(way, last, axis=2), level.visible[:, :, shared:]]
            output, window = self._extend(
                own[last],
                level.tokens,
                self.head.next_hidden(own[last], carry.outputs[:, :, latest]),
                level.positions(context) - 1 - last,
                state.caches[last],
                carry.window,
                ways + level.start - shared,
                _padded(jnp.concatenate(seen, axis=2), slots),
                exist(last, sizes[last], slots) if last else None,
            )
            carry = carry.replace(outputs=carry.outputs.at[:, :, latest].set(output), window=window)
            return self.head.logits(own[last], output), carry

        def step(level: Level, carry: Carry) -> tuple[Float[Array, "B T Vd"], Carry]:
            parents = level.parents[:, :, None]
            carry = carry.replace(
                tokens=jnp.take_along_axis(carry.tokens, parents, axis=1),
                outputs=jnp.take_along_axis(carry.outputs, parents[..., None], axis=1),
            )
            if not last:
                return recursion(level, carry)
            # Tokens at and after depth D go into the last entry, which is not read any more.
            start = (0, 0, level.depth - 1)
            tokens = lax.dynamic_update_slice(carry.tokens, level.tokens[:, :, None], start)
            carry = carry.replace(tokens=tokens)
            steps = [next_module(index) for index in range(1, min(modules, longest))]
            if longest > modules or not steps:
                steps.append(lambda carry: recursion(level, carry))
            if isinstance(level.depth, int):
                return steps[min(level.depth, len(steps)) - 1](carry)
            return lax.switch(jnp.minimum(level.depth, len(steps)) - 1, steps, carry)

        # A row of one token has no pair to draft from.
        limit = jnp.where(context.length > 1, context.limit, 0)
        start = Carry(
            jnp.zeros((batch, 1, last), jnp.int32),
            state.outputs[:, None, : max(last, 1)],
            self.head.make_window(batch, slots),
        )
        draft, _ = self.draft(
            self.head.logits(own[0], state.outputs[:, :1]),
            step,
            start,
            context.replace(limit=limit),
            noise,
            draft_ids=params.get("draft_ids"),
        )
        return draft, state

    def observe(self, params: Any, state: State, context: Context, accepted: Accepted) -> State:
        """Each module run over each row's `count` further pairs.

        All read the same tokens; module k stands k positions earlier, and reads the outputs of
        module k-1, the first of them kept from before. Its pairs before position 0 do not exist.
        Of the last module only the newest output is read.
        """
        del context
        batch, slots = accepted.tokens.shape
        step = jnp.arange(slots)
        first = state.caches[0].length
        newest = jnp.clip(accepted.count - 1, 0, slots - 1)
        hidden = self.head.fuse(params, accepted.features)
        caches, outputs = [], []
        for index, cache in enumerate(state.caches):
            own, is_last = self.head.module(params, index), index + 1 == len(state.caches)
            positions = (first - index)[:, None] + step[None, :]
            output, window = self._extend(
                own,
                accepted.tokens,
                hidden,
                positions,
                cache,
                self.head.make_window(batch, slots),
                0,
                causal(step, slots),
                positions >= 0 if index else None,
                newest if is_last else None,
            )
            missing = jnp.maximum(index - first, 0)
            count = jnp.maximum(accepted.count - missing, 0)
            which = jnp.minimum(missing[:, None] + step[None, :], slots - 1)
            caches.append(commit(cache, window, which, count + _zeros_after(output)))
            kept, latest = state.outputs[:, index], output
            if not is_last:
                latest = jnp.take_along_axis(output, newest[:, None, None], axis=1)
            outputs.append(jnp.where((count > 0)[:, None], latest[:, 0], kept))
            if not is_last:
                before = jnp.concatenate([kept[:, None], output[:, :-1]], axis=1)
                hidden = self.head.next_hidden(own, before)
        return State(tuple(caches), constrain_rows(jnp.stack(outputs, axis=1)))

    def _extend(
        self,
        own: dict[str, Any],
        tokens: Int[Array, "B T"],
        hidden: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        cache: KVCache,
        window: Window,
        start: Int[Array, ""] | int,
        visible: Bool[Array, "#B T W"],
        exists: Bool[Array, "B W"] | None,
        only: Int[Array, "B"] | None = None,
    ) -> tuple[Float[Array, "B Q D"], Window]:
        """A module over T pairs in slots start..start+T, which see those that are visible.

        None of them sees what does not `exist`: of modules after the first, pairs before position
        0. They see themselves, since their output must be a number. With `only`, one output for
        each row, of that pair.
        """
        if exists is not None:
            slots = jnp.arange(visible.shape[2])
            itself = start + jnp.arange(tokens.shape[1])[:, None] == slots[None, :]
            visible = (visible & exists[:, None, :]) | itself[None]
        return self.head.extend(own, tokens, hidden, positions, cache, window, start, visible, only)


def _padded(visible: Bool[Array | np.ndarray, "#B T _"], slots: int) -> Bool[Array, "#B T W"]:
    """The same for a window of W = `slots` slots, whose last ones nothing sees."""
    return jnp.pad(jnp.asarray(visible), ((0, 0), (0, 0), (0, slots - visible.shape[2])))


def _zeros_after(output: Float[Array, "B T D"]) -> Int[Array, "B"]:
    """Zeros that are computed from a module's output, whatever numbers it has.

    A layer's keys do not depend on the attention that reads its cache. An append that depends on
    neither would be made to a copy of the cache.
    """
    return jnp.any(output > jnp.inf, axis=(1, 2)).astype(jnp.int32)
