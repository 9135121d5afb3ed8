"""The combination of lookup drafters with the most accepted tokens, under one name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from specjax.core.drafter import Drafter, LoadedDrafter
from specjax.core.merged import Merged
from specjax.fields import Whole
from specjax.loading.model import Model
from specjax.methods.corpus.drafter import Corpus, CorpusFolder
from specjax.methods.method import Method
from specjax.methods.suffix import Suffix
from specjax.methods.token_recycling import TokenRecycling


@dataclass(frozen=True, kw_only=True)
class Lookup(Merged):
    """A drafter that merges the drafts of `suffix`, `token_recycling` and, if given, `corpus`.

    Of these, `suffix` drafts up to 4 tokens per token of its match. To set other options, join the
    drafters by name instead. docs/results.md has measurements.
    """

    name: ClassVar[str] = "lookup"
    vocab_size: Annotated[int, Whole(1)] = field(kw_only=False)
    reads_corpus: bool = field(default=False, kw_only=False)
    parts: tuple[Drafter, ...] = field(init=False)

    def __post_init__(self) -> None:
        defaults = Suffix(suffix_decoding_max_spec_factor=4.0), TokenRecycling(self.vocab_size)
        object.__setattr__(self, "parts", (*defaults, Corpus()) if self.reads_corpus else defaults)
        super().__post_init__()

    @classmethod
    def of_target(
        cls,
        target: Model,
        *,
        corpus: CorpusFolder = None,
        **options: Any,
    ) -> LoadedDrafter:
        """Return the drafter for a target, with the corpus index in the folder `corpus`, if any."""
        texts = () if corpus is None else (Corpus.of_target(target, corpus=corpus).params,)
        drafter = cls(target.config.vocab_size, bool(texts), **options)
        return LoadedDrafter(drafter, ((), (), *texts))


LOOKUP = Method(
    name=Lookup.name,
    paper="",
    drafter=Lookup,
    of_target=Lookup.of_target,
)
