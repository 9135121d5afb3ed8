"""The base class of drafters that draft token by token, or a tree level by level."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from jaxtyping import Array, Float, Int

from specjax.core.draft_length import DRAFT_TOKENS
from specjax.core.drafter import Context, Drafter, Noise
from specjax.core.growth import chain, dynamic_tree, static_tree
from specjax.core.growth.level import Step
from specjax.core.growth.processed_levels import after_processors
from specjax.core.growth.tree_options import TREE, TreeOptions
from specjax.errors import InputError
from specjax.fields import Number, check_instance, optional
from specjax.trees import Draft, DynamicTree, RankedTree

SampleMethod = Literal["probabilistic", "greedy"]
LeastProbability = Annotated[float, Number(0.0, 0.999999, remedy="use a number in [0, 1)")]
"""The probability of the most likely next token below which drafting stops."""


@dataclass(frozen=True, kw_only=True)
class ChainDrafter(Drafter):
    """A drafter of chains, sampled or greedy, or of trees, level by level.

    With a `tree` (a shape, or a `TreeOptions`, which is converted to one) several tokens are
    drafted after each token. The longest path is then the depth of the tree; a smaller
    `num_speculative_tokens` removes deeper nodes. `draft_sample_method` "probabilistic" draws each
    token under the row's own sampling parameters and gives the rule its distribution; "greedy"
    takes the most likely token. By default tokens are drawn, except in a dynamic tree, which cannot
    be sampled. A row stops drafting if the most likely token has a probability below `draft_p_min`.
    Raises InputError for invalid options.
    """

    num_speculative_tokens: Annotated[int, optional(DRAFT_TOKENS)] = None  # as __post_init__ says
    draft_sample_method: SampleMethod | None = None
    """How sampled rows get their draft tokens: drawn, as by default except in a dynamic tree, or
    the likeliest ones.
    """
    draft_p_min: LeastProbability = 0.0
    """A draft ends if its likeliest next token is less likely than this."""
    tree: Annotated[RankedTree | DynamicTree | None, TREE] = None

    usual_length: ClassVar[int] = 4
    """The length of the longest path unless one is specified."""

    def __post_init__(self) -> None:
        check_instance(self, "drafter.")
        tree, length = self.tree, self.num_speculative_tokens
        if isinstance(tree, TreeOptions):
            tree = tree.shape(length, self.longest_path)
            object.__setattr__(self, "tree", tree)
        if length is None:
            length = self.usual_length if tree is None else tree.depth
            object.__setattr__(self, "num_speculative_tokens", length)
        if tree is not None:
            self._check_tree(tree)
        if self.longest_path is not None and length > self.longest_path:
            raise InputError(
                f"num_speculative_tokens={length}: {self.name} drafts at most {self.longest_path} "
                "tokens in a row; lower it"
            )

    def _check_tree(self, tree: RankedTree | DynamicTree) -> None:
        """Raise InputError if other options are incompatible with `tree`."""
        if self.longest_path is not None and tree.depth > self.longest_path:
            raise InputError(
                f"tree.depth={tree.depth}: {self.name} drafts at most {self.longest_path} tokens "
                "in a row; lower it"
            )
        if self.num_speculative_tokens > tree.depth:
            raise InputError(
                f"num_speculative_tokens={self.num_speculative_tokens}: the tree has {tree.depth} "
                "levels; leave it out, or use a deeper tree"
            )
        if isinstance(tree, DynamicTree) and self.draft_sample_method == "probabilistic":
            raise InputError(
                "drafter.draft_sample_method='probabilistic': the nodes of a dynamic tree are "
                "chosen, not drawn; leave it out, or use tree.kind=static"
            )

    @property
    def longest_path(self) -> int | None:
        """The largest number of consecutive tokens that can be drafted, or None if unlimited."""
        return None

    @property
    def shape(self) -> RankedTree | DynamicTree | None:
        """The tree, limited to the longest path; None for a chain."""
        return None if self.tree is None else self.tree.limited(self.num_speculative_tokens)

    @property
    def num_nodes(self) -> int:
        """The number of nodes of the tree, or of tokens of the chain."""
        return self.num_speculative_tokens if self.tree is None else self.shape.num_nodes

    @property
    def branches(self) -> bool:
        """Whether drafts are trees that are not known to be chains."""
        shape = self.shape
        return isinstance(shape, DynamicTree) or (shape is not None and not shape.topology.is_chain)

    @property
    def stops(self) -> bool:
        """Whether drafting is token by token, as it is for chains, and can stop early."""
        return self.tree is None

    @property
    def sampled(self) -> bool:
        """Whether tokens are drawn, as set by `draft_sample_method`."""
        method = self.draft_sample_method
        if method is None:
            return not isinstance(self.tree, DynamicTree)
        return method == "probabilistic"

    @property
    def level_sizes(self) -> tuple[int, ...]:
        """The number of tokens that are run at each depth, from the root (depth 0) on."""
        shape = self.shape
        if shape is None:
            return chain.level_sizes(self.num_speculative_tokens)
        if isinstance(shape, DynamicTree):
            return dynamic_tree.level_sizes(shape)
        return static_tree.level_sizes(shape)

    @property
    def window_slots(self) -> int:
        """The number of window slots that a draft needs: the root and all tokens that are run."""
        return sum(self.level_sizes)

    def draft(
        self,
        logits: Float[Array, "B 1 Vd"],
        step: Step,
        carry: Any,
        context: Context,
        noise: Noise,
        draft_ids: Int[Array, "Vd"] | None = None,
        confidence: chain.Confidence | None = None,
    ) -> tuple[Draft, Any]:
        """Draft a chain or a tree with this drafter's options; return it and the last carry.

        `logits` follow the root; `step` returns the logits after the tokens of each further level,
        for a window of `window_slots` slots with the root in slot 0. `carry` is any state that
        `step` passes on. If the logits cover only part of the vocabulary, `draft_ids` are its token
        ids. `confidence` decides how long a chain grows (`chain.draft_chain`). Where rows have
        processors, tokens are chosen or drawn from the logits after these.
        """
        paths = carry
        if context.processors:
            length = self.num_speculative_tokens
            logits, step, paths = after_processors(length, logits, step, carry, context, draft_ids)
            draft_ids = None
        draft, paths = self._grow(
            (logits, step, paths, context), noise, draft_ids=draft_ids, confidence=confidence
        )
        return draft, paths.carry if context.processors else paths

    def _grow(
        self,
        start: tuple[Float[Array, "B 1 Vd"], Step, Any, Context],
        noise: Noise,
        *,
        draft_ids: Int[Array, "Vd"] | None,
        confidence: chain.Confidence | None,
    ) -> tuple[Draft, Any]:
        shape = self.shape
        options = {"p_min": self.draft_p_min, "draft_ids": draft_ids}
        if isinstance(shape, DynamicTree):
            return dynamic_tree.draft_dynamic_tree(shape, *start, **options)
        options["sampled"] = self.sampled
        if shape is None:
            return chain.draft_chain(
                self.num_speculative_tokens, *start, noise, confidence=confidence, **options
            )
        return static_tree.draft_static_tree(shape, *start, noise, **options)
