"""Comparison of a draft model's tokenizer with the target's."""

from __future__ import annotations

from specjax.errors import InputError
from specjax.loading.model import Model


def same_tokens(target: Model, draft: Model) -> bool:
    """Return whether tokens of two models with the same id are the same.

    Extra tokens at the end of one vocabulary are allowed, since models of a family are published
    with them. If a model has no tokenizer, only the vocabulary sizes are compared; InputError is
    raised if these differ.
    """
    if target.tokenizer is not None and draft.tokenizer is not None:
        return target.tokenizer.first_difference(draft.tokenizer, shared=True) is None
    sizes = (target.config.vocab_size, draft.config.vocab_size)
    if sizes[0] != sizes[1]:
        raise InputError(
            f"drafter.path: {target.name} and {draft.name} have {sizes[0]} and {sizes[1]} tokens, "
            "and no tokenizers by which these could be compared; use a draft model of the target's "
            "family, or train one on its tokens"
        )
    return True
