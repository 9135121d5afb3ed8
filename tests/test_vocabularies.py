"""What a tokenizer adds to a text, what ends one, and which ids are vocabulary.

Goldens are from transformers and llama.cpp (`scripts/data/make_vocabulary_goldens.py`).
"""

import dataclasses
import json
from pathlib import Path

import gguf_files
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from specjax.loading.tokenizers import gguf_tokenizer, huggingface_tokenizer

GOLDENS = Path(__file__).parent / "goldens"
GOLDEN = json.loads((GOLDENS / "vocabularies.json").read_text())
SENTENCEPIECE = json.loads((GOLDENS / "sentencepiece.json").read_text())
BASE, TEXTS, LLAMA_CPP = GOLDEN["base"], GOLDEN["texts"], GOLDEN["llama_cpp"]
TOKENS, SPECIAL = BASE["tokens"], BASE["special"]
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5


def write_directory(path, tokens=TOKENS, *, added=(), post_processor=None, **settings):
    """A tokenizer in Hugging Face's layout; `added` are pairs of a token and whether special."""
    path.mkdir(exist_ok=True)
    backend = tokenizers.Tokenizer(
        models.BPE(
            {token: index for index, token in enumerate(tokens)},
            [tuple(merge.split(" ")) for merge in BASE["merges"]],
        )
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    for token, special in added:
        one = tokenizers.AddedToken(token, normalized=False, special=special)
        (backend.add_special_tokens if special else backend.add_tokens)([one])
    content = json.loads(backend.to_str()) | {"post_processor": post_processor}
    (path / "tokenizer.json").write_text(json.dumps(content))
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def read_gguf(tokens=TOKENS, kinds=None, **keys):
    """The tokenizer of a GGUF file of byte-level BPE."""
    if kinds is None:
        kinds = [CONTROL] * len(SPECIAL) + [NORMAL] * (len(tokens) - len(SPECIAL))
    keys = {"model": "gpt2", "merges": BASE["merges"], "bos_token_id": 0, "eos_token_id": 2} | keys
    metadata = {"tokens": tokens, "token_type": np.array(kinds, np.int32), **keys}
    return gguf_tokenizer.read_tokenizer(
        "golden", {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    )


@pytest.mark.parametrize("case", GOLDEN["directories"], ids=lambda case: case["name"])
def test_texts_begin_and_end_as_in_transformers(tmp_path, case):
    write_directory(tmp_path, post_processor=case["post_processor"], **case["settings"])
    tokenizer = huggingface_tokenizer.read_tokenizer(tmp_path)
    assert tokenizer.encode("ab") == case["ids"]
    assert tokenizer.encode_chat([{"role": "user", "content": "ab"}]) == case["chat_ids"]
    # And so they do when it was saved.
    huggingface_tokenizer.write_tokenizer(tokenizer, tmp_path)
    assert huggingface_tokenizer.read_tokenizer(tmp_path).encode("ab") == case["ids"]


@pytest.mark.parametrize("name", LLAMA_CPP["splits"])
def test_texts_are_split_as_in_llama_cpp(name):
    # Files without the key are split as "default".
    tokenizer = read_gguf(**({} if name == "default" else {"pre": name}))
    plain = [tokenizer.encode(text) for text in TEXTS]
    assert plain == LLAMA_CPP["splits"][name]
    assert read_gguf(pre=name).encode(TEXTS[0]) == plain[0]


@pytest.mark.parametrize("case", LLAMA_CPP["added"], ids=lambda case: str(case["keys"]))
def test_gguf_texts_begin_and_end_as_in_llama_cpp(case):
    assert read_gguf(**case["keys"]).encode(TEXTS[0]) == case["ids"]


@pytest.mark.parametrize("case", LLAMA_CPP["sentencepiece"], ids=lambda case: str(case["keys"]))
def test_sentencepiece_texts_begin_and_end_as_in_llama_cpp(case):
    keys = {
        "model": "llama",
        "tokens": SENTENCEPIECE["tokens"],
        "scores": np.array(SENTENCEPIECE["scores"], np.float32),
        "token_type": np.array(SENTENCEPIECE["kinds"], np.int32),
    } | case["keys"]
    metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    tokenizer = gguf_tokenizer.read_tokenizer("golden", metadata)
    assert [tokenizer.encode(text) for text in TEXTS] == case["ids"]
    assert sorted(tokenizer.eos_ids) == case["ends"]


QUIET = [f"<|special_{index}|>" for index in range(len(SPECIAL))] + TOKENS[len(SPECIAL) :]
"""The vocabulary without names of ends."""


def ends_of(tokenizer):
    return sorted(tokenizer.token(index) for index in tokenizer.eos_ids)


@pytest.mark.parametrize("case", LLAMA_CPP["ends_by_name"])
def test_tokens_end_a_sequence_by_their_names(tmp_path, case):
    """As in llama.cpp, and from a directory as from a GGUF; but `</s>` in HTML ends nothing."""
    name, kind = case.rsplit(" ", 1)
    wanted = LLAMA_CPP["ends_by_name"][case]
    if (name, int(kind)) == ("</s>", USER_DEFINED):
        wanted = []
    kinds = [CONTROL] * len(SPECIAL) + [NORMAL] * (len(QUIET) - len(SPECIAL))
    tokenizer = read_gguf([*QUIET, name], [*kinds, int(kind)])
    assert ends_of(tokenizer) == sorted([*wanted, QUIET[2]])
    if wanted:
        # It is found whole in a text, whatever its type.
        assert tokenizer.encode(f"a{name}")[-1] == len(QUIET)
    added = [] if int(kind) == NORMAL else [(name, int(kind) == CONTROL)]
    tokens = [*QUIET, name] if int(kind) == NORMAL else QUIET
    write_directory(tmp_path, tokens, added=added)
    found = ends_of(huggingface_tokenizer.read_tokenizer(tmp_path))
    assert [end for end in found if end not in SPECIAL or end == name] == wanted


@pytest.mark.parametrize("case", LLAMA_CPP["ends_of_several"], ids=lambda case: str(case["ends"]))
def test_some_names_are_parts_of_a_turn_beside_others(case):
    kinds = [CONTROL] * len(SPECIAL) + [NORMAL] * (len(QUIET) - len(SPECIAL))
    names, types = zip(*case["tokens"], strict=True)
    assert ends_of(read_gguf([*QUIET, *names], [*kinds, *types])) == sorted(
        [*case["ends"], QUIET[2]]
    )


@pytest.mark.parametrize("case", LLAMA_CPP["ends_by_key"], ids=lambda case: case["key"])
def test_every_key_of_an_end_counts(case):
    tokenizer = read_gguf([*QUIET, "<end>"], **{case["key"]: len(QUIET)})
    assert tokenizer.eos_ids == (2, len(QUIET))
