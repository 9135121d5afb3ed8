"""Draft models with another tokenizer: which tokens are common, and what is drafted."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from bad_input import refused
from conftest import tiny_config
from decoding import decode
from test_structured_output import bytes_tokenizer

from specjax import SamplingParams, generate
from specjax.diagnosis import diagnose
from specjax.drafters import make_drafter
from specjax.loading.load import random_model
from specjax.loading.tokenizers.tokenizer import Tokenizer
from specjax.methods.draft_model.other_tokenizer import TranslatedModel, token_map


def sentencepiece_tokenizer():
    """A vocabulary of pieces with spaces, bytes, and an end of its own."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "a", "b", "ab", "▁a", "name", '":', "é"]
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=[],
            byte_fallback=True,
        )
    )
    backend.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(backend, eos_ids=(2,))


def model_of(tokenizer, seed):
    config = tiny_config(vocab_size=tokenizer.vocab_size)
    return random_model(config, seed, tokenizer, dtype="float32")


@pytest.fixture(scope="module")
def pair():
    """A target and a draft model with other tokenizers."""
    return model_of(bytes_tokenizer(), 0), model_of(sentencepiece_tokenizer(), 1)


def test_common_tokens_have_the_same_bytes(pair):
    target, draft = pair
    tokens = token_map(target, draft)
    ours = target.tokenizer.detokenizer.pieces(target.config.vocab_size, first=False)
    theirs = draft.tokenizer.detokenizer.pieces(draft.config.vocab_size, first=False)
    for mine, other in zip(tokens.target_ids, tokens.draft_ids, strict=True):
        assert ours[mine] == theirs[other]
    common = {ours[index] for index in tokens.target_ids}
    # All bytes, and the longer tokens that both have; no special token is the other's.
    assert common == {bytes([byte]) for byte in range(256)} | {b"ab", b"name", b'":'} & set(ours)
    assert (np.diff(tokens.target_ids) > 0).all()
    assert len(set(tokens.draft_ids.tolist())) == len(tokens.draft_ids)


def test_other_tokens_are_read_as_the_longest_end(pair):
    target, draft = pair
    tokens = token_map(target, draft)
    vocabulary = {
        target.tokenizer.detokenizer.piece(index, 0): index
        for index in range(target.config.vocab_size)
    }
    theirs = draft.tokenizer.detokenizer
    for text, end in ((b'"name', b"name"), (b'": ', b" "), (b"true", b"e"), (b"ab", b"ab")):
        assert theirs.piece(int(tokens.to_draft[vocabulary[text]]), 0) == end


def test_logits_are_those_of_the_common_tokens(pair):
    target, draft = pair
    tokens = token_map(target, draft)
    model = TranslatedModel(draft.architecture, target.config.vocab_size)
    params = TranslatedModel.parameters(draft.params, tokens)
    ids = jnp.array([[97, 98, 260, 5]])
    call = jnp.arange(4)[None], None, None, 0, jnp.tril(jnp.ones((1, 4, 4), bool))
    got = model.extend(params, ids, *call).logits
    read = jnp.asarray(tokens.to_draft)[ids]
    whole = draft.architecture.extend(draft.params, read, *call).logits
    np.testing.assert_array_equal(got, whole[:, :, tokens.draft_ids])


@pytest.mark.parametrize("sampled", [False, True])
def test_tokens_are_those_of_plain_decoding(sampled, pair, caplog):
    """A line says how many tokens are common."""
    target, draft = pair
    with caplog.at_level("INFO", "specjax"):
        drafter = make_drafter("draft_model", target, draft)
    assert "257 of its 267 tokens (96.3%) are the target's, too" in caplog.text
    prompts = ["abc", "name", "é", "12"]
    sampling = SamplingParams(temperature=0.9 * sampled, max_new_tokens=20)
    options = dict(sampling=[sampling] * len(prompts), verify="coupled")
    plain = decode(target, prompts, **options)
    found = decode(target, prompts, drafter=drafter, **options)
    assert found.token_ids == plain.token_ids
    assert (np.asarray(found.drafted) > 0).any()


def test_the_model_itself_with_ids_in_another_order_is_always_right(pair):
    """Each draft is accepted: tokens are read and written as the target's."""
    target, _ = pair
    order = np.random.default_rng(0).permutation(256)
    vocabulary = target.tokenizer.backend.get_vocab(with_added_tokens=False)
    renamed = {
        token: int(order[index]) if index < 256 else index for token, index in vocabulary.items()
    }
    other = bytes_tokenizer()
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=renamed, merges=[]))
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([other.token(index) for index in other.added_ids])
    before = np.concatenate([np.argsort(order), np.arange(256, target.config.vocab_size)])
    embedding = target.params["embed"]["embedding"][before]
    params = {**target.params, "embed": {"embedding": embedding}}
    if "head" in params:
        params["head"] = {"kernel": params["head"]["kernel"][:, before]}
    draft = dataclasses.replace(target, params=params, tokenizer=Tokenizer(backend))
    drafter = make_drafter("draft_model", target, draft)
    sampling = [SamplingParams(max_new_tokens=20)] * 2
    found = decode(target, ["abc", "name"], drafter=drafter, sampling=sampling)
    assert np.asarray(found.accepted).max() == 4
    ran = np.asarray(found.emitted) > 0
    assert (np.asarray(found.accepted)[ran] == np.asarray(found.drafted)[ran]).all()


def test_vocabularies_without_a_common_token_are_refused(pair):
    target, _ = pair
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"xyz": 0, "xyzz": 1}, merges=[]))
    backend.decoder = tokenizers.decoders.ByteLevel()
    draft = model_of(Tokenizer(backend), 2)
    refused(lambda: make_drafter("draft_model", target, draft), "have no token in common")


def test_the_doctor_says_how_much_is_drafted(pair):
    """Common tokens, and their share of the answers' tokens."""
    target, draft = pair
    sampling = SamplingParams(max_new_tokens=12, ignore_eos=True)
    prompts = [[number, number + 1] for number in range(0, 240, 12)]
    found = diagnose(target, make_drafter("draft_model", target, draft), prompts, sampling=sampling)
    (line,) = [line for line in found.notes if line.startswith("another tokenizer: ")]
    common = token_map(target, draft).target_ids
    answers = generate(target, prompts, sampling=sampling).token_ids
    share = np.isin(np.concatenate(answers), common).mean()
    size = target.config.vocab_size
    said = f"{len(common)} of the target's {size} tokens can be drafted, {share:.1%} of those in"
    assert said in line
    assert line in str(found)
    assert 0 < share < 1
