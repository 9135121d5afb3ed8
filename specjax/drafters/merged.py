"""Drafters that draft together: in each round their drafts are merged into one tree.

SpecInfer ([2305.09781](https://arxiv.org/abs/2305.09781), section 3). `Merged` is a drafter whose
parts are drafters, and not another kind of `Turns`: the parts draft in the same rounds, so they are
awake together, observe together and share one limit, and the loop has nothing to tell apart.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from specjax import trees
from specjax.drafters.base import (
    DRAFT_TOKENS,
    Accepted,
    Context,
    Drafter,
    LoadedDrafter,
    Noise,
    TargetPass,
)
from specjax.drafters.turns import Turns
from specjax.errors import InputError, shown
from specjax.sampling import drafter_noise
from specjax.trees import Draft


@dataclass(frozen=True, kw_only=True)
class Merged(Drafter):
    """Drafters whose drafts make one tree; parameters and states are tuples like `parts`.

    `num_speculative_tokens` bounds each part's own, and is the largest of them. Exact if each part
    is: they draw from noise of their own, so that what one proposes is independent of what another
    one draws, and a node that was drawn is never dropped (`trees.merge_duplicates`).
    """

    parts: tuple[Drafter, ...]
    num_speculative_tokens: Annotated[int, DRAFT_TOKENS] = DRAFT_TOKENS.most

    def __post_init__(self) -> None:
        most = self.num_speculative_tokens
        parts = tuple(
            part
            if part.num_speculative_tokens <= most
            else replace(part, num_speculative_tokens=most)
            for part in self.parts
        )
        longest = max(part.num_speculative_tokens for part in parts)
        object.__setattr__(self, "parts", parts)
        object.__setattr__(self, "num_speculative_tokens", longest)

    @property
    def name(self) -> str:
        """The drafters' names, joined by |."""
        return "|".join(part.name for part in self.parts)

    @property
    def num_nodes(self) -> int:
        """The nodes of all parts (N)."""
        return sum(part.num_nodes for part in self.parts)

    @property
    def features(self) -> tuple[str, ...]:
        """The target's features that any of them reads."""
        return tuple(dict.fromkeys(name for part in self.parts for name in part.features))

    @property
    def pass_features(self) -> tuple[str, ...]:
        """The target's features that any of them reads of each pass."""
        return tuple(dict.fromkeys(name for part in self.parts for name in part.pass_features))

    @property
    def sampled(self) -> bool:
        """Whether any of them draws its drafts."""
        return any(part.sampled for part in self.parts)

    @property
    def observes(self) -> bool:
        """Whether any of them does."""
        return any(part.observes for part in self.parts)

    def for_target(self, params: tuple, target_params: dict) -> tuple:
        """Those of each part."""
        pairs = zip(self.parts, params, strict=True)
        return tuple(part.for_target(own, target_params) for part, own in pairs)

    def init(self, params: tuple, batch: int, capacity: int) -> tuple:
        """Empty rows."""
        return tuple(
            part.init(own, batch, capacity) for part, own in zip(self.parts, params, strict=True)
        )

    def propose(
        self, params: tuple, state: tuple, context: Context, noise: Noise
    ) -> tuple[Draft, tuple]:
        """The parts' drafts, merged, and their states."""
        drafts, states = [], []
        for number, part in enumerate(self.parts):
            after = state[number]
            if part.num_speculative_tokens:
                draft, after = part.propose(
                    params[number],
                    after,
                    context.replace(limit=context.limit.clip(max=part.num_speculative_tokens)),
                    drafter_noise(noise, number, len(self.parts)) if context.needs_logq else noise,
                )
                drafts.append(draft)
            states.append(after)
        return trees.merge(*drafts), tuple(states)

    def observe(self, params: tuple, state: tuple, context: Context, accepted: Accepted) -> tuple:
        """Each part's state after further committed tokens."""
        return tuple(
            part.observe(own, before, context, accepted)
            for part, own, before in zip(self.parts, params, state, strict=True)
        )

    def observe_pass(self, params: tuple, state: tuple, target_pass: TargetPass) -> tuple:
        """Each part's state after a pass of the target."""
        return tuple(
            part.observe_pass(own, before, target_pass)
            for part, own, before in zip(self.parts, params, state, strict=True)
        )


def merge_drafters(*drafters: LoadedDrafter | Drafter) -> LoadedDrafter:
    """One drafter of several: the drafts of all of them in one tree.

    Raises InputError for drafters that take turns.
    """
    loaded = [one if isinstance(one, LoadedDrafter) else LoadedDrafter(one) for one in drafters]
    parts: tuple[Drafter, ...] = ()
    params: tuple = ()
    for one in loaded:
        if isinstance(one.drafter, Turns):
            raise InputError(
                f"drafter={shown(one.name)}: drafters that take turns cannot be merged with others "
                "yet; merge its parts"
            )
        inside = isinstance(one.drafter, Merged)
        parts += one.drafter.parts if inside else (one.drafter,)
        params += tuple(one.params) if inside else (one.params,)
    return LoadedDrafter(Merged(parts=parts), params)
