"""Drafters whose heads read pairs of a token and a hidden state, starting from target features.

These are EAGLE (Li et al. 2401.15077 and 2503.01840) and multi-token prediction (DeepSeek-V3,
2412.19437). A head has D modules. Module k has its own cache with the committed pairs at 0 ..
n-2-k, all made of committed tokens and true features of the target: `observe` runs each module once
over newly committed tokens. The last output of module 0, at n-2, gives the distribution of the
first draft token. Draft token i < D comes from module i at the same position; module D-1 continues
from its own outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from specjax.core.cache import KVCache, Window, commit
from specjax.core.causal_mask import causal
from specjax.core.drafter import Accepted, Context, LoadedDrafter, Noise
from specjax.core.growth.level import Level
from specjax.distributed.sharding import constrain_rows
from specjax.loading.model import Model
from specjax.methods.heads.examined import TrueText, within
from specjax.methods.heads.head import Head
from specjax.methods.heads.head_drafter import LayersDrafter
from specjax.models.pair_head import PairHead
from specjax.trees import Draft


@struct.dataclass
class PairState:
    """The state of each module: the cache of its committed keys, and its output at the last pair.

    Outputs are zero in rows without a pair.
    """

    caches: tuple[KVCache, ...]
    outputs: Float[Array, "B M D"]


@struct.dataclass
class Carry:
    """The state carried between draft steps, for each of the T tokens of a level.

    `tokens` are the first tokens on each path from the root, which modules after the first read.
    `outputs` are those of the latest module along the path, in order of position, or those of the
    last module at the tokens themselves. `window` belongs to the last module.
    """

    tokens: Int[Array, "B T M"]
    outputs: Float[Array, "B T _ D"]
    window: Window


@dataclass(frozen=True, kw_only=True)
class PairDrafter(LayersDrafter):
    """A drafter with a head that reads pairs of a token and a hidden state.

    Options are those of `OwnCacheDrafter`. A row of one token has no pair and drafts nothing in its
    first round. Raises InputError for invalid options.
    """

    head: PairHead = field(kw_only=False)
    head_class: ClassVar[type[PairHead]]

    @classmethod
    def of_head(cls, head: Head, params: Any, target: Model, **options: Any) -> LoadedDrafter:
        """Return a drafter for a trained head; `params` come from `complete_parameters`.

        Without a `sliding_window` among the options, it is as long as
        the rows that the head was trained on, if that is known, and no longer than the positions of
        a head that has fewer than the target; with None there is no window.
        """
        options = {"sliding_window": _usual_window(head, target), **options}
        return LoadedDrafter(cls(cls.functions_of(cls.head_class, head, target), **options), params)

    @property
    def following_tokens(self) -> int | None:
        """One, the token of a pair; later modules also read outputs that are not in a cache."""
        return 1 if self.head.config.num_modules == 1 else None

    def init(self, params: Any, batch: int, capacity: int) -> PairState:
        """Return the state of rows without pairs."""
        del params
        modules, width = self.head.config.num_modules, self.head.config.decoder.hidden_size
        caches = tuple(self.head.make_cache(batch, capacity) for _ in range(modules))
        outputs = jnp.zeros((batch, modules, width), self.head.dtype)
        return PairState(caches, constrain_rows(outputs))

    def propose(
        self, params: Any, state: PairState, context: Context, noise: Noise
    ) -> tuple[Draft, PairState]:
        """Draft a chain or a tree: one level per module, then further levels by the last module."""
        modules = [self.head.module(params, index) for index in range(self.head.config.num_modules)]
        steps = _DraftSteps(self, modules, state, context)
        # A row of one token has no pair to draft from.
        limit = jnp.where(context.length > 1, context.limit, 0)
        draft, _ = self.draft(
            self.head.logits(modules[0], state.outputs[:, :1]),
            steps.next_level,
            steps.first_carry(),
            context.replace(limit=limit),
            noise,
            draft_ids=params.get("draft_ids"),
        )
        return draft, state

    def observe(
        self, params: Any, state: PairState, context: Context, accepted: Accepted
    ) -> PairState:
        """Run each module over each row's `count` new pairs, and commit their keys.

        All modules read the same tokens; module k is k positions behind and reads the outputs of
        module k-1, the first of which are in the state. Pairs before position 0 do not exist. Only
        the newest output of the last module is computed.
        """
        del context
        batch, num_pairs = accepted.tokens.shape
        step = jnp.arange(num_pairs)
        first = state.caches[0].length
        newest = jnp.clip(accepted.count - 1, 0, num_pairs - 1)
        hidden = self.head.fuse(params, accepted.features)
        caches, outputs = [], []
        for index, cache in enumerate(state.caches):
            module, is_last = self.head.module(params, index), index + 1 == len(state.caches)
            positions = (first - index)[:, None] + step[None, :]
            output, window = self.extend_pairs(
                module,
                accepted.tokens,
                hidden,
                positions,
                cache,
                self.head.make_window(batch, num_pairs),
                0,
                causal(step, num_pairs),
                positions >= 0 if index else None,
                newest if is_last else None,
            )
            before_first = jnp.maximum(index - first, 0)
            count = jnp.maximum(accepted.count - before_first, 0)
            slots_to_commit = jnp.minimum(before_first[:, None] + step[None, :], num_pairs - 1)
            caches.append(commit(cache, window, slots_to_commit, count + zeros_after(output)))
            kept, latest = state.outputs[:, index], output
            if not is_last:
                latest = jnp.take_along_axis(output, newest[:, None, None], axis=1)
            outputs.append(jnp.where((count > 0)[:, None], latest[:, 0], kept))
            if not is_last:
                before = jnp.concatenate([kept[:, None], output[:, :-1]], axis=1)
                hidden = self.head.next_hidden(module, before)
        return PairState(tuple(caches), constrain_rows(jnp.stack(outputs, axis=1)))

    def extend_pairs(
        self,
        module: dict[str, Any],
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
        """Run a module over T pairs in slots start..start+T, which attend to the visible slots.

        No pair attends to pairs that do not `exist` (those before position 0, in modules after the
        first), but each attends to itself, since an empty attention would give NaN. With `only`,
        each row returns the output of the pair at that index only.
        """
        if exists is not None:
            slots = jnp.arange(visible.shape[2])
            itself = start + jnp.arange(tokens.shape[1])[:, None] == slots[None, :]
            visible = (visible & exists[:, None, :]) | itself[None]
        return self.head.extend(
            module, tokens, hidden, positions, cache, window, start, visible, only
        )

    def teacher_forced(self, params: Any, text: TrueText) -> list[Float[Array, "A Vd"]]:
        """Return the logits of drafts after true tokens, each draft step at all positions at once.

        Each module reads the true pairs up to a position. After the last module, the head reads its
        own output, which attends to those pairs and, at its own position, to the steps before it.
        """
        tokens, features, window, labels = text
        head, width = self.head, tokens.shape[0]
        last, length = head.config.num_modules - 1, self.num_speculative_tokens
        slots = width * max(length - last, 1)
        itself = jnp.eye(width, dtype=bool)
        cache = head.make_cache(1, 64)
        hidden, logits = head.fuse(params, features), []
        for step in range(length):
            further = max(step - last, 0)
            if not further:
                module, kept = head.module(params, step), head.make_window(1, slots)
            seen = jnp.concatenate([within(window, width), *[itself] * further], axis=1)
            output, kept = head.extend(
                module,
                jnp.roll(tokens, -1 - step)[None],
                hidden,
                jnp.arange(width)[None] + further,
                cache,
                kept,
                further * width,
                jnp.pad(seen, ((0, 0), (0, slots - seen.shape[1])))[None],
            )
            logits.append(head.logits(module, output[:, labels - 2])[0])
            hidden = head.next_hidden(module, output)
        return logits


def _usual_window(head: Head, target: Model) -> int | None:
    """Return the longest rows for which a head is known to draft as it does in training, or None.

    That is the row length of its training, or fewer tokens if it has fewer positions than `target`.
    """
    positions = head.config.decoder.max_positions
    known = [head.row_tokens] if head.row_tokens else []
    if positions < target.config.max_positions:
        known.append(positions)
    return min(known, default=None)


@dataclass(frozen=True)
class _DraftSteps:
    """The draft steps of one round, each a function of the tokens of a level.

    Modules 1 to D-1 read the tokens on the path from the root to a token of level D (the number of
    modules), since they need the uncommitted pairs before that token. The window of the last module
    therefore has D-1 slots for the path to each token of its first level, then one slot for each
    token of further levels.
    """

    drafter: PairDrafter
    modules: Sequence[dict[str, Any]]
    state: PairState
    context: Context

    @property
    def last(self) -> int:
        """The index of the last module."""
        return len(self.modules) - 1

    @property
    def path_slots(self) -> int:
        """The number of slots in the last module's window for the paths to its first level."""
        return self.last * self._level_sizes[self.last]

    @property
    def slots_before(self) -> int:
        """The number of window slots of the draft's levels up to the last module's first level."""
        return sum(self._level_sizes[: self.last + 1])

    @property
    def slots(self) -> int:
        """The number of window slots of the last module (W)."""
        return max(self.path_slots + sum(self._level_sizes[self.last + 1 :]), 1)

    @property
    def _level_sizes(self) -> tuple[int, ...]:
        return (*self.drafter.level_sizes, *[0] * len(self.modules))

    def first_carry(self) -> Carry:
        """Return the carry for the first step, which has only the root."""
        batch = self.context.length.shape[0]
        return Carry(
            jnp.zeros((batch, 1, self.last), jnp.int32),
            self.state.outputs[:, None, : max(self.last, 1)],
            self.drafter.head.make_window(batch, self.slots),
        )

    def next_level(self, level: Level, carry: Carry) -> tuple[Float[Array, "B T Vd"], Carry]:
        """Return the logits after the tokens of a level; the `step` of `HeadDrafter.draft`."""
        parents = level.parents[:, :, None]
        carry = carry.replace(
            tokens=jnp.take_along_axis(carry.tokens, parents, axis=1),
            outputs=jnp.take_along_axis(carry.outputs, parents[..., None], axis=1),
        )
        if not self.last:
            return self.repeat_last_module(level, carry)
        # Tokens from depth D on are written to the last entry, which is no longer read.
        start = (0, 0, level.depth - 1)
        tokens = lax.dynamic_update_slice(carry.tokens, level.tokens[:, :, None], start)
        carry = carry.replace(tokens=tokens)
        longest = self.drafter.num_speculative_tokens
        steps: list[Callable[[Carry], tuple[Float[Array, "B T Vd"], Carry]]] = [
            functools.partial(self.run_module, index)
            for index in range(1, min(len(self.modules), longest))
        ]
        if longest > len(self.modules) or not steps:
            steps.append(functools.partial(self.repeat_last_module, level))
        if isinstance(level.depth, int):
            return steps[min(level.depth, len(steps)) - 1](carry)
        return lax.switch(jnp.minimum(level.depth, len(steps)) - 1, steps, carry)

    def run_module(self, index: int, carry: Carry) -> tuple[Float[Array, "B T Vd"], Carry]:
        """Run module `index` over the paths to the tokens of a level.

        Returns the logits after these tokens, and the new carry.
        """
        head, is_last = self.drafter.head, index == self.last
        batch, count, _ = carry.tokens.shape
        width = self.state.outputs.shape[2]
        # The module's committed pairs end `index` positions before those of module 0.
        committed_output = self.state.outputs[:, None, index - 1 : index]
        committed_output = jnp.broadcast_to(committed_output, (batch, count, 1, width))
        before = jnp.concatenate([committed_output, carry.outputs[:, :, : index - 1]], axis=2)
        path, position_on_path = np.divmod(np.arange(count * index), index)
        window = carry.window if is_last else head.make_window(batch, len(position_on_path))
        slots = window.k.shape[3]
        visible = (path[:, None] == path) & (position_on_path[:, None] >= position_on_path)
        output, window = self.drafter.extend_pairs(
            self.modules[index],
            carry.tokens[:, :, :index].reshape(batch, -1),
            head.next_hidden(self.modules[index - 1], before.reshape(batch, -1, width)),
            (self.context.length - 1 - index)[:, None] + position_on_path[None, :],
            self.state.caches[index],
            window,
            0,
            _padded(visible[None], slots),
            self._existing_pairs(index, count, slots),
        )
        output = output.reshape(batch, count, index, width)
        carry = carry.replace(outputs=carry.outputs.at[:, :, :index].set(output))
        if is_last:
            carry = carry.replace(window=window)
        return head.logits(self.modules[index], output[:, :, -1]), carry

    def repeat_last_module(
        self, level: Level, carry: Carry
    ) -> tuple[Float[Array, "B T Vd"], Carry]:
        """Run the last module over further tokens, on its own outputs at their parents.

        Returns the logits after these tokens, and the new carry.
        """
        head, last, module = self.drafter.head, self.last, self.modules[self.last]
        first_level_size = self._level_sizes[last]
        latest = max(last - 1, 0)
        first_level = level.visible[:, :, self.slots_before - first_level_size : self.slots_before]
        further = level.visible[:, :, self.slots_before :]
        visible = jnp.concatenate([jnp.repeat(first_level, last, axis=2), further], axis=2)
        exists = self._existing_pairs(last, first_level_size, self.slots) if last else None
        output, window = self.drafter.extend_pairs(
            module,
            level.tokens,
            head.next_hidden(module, carry.outputs[:, :, latest]),
            level.positions(self.context) - 1 - last,
            self.state.caches[last],
            carry.window,
            self.path_slots + level.start - self.slots_before,
            _padded(visible, self.slots),
            exists,
        )
        carry = carry.replace(outputs=carry.outputs.at[:, :, latest].set(output), window=window)
        return head.logits(module, output), carry

    def _existing_pairs(self, index: int, count: int, slots: int) -> Bool[Array, "B W"]:
        """Return which pairs in the window of module `index` exist: not those before position 0.

        The pairs on the paths to `count` tokens come first in the window; all others exist.
        """
        position_on_path = np.tile(np.arange(index), count)
        exists = (self.context.length - 1 - index)[:, None] + position_on_path[None, :] >= 0
        return jnp.pad(exists, ((0, 0), (0, slots - len(position_on_path))), constant_values=True)


def _padded(visible: Bool[Array | np.ndarray, "#B T _"], slots: int) -> Bool[Array, "#B T W"]:
    """Return `visible` for a window of W = `slots` slots, the added ones being visible to none."""
    return jnp.pad(jnp.asarray(visible), ((0, 0), (0, 0), (0, slots - visible.shape[2])))


def zeros_after(output: Float[Array, "B T D"]) -> Int[Array, "B"]:
    """Return zeros that depend on a module's output, so that XLA computes the output first.

    A layer's keys do not depend on the attention that reads its cache, and XLA would append keys
    that do not depend on that attention to a copy of the cache.
    """
    return jnp.any(output > jnp.inf, axis=(1, 2)).astype(jnp.int32)
