"""Conversion of token ids to text, for complete outputs and for growing ones.

In decoders of the tokenizers package the text of a token can depend on later tokens. Here every
token has fixed bytes, and the text is their concatenation read as UTF-8, so that emitted text never
changes. For byte-level vocabularies this equals the package's text. In SentencePiece vocabularies
tokens such as `<0x0A>` stand for bytes: a valid character stays valid whatever bytes follow, as in
SentencePiece and llama.cpp, while the package replaces a whole run of such tokens if any byte of it
is invalid.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import tokenizers

from specjax.files.json_files import parse_json

_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_EACH_BYTE = "specjax.each_byte"
"""The name of an error handler that replaces each invalid byte, not sequence, by U+FFFD."""
_METASPACE_KEPT = "never"


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return _REPLACEMENT * (error.end - error.start), error.end


codecs.register_error(_EACH_BYTE, _replace_each_byte)


def _byte_characters() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for, as in GPT-2."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + n): b for n, b in enumerate(hidden)}


_BYTES = _byte_characters()


@dataclass(frozen=True, eq=False)
class Detokenizer:
    """The rules by which the tokens of a vocabulary become text."""

    backend: tokenizers.Tokenizer

    @cached_property
    def special(self) -> Mapping[int, str]:
        """The texts of special tokens by id, which are normally left out of the output."""
        added = self.backend.get_added_tokens_decoder()
        return {index: token.content for index, token in added.items() if token.special}

    @cached_property
    def _steps(self) -> list[dict[str, Any]]:
        decoder = self.backend.decoder
        if decoder is None:
            return []
        return _flat(parse_json(decoder.__getstate__(), "the tokenizer's decoder"))

    @cached_property
    def _byte_level(self) -> bool:
        return [step["type"] for step in self._steps if step["type"] != "Fuse"] == ["ByteLevel"]

    @cached_property
    def _piecewise(self) -> bool:
        """Whether tokens are decoded one by one, joined, and stripped at the beginning."""
        names = [step["type"] for step in self._steps]
        fuse = names.index("Fuse") if "Fuse" in names else len(names)
        return (
            bool(names)
            and all(_is_local(step) for step in self._steps[:fuse])
            and all(_is_strip_of_beginning(step) for step in self._steps[fuse + 1 :])
            and len(names) <= fuse + 2
        )

    @cached_property
    def errors(self) -> str:
        """The name of Python's error handler for bytes that are not UTF-8."""
        return _EACH_BYTE if any(s["type"] == "ByteFallback" for s in self._steps) else "replace"

    @cached_property
    def stripped(self) -> tuple[str, int]:
        """The character to strip from the start of the text, and the maximum number to strip."""
        last = self._steps[-1] if self._piecewise else {}
        return last.get("content", "") if last.get("type") == "Strip" else "", last.get("start", 0)

    def piece(self, index: int, previous: int | None) -> bytes | None:
        """Return the bytes that token `index` adds to the text, or None if there is no such token.

        `previous` is the preceding token, None at the start of the text.
        """
        if index in self.special:
            return self.special[index].encode()
        token = self.backend.id_to_token(index)
        if token is None:
            return None
        if self._byte_level:
            if all(char in _BYTES for char in token):
                return bytes(_BYTES[char] for char in token)
            return token.encode()
        if self._piecewise:
            return self._piece(token, first=previous is None)
        before = "" if previous is None else self.backend.decode([previous], False)
        both = [index] if previous is None else [previous, index]
        return self.backend.decode(both, False).removeprefix(before).encode()

    def pieces(self, size: int, *, first: bool) -> tuple[bytes | None, ...] | None:
        """Return the bytes of the first `size` tokens, at the start of a text or after others.

        None stands for ids without a token, and for a whole vocabulary if the text of a token
        depends on others.
        """
        if not (self._byte_level or self._piecewise):
            return None
        found = [self.piece(index, None if first else 0) for index in range(size)]
        strip, most = self.stripped
        if first and strip:
            found = [piece and _without_first(piece, strip.encode(), most) for piece in found]
        return tuple(found)

    def _piece(self, token: str, *, first: bool) -> bytes:
        for step in self._steps:
            if step["type"] == "Replace":
                token = token.replace(step["pattern"]["String"], step["content"])
            elif step["type"] == "Metaspace":
                drops = first and step.get("prepend_scheme") != _METASPACE_KEPT
                token = token.replace(step["replacement"], "" if drops else " ")
            elif step["type"] == "ByteFallback" and (byte := _BYTE_TOKEN.fullmatch(token)):
                return bytes([int(byte[1], 16)])
        return token.encode()


class TextStream:
    """The text of tokens that arrive a few at a time; emitted text never changes."""

    def __init__(self, detokenizer: Detokenizer, *, skip_special_tokens: bool = True) -> None:
        self._detokenizer = detokenizer
        self._skipped = detokenizer.special if skip_special_tokens else {}
        self._utf8 = codecs.getincrementaldecoder("utf-8")(detokenizer.errors)
        self._previous: int | None = None
        self._stripped, self._to_strip = detokenizer.stripped

    def feed(self, ids: Iterable[int]) -> str:
        """Return the text that `ids` complete; an incomplete character waits for the next call."""
        pieces = []
        for index in ids:
            if index in self._skipped:
                continue
            piece = self._detokenizer.piece(index, self._previous)
            if piece is not None:
                pieces.append(piece)
                self._previous = index
        return self._strip(self._utf8.decode(b"".join(pieces)))

    def flush(self) -> str:
        """Return the remaining text, in which an incomplete character becomes U+FFFD."""
        return self._strip(self._utf8.decode(b"", True))

    def _strip(self, text: str) -> str:
        while self._to_strip and text:
            if text[0] != self._stripped:
                self._to_strip = 0
                break
            text, self._to_strip = text[1:], self._to_strip - 1
        return text


def _flat(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for inner in decoder["decoders"] for step in _flat(inner)]


def _without_first(piece: bytes, strip: bytes, most: int) -> bytes:
    """Return a piece without up to `most` copies of `strip` at its start."""
    while most and piece.startswith(strip):
        piece, most = piece.removeprefix(strip), most - 1
    return piece


def _is_local(step: dict[str, Any]) -> bool:
    """Return whether a decoding step changes each token separately, apart from the first one."""
    is_text_replacement = step["type"] == "Replace" and "String" in step["pattern"]
    return is_text_replacement or step["type"] in ("ByteFallback", "Metaspace")


def _is_strip_of_beginning(step: dict[str, Any]) -> bool:
    return step["type"] == "Strip" and not step["stop"]
