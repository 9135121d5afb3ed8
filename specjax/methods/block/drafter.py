"""Drafters that write a whole block in one pass: DFlash, DFlash2, DSpark (`models.heads.block`).

The keys and values of the target's features at positions 0 .. n-2 are in a cache of the drafter's
own, which `observe` extends by one product per layer. A round runs one block: the root, at position
n-1, and mask tokens. Without a Markov head or selector each token is drawn from its slot's
distribution, which does not depend on the other drafted tokens; with one, tokens are drawn one
after the other, each from its slot's logits, or some of them, plus a bias by the token before it.
Either way the distribution that a token is drawn from is known, so that sampled drafts, and trees
of them, are verified exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Float, Int

from specjax.core.cache import KVCache, commit
from specjax.core.drafter import Accepted, Context, LoadedDrafter, Noise
from specjax.core.growth.level import Level
from specjax.core.growth.tree_options import over_marginals
from specjax.loading.model import Model
from specjax.methods.block.head import BlockHead
from specjax.methods.block.rows import run_blocks
from specjax.methods.heads.examined import BLOCK, TrueText, Variation
from specjax.methods.heads.head import Head
from specjax.methods.heads.head_drafter import LayersDrafter
from specjax.trees import Draft


@struct.dataclass
class BlockState:
    """The keys and values that all layers make of the target's features at positions 0 .. n-2."""

    cache: KVCache


@dataclass(frozen=True, kw_only=True)
class BlockDrafter(LayersDrafter):
    """A drafter with a head that predicts a block of tokens in one pass.

    Options are those of `OwnCacheDrafter`; by default it drafts the whole block, and a shorter
    draft runs fewer slots. In chains of a head with a confidence head, `draft_p_min` and the limit
    of confidence apply to its estimate instead of the likeliest token's probability. The default
    `topk` of a dynamic tree is 8 or, over marginals, which give every level at once, `num_nodes`:
    that is the best tree of all (DDTree, 2604.12989). Raises InputError for invalid options, and
    for chains and trees that are longer than a block.
    """

    paired_with: ClassVar[str] = "position t"
    taps_field: ClassVar[str] = "target_layer_ids, of outputs, or aux_hidden_state_layer_ids"
    applies_window: ClassVar[bool] = False
    head: BlockHead = field(kw_only=False)

    def __post_init__(self) -> None:
        if not (self.head.config.markov_rank or self.head.config.selector_rank):
            object.__setattr__(self, "tree", over_marginals(self.tree))
        super().__post_init__()

    @classmethod
    def of_head(cls, head: Head, params: Any, target: Model, **options: Any) -> LoadedDrafter:
        """Return a drafter for a trained head; `params` come from `complete_parameters`."""
        if options.get("tree") is None:
            options = {"num_speculative_tokens": head.config.longest_draft, **options}
        return LoadedDrafter(cls(cls.functions_of(BlockHead, head, target), **options), params)

    @property
    def name(self) -> str:
        """The name by which the drafter is made: "dflash" or "dspark"."""
        return self.head.config.kind

    @property
    def longest_path(self) -> int:
        """The number of tokens that a block drafts."""
        return self.head.config.longest_draft

    @property
    def fuses_taps(self) -> bool:
        """True: `fc` reads the target's features, joined."""
        return True

    @property
    def mask_token_id(self) -> int:
        """The token whose embedding stands for tokens to be drafted."""
        return self.head.config.mask_token_id

    @property
    def has_confidence(self) -> bool:
        """Whether the head estimates the probability that a draft token is accepted."""
        return self.head.config.confidence

    @property
    def following_tokens(self) -> int:
        """Zero: an entry of the cache depends on the feature at its position."""
        return 0

    def init(self, params: Any, batch: int, capacity: int) -> BlockState:
        """Return the state of rows without features."""
        del params
        return BlockState(self.head.make_cache(batch, capacity))

    def propose(
        self, params: Any, state: BlockState, context: Context, noise: Noise
    ) -> tuple[Draft, BlockState]:
        """Run one block per row, and draft a chain or a tree from its logits."""
        head, config = self.head, self.head.config
        slots = config.num_slots(max(self.num_speculative_tokens, 1))
        root = context.token_at(context.length - 1)[:, None]
        masks = jnp.full((root.shape[0], slots - 1), config.mask_token_id, root.dtype)
        states = head.extend(
            params,
            jnp.concatenate([root, masks], axis=1),
            (context.length - 1)[:, None] + jnp.arange(slots)[None, :],
            state.cache,
        )
        states = states if config.sample_from_anchor else states[:, 1:]
        every = head.logits(params, states)
        candidates = head.candidates(every)

        def logits_after(
            tokens: Int[Array, "B T"], depth: Int[Array, ""] | int
        ) -> Float[Array, "B #T Vd"]:
            logits, chosen, state = jax.tree.map(
                lambda of_slots: lax.dynamic_slice_in_dim(of_slots, depth, 1, axis=1),
                (every, candidates, states),
            )
            return head.logits_after(params, logits, chosen, state, tokens)

        def step(level: Level, carry: tuple[()]) -> tuple[Float[Array, "B #T Vd"], tuple[()]]:
            return logits_after(level.tokens, level.depth), carry

        def confidence(depth: Int[Array, ""] | int, token: Int[Array, "B"]) -> Float[Array, "B"]:
            embedded = head.embed_previous(params, token[:, None])
            state = lax.dynamic_slice_in_dim(states, depth, 1, axis=1)
            return jax.nn.sigmoid(head.confidence_logit(params, state, embedded)[:, 0])

        draft, _ = self.draft(
            logits_after(root, 0),
            step,
            (),
            context,
            noise,
            draft_ids=params.get("draft_ids"),
            confidence=confidence if config.confidence else None,
        )
        return draft, state

    def observe(
        self, params: Any, state: BlockState, context: Context, accepted: Accepted
    ) -> BlockState:
        """Return the state with the keys and values of the features in `accepted` in the cache.

        These are the features of the `count` positions before each row's last token.
        """
        del context
        step = jnp.arange(accepted.tokens.shape[1])
        positions = state.cache.length[:, None] + step[None, :]
        fused = self.head.fuse(params, accepted.features)
        window = self.head.context(params, fused, positions)
        slots = jnp.broadcast_to(step, positions.shape)
        return BlockState(commit(state.cache, window, slots, accepted.count))

    def teacher_forced(self, params: Any, text: TrueText) -> list[Float[Array, "A Vd"]]:
        """Return the logits of each draft token, given the true token before.

        A block reads the features of the latest `window` positions before its root.
        """
        logits = []
        for state, before in self._forced_states(params, text):
            unary = self.head.logits(params, state)
            candidates = self.head.candidates(unary)
            logits.append(self.head.logits_after(params, unary, candidates, state, before)[0])
        return logits

    def teacher_forced_confidence(self, params: Any, text: TrueText) -> Float[Array, "A K"]:
        """Return the logits of estimated acceptance, of each draft token after the true one."""
        logits = [
            self.head.confidence_logit(params, state, self.head.embed_previous(params, before))[0]
            for state, before in self._forced_states(params, text)
        ]
        return jnp.stack(logits, axis=-1)

    def _forced_states(
        self, params: Any, text: TrueText
    ) -> list[tuple[Float[Array, "1 A D"], Int[Array, "1 A"]]]:
        """Return the state of each draft token of blocks before `labels`, and the token before."""
        tokens, features, window, labels = text
        positions, roots = jnp.arange(tokens.shape[0]), labels - 1
        ago = roots[:, None] - positions[None, :]
        drafts = self.num_speculative_tokens
        states = run_blocks(
            self.head,
            params,
            features,
            positions[None],
            tokens[roots][None],
            roots[None],
            ((ago > 0) & (ago <= window))[None],
            drafts,
        )
        before = [jnp.minimum(roots + draft, tokens.shape[0] - 1) for draft in range(drafts)]
        return [(states[:, :, draft], tokens[before[draft]][None]) for draft in range(drafts)]

    def variations(self) -> Iterator[Variation]:
        """Yield drafters with another block size, other attention in it, or other predictions."""
        config, length = self.head.config, self.num_speculative_tokens
        sizes = [length >> power for power in range(1, length.bit_length())]
        if length < config.longest_draft:
            sizes.append(config.longest_draft)
        # A causal block's tokens do not depend on later slots.
        for size in () if config.causal else sizes:
            remedy = f"num_speculative_tokens={size}"
            if size < length:
                remedy += f", or block_size={config.num_slots(size)} in the head's config"
            yield Variation(
                BLOCK,
                f"blocks of {size} drafted token(s) in place of {length}",
                remedy,
                replace(self, num_speculative_tokens=size),
            )
        if length > 1:
            yield self.with_setting(BLOCK, "causal", not config.causal)
        anchored = not config.sample_from_anchor
        size = config.longest_draft + 1 - anchored
        yield self.with_setting(BLOCK, "sample_from_anchor", anchored, block_size=size)
