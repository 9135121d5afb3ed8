"""The tokenizer of a corpus: trained on it, or taken from a model."""

from __future__ import annotations

from collections.abc import Iterable

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from specjax.errors import InputError
from specjax.files.path_checks import user_path
from specjax.loading.load import load_model
from specjax.loading.tokenizers.huggingface_tokenizer import read_tokenizer
from specjax.loading.tokenizers.tokenizer import Tokenizer

TRAIN = "train"
"""Stands for a tokenizer that is trained on the corpus."""
END = "<|endoftext|>"
"""Ends each document, and so the texts of a model that was trained on them."""
SMALLEST_VOCABULARY = 257
"""Every byte, and the end of a document."""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE of `vocab_size` tokens, `END` included.

    Every byte is a token, so that every text can be encoded and decoded without loss (Radford et
    al. 2019, section 2.2). Raises InputError if the texts have too few distinct words for so many
    tokens.
    """
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    if (size := backend.get_vocab_size()) != vocab_size:
        raise InputError(
            f"vocab_size={vocab_size}: the corpus gives only {size} tokens; use at most {size}"
        )
    end = backend.token_to_id(END)
    return Tokenizer(backend, eos_ids=(end,), special_tokens=(("eos_token", END),))


def open_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer of a directory in Hugging Face's layout, or of a known model.

    Raises InputError if there is none, or if it has no end-of-text token.
    """
    path = user_path("tokenizer", name)
    found = read_tokenizer(path) if path.is_dir() else None
    if found is None:
        found = load_model(name, field="tokenizer").tokenizer
    if found is None or not found.eos_ids:
        missing = "no tokenizer" if found is None else "no token that ends a text"
        raise InputError(f"tokenizer={name!r}: has {missing}; use another one, or {TRAIN}")
    return found


def encode_document(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the tokens of a document, followed by the end-of-text token.

    Text that looks like a special token is encoded as text, so that it cannot end the document or
    start a turn of a conversation.
    """
    backend = tokenizer.backend
    before = backend.encode_special_tokens
    backend.encode_special_tokens = True
    try:
        ids, end = tokenizer.encode(text), tokenizer.eos_ids[0]
        # Some tokenizers end every text themselves.
        return ids if ids[-1:] == [end] else [*ids, end]
    finally:
        backend.encode_special_tokens = before
