"""Conversion of text to token ids and back, with one class for all file formats."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import tokenizers
from tokenizers import processors

from specjax.errors import InputError, shown
from specjax.fields import Text
from specjax.loading.tokenizers import chat_templates
from specjax.loading.tokenizers.detokenizer import Detokenizer, TextStream

_FILLER = re.compile(r"\[PAD(\d+)\]|<dummy\d{5}>")
_QUESTION = "A question of the user"
"""A text by which the user's place in a chat template is found."""


def is_filler(token: str, index: int) -> bool:
    """Return whether a token is a placeholder that converters write for an unused embedding row.

    Some of these names contain the row's id, `index`.
    """
    if not token.startswith(("[PAD", "<dummy")):
        return False
    match = _FILLER.fullmatch(token)
    return match is not None and match[1] in (None, str(index))


@contextmanager
def refused(problem: str, remedy: str) -> Iterator[None]:
    """Turn errors of the package tokenizers in the context into InputError.

    Its message has `problem` and `remedy`. The errors may be bare Exceptions, or BaseExceptions if
    the package's Rust code panics.
    """
    try:
        yield
    except (InputError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise InputError(f"{problem} ({' '.join(str(error).split()):.160}); {remedy}") from None


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A vocabulary with its segmentation rules and special ids.

    The backend's post-processor adds tokens at the start and end of raw text; a chat template
    writes such tokens itself. `eos_ids` end a sequence (end of text, end of turn); the first is the
    model's own. `special_tokens` are pairs of a name, such as `bos_token`, and the text that
    templates print for it. `rows`, unless None, is the number of rows of the model's embedding;
    tokens beyond them are not in the vocabulary.
    """

    backend: tokenizers.Tokenizer
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    chat_template: str | None = None
    special_tokens: tuple[tuple[str, str], ...] = ()
    rows: int | None = None

    def __post_init__(self) -> None:
        if self.rows is not None and self.rows < 1:
            raise InputError(f"tokenizer: rows={shown(self.rows)}: must be at least 1")
        for name, ids in (("bos_id", (self.bos_id,)), ("eos_ids", self.eos_ids)):
            for index in ids:
                if index is not None and not 0 <= index < self.vocab_size:
                    raise InputError(
                        f"tokenizer: {name}={shown(index)} is outside the vocabulary of "
                        f"{self.vocab_size} tokens; name one of its tokens"
                    )

    @cached_property
    def _strings(self) -> tuple[str | None, ...]:
        """The token of each id, or None for an id without a token."""
        vocabulary = self.backend.get_vocab(with_added_tokens=True)
        size = max(vocabulary.values(), default=-1) + 1
        # Ids may have gaps, but a table of all ids must not be far larger than the file.
        if size > 4 * len(vocabulary) + 65536:
            raise InputError(
                f"tokenizer: {len(vocabulary)} tokens have ids up to {size - 1}; number them "
                "without such a gap"
            )
        strings: list[str | None] = [None] * size
        for string, index in vocabulary.items():
            if not is_filler(string, index):
                strings[index] = string
        strings = strings[: self.rows]
        while strings and strings[-1] is None:
            strings.pop()
        return tuple(strings)

    def limited(self, rows: int, what: str) -> Tokenizer:
        """Return the tokenizer of a model whose embedding has `rows` rows.

        Only tokens that were added to the vocabulary may lack a row (Gemma 3 up to 1B has one for
        images). If others do, the tokenizer is another model's, and InputError is raised; `what` is
        the name of the number of rows in its message.
        """
        if self.vocab_size <= rows:
            return self
        added = self.backend.get_added_tokens_decoder()
        for index in range(rows, self.vocab_size):
            if self._strings[index] is not None and index not in added:
                raise InputError(
                    f"{what}={rows}, but the tokenizer has {self.vocab_size} tokens, and "
                    f"{self._strings[index]!r:.40} ({index}) is none that was added to a model's; "
                    "take weights and tokenizer from one model"
                )
        # A token that the model cannot produce cannot end a sequence.
        return replace(self, rows=rows, eos_ids=tuple(end for end in self.eos_ids if end < rows))

    @property
    def added_ids(self) -> tuple[int, ...]:
        """The ids of tokens that were added to the vocabulary, such as special ones, ascending."""
        return tuple(
            sorted(
                index
                for index in self.backend.get_added_tokens_decoder()
                if index < self.vocab_size
            )
        )

    @property
    def unused_ids(self) -> tuple[int, ...]:
        """The ids below `vocab_size` without a token, ascending."""
        return tuple(index for index, string in enumerate(self._strings) if string is None)

    @property
    def vocab_size(self) -> int:
        """The number of token ids (V): the highest id plus one."""
        return len(self._strings)

    @cached_property
    def vocabulary_hash(self) -> str:
        """A hash of all token strings in the order of their ids, to identify the vocabulary."""
        tokens = [string or "" for string in self._strings]
        return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()

    def token(self, index: int) -> str:
        """Return the vocabulary's string of a token id, empty for an id without a token."""
        if not 0 <= index < self.vocab_size:
            raise InputError(
                f"token id {shown(index)}: must be at least 0 and below {self.vocab_size}"
            )
        return self._strings[index] or ""

    def name_beyond(self, index: int) -> str | None:
        """Return the string of a token beyond the model's vocabulary, or None for other ids."""
        known = 0 <= index < self.vocab_size and self._strings[index] is not None
        return None if known or not 0 <= index < 2**31 else self.backend.id_to_token(index)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of raw text, including tokens that the tokenizer adds around it.

        Special tokens in the text are recognized. Raises InputError for text that is not Unicode (a
        lone surrogate), and for a token without a row in the model's embedding.
        """
        return self._segment(text, add_special_tokens=True)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; bytes that are not UTF-8 become U+FFFD."""
        stream = StreamDecoder(self, skip_special_tokens=skip_special_tokens)
        return stream.feed(ids) + stream.flush()

    @cached_property
    def detokenizer(self) -> Detokenizer:
        """The rules by which the tokens become text."""
        return Detokenizer(self.backend)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        """Return the text of a prompt, by the model's chat template, from a conversation.

        With `add_generation_prompt` the text ends where the assistant's answer begins. Raises
        InputError for malformed messages, and if the model has no template or the template fails.
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
        """Return the token ids of a conversation, by the chat template, up to the next answer.

        Raises InputError as `apply_chat_template` does.
        """
        return self._segment(self.apply_chat_template(messages), add_special_tokens=False)

    def encode_around_question(self) -> tuple[list[int], list[int]]:
        """Return the token ids before and after the user's text in a conversation of one message.

        The first are the chat template's up to where the text begins, the second those from its end
        to the answer. Raises InputError as `apply_chat_template` does, and if the text cannot be
        found in what the template renders, or nothing precedes it.
        """
        rendered = self.apply_chat_template([{"role": "user", "content": _QUESTION}])
        before, *after = rendered.split(_QUESTION)
        # A space between header and text belongs to the text's first token.
        before = before.rstrip(" ")
        if len(after) != 1 or not before:
            problem = "nothing precedes the user's text"
            if len(after) != 1:
                problem = f"the user's text {_QUESTION!r} is in its output {len(after)} times"
            raise InputError(
                f"chat template: {problem}, so that where a question begins is not known; give the "
                "model another template"
            )
        first, last = (self._segment(text, add_special_tokens=False) for text in (before, *after))
        return first, last

    def _segment(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            with refused("text: the tokenizer cannot encode it", "change the text"):
                ids = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except InputError:
            # The package's error for half of a surrogate pair only says that it is not text.
            Text(empty=True).check("text", text)
            raise
        for index in ids:
            if (name := self.name_beyond(index)) is not None:
                raise InputError(
                    f"text: the token {name!r:.60} ({index}) has no row in the model's embedding; "
                    "take it out of the text"
                )
        return ids

    def first_difference(self, other: Tokenizer, *, shared: bool = False) -> str | None:
        """Return a description of the first difference of two vocabularies, or None if they agree.

        With `shared`, only ids that have a token in both are compared.
        """
        for index, (mine, theirs) in enumerate(zip(self._strings, other._strings, strict=False)):
            if mine != theirs and not (shared and None in (mine, theirs)):
                return f"token {index} is {mine!r} against {theirs!r}"
        shorter, longer = sorted((self, other), key=lambda tokenizer: tokenizer.vocab_size)
        if shared or shorter.vocab_size == longer.vocab_size:
            return None
        first = shorter.vocab_size
        return (
            f"{self.vocab_size} against {other.vocab_size} tokens, "
            f"the first without a partner is {first} {longer.token(first)!r}"
        )


def frame(
    backend: tokenizers.Tokenizer, first: tuple[str, int] | None, last: tuple[str, int] | None
) -> None:
    """Make a backend add tokens before and after every raw text.

    `first` and `last` are pairs of a token's string and id, or None to add none.
    """
    around = [f"{token[0]} " if token else "" for token in (first, last)]
    single_text = f"{around[0]}$A {around[1]}".strip()
    backend.post_processor = processors.TemplateProcessing(
        single_text, f"{single_text} $B:1", [token for token in (first, last) if token]
    )


class StreamDecoder(TextStream):
    """A decoder of growing output.

    The concatenated results of `feed` and a final `flush` equal `Tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        super().__init__(tokenizer.detokenizer, skip_special_tokens=skip_special_tokens)

    def feed(self, ids: Iterable[int]) -> str:
        """Return the text that `ids` complete; raise InputError for invalid ids."""
        with refused("token ids: the tokenizer cannot decode them", "use ids of its vocabulary"):
            return super().feed(ids)
