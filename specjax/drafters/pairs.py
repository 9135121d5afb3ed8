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
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from specjax.cache import KVCache, Window, commit
from specjax.distributed.sharding import constrain_rows
from specjax.drafters.base import Accepted, Context, LoadedDrafter, Noise
from specjax.drafters.growth.level import Level
from specjax.drafters.trained import HeadDrafter
from specjax.errors import InputError
from specjax.loading.formats.build_parameters import can_split
from specjax.loading.heads.complete_parameters import complete_parameters
from specjax.loading.heads.find_head import shipped_head
from specjax.loading.heads.head import Head, own_modules
from specjax.loading.model import Model
from specjax.models.heads.eagle import Eagle
from specjax.models.heads.mtp import Mtp
from specjax.models.heads.pair_head import PairHead
from specjax.models.masks import causal
from specjax.trees import Draft, DynamicTree, RankedTree


@struct.dataclass
class State:
    """Each module's committed keys, and its output at each row's last pair; zeros before one."""

    caches: tuple[KVCache, ...]
    outputs: Float[Array, "B M D"]


@struct.dataclass
class Carry:
    """What a draft step hands to the next: the tokens that modules read, and their outputs.

    `outputs` are those of the latest module, the last of them at the latest position, or of a
    single module those at the latest level; `window` is the last module's.
    """

    tokens: Int[Array, "B M"]
    outputs: Float[Array, "B T D"]
    window: Window


@dataclass(frozen=True, kw_only=True)
class PairDrafter(HeadDrafter):
    """A head of pairs as a drafter; its parameters hold "shared" and, for a part of V, "draft_ids".

    Options are those of a draft model. A row of one token has no pair, and drafts nothing in its
    first round. Raises InputError for bad options, and for a tree of several modules.
    """

    head: PairHead = field(kw_only=False)
    head_class: ClassVar[type[PairHead]]

    def _check_tree(self, tree: RankedTree | DynamicTree) -> None:
        """As its base, and that there is one module."""
        super()._check_tree(tree)
        if (modules := self.head.config.num_modules) > 1:
            raise InputError(
                f"tree: {self.name} has {modules} modules here, which draft chains; use "
                "tree.kind=chain, or a head of one module"
            )

    @classmethod
    def of_head(cls, head: Head, params: Any, target: Model, **options: Any) -> LoadedDrafter:
        """The drafter of a trained head and its complete parameters.

        Its caches are split over devices as the target's, where its heads can be.
        """
        shards = target.shards if can_split(head.config.decoder, target.shards) else 1
        functions = cls.head_class(head.config, target.dtype, shards=shards)
        return LoadedDrafter(cls(functions, **options), params)

    @property
    def features(self) -> tuple[str, ...]:
        """The target's features that the first module reads."""
        return self.head.config.taps

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
        """A chain: a token of each module, and further ones of the last module; or its tree."""
        modules, longest = self.head.config.num_modules, self.num_speculative_tokens
        batch, last = context.length.shape[0], modules - 1
        own = [self.head.module(params, index) for index in range(modules)]
        slots = max(self.window_slots - 1, last, 1)

        def next_module(index: int) -> Callable[[Carry], tuple[Float[Array, "B 1 Vd"], Carry]]:
            """Module `index` over the drafted tokens, up to position n-2."""

            def run(carry: Carry) -> tuple[Float[Array, "B 1 Vd"], Carry]:
                # Its committed pairs end `index` positions earlier, for want of tokens.
                before = jnp.concatenate(
                    [state.outputs[:, index - 1 : index], carry.outputs[:, : index - 1]], axis=1
                )
                window = carry.window if index == last else self.head.make_window(batch, index)
                step = jnp.arange(index)
                output, window = self._extend(
                    index,
                    own[index],
                    carry.tokens[:, :index],
                    self.head.next_hidden(own[index - 1], before),
                    (context.length - 1 - index)[:, None] + step[None, :],
                    state.caches[index],
                    window,
                    0,
                    causal(step, window.k.shape[3]),
                )
                carry = carry.replace(outputs=carry.outputs.at[:, :index].set(output))
                if index == last:
                    carry = carry.replace(window=window)
                return self.head.logits(own[index], output[:, -1:]), carry

            return run

        def recursion(level: Level, carry: Carry) -> tuple[Float[Array, "B T Vd"], Carry]:
            """The last module over further tokens, with its own outputs at their parents."""
            earlier = max(last - 1, 0)
            before = carry.outputs[:, earlier:]
            before = jnp.take_along_axis(before, level.parents[:, :, None], axis=1)
            # The pair of the root is committed, and has no slot.
            seen = level.visible[:, :, 1:]
            output, window = self._extend(
                last,
                own[last],
                level.tokens,
                self.head.next_hidden(own[last], before),
                level.positions(context) - 1 - last,
                state.caches[last],
                carry.window,
                level.start - 1,
                jnp.pad(seen, ((0, 0), (0, 0), (0, slots - seen.shape[2]))),
            )
            outputs = jnp.concatenate([carry.outputs[:, :earlier], output], axis=1)
            carry = carry.replace(outputs=outputs, window=window)
            return self.head.logits(own[last], output), carry

        def step(level: Level, carry: Carry) -> tuple[Float[Array, "B T Vd"], Carry]:
            if not last:
                return recursion(level, carry)
            # Tokens at and after depth D go into the last entry, which is not read any more.
            tokens = lax.dynamic_update_slice(carry.tokens, level.tokens, (0, level.depth - 1))
            steps = [next_module(index) for index in range(1, min(modules, longest))]
            if longest > modules or not steps:
                steps.append(lambda carry: recursion(level, carry))
            return lax.switch(
                jnp.minimum(level.depth, len(steps)) - 1, steps, carry.replace(tokens=tokens)
            )

        # A row of one token has no pair to draft from.
        limit = jnp.where(context.length > 1, context.limit, 0)
        start = Carry(
            jnp.zeros((batch, last), jnp.int32),
            state.outputs[:, : max(last, 1)],
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
        """
        del context
        batch, slots = accepted.tokens.shape
        step = jnp.arange(slots)
        first = state.caches[0].length
        at_last = jnp.clip(accepted.count - 1, 0, slots - 1)[:, None, None]
        hidden = self.head.fuse(params, accepted.features)
        caches, outputs = [], []
        for index, cache in enumerate(state.caches):
            own = self.head.module(params, index)
            output, window = self._extend(
                index,
                own,
                accepted.tokens,
                hidden,
                (first - index)[:, None] + step[None, :],
                cache,
                self.head.make_window(batch, slots),
                0,
                causal(step, slots),
            )
            missing = jnp.maximum(index - first, 0)
            count = jnp.maximum(accepted.count - missing, 0)
            which = jnp.minimum(missing[:, None] + step[None, :], slots - 1)
            caches.append(commit(cache, window, which, count + _zeros_after(output)))
            latest = jnp.take_along_axis(output, at_last, axis=1)[:, 0]
            kept = state.outputs[:, index]
            outputs.append(jnp.where((count > 0)[:, None], latest, kept))
            if index + 1 < len(state.caches):
                before = jnp.concatenate([kept[:, None], output[:, :-1]], axis=1)
                hidden = self.head.next_hidden(own, before)
        return State(tuple(caches), constrain_rows(jnp.stack(outputs, axis=1)))

    def _extend(
        self,
        index: int,
        own: dict[str, Any],
        tokens: Int[Array, "B T"],
        hidden: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        cache: KVCache,
        window: Window,
        start: Int[Array, ""] | int,
        visible: Bool[Array, "#B T W"],
    ) -> tuple[Float[Array, "B T D"], Window]:
        """Module `index` over T pairs in slots start..start+T, which see those that are visible.

        The slots of modules after the first are a chain.
        """
        if index:
            # What stands before position 0 sees only itself: its output must be a number.
            slots = jnp.arange(window.k.shape[3])
            exists = positions[:, :1] - start + slots[None, :] >= 0
            itself = start + jnp.arange(tokens.shape[1])[:, None] == slots[None, :]
            visible = (visible & exists[:, None, :]) | itself[None]
        return self.head.extend(own, tokens, hidden, positions, cache, window, start, visible)


def _zeros_after(output: Float[Array, "B T D"]) -> Int[Array, "B"]:
    """Zeros that are computed from a module's output, whatever numbers it has.

    A layer's keys do not depend on the attention that reads its cache. An append that depends on
    neither would be made to a copy of the cache.
    """
    return jnp.any(output > jnp.inf, axis=(1, 2)).astype(jnp.int32)


@dataclass(frozen=True, kw_only=True)
class EagleDrafter(PairDrafter):
    """An EAGLE head as a drafter."""

    head: Eagle = field(kw_only=False)
    head_class = Eagle

    @property
    def name(self) -> str:
        """Its registered name."""
        return "eagle3" if self.head.config.version == 3 else "eagle"


@dataclass(frozen=True, kw_only=True)
class MtpDrafter(PairDrafter):
    """MTP modules as a drafter: the target's own, or those trained for it as a head.

    By default one token is drafted, as the makers of GLM-4.7 recommend for its one module.
    """

    head: Mtp = field(kw_only=False)
    head_class = Mtp
    usual_length: ClassVar[int] = 1

    @classmethod
    def load(cls, name: str, target: Model, path: Any = None, **options: Any) -> LoadedDrafter:
        """The head at a path; without one the target's own modules, or the head that is shipped.

        Raises InputError where there is none.
        """
        if path is not None:
            return super().load(name, target, path, **options)
        if (head := own_modules(target) or shipped_head("mtp", target)) is None:
            raise InputError(
                f"drafter.name=mtp: {target.name} has no MTP modules, and none come with specjax "
                "for it; give trained ones as drafter.path=, or use another drafter"
            )
        return cls.of_head(head, complete_parameters(head, target), target, **options)

    @property
    def name(self) -> str:
        """Its registered name."""
        return "mtp"
