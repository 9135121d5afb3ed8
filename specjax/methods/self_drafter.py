"""The base class of drafters that run the target's layers, or a copy, over the target's cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Float, Int

from specjax.core.cache import KVCache, Window
from specjax.core.drafter import Context, Noise
from specjax.core.growth import chain, static_tree
from specjax.core.growth.autoregressive import ChainDrafter
from specjax.core.growth.level import Level, root_level
from specjax.core.language_model import Extension, LanguageModel
from specjax.trees import Draft, DynamicTree, PartialPass


@dataclass(frozen=True, kw_only=True)
class SelfDrafter(ChainDrafter):
    """A drafter that runs the target's layers, or a copy of them, with the target's cache.

    That cache already has the keys and values of all committed tokens; the drafter adds only a
    window for the round's tokens, which verification resumes from if these are the target's layers.
    """

    def layers(self, params: Any, context: Context) -> tuple[LanguageModel, Any, int | None]:
        """Return a model whose layers fit the target's cache, its parameters, and how many to run.

        The number is None for all layers.
        """
        raise NotImplementedError

    def committed(self, params: Any, state: Any, context: Context) -> tuple[KVCache, Any]:
        """Return the committed keys that drafts attend to, by default all, and the state."""
        del params
        return context.cache, state

    def propose(self, params: Any, state: Any, context: Context, noise: Noise) -> tuple[Draft, Any]:
        """Draft a chain or a tree with the model of `layers`, over the keys of `committed`.

        Where verification resumes from the target's own first layers, these also run over the
        leaves, and the draft has a `PartialPass`. A dynamic tree has none: which of its nodes have
        run is known only when they are chosen.
        """
        model, model_params, num_layers = self.layers(params, context)
        resumes = context.resumes and num_layers is not None and model is context.target
        resumes &= not isinstance(self.shape, DynamicTree)
        slots = self.num_nodes + 1 if resumes else self.window_slots
        cache, state = self.committed(params, state, context)

        def run(level: Level, window: Window, logits: bool = True) -> Extension:
            unused = slots - level.visible.shape[2]
            return model.extend(
                model_params,
                level.tokens,
                level.positions(context),
                cache,
                window,
                level.start,
                jnp.pad(level.visible, ((0, 0), (0, 0), (0, unused))),
                features=("pre_norm",) if resumes else (),
                logits=logits,
                num_layers=num_layers,
            )

        def step(level: Level, kept: _Kept) -> tuple[Float[Array, "B T V"], _Kept]:
            result = run(level, kept.window)
            return result.logits, kept.after(level, result)

        result = run(root_level(context, slots), model.make_window(context.length.shape[0], slots))
        states = result.features.get("pre_norm")
        if states is not None:
            states = jnp.pad(states, ((0, 0), (0, slots - 1), (0, 0)))
        draft, kept = self.draft(result.logits, step, _Kept(result.window, states), context, noise)
        if not resumes:
            return draft, state

        def run_leaves(level: Level, kept: _Kept) -> _Kept:
            return kept.after(level, run(level, kept.window, logits=False))

        if self.shape is None:
            level, missing = chain.last_level(draft, slots)
            if context.full_drafts:
                kept = run_leaves(level, kept)
            else:
                kept = lax.cond(missing, run_leaves, lambda level, kept: kept, level, kept)
        else:
            kept = run_leaves(static_tree.leaf_level(self.shape, draft), kept)
            kept = kept.at_slots(np.argsort(static_tree.run_order(self.shape)))
        return draft.replace(partial=PartialPass(kept.states, kept.window, num_layers)), state


@struct.dataclass
class _Kept:
    """The window of a draft, and the states after the last layer, if verification resumes there."""

    window: Window
    states: Float[Array, "B W D"] | None

    def after(self, level: Level, result: Extension) -> _Kept:
        """Return what is kept after a level."""
        if self.states is None:
            return _Kept(result.window, None)
        new, where = result.features["pre_norm"], (0, level.start, 0)
        return _Kept(result.window, lax.dynamic_update_slice(self.states, new, where))

    def at_slots(self, slots: Int[np.ndarray, "W"]) -> _Kept:
        """Return the slots in another order."""
        return _Kept(self.window.at_slots(slots), self.states[:, slots])
