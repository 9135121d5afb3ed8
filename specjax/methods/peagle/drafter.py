"""The drafter of P-EAGLE heads: one pass reads the accepted tokens and predicts all draft tokens.

Its state is that of an EAGLE-3 drafter, with an output per depth: `observe` runs the new pairs and,
after each row's last one, the masks, whose keys are not committed. `propose` computes logits and
draws: tokens of one depth have one distribution, whatever was drafted before them, which is
the rule's q.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from specjax.core.cache import commit
from specjax.core.causal_mask import causal
from specjax.core.drafter import Accepted, Context, Noise
from specjax.core.growth.level import Level
from specjax.core.growth.tree_options import over_marginals
from specjax.distributed.sharding import constrain_rows
from specjax.methods.eagle.drafter import EagleDrafter
from specjax.methods.heads.examined import TrueText, Variation, within
from specjax.methods.heads.pair_drafter import PairState, zeros_after
from specjax.methods.peagle.head import PEagle
from specjax.methods.peagle.rows import run_depths
from specjax.trees import Draft


@dataclass(frozen=True, kw_only=True)
class PEagleDrafter(EagleDrafter):
    """A drafter with a P-EAGLE head.

    Options are those of `OwnCacheDrafter`. A shorter `num_speculative_tokens` runs fewer masks; it
    should be no longer than the depths of training. The default `topk` of a dynamic tree is
    `num_nodes`, as for all drafters whose levels are known at once. Raises InputError for invalid
    options.
    """

    head: PEagle = field(kw_only=False)
    head_class = PEagle

    def __post_init__(self) -> None:
        object.__setattr__(self, "tree", over_marginals(self.tree))
        super().__post_init__()

    @property
    def mask_token_id(self) -> int:
        """The token whose embedding stands for tokens to be drafted."""
        return self.head.config.mask_token_id

    @property
    def depths(self) -> int:
        """The number of depths that a pass predicts (K), at least 1."""
        return max(self.num_speculative_tokens, 1)

    def init(self, params: Any, batch: int, capacity: int) -> PairState:
        """Return the state of rows without pairs, with the outputs of K depths."""
        state = super().init(params, batch, capacity)
        return state.replace(outputs=jnp.repeat(state.outputs, self.depths, axis=1))

    def propose(
        self, params: Any, state: PairState, context: Context, noise: Noise
    ) -> tuple[Draft, PairState]:
        """Draft a chain or a tree from the outputs of all depths."""
        logits = self.head.logits(params, state.outputs)

        def step(level: Level, carry: tuple[()]) -> tuple[Float[Array, "B 1 Vd"], tuple[()]]:
            return lax.dynamic_slice_in_dim(logits, level.depth, 1, axis=1), carry

        # A row of one token has no pair to draft from.
        context = context.replace(limit=jnp.where(context.length > 1, context.limit, 0))
        ids = params.get("draft_ids")
        draft, _ = self.draft(logits[:, :1], step, (), context, noise, draft_ids=ids)
        return draft, state

    def observe(
        self, params: Any, state: PairState, context: Context, accepted: Accepted
    ) -> PairState:
        """Run each row's `count` new pairs and the masks after them; commit the keys of pairs."""
        del context
        (cache,), head = state.caches, self.head
        (batch, pairs), count = accepted.tokens.shape, accepted.count[:, None]
        slots = pairs + self.depths - 1
        step, mask_tokens, mask_hidden = (
            jnp.arange(slots),
            *head.masks(params, batch, slots - pairs),
        )
        # Masks follow a row's last pair, although their slots come after those of all pairs. A slot
        # without a pair attends to itself, since an empty attention would give NaN.
        after = jnp.where((step < pairs)[None], step[None], (step - pairs)[None] + count)
        exists = (step[None] < count) | (step >= pairs)[None]
        seen = causal(step, slots) & exists[:, None] | jnp.eye(slots, dtype=bool)[None]
        last = jnp.clip(count - 1, 0, pairs - 1)
        output, window = head.extend(
            params,
            jnp.concatenate([accepted.tokens, mask_tokens], axis=1),
            jnp.concatenate([head.fuse(params, accepted.features), mask_hidden], axis=1),
            cache.length[:, None] + after,
            cache,
            head.make_window(batch, slots),
            0,
            seen,
            jnp.concatenate([last, jnp.tile(step[None, pairs:], (batch, 1))], axis=1),
        )
        committed = jnp.broadcast_to(step[:pairs], (batch, pairs))
        cache = commit(cache, window, committed, accepted.count + zeros_after(output))
        outputs = jnp.where(count[:, :, None] > 0, output, state.outputs)
        return PairState((cache,), constrain_rows(outputs))

    def teacher_forced(self, params: Any, text: TrueText) -> list[Float[Array, "A Vd"]]:
        """Return the logits of each depth, which reads true pairs only."""
        tokens, features, window, labels = text
        width = tokens.shape[0]
        outputs = run_depths(
            self.head,
            params,
            tokens[None],
            features,
            jnp.arange(width)[None],
            within(window, width)[None],
            (labels - 2)[None],
            self.depths,
        )
        return [self.head.logits(params, outputs[depth])[0] for depth in range(self.depths)]

    def variations(self) -> Iterator[Variation]:
        """Yield drafters with another norm of EAGLE-3 that P-EAGLE has too."""
        yield from (one for one in super().variations() if "norm_output" not in one.remedy)
