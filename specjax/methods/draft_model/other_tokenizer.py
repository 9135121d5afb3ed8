"""Draft models with another tokenizer than the target's (TLI: Timor et al. 2502.05202, section 4).

Tokens that stand for the same bytes in both vocabularies are common. The model drafts among these
alone: its distribution is renormalised over them, and is then q, so that every rule stays exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from specjax.core.cache import KVCache, Window
from specjax.core.language_model import Extension
from specjax.errors import InputError
from specjax.loading.model import Model
from specjax.methods.draft_model.wrapped import WrappedModel


class TokenMap(NamedTuple):
    """How two vocabularies correspond.

    The tokens `target_ids` of the target, ascending, stand for the same bytes as `draft_ids` of the
    draft model. `to_draft` is the draft model's token for each of the target's: where none has the
    same bytes, the longest with which these end.
    """

    target_ids: Int[np.ndarray, "Vd"]
    draft_ids: Int[np.ndarray, "Vd"]
    to_draft: Int[np.ndarray, "V"]

    def described(self, target: Model, draft: Model) -> str:
        """Return how many tokens are common, in words."""
        count, size = len(self.target_ids), draft.config.vocab_size
        return (
            f"{draft.name} has another tokenizer than {target.name}: {count} of its {size} tokens "
            f"({count / size:.1%}) are the target's, too, and only these are drafted"
        )


def token_map(target: Model, draft: Model) -> TokenMap:
    """Return how the vocabularies of two models correspond, by the bytes of their tokens.

    Raises InputError if they have no token in common, or if texts of tokens depend on others.
    """
    targets, drafts = (_texts(model) for model in (target, draft))
    by_text = {text: index for index, text in reversed([*enumerate(drafts)]) if text}
    pairs = {}
    for index, text in enumerate(targets):
        if text in by_text:
            pairs.setdefault(by_text[text], index)
    if not pairs:
        raise InputError(
            f"drafter.path: {draft.name} and {target.name} have no token in common; use a draft "
            "model of the target's family"
        )
    target_ids = np.array(sorted(pairs.values()), np.int32)
    of_target = {index: of_draft for of_draft, index in pairs.items()}
    return TokenMap(
        target_ids,
        np.array([of_target[index] for index in target_ids.tolist()], np.int32),
        np.array([_longest_end(text, by_text) for text in targets], np.int32),
    )


def _texts(model: Model) -> list[tuple[bool, bytes] | None]:
    """Return the bytes of each token of a model, and whether it is special."""
    if model.tokenizer is None:
        raise InputError(
            f"drafter.path: {model.name} has no tokenizer, so that its tokens cannot be compared; "
            "use a draft model of the target's family"
        )
    detokenizer = model.tokenizer.detokenizer
    pieces = detokenizer.pieces(model.config.vocab_size, first=False)
    if pieces is None:
        raise InputError(
            f"drafter.path: the texts of {model.name}'s tokens depend on one another, so that they "
            "cannot be compared; use a draft model of the target's family"
        )
    return [
        (index in detokenizer.special, piece) if piece else None
        for index, piece in enumerate(pieces)
    ]


def _longest_end(text: tuple[bool, bytes] | None, by_text: dict[tuple[bool, bytes], int]) -> int:
    """Return the token with a text, or with the longest end of it; 0 if there is none."""
    if text is None:
        return 0
    special, piece = text
    ends = [(special, piece), *((False, piece[begin:]) for begin in range(len(piece)))]
    return next((by_text[end] for end in ends if end in by_text), 0)


@dataclass(frozen=True)
class TranslatedModel(WrappedModel):
    """A model that reads the target's tokens, and has logits [B, T, Vd] of the common ones.

    It is a `LanguageModel` otherwise, and hashable. `params` are the `decoder`'s under "model", and
    the arrays of a `TokenMap`: "draft_ids", the target's ids of the logits, "columns", the draft
    model's, and "to_draft".
    """

    vocab_size: int

    @classmethod
    def parameters(cls, params: Any, tokens: TokenMap) -> dict[str, Any]:
        """Return the parameters of a model with parameters `params`."""
        names = ("draft_ids", "columns", "to_draft")
        return {"model": params} | dict(zip(names, map(jnp.asarray, tokens), strict=True))

    def extend(
        self,
        params: dict[str, Any],
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        cache: KVCache | None,
        window: Window | None,
        start: Int[Array, ""] | int,
        visible: Bool[Array, "#B T W"],
        *,
        logits: bool = True,
        **options: Any,
    ) -> Extension:
        """Run T tokens of the target as `LanguageModel.extend` does, with logits [B, T, Vd]."""
        result = self.decoder.extend(
            params["model"],
            params["to_draft"][tokens],
            positions,
            cache,
            window,
            start,
            visible,
            logits=logits,
            **options,
        )
        if not logits:
            return result
        return result.replace(logits=_columns(result.logits, params["columns"]))


def _columns(logits: Float[Array, "B T V"], ids: Int[Array, "Vd"]) -> Float[Array, "B T Vd"]:
    return jnp.take(logits, ids, axis=2)
