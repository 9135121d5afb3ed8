"""Drafters that draft together: in each round their drafts are merged into one tree.

SpecInfer ([2305.09781](https://arxiv.org/abs/2305.09781), section 3). Unlike the drafters in
`Turns`, the parts of a `Merged` draft in the same rounds, observe together and share one limit, so
that the decoding loop treats them as a single drafter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

from specjax import trees
from specjax.core.draft_length import DRAFT_TOKENS
from specjax.core.drafter import Accepted, Context, Drafter, LoadedDrafter, Noise, TargetPass
from specjax.core.turn_taking import (
    Turns,
    check_proposal,
    flattened,
    most_following,
    observed,
    observed_pass,
)
from specjax.errors import InputError, shown
from specjax.trees import Draft


@dataclass(frozen=True, kw_only=True)
class Merged(Drafter):
    """A drafter that merges the drafts of its `parts` into one tree.

    Its parameters and states are tuples of theirs. `num_speculative_tokens` is the longest path of
    each part, by default the largest of theirs. The drafter is exact if each part is: the parts
    draw with separate noise, so that the proposals of one are independent of the draws of another,
    and a sampled node is never dropped (`trees.merge_duplicates`).
    """

    parts: tuple[Drafter, ...]
    num_speculative_tokens: Annotated[int, DRAFT_TOKENS] = DRAFT_TOKENS.most

    def __post_init__(self) -> None:
        length = self.num_speculative_tokens
        parts = tuple(
            drafter
            if drafter.num_speculative_tokens <= length
            else replace(drafter, num_speculative_tokens=length)
            for drafter in self.parts
        )
        longest = max(drafter.num_speculative_tokens for drafter in parts)
        object.__setattr__(self, "parts", parts)
        object.__setattr__(self, "num_speculative_tokens", longest)

    @property
    def name(self) -> str:
        """The names of the drafters, joined by |."""
        return "|".join(drafter.name for drafter in self.parts)

    @property
    def num_nodes(self) -> int:
        """The total number of nodes of all parts (N)."""
        return sum(drafter.num_nodes for drafter in self.parts)

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the target's features that any part reads."""
        return tuple(dict.fromkeys(name for drafter in self.parts for name in drafter.features))

    @property
    def pass_features(self) -> tuple[str, ...]:
        """The names of the features that any part reads after each pass of the target."""
        names = (name for drafter in self.parts for name in drafter.pass_features)
        return tuple(dict.fromkeys(names))

    @property
    def sampled(self) -> bool:
        """Whether any part draws its tokens from distributions."""
        return any(drafter.sampled for drafter in self.parts)

    @property
    def max_positions(self) -> int | None:
        """The largest number of positions of any part, or None if a part has no such limit."""
        each = [part.max_positions for part in self.parts if part.num_speculative_tokens]
        return None if None in each else max(each, default=None)

    @property
    def observes(self) -> bool:
        """Whether any part implements `observe`."""
        return any(drafter.observes for drafter in self.parts)

    @property
    def following_tokens(self) -> int | None:
        """The largest number of any part, or None if that of a part is None."""
        return most_following(self.parts)

    @property
    def max_cached_requests(self) -> int:
        """The largest number of outputs that any part keeps."""
        return max(drafter.max_cached_requests for drafter in self.parts)

    def with_outputs(
        self, params: tuple, outputs: Sequence[tuple[Sequence[int], Sequence[int]]]
    ) -> tuple:
        """Return each part's parameters with an engine's latest outputs."""
        return tuple(
            drafter.with_outputs(drafter_params, outputs)
            for drafter, drafter_params in self._each(params)
        )

    def text_digests(self, params: tuple) -> tuple[UInt32[Array | np.ndarray, "2"], ...]:
        """Return the digests of the texts of all parts."""
        return sum(
            (
                drafter.text_digests(drafter_params)
                for drafter, drafter_params in self._each(params)
            ),
            (),
        )

    def with_new_digests(self, params: tuple, before: tuple) -> tuple:
        """Return each part's parameters with their digests."""
        return tuple(
            drafter.with_new_digests(drafter_params, old)
            for (drafter, drafter_params), old in zip(self._each(params), before, strict=True)
        )

    def for_target(self, params: tuple, target_params: dict) -> tuple:
        """Return each part's parameters with the shared ones taken from `target_params`."""
        return tuple(
            drafter.for_target(drafter_params, target_params)
            for drafter, drafter_params in self._each(params)
        )

    def init(self, params: tuple, batch: int, capacity: int) -> tuple:
        """Return each part's state for empty rows."""
        return tuple(
            drafter.init(drafter_params, batch, capacity)
            for drafter, drafter_params in self._each(params)
        )

    def propose(
        self, params: tuple, state: tuple, context: Context, noise: Noise
    ) -> tuple[Draft, tuple]:
        """Return the merged drafts of all parts, and their states."""
        drafts, states = [], []
        for number, drafter in enumerate(self.parts):
            drafter_state = state[number]
            if drafter.num_speculative_tokens:
                proposal = drafter.propose(
                    params[number],
                    drafter_state,
                    context.replace(limit=drafter.longest_paths(context), resumes=False),
                    noise.part(number, branches=drafter.branches),
                )
                draft, drafter_state = check_proposal(drafter, proposal, drafter_state, context)
                drafts.append(draft.replace(drafted_by=jnp.full_like(draft.tokens, number)))
            states.append(drafter_state)
        return trees.merge(*drafts), tuple(states)

    def observe(self, params: tuple, state: tuple, context: Context, accepted: Accepted) -> tuple:
        """Return each part's state after further committed tokens."""
        return tuple(
            observed(drafter, drafter_params, drafter_state, context, accepted)
            for drafter, drafter_params, drafter_state in self._each(params, state)
        )

    def observe_pass(self, params: tuple, state: tuple, target_pass: TargetPass) -> tuple:
        """Return each part's state after a pass of the target."""
        return tuple(
            observed_pass(drafter, drafter_params, drafter_state, target_pass)
            for drafter, drafter_params, drafter_state in self._each(params, state)
        )

    def _each(self, *values: tuple) -> Iterator[tuple]:
        """Yield each part together with its entries of `values`."""
        return zip(self.parts, *values, strict=True)


def merge_drafters(*drafters: LoadedDrafter | Drafter) -> LoadedDrafter:
    """Return a drafter that merges the drafts of several drafters into one tree.

    Raises InputError for drafters that take turns.
    """
    parts, params = flattened(drafters, Merged)
    for part in parts:
        if isinstance(part, Turns):
            raise InputError(
                f"drafter={shown(part.name)}: drafters that take turns cannot be merged with "
                "others yet; merge its parts"
            )
    return LoadedDrafter(Merged(parts=parts), params)
