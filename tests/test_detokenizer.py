"""Text of tokens: the same streamed and at once, for every sequence and every kind of decoder."""

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tokenizer import sentencepiece, smollm2, tiny  # noqa: F401 - fixtures
from tokenizers import decoders

from specjax.errors import InputError
from specjax.loading.tokenizers.tokenizer import StreamDecoder, Tokenizer

SENTENCEPIECE = json.loads((Path(__file__).parent / "goldens" / "detokenized.json").read_text())
BYTES = [f"<0x{byte:02X}>" for byte in (0x0A, 0x20, 0x41, *"é☃🙂".encode(), 0xFF, 0xC0)]
PIECES = ["<unk>", "▁", "▁▁", "▁a", "a", "b▁", "é", "##x", "c</w>", "</w>", ".", "n't", "|"]
REPLACE, FALLBACK, FUSE = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
STRIP = decoders.Strip(" ", 1, 0)
DECODERS = {
    "llama": decoders.Sequence([REPLACE, FALLBACK, FUSE, STRIP]),
    "gemma": decoders.Sequence([REPLACE, FALLBACK, FUSE]),
    "two spaces": decoders.Sequence([REPLACE, FALLBACK, FUSE, decoders.Strip(" ", 2, 0)]),
    "nested": decoders.Sequence([decoders.Sequence([REPLACE]), decoders.Sequence([FALLBACK])]),
    "metaspace": decoders.Metaspace(),
    "metaspace, never": decoders.Metaspace(prepend_scheme="never"),
    "bytes, metaspace": decoders.Sequence([FALLBACK, decoders.Metaspace()]),
    "byte level": decoders.ByteLevel(),
    "fuse": FUSE,
    "none": None,
    "wordpiece": decoders.WordPiece(),
    "bpe": decoders.BPEDecoder(),
    "ctc": decoders.CTC(),
}


def tokenizer_of(decoder):
    """A vocabulary of pieces that these decoders read in ways of their own, and special tokens."""
    vocabulary = {token: index for index, token in enumerate([*PIECES, *BYTES])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "<unk>"))
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens(["<s>", "<|é▁|>"])
    backend.add_tokens(["<think>", "▁▁▁"])
    return Tokenizer(backend)


@pytest.fixture(scope="module")
def kinds(smollm2, sentencepiece, tiny):  # noqa: F811
    """Tokenizers by name; there is one of each kind of decoder."""
    files = {"smollm2": smollm2, "sentencepiece": sentencepiece, "tiny": tiny}
    return files | {name: tokenizer_of(decoder) for name, decoder in DECODERS.items()}


def sequences(tokenizer):
    """Token ids, more often such as characters are made of; some name no token."""
    size = tokenizer.vocab_size
    some = [*range(min(size, 300)), *tokenizer.encode("👩‍👩‍👧 नम 日本")]
    return st.lists(st.sampled_from(some) | st.integers(0, size + 5), max_size=16)


@pytest.mark.parametrize("name", ["smollm2", "sentencepiece", "tiny", *DECODERS])
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_streamed_text_is_the_text_of_all_tokens(name, kinds, data):
    tokenizer = kinds[name]
    ids = data.draw(sequences(tokenizer))
    stream, text, rest = StreamDecoder(tokenizer), "", ids
    while rest:
        count = data.draw(st.integers(1, 4))
        text += stream.feed(rest[:count])
        # What was given out is what the text begins with, whatever comes.
        assert tokenizer.decode(ids).startswith(text)
        rest = rest[count:]
    whole = tokenizer.decode(ids)
    assert text + stream.flush() == whole
    if "\ufffd" not in whole or "ByteFallback" not in str(tokenizer.backend.decoder):
        assert whole == tokenizer.backend.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize(("ids", "text"), SENTENCEPIECE)
def test_bytes_are_read_as_in_sentencepiece(sentencepiece, ids, text):  # noqa: F811
    assert sentencepiece.decode(ids) == text


def test_a_line_break_stays_whatever_bytes_follow():
    tokenizer = tokenizer_of(DECODERS["llama"])
    first = len(PIECES)
    line_break, invalid = first, first + len(BYTES) - 2
    stream = StreamDecoder(tokenizer)
    assert [stream.feed([index]) for index in (line_break, invalid, 4)] == ["\n", "\ufffd", "a"]
    assert tokenizer.decode([line_break, invalid, 4]) == "\n\ufffda"
    # The package replaces both bytes.
    assert tokenizer.backend.decode([line_break, invalid, 4]) == "\ufffd\ufffda"


def test_special_tokens_are_shown_as_they_are_written():
    for decoder in DECODERS.values():
        tokenizer = tokenizer_of(decoder)
        (special,) = (i for i, text in tokenizer.detokenizer.special.items() if "é" in text)
        assert tokenizer.decode([special], skip_special_tokens=False) == "<|é▁|>"
        assert tokenizer.decode([special]) == ""


def test_what_is_no_id_is_an_error(smollm2):  # noqa: F811
    for index in (-1, 2**40):
        with pytest.raises(InputError, match="use ids of its vocabulary"):
            smollm2.decode([index])
    assert smollm2.decode([smollm2.vocab_size + 1]) == ""
