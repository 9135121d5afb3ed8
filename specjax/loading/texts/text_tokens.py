"""Documents as token ids: the tokenizer of a corpus, and the token that ends each document."""

from __future__ import annotations

from collections.abc import Sequence

from specjax.errors import InputError
from specjax.files.path_checks import user_path
from specjax.loading.load import load_model
from specjax.loading.tokenizers.huggingface_tokenizer import read_tokenizer
from specjax.loading.tokenizers.tokenizer import Tokenizer, refused


def open_tokenizer(name: str, remedy: str = "use another one") -> Tokenizer:
    """Return the tokenizer of a directory or model.

    `name` is a directory with a tokenizer in Hugging Face's layout, or anything that `load_model`
    accepts, whose tokenizer is then taken. Raises InputError, which ends with `remedy`, if there is
    no such directory or model, or if its tokenizer is missing or has no token that ends a text.
    """
    path = user_path("tokenizer", name)
    tokenizer = read_tokenizer(path) if path.is_dir() else None
    if tokenizer is None:
        tokenizer = load_model(name, field="tokenizer").tokenizer
    if tokenizer is None or not tokenizer.eos_ids:
        missing = "no tokenizer" if tokenizer is None else "no token that ends a text"
        raise InputError(f"tokenizer={name!r}: has {missing}; {remedy}")
    return tokenizer


def encode_documents(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of each text, followed by the id of the end-of-text token.

    Text that looks like a special token is encoded as text, so that it cannot end the document or
    start a turn of a conversation. Raises InputError for a text that cannot be encoded.
    """
    backend = tokenizer.backend
    before = backend.encode_special_tokens
    backend.encode_special_tokens = True
    try:
        encoded = _side_by_side(tokenizer, texts)
        if encoded is None:  # encoded separately, so that the error names the text
            encoded = [tokenizer.encode(text) for text in texts]
    finally:
        backend.encode_special_tokens = before
    end = tokenizer.eos_ids[0]
    # Some tokenizers end every text themselves.
    return [ids if ids[-1:] == [end] else [*ids, end] for ids in encoded]


def encode_document(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the token ids of one text, as `encode_documents` does."""
    return encode_documents(tokenizer, [text])[0]


def _side_by_side(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]] | None:
    """Return the tokens of each text, encoded in parallel, or None if a text cannot be encoded."""
    try:
        with refused("texts", "change them"):
            encoded = [each.ids for each in tokenizer.backend.encode_batch_fast(list(texts))]
    except InputError:
        return None
    known = all(max(ids, default=0) < tokenizer.vocab_size for ids in encoded)
    return encoded if known else None
