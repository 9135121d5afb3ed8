"""What the doctor (`specjax.diagnosis`) asks of a drafter with trained weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from specjax.models.config import DecoderConfig

Fault = Literal["wrong norm", "wrong attention window", "another kind of block"]
NORM: Fault = "wrong norm"
WINDOW: Fault = "wrong attention window"
BLOCK: Fault = "another kind of block"


class Variation(NamedTuple):
    """A drafter that differs from another in one setting, which would undo a known fault.

    `what` says what differs, and `remedy` which setting of files or options that would be.
    """

    fault: Fault
    what: str
    remedy: str
    drafter: Examined


class TrueText(NamedTuple):
    """The true tokens of one row, for drafts that begin at `labels`, positions of at least 2.

    `features` are the target's at the same positions. Drafters attend to the latest `window`
    tokens, whatever their own options say.
    """

    tokens: Int[Array, "T"]
    features: dict[str, Float[Array, "1 T D"]]
    window: Int[Array, ""] | np.integer
    labels: Int[Array, "A"]


class Examined:
    """The part of a drafter's class that is for its examination with true tokens.

    Drafters that are not of this class cannot be examined. `head` is the drafter's field.
    """

    paired_with: ClassVar[str] = "token x(t+1)"
    """What the head reads together with the feature of position t."""
    taps_field: ClassVar[str] = "eagle_aux_hidden_state_layer_ids"
    """The fields of published configs that say which features the head reads."""
    applies_window: ClassVar[bool] = True
    """Whether `teacher_forced` applies the option `sliding_window`."""

    def teacher_forced(self, params: Any, text: TrueText) -> list[Float[Array, "A Vd"]]:
        """Return the logits of each draft token, given the true tokens before it. Traced."""
        raise NotImplementedError

    @property
    def has_confidence(self) -> bool:
        """Whether the drafter estimates the probability that a draft token is accepted."""
        return False

    def teacher_forced_confidence(self, params: Any, text: TrueText) -> Float[Array, "A K"]:
        """Return the logits of these estimates."""
        raise NotImplementedError

    def own_params(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parameters that training a head leaves changed: all that are not shared."""
        others = ("shared", "draft_ids", "digest")
        return {name: tree for name, tree in params.items() if name not in others}

    @property
    def layers_config(self) -> DecoderConfig | None:
        """The config of the head's decoder layers, or None if it has none."""
        return None

    @property
    def fuses_taps(self) -> bool:
        """Whether the parameter `fc` reads the target's features, joined."""
        return False

    @property
    def mask_token_id(self) -> int | None:
        """The token whose embedding stands for tokens to be drafted, or None."""
        return None

    @property
    def addable_norms(self) -> tuple[tuple[str, bool], ...]:
        """The flags of norms of the target's features that the head lacks, and other heads have.

        Each with whether the features are normed together.
        """
        return ()

    def variations(self) -> Iterator[Variation]:
        """Yield drafters with one other setting, each of which known faults may call for."""
        yield from ()

    def taps_remedy(self, taps: str) -> str:
        """Return what to set for the head to read the features `taps`."""
        return f"taps={taps} in the head's config ({self.taps_field})"

    def window_remedy(self, size: int) -> str:
        """Return what to do if the drafter is right only with a window of `size` tokens."""
        return f"train the head without a window (it fits one of about {size} positions)"

    def with_config(self, **values: Any) -> Examined:
        """Return the drafter with other values in its head's config."""
        head = self.head
        return replace(self, head=replace(head, config=replace(head.config, **values)))

    def with_setting(self, fault: Fault, field: str, value: Any, **others: Any) -> Variation:
        """Return the variation with another value of a field of the head's config.

        `others` are fields that change with it.
        """
        before, after = str(getattr(self.head.config, field)).lower(), str(value).lower()
        return Variation(
            fault,
            f"{field}={after} in place of {before}",
            f"{field}={after} in the head's config",
            self.with_config(**{field: value}, **others),
        )


def within(window: Int[Array, ""] | np.integer, width: int) -> Bool[Array, "T T"]:
    """Return the attention mask of each token's latest `window` tokens, itself included."""
    ago = jnp.arange(width)[:, None] - jnp.arange(width)[None, :]
    return (ago >= 0) & (ago < window)
