"""What a tokenizer adds to a text, what ends one, and which ids are vocabulary.

Goldens are from transformers and llama.cpp (`scripts/data/make_vocabulary_goldens.py`).
"""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import tokenizers
from model_files import (
    GGUF_TOKENS,
    GOLDENS,
    WEIGHTS,
    edit_json,
    edit_tensors,
    gguf_metadata,
    gguf_tensors,
    write_gguf,
)
from tokenizers import decoders, models, pre_tokenizers

from specjax.apps.run.decode import _ends_and_beginning
from specjax.engine.generate import generate
from specjax.engine.requests import SamplingParams
from specjax.errors import InputError
from specjax.files.folder_checksums import MARKER
from specjax.loading.checkpoints import save_checkpoint
from specjax.loading.load import load_model, save_model, with_vocabulary
from specjax.loading.tokenizers import gguf_tokenizer, huggingface_tokenizer
from specjax.methods.heads.head import TargetMetadata
from specjax.methods.make import make_drafter

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


@pytest.mark.parametrize(
    ("name", "same"),
    [("mellum", "gpt-2"), ("gigachat", "gpt-2"), ("a.x-4.0", "gpt-2"), ("kormo", "qwen2")],
)
def test_names_that_llama_cpp_splits_alike(name, same):
    texts = [read_gguf(pre=name).encode(text) for text in TEXTS]
    assert texts == LLAMA_CPP["splits"][same]


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


def padding(first, count):
    """Entries that fill rows, as converters write them."""
    return [f"[PAD{index}]" for index in range(first, first + count)]


def write_padded(path, rows, *, kind=UNUSED, extra=(), seed=0):
    """A tiny GGUF model of `rows` rows; those after its tokens have none. `extra` are tokens."""
    tokens = [*GGUF_TOKENS, *extra]
    fill = rows - len(tokens)
    keys = gguf_metadata()
    types = [*keys["tokenizer.ggml.token_type"], *([CONTROL] * len(extra)), *([kind] * fill)]
    arrays = gguf_tensors(seed=seed)
    embedding = arrays["token_embd.weight"]
    # What would be produced if it could: every row beyond is a large one.
    beyond = np.tile(20 * embedding[:1], (rows - len(embedding), 1))
    keys |= {
        "tokenizer.ggml.tokens": [*tokens, *padding(len(tokens), fill)],
        "tokenizer.ggml.token_type": types,
    }
    arrays |= {"token_embd.weight": np.vstack([embedding, beyond])}
    return write_gguf(path, keys, arrays)


def as_directory(model, path, rows):
    """The model as another tool would save it, its embedding padded to `rows` rows."""
    save_model(model, path / "ours")
    path = shutil.copytree(path / "ours", path / "foreign")

    def pad(tensors):
        name = "model.embed_tokens.weight"
        fill = ((0, rows - len(tensors[name])), (0, 0))
        return tensors | {name: np.pad(tensors[name], fill, constant_values=9)}

    edit_tensors(path / WEIGHTS, pad)
    edit_json(path / "config.json", vocab_size=rows)
    (path / MARKER).unlink()
    return path


def with_names(path):
    """The directory with padding in its tokenizer, as a tool writes it that has read a GGUF."""
    state = json.loads((path / "tokenizer.json").read_text())
    state["model"]["vocab"] |= {token: V + index for index, token in enumerate(padding(V, 3))}
    (path / "tokenizer.json").write_text(json.dumps(state))
    return path


V = len(GGUF_TOKENS)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    path = tmp_path_factory.mktemp("plain") / "a.gguf"
    keys, arrays = gguf_metadata(), gguf_tensors()
    return load_model(write_gguf(path, keys, arrays))


@pytest.fixture(scope="module")
def padded(plain, tmp_path_factory):
    """The same model with other rows beyond its tokens, by what it is written as."""
    path = tmp_path_factory.mktemp("padded")
    return {
        "unused": load_model(write_padded(path / "a.gguf", V + 9)),
        "user defined": load_model(write_padded(path / "b.gguf", V + 30, kind=USER_DEFINED)),
        "directory": load_model(as_directory(plain, path, V + 17)),
        "named in tokenizer.json": load_model(with_names(as_directory(plain, path / "c", V + 3))),
    }


@pytest.mark.parametrize("name", ["unused", "user defined", "directory", "named in tokenizer.json"])
def test_rows_without_a_token_are_no_vocabulary(plain, padded, name):
    other = padded[name]
    assert other.config == plain.config
    assert TargetMetadata.of(other) == dataclasses.replace(
        TargetMetadata.of(plain), name=other.name
    )
    assert other.tokenizer.first_difference(plain.tokenizer) is None
    assert other.ends == plain.ends
    np.testing.assert_array_equal(other.params["head"]["kernel"], plain.params["head"]["kernel"])
    # Kept for drafters whose mask token is one of them.
    assert plain.padding_embeddings is None
    count = {"unused": 9, "user defined": 30, "directory": 17}.get(name, 3)
    assert other.padding_embeddings.shape == (count, plain.config.hidden_size)
    drafter = make_drafter("draft_model", other, plain, num_speculative_tokens=2)
    assert drafter.drafter.model.vocab_size == V


@pytest.fixture(scope="module")
def gapped(tmp_path_factory):
    """A model with two rows without a token in the middle: by GGUF, and from a directory."""
    path = tmp_path_factory.mktemp("gapped")
    return load_model(write_padded(path / "a.gguf", V + 5, extra=[*padding(V, 2), "<tool>"]))


def decode(model, prompt, *, count=12, ignore_eos=True, temperature=0.0, **options):
    sampling = SamplingParams(max_new_tokens=count, ignore_eos=ignore_eos, temperature=temperature)
    return list(generate(model, [prompt], sampling=sampling, **options).token_ids[0])


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.5}], ids=["greedy", "sampled"])
def test_an_id_without_a_token_in_the_middle_is_never_produced(gapped, sampling):
    assert gapped.config.vocab_size == V + 3
    assert gapped.config.unused_tokens == (V, V + 1)
    assert not {V, V + 1} & set(decode(gapped, [3, 4, 5], **sampling))
    with pytest.raises(InputError, match=f"token id {V} names no token"):
        decode(gapped, [3, V])


def test_gaps_stay_when_a_model_is_saved(gapped, tmp_path):
    save_model(gapped, tmp_path / "model")
    save_checkpoint(gapped, tmp_path / "checkpoint")
    for name in ("model", "checkpoint"):
        again = load_model(tmp_path / name)
        assert again.config == gapped.config
        assert again.tokenizer.vocabulary_hash == gapped.tokenizer.vocabulary_hash
        assert again.ends == gapped.ends


def test_models_with_other_tokens_at_the_end_draft_for_each_other(plain, gapped):
    longer, shorter = with_vocabulary(plain, V + 3), with_vocabulary(gapped, V)
    assert longer.config.unused_tokens == (V, V + 1, V + 2)
    for model, own in ((longer, plain), (shorter, gapped)):
        kernels = (one.params["head"]["kernel"][:, :V] for one in (model, own))
        np.testing.assert_array_equal(*kernels)
    assert not np.any(longer.params["head"]["kernel"][:, V:])
    # The draft model reads a token that it does not have.
    prompt = [3, 4, V + 2]
    drafter = make_drafter("draft_model", gapped, plain, num_speculative_tokens=2)
    assert decode(gapped, prompt, drafter=drafter) == decode(gapped, prompt)


def test_a_token_without_a_row_is_refused_by_name(plain, tmp_path):
    """As Gemma 3 up to 1B has: 262,145 tokens, 262,144 rows."""
    path = as_directory(plain, tmp_path, V)
    state = json.loads((path / "tokenizer.json").read_text())
    image = dict(state["added_tokens"][0]) | {"id": V, "content": "<image>", "special": True}
    state["added_tokens"].append(image | {"content": "[PAD]", "id": V + 1})
    state["added_tokens"].insert(-1, image)
    (path / "tokenizer.json").write_text(json.dumps(state))
    model = load_model(path)
    assert model.config == plain.config
    assert model.tokenizer.vocabulary_hash == plain.tokenizer.vocabulary_hash
    assert model.ends == plain.ends  # not at [PAD]
    for prompt in ("an <image>", [3, V]):
        with pytest.raises(InputError, match="no row.*<image>|<image>.*no row"):
            decode(model, prompt)
    save_model(model, tmp_path / "again")
    save_checkpoint(model, tmp_path / "checkpoint")
    for name in ("again", "checkpoint"):
        again = load_model(tmp_path / name)
        assert again.config == plain.config
        with pytest.raises(InputError, match="<image>"):
            again.tokenizer.encode("an <image>")


def test_a_tokenizer_of_another_model_is_refused(plain, tmp_path):
    path = as_directory(plain, tmp_path, V)
    edit_json(path / "config.json", vocab_size=V - 2)
    with pytest.raises(InputError, match=rf"vocab_size={V - 2}, but the tokenizer has {V} tokens"):
        load_model(path)


def test_a_model_ends_alike_from_a_gguf_and_from_its_directory(tmp_path):
    names = ["<end_of_turn>", "<|eom_id|>"]
    gguf_model = load_model(write_padded(tmp_path / "a.gguf", V + 4, extra=names))
    path = as_directory(gguf_model, tmp_path, V + 4)
    (path / "generation_config.json").unlink()
    for config in ({}, {"eos_token_id": 0}, {"eos_token_id": [2, 0, V]}):
        edit_json(path / "config.json", **{"eos_token_id": None, **config})
        assert set(load_model(path).ends) == set(gguf_model.ends) == {2, 0, V, V + 1}
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [V, 7]}))
    assert load_model(path).ends == (2, V, 7, 0, V + 1)


def test_a_model_without_a_tokenizer_keeps_its_ends(plain, tmp_path):
    path = as_directory(dataclasses.replace(plain, tokenizer=None), tmp_path, V)
    edit_json(path / "config.json", eos_token_id=[5, 6])
    model = load_model(path)
    assert model.ends == (5, 6)
    first = decode(model, [3, 4], count=4)
    model = dataclasses.replace(model, stated_ends=(first[2],))
    stopped = decode(model, [3, 4], count=4, ignore_eos=False)
    assert stopped == first[: first.index(first[2]) + 1]
    save_model(model, tmp_path / "saved")
    save_checkpoint(model, tmp_path / "checkpoint")
    for name in ("saved", "checkpoint"):
        assert load_model(tmp_path / name).ends == (first[2],)


def test_what_config_json_has_by_default_ends_nothing(tmp_path, caplog):
    """GPT2Config states 50256, of whatever vocabulary the model is."""
    write_directory(tmp_path, bos_token="", eos_token=TOKENS[5])
    (tmp_path / "config.json").write_text('{"eos_token_id": [50256, 4]}')
    assert huggingface_tokenizer.read_tokenizer(tmp_path).eos_ids[:2] == (5, 4)
    (line,) = caplog.messages
    says = f"eos_token_id=50256 is outside the vocabulary of {len(TOKENS)} tokens, and ends no row"
    assert line == f"{tmp_path / 'config.json'}: {says}"
    caplog.clear()
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 2}')
    read = huggingface_tokenizer.read_tokenizer(tmp_path)
    assert read.eos_ids[:3] == (5, 2, 4)
    assert read.special_tokens == (("eos_token", TOKENS[5]),)
    assert not caplog.messages


@pytest.mark.parametrize("value", [50256, [151329, 151336, -1], 10**4000])
def test_ends_outside_of_the_vocabulary_are_said_and_end_nothing(plain, tmp_path, value, caplog):
    """As transformers writes tiny models of GPT-2 and GLM-4, with and without a tokenizer."""
    path = as_directory(dataclasses.replace(plain, tokenizer=None), tmp_path, V)
    (path / "generation_config.json").write_text("{}")
    for name in ("config.json", "generation_config.json"):
        edit_json(path / name, eos_token_id=value)
    model = load_model(path)
    assert model.ends == ()
    said = [line for line in caplog.messages if "eos_token_id" in line]
    assert len(said) == (3 if isinstance(value, list) else 1)
    assert all(f"is outside the vocabulary of {V} tokens" in line for line in said)
    assert len(decode(model, [3, 4], count=4)) == 4
    edit_json(path / "generation_config.json", eos_token_id=[6, 50256])
    assert load_model(path).ends == (6,)


def test_ends_of_a_gguf_outside_of_its_vocabulary_are_said(caplog):
    """As llama.cpp does. A padding token is used by nothing; the first token must be there."""
    far = 2**32 - 1
    read = read_gguf(eot_token_id=far, padding_token_id=far)
    assert read.eos_ids == read_gguf().eos_ids
    assert read.special_tokens == read_gguf().special_tokens
    assert caplog.messages == [
        f"golden: tokenizer.ggml.eot_token_id={far} is outside the vocabulary of "
        f"{len(TOKENS)} tokens, and ends no row"
    ]
    assert read_gguf(eos_token_id=far, add_eos_token=True).encode("ab") == read_gguf().encode("ab")
    with pytest.raises(InputError, match=f"bos_token_id={far}: is outside"):
        read_gguf(bos_token_id=far)


def test_the_command_says_where_a_model_ends_and_begins(plain):
    line = _ends_and_beginning(plain)
    assert line == "ends at <|im_end|> (2), <|endoftext|> (0); nothing is added to raw text"
