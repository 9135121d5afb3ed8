"""Text to token ids and back: one class for the tokenizers of all file formats."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import tokenizers
from tokenizers import processors

from specjax.errors import InputError, shown
from specjax.loading.tokenizers import chat_templates
from specjax.loading.tokenizers.detokenizer import Detokenizer, TextStream


@contextmanager
def refused(problem: str, remedy: str) -> Iterator[None]:
    """Raise an InputError instead of whatever the tokenizers package raises.

    That is a bare Exception, or a BaseException where its Rust code panics.
    """
    try:
        yield
    except (InputError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise InputError(f"{problem} ({' '.join(str(error).split()):.160}); {remedy}") from None


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A vocabulary, its segmentation rules, and its special ids.

    `eos_ids` end a sequence: end of text and end of turn; the first is the model's own. `add_bos`
    says that plain text starts with `bos_id`; a chat template writes its own. `special_tokens`
    are the names (`bos_token`, ...) that templates may print.
    """

    backend: tokenizers.Tokenizer
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    add_bos: bool = False
    chat_template: str | None = None
    special_tokens: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if self.add_bos and self.bos_id is None:
            raise InputError("tokenizer: add_bos needs a bos token; name one in the metadata")
        for name, ids in (("bos_id", (self.bos_id,)), ("eos_ids", self.eos_ids)):
            for index in ids:
                if index is not None and not 0 <= index < self.vocab_size:
                    raise InputError(
                        f"tokenizer: {name}={shown(index)} is outside the vocabulary of "
                        f"{self.vocab_size} tokens; use the model's own tokenizer"
                    )

    @cached_property
    def _strings(self) -> tuple[str | None, ...]:
        vocabulary = self.backend.get_vocab(with_added_tokens=True)
        size = max(vocabulary.values(), default=-1) + 1
        # Ids may have gaps, but a table of all ids must not be far larger than the file.
        if size > 4 * len(vocabulary) + 65536:
            raise InputError(
                f"tokenizer: {len(vocabulary)} tokens have ids up to {size - 1}; use the model's "
                "own tokenizer"
            )
        strings: list[str | None] = [None] * size
        for string, index in vocabulary.items():
            strings[index] = string
        return tuple(strings)

    @property
    def vocab_size(self) -> int:
        """Number of token ids (V): the highest id plus one."""
        return len(self._strings)

    @cached_property
    def vocabulary_hash(self) -> str:
        """A hash of all token strings, in order of their ids, which identifies the vocabulary."""
        tokens = [string or "" for string in self._strings]
        return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()

    def token(self, index: int) -> str:
        """The vocabulary's own string of a token id; empty for an id that names no token."""
        if not 0 <= index < self.vocab_size:
            raise InputError(
                f"token id {shown(index)}: must be at least 0 and below {self.vocab_size}"
            )
        return self._strings[index] or ""

    def encode(self, text: str) -> list[int]:
        """Token ids of raw text; special tokens written in it are recognised as such.

        Raises InputError for text that is not Unicode (half of a surrogate pair).
        """
        ids = self._segment(text)
        return [self.bos_id, *ids] if self.add_bos and self.bos_id is not None else ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD."""
        stream = StreamDecoder(self, skip_special_tokens=skip_special_tokens)
        return stream.feed(ids) + stream.flush()

    @cached_property
    def detokenizer(self) -> Detokenizer:
        """How its tokens become text."""
        return Detokenizer(self.backend)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        """The prompt text of a conversation, as `chat_templates.render` makes it.

        Raises InputError where the model has no template or the template fails.
        """
        if self.chat_template is None:
            raise InputError(
                "messages: this model has no chat template; give the prompt as raw text"
            )
        return chat_templates.render(
            self.chat_template,
            messages,
            dict(self.special_tokens),
            add_generation_prompt=add_generation_prompt,
        )

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation, up to where the assistant's turn begins."""
        return self._segment(self.apply_chat_template(messages))

    def _segment(self, text: str) -> list[int]:
        try:
            with refused("text: the tokenizer cannot encode it", "change the text"):
                return self.backend.encode(text, add_special_tokens=False).ids
        except InputError:
            # For half of a surrogate pair the package's own error only says that it is not text.
            halves = [at for at, char in enumerate(text) if "\ud800" <= char <= "\udfff"]
            if not halves:
                raise
            raise InputError(
                f"text: character {halves[0]} is {text[halves[0]]!r}, half of a surrogate pair; "
                "repair the text's encoding"
            ) from None

    def first_difference(self, other: Tokenizer) -> str | None:
        """Where two vocabularies first differ, in words; None where every id means the same."""
        for index, (mine, theirs) in enumerate(zip(self._strings, other._strings, strict=False)):
            if mine != theirs:
                return f"token {index} is {mine!r} against {theirs!r}"
        shorter, longer = sorted((self, other), key=lambda tokenizer: tokenizer.vocab_size)
        if shorter.vocab_size == longer.vocab_size:
            return None
        first = shorter.vocab_size
        return (
            f"{self.vocab_size} against {other.vocab_size} tokens, "
            f"the first without a partner is {first} {longer.token(first)!r}"
        )


def set_bos(backend: tokenizers.Tokenizer, bos: tuple[str, int] | None) -> None:
    """Make the saved tokenizer start text with `bos`, or with nothing, in every other reader."""
    start = f"{bos[0]} " if bos else ""
    backend.post_processor = processors.TemplateProcessing(
        f"{start}$A", f"{start}$A $B:1", [bos] if bos else []
    )


class StreamDecoder(TextStream):
    """Decodes an output that grows.

    Joined, the pieces of `feed` and the last one of `flush` equal `Tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        super().__init__(tokenizer.detokenizer, skip_special_tokens=skip_special_tokens)

    def feed(self, ids: Iterable[int]) -> str:
        """As of a `TextStream`. Raises InputError for what cannot be an id."""
        with refused("token ids: the tokenizer cannot decode them", "use ids of its vocabulary"):
            return super().feed(ids)
