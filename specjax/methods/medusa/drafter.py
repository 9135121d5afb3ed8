"""Drafters of Medusa heads, which predict all tokens from one feature (Cai et al. 2401.10774).

Head i predicts the token i + 2 positions after the feature f_{n-2}; its distribution does not
depend on the tokens drawn by earlier heads. A path of a draft has one token per head.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Float

from specjax.core.drafter import Accepted, Context, LoadedDrafter, Noise
from specjax.core.growth.level import Level
from specjax.distributed.sharding import constrain_rows
from specjax.loading.model import Model
from specjax.methods.heads.examined import TrueText
from specjax.methods.heads.head import Head
from specjax.methods.heads.head_drafter import HeadDrafter
from specjax.methods.medusa.head import KIND, Medusa
from specjax.trees import Draft


@struct.dataclass
class MedusaState:
    """The feature that the heads read: the target's `final_norm` at each row's position n - 2.

    It is zero in a row of one token.
    """

    feature: Float[Array, "B D"]


@dataclass(frozen=True, kw_only=True)
class MedusaDrafter(HeadDrafter):
    """A drafter with Medusa heads, each of which predicts one later token.

    Its parameters have "shared" and, for a draft vocabulary, "draft_ids".

    Options are those of `ChainDrafter`. It drafts at most one token per head, and none in the first
    round of a row of one token, which has no feature. Raises InputError for invalid options and for
    chains and trees that are longer than the number of heads.
    """

    name: ClassVar[str] = KIND
    head: Medusa = field(kw_only=False)

    @classmethod
    def of_head(cls, head: Head, params: Any, target: Model, **options: Any) -> LoadedDrafter:
        """Return a drafter for trained heads; `params` are the result of `complete_parameters`."""
        if options.get("tree") is None:
            options = {"num_speculative_tokens": head.config.num_heads, **options}
        functions = Medusa(head.config, target.activation_dtype, target.multiply)
        return LoadedDrafter(cls(functions, **options), params)

    @property
    def longest_path(self) -> int:
        """The number of heads, since a path has one token per head."""
        return self.head.config.num_heads

    @property
    def following_tokens(self) -> int:
        """Zero: the state is the feature of one position."""
        return 0

    def init(self, params: Any, batch: int, capacity: int) -> MedusaState:
        """Return the state of rows without a feature."""
        del params, capacity
        empty = jnp.zeros((batch, self.head.config.hidden_size), self.head.dtype)
        return MedusaState(constrain_rows(empty))

    def propose(
        self, params: Any, state: MedusaState, context: Context, noise: Noise
    ) -> tuple[Draft, MedusaState]:
        """Draft a chain of one token per head, or a tree of the heads' best tokens."""
        every = self._logits(params, state.feature)

        def step(level: Level, carry: tuple[()]) -> tuple[Float[Array, "B 1 Vd"], tuple[()]]:
            return lax.dynamic_slice_in_dim(every, level.depth, 1, axis=1), carry

        limit = jnp.where(context.length > 1, context.limit, 0)
        draft, _ = self.draft(
            every[:, :1],
            step,
            (),
            context.replace(limit=limit),
            noise,
            draft_ids=params.get("draft_ids"),
        )
        return draft, state

    def observe(
        self, params: Any, state: MedusaState, context: Context, accepted: Accepted
    ) -> MedusaState:
        """Return the state with the target's feature before each row's last token."""
        del params, context
        features = accepted.features["final_norm"]
        last = jnp.maximum(accepted.count - 1, 0)[:, None, None]
        latest = jnp.take_along_axis(features, last, axis=1)[:, 0]
        return MedusaState(jnp.where((accepted.count > 0)[:, None], latest, state.feature))

    def teacher_forced(self, params: Any, text: TrueText) -> list[Float[Array, "A Vd"]]:
        """Return the logits of each head for the drafts that begin at `labels`."""
        (feature,) = self.features
        states = self.head.states(params, text.features[feature])[:, :, text.labels - 2]
        heads = range(self.num_speculative_tokens)
        return [self.head.logits(params, states[head], head)[0] for head in heads]

    def _logits(self, params: Any, feature: Float[Array, "B D"]) -> Float[Array, "B K Vd"]:
        """Return the logits of the heads in use, by one product if they share a matrix."""
        used = max(self.num_speculative_tokens, 1)
        states = self.head.states(params, feature[:, None])[:used, :, 0]
        if self.head.config.original_lm_head:
            return self.head.logits(params, states.swapaxes(0, 1), 0)
        each = [self.head.logits(params, states[i][:, None], i) for i in range(used)]
        return jnp.concatenate(each, axis=1)
