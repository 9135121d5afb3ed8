"""Token recycling: looking up the target's candidates from earlier passes (Luo et al. 2408.08696).

Each row has a table of the target's k most likely next tokens after each token of the vocabulary.
An entry dates from the last time that the target read the token in this row: in the prompt, the
output or a rejected draft. A tree is drafted by looking up the tokens after the root, then after
those, and so on. Nothing is trained; the only extra work is computing logits at each position of a
prompt.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from specjax.core.cache import put
from specjax.core.draft_length import DRAFT_TOKENS
from specjax.core.drafter import Context, Drafter, LoadedDrafter, Noise, TargetPass
from specjax.core.growth.tree_options import TREE, USUAL_DEPTH, TreeOptions
from specjax.core.top_tokens import feature_name
from specjax.distributed.sharding import constrain_rows
from specjax.errors import InputError
from specjax.fields import Whole, check_instance, optional
from specjax.loading.model import Model
from specjax.methods.method import Method
from specjax.trees import Draft, DynamicTree, RankedTree

_RATES = (
    (0.34, 0.08, 0.043, 0.023, 0.02, 0.01, 0.01, 0.01),
    (0.47, 0.086, 0.064, 0.029, 0.015, 0.012, 0.011, 0.011),
    (0.55, 0.085, 0.058, 0.032, 0.012, 0.012, 0.011, 0.011),
    (0.58, 0.07, 0.061, 0.035, 0.016, 0.012, 0.012, 0.012),
    (0.62, 0.061, 0.057, 0.04, 0.02, 0.012, 0.012, 0.012),
)
"""Rates [d][r] at which the candidate of rank r at depth d is the target's token, if its parent is.

They were measured on SmolLM2-135M-Instruct, greedy, with tables of committed tokens only.
"""
_UNKNOWN = -1


@dataclass(frozen=True, kw_only=True)
class TokenRecycling(Drafter):
    """A drafter that copies the tokens which the target found likely after the same token before.

    They are in a table per row; the node of rank r after a token is its r-th most likely successor.
    The `tree` (a shape, or a `TreeOptions`, which is converted to one) is static; None means a
    chain of the most likely successors. A smaller `num_speculative_tokens` removes deeper nodes.
    The table has as many candidates (k) as the tree has ranks and takes V * k * 4 bytes per row,
    1.6 MB for 49,152 tokens and k = 8. Nodes are deterministic. Raises InputError for a dynamic
    tree, a tree with fewer levels than requested tokens, and one with more ranks than there are
    tokens.
    """

    name: ClassVar[str] = "token_recycling"
    vocab_size: Annotated[int, Whole(1)] = field(kw_only=False)
    num_speculative_tokens: Annotated[int, optional(DRAFT_TOKENS)] = None  # as __post_init__ says
    tree: Annotated[RankedTree | TreeOptions | None, TREE] = TreeOptions(kind="static")  # noqa: RUF009 - frozen

    def __post_init__(self) -> None:
        check_instance(self, "drafter.")
        tree, length = self.tree, self.num_speculative_tokens
        if isinstance(tree, TreeOptions):
            if tree.acceptance is None:
                tree = replace(tree, acceptance=_RATES)
            tree = tree.shape(length)
            object.__setattr__(self, "tree", tree)
        if isinstance(tree, DynamicTree):
            raise InputError("tree.kind=dynamic: token_recycling has static trees; use static")
        if length is None:
            length = USUAL_DEPTH if tree is None else tree.depth
            object.__setattr__(self, "num_speculative_tokens", length)
        if tree is not None and length > tree.depth:
            raise InputError(
                f"num_speculative_tokens={length}: the tree has {tree.depth} levels; leave it out, "
                "or use a deeper tree"
            )
        if self.num_candidates > self.vocab_size:
            raise InputError(
                f"tree.topk={self.num_candidates}: the vocabulary has {self.vocab_size} tokens; "
                "lower it"
            )

    @classmethod
    def of_target(cls, target: Model, **options: Any) -> LoadedDrafter:
        """Return the drafter for a target's vocabulary."""
        return LoadedDrafter(cls(target.config.vocab_size, **options))

    @property
    def usual_acceptance(self) -> tuple[tuple[float, ...], ...]:
        """The acceptance rates by depth and rank that are assumed without measurements."""
        return _RATES

    @property
    def longest_path(self) -> None:
        """None: any number of consecutive tokens can be drafted."""
        return None

    @property
    def shape(self) -> RankedTree:
        """The tree to draft, limited to a depth of `num_speculative_tokens`."""
        if self.tree is not None:
            return self.tree.limited(self.num_speculative_tokens)
        return RankedTree(
            tuple((0,) * depth for depth in range(1, self.num_speculative_tokens + 1))
        )

    @property
    def num_nodes(self) -> int:
        """The number of nodes of the tree."""
        return self.shape.num_nodes

    @property
    def num_candidates(self) -> int:
        """The number of successors per token in the table (k)."""
        return max(self.shape.most_candidates, 1)

    @property
    def pass_features(self) -> tuple[str, ...]:
        """The name of the target's feature that fills the table."""
        return (feature_name(self.num_candidates),)

    def init(self, params: Any, batch: int, capacity: int) -> Int[Array, "B V k"]:
        """Return tables without successors."""
        del params, capacity
        shape = (batch, self.vocab_size, self.num_candidates)
        return constrain_rows(jnp.full(shape, _UNKNOWN, jnp.int32))

    def propose(
        self, params: Any, state: Int[Array, "B V k"], context: Context, noise: Noise
    ) -> tuple[Draft, Int[Array, "B V k"]]:
        """Look up the tree in the tables, level by level."""
        del params, noise
        tree = self.shape
        depths, parents = tree.topology.depths[1:], tree.topology.row_parents[0]
        ranks = np.array(tree.ranks, np.int32)
        rows = jnp.arange(len(state))[:, None]
        root = context.token_at(context.length - 1)
        tokens = jnp.zeros((len(state), 1 + tree.num_nodes), jnp.int32).at[:, 0].set(root)
        known = jnp.zeros(tokens.shape, bool).at[:, 0].set(True)
        for depth in range(1, tree.depth + 1):
            nodes = np.flatnonzero(depths == depth)
            parents_of_level = parents[nodes]
            successors = state[rows, tokens[:, parents_of_level], ranks[nodes][None, :]]
            is_known = (
                known[:, parents_of_level]
                & (successors != _UNKNOWN)
                & (depth <= context.limit)[:, None]
            )
            known = known.at[:, 1 + nodes].set(is_known)
            tokens = tokens.at[:, 1 + nodes].set(jnp.where(is_known, successors, 0))
        row = jnp.full((len(state), tree.num_nodes), -1, jnp.int32)
        return Draft(tokens[:, 1:], known[:, 1:], row, None, tree.topology), state

    def observe_pass(
        self, params: Any, state: Int[Array, "B V k"], target_pass: TargetPass
    ) -> Int[Array, "B V k"]:
        """Return the tables with the successors of every token of the pass."""
        del params
        tokens, computed = target_pass.tokens, target_pass.computed
        # Write only the last occurrence of each token, since scatters have no order.
        step = jnp.arange(tokens.shape[1])
        same_token = (tokens[:, :, None] == tokens[:, None, :]) & computed[:, None, :]
        last = computed & ~(same_token & (step[None, :] > step[:, None])[None]).any(axis=2)
        where = jnp.where(last, tokens, self.vocab_size)
        return put(state, where, target_pass.features[feature_name(self.num_candidates)])


TOKEN_RECYCLING = Method(
    name=TokenRecycling.name,
    paper="2408.08696",
    drafter=TokenRecycling,
    of_target=TokenRecycling.of_target,
)
