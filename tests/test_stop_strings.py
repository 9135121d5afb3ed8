"""Stop strings in an output that grows: as in all of its text, and at a cost that does not grow."""

import dataclasses

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tokenizer import sentencepiece, smollm2, tiny  # noqa: F401 - fixtures

from specjax.decoding.engine.stop_strings import StopFinder, first_stop
from specjax.loading.tokenizers.tokenizer import Tokenizer

TEXT = "The naïve café, 12 €: 日本語 👩‍👩‍👧 <|im_end|> é  end\n\nx"


@pytest.fixture(scope="module")
def metaspace():
    """Pieces that begin with a space, which the first one drops, and bytes where there is none."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["\u2581", "\u2581a", "a", "b", "ab", "\u2581ab", "\u2581b", "ba", "\u00e9", "."]
    scores = [(piece, -1.0 - 0.1 * number) for number, piece in enumerate(pieces)]
    backend = tokenizers.Tokenizer(tokenizers.models.Unigram(scores, 0, byte_fallback=True))
    backend.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("\u2581", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    return Tokenizer(backend)


def by_full_decode(tokenizer, tokens, stops):
    """The first number of tokens whose text has a stop string."""
    for count in range(1, len(tokens) + 1):
        if first_stop(tokenizer.decode(tokens[:count]), stops) is not None:
            return count
    return None


@pytest.mark.parametrize("name", ["smollm2", "sentencepiece", "tiny", "metaspace"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_found_where_the_whole_text_first_has_one(name, request, data):
    tokenizer = request.getfixturevalue(name)
    some = tokenizer.encode(TEXT) + list(range(min(40, tokenizer.vocab_size)))
    ids = st.sampled_from(some) | st.integers(0, tokenizer.vocab_size - 1)
    tokens = data.draw(st.lists(ids, min_size=1, max_size=24))
    if data.draw(st.booleans()):
        tokens = tokenizer.encode(TEXT)[: len(tokens)]
    text = tokenizer.decode(tokens)

    def substring(start, length):
        return text[start : start + length]

    found = st.builds(substring, st.integers(0, len(text)), st.integers(1, 5))
    stops = data.draw(st.lists(found | st.text(min_size=1, max_size=2), min_size=1, max_size=3))
    # What an unfinished character is shown as is no part of the output yet.
    stops = [stop for stop in stops if stop and "\ufffd" not in stop]
    if not stops:
        return
    steps = data.draw(st.lists(st.integers(1, 6), min_size=24, max_size=24))
    finder, got, first = StopFinder(tokenizer, stops), None, 0
    for step in steps:
        got = finder.find(tokens[first : first + step])
        first += step
        if got is not None or first >= len(tokens):
            break
    assert got == by_full_decode(tokenizer, tokens, stops)


def test_a_character_of_several_tokens_completes_a_stop_string(smollm2):  # noqa: F811
    tokens = smollm2.encode("ok 日x")
    assert len(tokens) > 4
    whole = by_full_decode(smollm2, tokens, ["日"])
    finder = StopFinder(smollm2, ["日"])
    assert [finder.find([token]) for token in tokens[:whole]] == [None] * (whole - 1) + [whole]


def test_each_token_is_decoded_about_once(smollm2):  # noqa: F811
    decoded = []

    class Counting(Tokenizer):
        def decode(self, ids, **options):
            ids = list(ids)
            decoded.append(len(ids))
            return super().decode(ids, **options)

    fields = {one.name: getattr(smollm2, one.name) for one in dataclasses.fields(smollm2)}
    finder = StopFinder(Counting(**fields), ["never there"])
    tokens = smollm2.encode(TEXT * 20)
    for token in tokens:
        assert finder.find([token]) is None
    assert sum(decoded) < 8 * len(tokens)
