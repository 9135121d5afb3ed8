"""Tokenizers against transformers and sentencepiece, chat templates, and streaming."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from model_files import GGUF_CONFIG, GGUF_TOKENS, gguf_metadata

from specjax.errors import InputError
from specjax.loading.formats.gguf_file import open_gguf
from specjax.loading.hub import default_model_file
from specjax.loading.load import load_model, random_model, save_model
from specjax.loading.tokenizers import chat_templates
from specjax.loading.tokenizers.gguf_tokenizer import read_tokenizer
from specjax.loading.tokenizers.tokenizer import StreamDecoder

GOLDENS = Path(__file__).parent / "goldens"
SMOLLM2 = json.loads((GOLDENS / "smollm2_tokenizer.json").read_text())
SENTENCEPIECE = json.loads((GOLDENS / "sentencepiece.json").read_text())


@pytest.fixture(scope="module")
def smollm2():
    path = default_model_file()
    with open_gguf(path) as file:
        return read_tokenizer(str(path), file.metadata)


@pytest.fixture(scope="module")
def sentencepiece():
    return read_tokenizer("golden", sentencepiece_metadata())


@pytest.fixture(scope="module")
def tiny():
    return load_model(GOLDENS / "grouped_tied").tokenizer


def sentencepiece_metadata(**extra):
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": SENTENCEPIECE["tokens"],
        "tokenizer.ggml.scores": np.array(SENTENCEPIECE["scores"], np.float32),
        "tokenizer.ggml.token_type": np.array(SENTENCEPIECE["kinds"], np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    } | {f"tokenizer.ggml.{key}": value for key, value in extra.items()}


def byte_level(pre, **extra):
    """The tokenizer of the tiny GGUF files, with another pre-tokenizer."""
    keys = gguf_metadata() | {"tokenizer.ggml.pre": pre}
    keys |= {f"tokenizer.ggml.{key}": value for key, value in extra.items()}
    for key, value in keys.items():
        if isinstance(value, np.generic):
            keys[key] = value.item()
    keys["tokenizer.ggml.token_type"] = np.array(keys["tokenizer.ggml.token_type"], np.int32)
    return read_tokenizer("tiny", keys)


@pytest.mark.parametrize("line", SMOLLM2["lines"], ids=lambda line: line["text"][:12])
def test_the_default_model_tokenizes_as_in_transformers(smollm2, line):
    assert smollm2.encode(line["text"]) == line["ids"]
    assert smollm2.decode(line["ids"]) == line["decoded"]


@pytest.mark.parametrize("conversation", SMOLLM2["chats"])
def test_the_default_model_formats_chats_as_in_transformers(smollm2, conversation):
    assert smollm2.apply_chat_template(conversation["messages"]) == conversation["text"]
    assert smollm2.encode_chat(conversation["messages"]) == conversation["ids"]


def test_the_default_model_knows_its_special_tokens(smollm2):
    assert smollm2.vocab_size == 49152
    assert smollm2.token(smollm2.bos_id) == "<|im_start|>"
    ends = [smollm2.token(index) for index in smollm2.eos_ids]
    assert ends == ["<|im_end|>", "<|endoftext|>", "<reponame>"]
    # Each numeral is a piece of its own, whatever its script and the space before it.
    assert [smollm2.decode([index]) for index in smollm2.encode("7 12²")] == list("7 12²")


def test_a_directory_tokenizes_as_in_transformers(tiny):
    golden = json.loads((GOLDENS / "grouped_tied" / "golden.json").read_text())
    for text, ids in golden["ids"].items():
        assert tiny.encode(text) == ids
    # The template writes bos itself: there must not be a second one.
    assert tiny.encode_chat(golden["chat"]) == golden["chat_ids"]
    assert tiny.eos_ids == (1, 2)


@pytest.mark.parametrize("line", SENTENCEPIECE["lines"].items(), ids=lambda line: line[0][:12])
def test_scores_merge_as_in_sentencepiece(sentencepiece, line):
    text, ids = line
    assert sentencepiece.encode(text) == [1, *ids]
    assert sentencepiece.decode(ids) == text


def test_sentencepiece_flags_are_followed():
    plain = read_tokenizer("golden", sentencepiece_metadata(add_bos_token=False))
    assert plain.encode("the fox") == SENTENCEPIECE["lines"].get("the fox", plain.encode("the fox"))
    assert plain.decode(plain.encode("the fox")) == "the fox"
    bare = read_tokenizer(
        "golden", sentencepiece_metadata(add_bos_token=False, add_space_prefix=False)
    )
    assert bare.encode("▁the") == plain.encode("the")
    assert bare.decode(bare.encode(" the fox")) == " the fox"


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["It", "'s", "ĠI", "'", "M", "Ġ12345", "!", "Ċ", "Ċ", "x"]),
        ("smollm", ["It", "'s", "ĠI", "'", "M", "Ġ", "1", "2", "3", "4", "5", "!", "Ċ", "Ċ", "x"]),
        ("qwen2", ["It", "'s", "ĠI", "'M", "Ġ", "1", "2", "3", "4", "5", "!ĊĊ", "x"]),
        ("llama-bpe", ["It", "'s", "ĠI", "'M", "Ġ", "123", "45", "!ĊĊ", "x"]),
    ],
)
def test_each_vocabulary_is_split_its_own_way(pre, pieces):
    tokenizer = byte_level(pre)
    split = tokenizer.backend.pre_tokenizer.pre_tokenize_str("It's I'M 12345!\n\nx")
    assert [piece for piece, _ in split] == pieces
    assert tokenizer.encode("") == ([tokenizer.bos_id] if pre == "llama-bpe" else [])


def test_ends_of_turn_end_a_sequence():
    tokenizer = byte_level("smollm", eos_token_id=0, eot_token_id=1)
    assert [tokenizer.token(index) for index in tokenizer.eos_ids] == [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
    ]


def test_a_gguf_tokenizer_survives_saving(tmp_path):
    tokenizer = dataclasses.replace(
        byte_level("llama-bpe"), chat_template="{{ bos_token }}{{ messages[0].content }}"
    )
    config = dataclasses.replace(GGUF_CONFIG, num_layers=1)
    save_model(random_model(config, 0, tokenizer), tmp_path / "model")
    again = load_model(tmp_path / "model").tokenizer
    assert again.first_difference(tokenizer) is None
    for field in ("bos_id", "eos_ids", "chat_template", "special_tokens"):
        assert getattr(again, field) == getattr(tokenizer, field)
    text = "the thin end<|im_end|> 123"
    assert again.encode(text) == tokenizer.encode(text)


def test_no_half_character_is_ever_shown(smollm2):
    text = "👩‍👩‍👧‍👦 नमस्ते 你好"
    stream = StreamDecoder(smollm2)
    pieces = [stream.feed([index]) for index in smollm2.encode(text)]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert stream.flush() == ""


def test_the_first_differing_token_is_shown(tiny, smollm2):
    assert smollm2.first_difference(smollm2) is None
    assert tiny.first_difference(smollm2) == "token 0 is '<s>' against '<|endoftext|>'"
    longer = byte_level(
        "smollm",
        tokens=[*GGUF_TOKENS, "xyz"],
        token_type=[1] * (len(GGUF_TOKENS) + 1),
    )
    assert "264 tokens" in byte_level("smollm").first_difference(longer)
    assert "263 'xyz'" in byte_level("smollm").first_difference(longer)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "text",
        ["text"],
        [{"role": "user"}],
        [{"role": "user", "content": 3}],
        [{"role": "system", "content": "be brief"}],
        [{"role": "user\n", "content": "x"}],
    ],
)
def test_bad_messages_are_one_line_errors(tiny, messages):
    with pytest.raises(InputError) as error:  # noqa: PT012 - either may refuse them
        chat_templates.check_messages(messages)
        tiny.encode_chat(messages)
    assert "\n" not in str(error.value)


def test_a_model_without_a_template_says_so(sentencepiece):
    with pytest.raises(InputError, match="no chat template"):
        sentencepiece.encode_chat([{"role": "user", "content": "x"}])


MESSAGES = [{"role": "user", "content": "<b>é"}]


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ messages | tojson }}", '[{"role": "user", "content": "<b>é"}]'),
        ("{{ messages[0] | tojson(indent=1) }}", '{\n "role": "user",\n "content": "<b>é"\n}'),
        ("{% for m in messages %}\n  {% if true %}\nx\n  {% endif %}\n{% endfor %}", "x\n"),
        ("{% for m in [1, 2, 3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}", "1"),
        ("{% generation %}{{ messages[0].role }}{% endgeneration %}", "user"),
        ("{{ bos_token }}|{{ tools is none }}|{{ add_generation_prompt }}", "<s>|True|True"),
        ("{{ strftime_now('%Y')[:2] }}", "20"),
        ("{% set ns = namespace(n=0) %}{% set ns.n = 2 %}{{ ns.n }}", "2"),
    ],
)
def test_templates_have_what_transformers_gives_them(template, text):
    assert chat_templates.render(template, MESSAGES, {"bos_token": "<s>"}) == text


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__.items() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ raise_exception('two\nlines') }}",
        "{{ 1 / 0 }}",
        "{% if %}",
        "{{ undefined.field }}",
    ],
)
def test_templates_cannot_leave_the_sandbox(template):
    with pytest.raises(InputError, match=r"^chat template: .*") as error:
        chat_templates.render(template, MESSAGES, {})
    assert "\n" not in str(error.value)


def test_half_a_surrogate_pair_is_an_error(tiny):
    for encode in (tiny.encode, lambda text: tiny.encode_chat([{"role": "user", "content": text}])):
        with pytest.raises(InputError, match="half of a surrogate"):
            encode("ab\ud83d")


def test_ids_outside_the_vocabulary_are_errors(tiny):
    with pytest.raises(InputError, match="token id 80"):
        tiny.token(80)
    with pytest.raises(InputError, match="eos_ids=99"):
        dataclasses.replace(tiny, eos_ids=(99,))
