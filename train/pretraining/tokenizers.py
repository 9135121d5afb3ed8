"""The tokenizer of a corpus: trained on it, or taken from a model."""

from __future__ import annotations

from collections.abc import Iterable

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from specjax.errors import InputError
from specjax.loading.tokenizers.tokenizer import Tokenizer

TRAIN = "train"
"""The value that stands for a tokenizer trained on the corpus."""
END = "<|endoftext|>"
"""The token that ends each document, and so the output of models trained on them."""
SMALLEST_VOCABULARY = 257
"""The minimum vocabulary size: one token per byte, and the end of a document."""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Return a byte-level BPE tokenizer with `vocab_size` tokens, trained on texts.

    One of the tokens is `END`. Every byte is a token, so that every text can be encoded and decoded
    without loss (Radford et al. 2019, section 2.2). Raises InputError if the texts have too few
    distinct words for so many tokens.
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
