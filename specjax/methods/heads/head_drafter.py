"""The base class of drafters with trained heads; loading of heads; comparison of tokenizers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from specjax.core.drafter import LoadedDrafter
from specjax.core.growth.autoregressive import ChainDrafter
from specjax.errors import InputError
from specjax.loading.model import Model
from specjax.loading.quantize import DRAFT_WEIGHTS
from specjax.methods.heads.complete_parameters import complete_parameters
from specjax.methods.heads.find_head import open_head
from specjax.methods.heads.head import Head

DraftWeights = Annotated[
    str,
    DRAFT_WEIGHTS,
    "How the drafter's kernels are stored; auto: int8 if the target has few bits, for a separate "
    "model as for a target.",
]
"""The storage of a trained drafter's kernels."""


@dataclass(frozen=True, kw_only=True)
class HeadDrafter(ChainDrafter):
    """A drafter with a head that was trained for one target."""

    trained: ClassVar[bool] = True

    @classmethod
    def load(
        cls,
        name: str,
        target: Model,
        path: Any = None,
        *,
        weights: DraftWeights = "auto",
        **options: Any,
    ) -> LoadedDrafter:
        """Load the head at `path`, by default the head that comes with specjax for the target.

        `weights` is the storage of its kernels (`DRAFT_WEIGHTS`). Raises InputError if there is
        none, for a head of another kind or target, and for invalid options.
        """
        return cls.of_head(*load_head(name, path, target, weights), target, **options)

    @classmethod
    def of_head(cls, head: Head, params: Any, target: Model, **options: Any) -> LoadedDrafter:
        """Return a drafter for a head; `params` are the result of `complete_parameters`.

        `options` are those of the drafter.
        """
        raise NotImplementedError


def load_head(kind: str, path: Any, target: Model, weights: str = "auto") -> tuple[Head, Any]:
    """Return a head of the given kind, and its parameters completed by the target's.

    `path` is None for the head that comes with specjax, and `weights` is the storage of kernels
    (`DRAFT_WEIGHTS`). Raises InputError if there is none, and for a head of another kind or target.
    """
    head = open_head(kind, path, target)
    return head, complete_parameters(head, target, weights)


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
