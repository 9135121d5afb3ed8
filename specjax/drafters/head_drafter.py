"""The base class of drafters that are trained heads; loading heads, and comparing tokenizers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from specjax.drafters.autoregressive import ChainDrafter
from specjax.drafters.base import LoadedDrafter
from specjax.errors import InputError
from specjax.loading.find_head import open_head
from specjax.loading.heads.complete_parameters import complete_parameters
from specjax.loading.heads.head import Head
from specjax.loading.model import Model
from specjax.loading.quantize import DRAFT_WEIGHTS

DraftWeights = Annotated[str, DRAFT_WEIGHTS]
"""How a trained drafter's kernels are stored."""


@dataclass(frozen=True, kw_only=True)
class HeadDrafter(ChainDrafter):
    """A drafter that is a trained head for one target."""

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
        """Load the head at a path, or the one that is shipped with specjax for the target.

        Its kernels are in `weights`. Raises InputError if there is none, for a head of another kind
        or target, and for bad options.
        """
        return cls.of_head(*load_head(name, path, target, weights), target, **options)

    @classmethod
    def of_head(cls, head: Head, params: Any, target: Model, **options: Any) -> LoadedDrafter:
        """Return the drafter of a head and its complete parameters."""
        raise NotImplementedError


def load_head(kind: str, path: Any, target: Model, weights: str = "auto") -> tuple[Head, Any]:
    """Return a head of a kind and its complete parameters; without a path, the shipped one.

    Its kernels are in `weights` (`DRAFT_WEIGHTS`).

    Raises InputError if there is none, and for a head of another kind or target.
    """
    head = open_head(kind, path, target)
    return head, complete_parameters(head, target, weights)


def check_tokenizers(target: Model, draft: Model) -> None:
    """Raise InputError, with the first tokens that differ, unless both models share one tokenizer.

    Tokens of one alone are allowed: models of a family are published with different ones at the
    end. Without a tokenizer only the number of tokens can be compared.
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
