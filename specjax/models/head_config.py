"""The base class of heads' configs: what saving, checking and completing a head ask of one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Int

from specjax.errors import InputError
from specjax.models.joined_kernels import with_joined


class HeadConfig:
    """The config of a trained head; subclass it as a frozen dataclass.

    A config has a field `draft_vocab_size` (Vd), the number of logits. Most have a field `decoder`
    too, the `DecoderConfig` of the head's layers with the target's vocabulary (V); a config without
    one overrides what reads it here.
    """

    @property
    def kind(self) -> str:
        """The kind of head, which is the name of the drafter made from it."""
        raise NotImplementedError

    @property
    def target_vocab_size(self) -> int:
        """The number of tokens of the target (V)."""
        return self.decoder.vocab_size

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the target's features that the head reads."""
        return ()

    @property
    def shares_output(self) -> bool:
        """Whether logits are computed with the target's output head, from the head's features."""
        return True

    @property
    def is_quantizable(self) -> bool:
        """Whether the head's kernels may be stored in few bits."""
        return True

    def check_kind(self, kind: str) -> None:
        """Raise InputError unless heads with this config are of the given kind."""
        if kind != self.kind:
            raise InputError(
                f"head: kind={kind!r} is unknown to the config of {self.kind}; use the head's own"
            )

    def parameter_table(self) -> dict[str, Any]:
        """Return the shapes and axes of the head's parameters, as a nested dict of `Parameter`."""
        raise NotImplementedError

    def joined(self, params: dict[str, Any]) -> dict[str, Any]:
        """Return parameters with joined kernels; earlier versions saved them in parts."""
        return with_joined(params, self.parameter_table(), self.decoder)

    def without_unused(self) -> HeadConfig:
        """Return the config without unused token ids, which other tools' layouts do not state."""
        return replace(self, decoder=replace(self.decoder, unused_tokens=()))

    def whole(
        self, params: dict[str, Any], draft_ids: Int[np.ndarray, "Vd"]
    ) -> tuple[HeadConfig, dict[str, Any]]:
        """Return config and parameters with logits for all V tokens rather than `draft_ids`.

        The config `shares_output`; logits of the draft vocabulary do not change.
        """
        del draft_ids
        return replace(self, draft_vocab_size=self.target_vocab_size), params
