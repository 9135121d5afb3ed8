"""Retrieval: copying tokens from a corpus, and from earlier outputs of an engine.

The datastore is that of REST (He et al. 2311.08252), with the counts of suffix decoding (Oliaro et
al. 2411.04975): the drafts are the most frequent continuations of the longest match of a row's last
tokens in a sorted text. A binary search in the compiled loop finds the match; the texts are
operands of the program, shared by all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt32

from specjax.core.drafter import Context, Drafter, LoadedDrafter, Noise
from specjax.errors import InputError
from specjax.fields import Whole, optional
from specjax.loading.model import Model
from specjax.methods.corpus.index_folder import IndexFolder, open_index
from specjax.methods.corpus.longest_match import SEPARATOR, find_longest
from specjax.methods.corpus.sorted_text import (
    LONGEST_MATCH,
    SortedText,
    sorted_text,
    token_dtype,
    with_separator,
)
from specjax.methods.suffix import Suffix
from specjax.sampling import text_digest
from specjax.trees import Draft

_LENGTH = Whole(1, LONGEST_MATCH)
CorpusFolder = Annotated[
    str | None,
    optional(IndexFolder()),
    "The folder of an index of texts, which specjax.corpus_index makes.",
]
_BY_INDEX = "make an index by python -m specjax.corpus_index"


@dataclass(frozen=True, kw_only=True)
class Corpus(Suffix):
    """A drafter that copies the most frequent continuation of a row's last tokens in a corpus.

    It uses the longest match of `prompt_lookup_min` to `prompt_lookup_max` tokens, and counts its
    occurrences as `Suffix` does, with the same options. With `suffix_decoding_max_cached_requests`,
    an engine's latest finished outputs are a second text of up to
    `suffix_decoding_max_cached_tokens`, which is preferred if its match is as long. Parameters are
    a tuple of `SortedText`, that of the outputs first. There is no state. Raises InputError for
    options out of range.
    """

    prompt_lookup_max: Annotated[int, _LENGTH] = LONGEST_MATCH
    """The longest match that is searched for, in tokens."""
    prompt_lookup_min: Annotated[int, _LENGTH] = 2
    """The shortest match, in tokens."""
    suffix_decoding_max_cached_requests: Annotated[int, Whole(0, 1 << 20)] = 0
    """How many of an engine's latest finished requests are copied from too."""
    suffix_decoding_max_cached_tokens: Annotated[int, Whole(64, 1 << 28)] = 1 << 16
    """The most tokens of these requests; the oldest are dropped."""
    observe = Drafter.observe

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompt_lookup_max < self.prompt_lookup_min:
            raise InputError(
                f"drafter.prompt_lookup_max={self.prompt_lookup_max}: must be at least "
                f"prompt_lookup_min={self.prompt_lookup_min}"
            )

    @classmethod
    def of_target(
        cls,
        target: Model,
        *,
        corpus: CorpusFolder = None,
        **options: Any,
    ) -> LoadedDrafter:
        """Return the drafter for a target, with an index of a corpus, cached requests, or both.

        `corpus` is the folder of the index. Raises InputError if it cannot be read.
        """
        cls.check_texts(corpus=corpus, **options)
        drafter = cls(**options)
        texts = []
        if drafter.max_cached_requests:
            dtype = token_dtype(target.config.vocab_size)
            size = drafter.suffix_decoding_max_cached_tokens
            texts.append(sorted_text([], size, dtype))
        if corpus is not None:
            texts.append(open_index("drafter.corpus", corpus, target))
        return LoadedDrafter(drafter, tuple(texts))

    @classmethod
    def check_texts(cls, *, corpus: str | None = None, **options: Any) -> None:
        """Raise InputError if there is neither a corpus nor cached requests to copy from."""
        if corpus is None and not cls(**options).max_cached_requests:
            raise InputError(
                f"drafter.corpus is missing: {_BY_INDEX}, or copy from finished requests with "
                "drafter.suffix_decoding_max_cached_requests"
            )

    @property
    def max_cached_requests(self) -> int:
        """The maximum number of an engine's latest outputs to copy from."""
        return self.suffix_decoding_max_cached_requests

    def with_outputs(
        self, params: tuple[SortedText, ...], outputs: Sequence[tuple[Sequence[int], Sequence[int]]]
    ) -> tuple[SortedText, ...]:
        """Return the parameters with the latest of `outputs` in place of earlier ones.

        As many outputs are included as fit; the oldest may be truncated at its start. Each output
        follows the end of its prompt, so that its first tokens can be matched. The new digest
        differs from all earlier ones, even where the same text was there before: otherwise a
        request that emits what is cached would draw the same once more when it is repeated.
        """
        if not self.max_cached_requests:
            return params
        cached, *others = params
        size, dtype = len(cached.tokens), cached.tokens.dtype
        documents, room = [], size
        for prompt, output in reversed(outputs[-self.max_cached_requests :]):
            document = with_separator([*prompt[-self.prompt_lookup_max :], *output], dtype)
            documents.append(document[max(len(document) - room, 0) :])
            room -= len(documents[-1])
        text = sorted_text(documents, size, dtype)
        digest = text_digest(text.tokens, after=np.asarray(cached.digest))
        return (text._replace(digest=digest), *others)

    def text_digests(
        self, params: tuple[SortedText, ...]
    ) -> tuple[UInt32[Array | np.ndarray, "2"], ...]:
        """Return the digests of the cached outputs and of the corpus."""
        return tuple(text.digest for text in params)

    def init(self, params: Any, batch: int, capacity: int) -> tuple[()]:
        """Return an empty tuple, since the drafter has no state."""
        del params, batch, capacity
        return ()

    def propose(
        self, params: tuple[SortedText, ...], state: tuple[()], context: Context, noise: Noise
    ) -> tuple[Draft, tuple[()]]:
        """Propose the most likely continuations of the longest match, in rows that have one."""
        count = self.num_speculative_tokens
        match = find_longest(params, self._last_tokens(context), count)
        length = jnp.where(match.length >= self.prompt_lookup_min, match.length, 0)
        # `Suffix` counts occurrences in a row's text, so concatenate them into one, latest first.
        matched = jnp.where(match.known, length[:, None], 0)[:, ::-1, None]
        matched = jnp.pad(matched, ((0, 0), (0, 0), (0, count))).reshape(len(length), -1)
        text = jnp.pad(match.tokens[:, ::-1], ((0, 0), (0, 0), (1, 0)))
        occurrences = context.replace(
            tokens=text.reshape(matched.shape),
            length=jnp.full_like(context.length, matched.shape[1]),
        )
        draft, _ = super().propose((), matched, occurrences, noise)
        is_token = draft.valid & (draft.tokens != SEPARATOR)
        return draft.replace(valid=draft.topology.close(is_token)), state

    def _last_tokens(self, context: Context) -> Int[Array, "B L"]:
        """Return each row's last tokens, the last one first; -1 before its first token."""
        most = self.prompt_lookup_max
        tokens = context.tokens_from(context.length - most, most)[:, ::-1]
        return jnp.where(jnp.arange(most)[None, :] < context.length[:, None], tokens, -1)
