"""Comparison of a draft model's tokenizer with the target's."""

from __future__ import annotations

from specjax.errors import InputError
from specjax.loading.model import Model


def check_tokenizers(target: Model, draft: Model) -> None:
    """Raise InputError, naming the first tokens that differ, unless the tokenizers agree.

    Extra tokens at the end of one vocabulary are allowed, since models of a family are published
    with them. If a model has no tokenizer, only the vocabulary sizes are compared.
    """
    if target.tokenizer is None or draft.tokenizer is None:
        sizes = (target.config.vocab_size, draft.config.vocab_size)
        difference = None if sizes[0] == sizes[1] else f"{sizes[0]} against {sizes[1]} tokens"
    else:
        difference = target.tokenizer.first_difference(draft.tokenizer, shared=True)
    if difference is not None:
        raise InputError(
            f"drafter.path: the tokenizers of {target.name} and {draft.name} differ "
            f"({difference}): use a draft model of the target's family, or train one on its tokens"
        )
