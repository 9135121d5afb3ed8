"""Stop strings in an output that grows: as in all of its text, special tokens included."""

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tokenizer import sentencepiece, smollm2, tiny  # noqa: F401 - fixtures

from specjax.engine.rows import OutputText
from specjax.loading.tokenizers.detokenizer import Detokenizer
from specjax.loading.tokenizers.tokenizer import StreamDecoder, Tokenizer

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


def whole_texts(tokenizer, tokens):
    """After each token: the text that is shown, and the one with special tokens, whose characters
    have the index in the shown one."""
    stream, shown, whole = StreamDecoder(tokenizer), "", []
    for token in tokens:
        fresh = stream.feed([token])
        whole = whole + [(char, len(shown) + at) for at, char in enumerate(fresh)]
        shown += fresh
        if token in tokenizer.detokenizer.special:
            whole += [(char, len(shown)) for char in tokenizer.token(token)]
        yield shown, whole


def characters_of(whole):
    return "".join(char for char, _ in whole)


def first_stop(tokenizer, tokens, stops):
    """The first number of tokens whose text has a stop string, and the text before it."""
    for count, (shown, whole) in enumerate(whole_texts(tokenizer, tokens), 1):
        characters = characters_of(whole)
        starts = [shown.find(stop) for stop in stops if stop in shown]
        starts += [whole[characters.find(stop)][1] for stop in stops if stop in characters]
        if starts:
            return count, shown[: min(starts)]
    return len(tokens), tokenizer.decode(tokens)


def followed(tokenizer, tokens, stops, steps):
    """Tokens that an output keeps, and the pieces of its text, given in steps."""
    output, pieces, kept = OutputText(tokenizer, stops), [], 0
    for step in steps:
        part = tokens[kept : kept + step]
        kept += output.feed(part)
        pieces.append(output.take(ended=output.stopped))
        if output.stopped or not part:
            break
    return kept, [*pieces, output.take(ended=True)]


@pytest.mark.parametrize("name", ["smollm2", "sentencepiece", "tiny", "metaspace"])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_found_where_the_whole_text_first_has_one(name, request, data):
    tokenizer = request.getfixturevalue(name)
    special = list(tokenizer.detokenizer.special)
    some = tokenizer.encode(TEXT) + special + list(range(min(40, tokenizer.vocab_size)))
    ids = st.sampled_from(some) | st.integers(0, tokenizer.vocab_size - 1)
    tokens = data.draw(st.lists(ids, min_size=1, max_size=24))
    if data.draw(st.booleans()):
        tokens = tokenizer.encode(TEXT)[: len(tokens)]
    *_, (shown, whole) = whole_texts(tokenizer, tokens)
    text = data.draw(st.sampled_from([shown, characters_of(whole)]))

    def substring(start, length):
        return text[start : start + length]

    found = st.builds(substring, st.integers(0, len(text)), st.integers(1, 16))
    stops = data.draw(st.lists(found | st.text(min_size=1, max_size=2), min_size=1, max_size=3))
    stops = [stop for stop in stops if stop]
    steps = data.draw(st.lists(st.integers(1, 6), min_size=24, max_size=24))
    kept, pieces = followed(tokenizer, tokens, stops, steps)
    assert (kept, "".join(pieces)) == first_stop(tokenizer, tokens, stops)


@pytest.mark.parametrize(
    ("text", "stop", "before"),
    [
        ("Fine.<|im_end|>\nmore", "<|im_end|>", "Fine."),
        ("Fine.\n<|im_start|>user\nAnd", "\n<|im_start|>user", "Fine."),
        ("Fine.<|im_end|>\n<|im_start|>user\n", "<|im_end|>\n<|im_start|>", "Fine."),
        ("Fi<|im_start|>ne.", "ine", "F"),
        ("Fine, |im_end", "im_end|", "Fine, |im_end"),
        ("<|endoftext|>Fine.", "<|endoftext|>", ""),
        ("Fi<|im_end|>ne.", "n", "Fi"),
        ("12345678", "1234567", ""),
    ],
)
def test_a_stop_string_may_be_or_contain_a_special_token(smollm2, text, stop, before):  # noqa: F811
    tokens = smollm2.encode(text)
    for steps in ([1] * len(tokens), [3] * len(tokens), [len(tokens)]):
        kept, pieces = followed(smollm2, tokens, [stop, "never there"], steps)
        assert "".join(pieces) == before
        assert (kept == len(tokens)) == (before == smollm2.decode(tokens))


def test_text_that_may_become_a_stop_string_is_kept_back(smollm2):  # noqa: F811
    output, text = OutputText(smollm2, ["\n<|im_start|>user"]), ""
    for token in smollm2.encode("Fine.\n<|im_start|>"):
        assert output.feed([token]) == 1
        text += output.take(ended=False)
        assert "Fine.".startswith(text)
    assert text + output.take(ended=True) == "Fine.\n"


def test_a_character_of_several_tokens_completes_a_stop_string(smollm2):  # noqa: F811
    tokens = smollm2.encode("ok 日x")
    output = OutputText(smollm2, ["日"])
    stopped = []
    for token in tokens[:-1]:
        assert output.feed([token]) == 1
        stopped.append(output.stopped)
    assert stopped == [False] * (len(tokens) - 2) + [True]
    assert output.take(ended=True) == "ok "


def test_an_unfinished_character_is_part_of_no_stop_string(smollm2):  # noqa: F811
    tokens = smollm2.encode("日")
    output = OutputText(smollm2, ["\ufffd"])
    assert output.feed(tokens[:-1]) == len(tokens) - 1
    assert not output.stopped
    assert output.take(ended=True) == "\ufffd"


def test_tokens_are_looked_up_once(smollm2, monkeypatch):  # noqa: F811
    looked_up = []
    piece = Detokenizer.piece

    def counted(detokenizer, index, previous):
        looked_up.append(index)
        return piece(detokenizer, index, previous)

    monkeypatch.setattr(Detokenizer, "piece", counted)
    output = OutputText(smollm2, ["never there"])
    tokens = smollm2.encode("a long text " * 200)
    for token in tokens:
        output.feed([token])
        assert len(output._whole) < len("never there")
    assert looked_up == tokens
