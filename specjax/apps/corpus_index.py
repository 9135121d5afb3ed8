"""Build an index of documents, from which the drafter `corpus` copies.

    python -m specjax.corpus_index --input=FILE,FOLDER --tokenizer=MODEL --output=DIR
    python -m specjax.corpus_index --input=tfds:NAME --tokenizer=MODEL --output=DIR

Documents are text files (one document per file), the lines of JSON lines files, or the texts of a
TFDS dataset. A JSON line has the key text, or prompt_token_ids and response_token_ids, the tokens
of a conversation. The tokenizer is that of a directory or a model. Afterwards
--config.drafter.name=corpus --config.drafter.corpus=DIR drafts from the index. Indexing takes about
10 bytes of memory per token, plus half a gigabyte. Exit codes: 0; 2 for bad input; 130 after Ctrl-C
or SIGTERM.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from jaxtyping import Int32
from rich.console import Console

from specjax.apps.command_line.console import Screen
from specjax.apps.command_line.flags import run_flags
from specjax.errors import InputError
from specjax.fields import INT32_MAX, OutputFolder, PathOrName, Text, Whole
from specjax.files import folders
from specjax.loading.texts.documents import (
    DocumentFiles,
    document_files,
    num_documents,
    texts_or_tokens,
)
from specjax.loading.texts.text_tokens import encode_documents, open_tokenizer
from specjax.loading.texts.tfds_texts import FieldNames, open_texts
from specjax.loading.tokenizers.tokenizer import Tokenizer
from specjax.methods.corpus.index_folder import KIND, IndexMetadata, write_index
from specjax.methods.corpus.sorted_text import token_dtype, with_separator

_TFDS = "tfds:"
_TOGETHER = 256
"""The number of documents that are tokenized at once."""


@dataclass(frozen=True)
class CorpusInput:
    """The value of --input: comma-separated files and folders, or tfds: followed by a dataset."""

    def check(self, name: str, value: Any) -> str | tuple[Path, ...]:
        """Return the paths in a comma-separated text, or the name after "tfds:".

        Raises InputError, which names the field `name`, if a file is missing.
        """
        if isinstance(value, str) and value.startswith(_TFDS):
            return PathOrName().check(name, value.removeprefix(_TFDS))
        return DocumentFiles().check(name, value)


@dataclass(frozen=True, kw_only=True)
class Flags:
    """The flags of `specjax.corpus_index`."""

    input: Annotated[str | tuple[Path, ...], CorpusInput()]
    """Files and folders, or tfds:NAME."""
    tokenizer: Annotated[str, PathOrName()]
    """The directory or model with the tokenizer."""
    output: Annotated[Path, OutputFolder()]
    """The directory to write the index to."""
    max_tokens: Annotated[int, Whole(2)] = INT32_MAX
    """The maximum number of tokens, separators included."""
    split: Annotated[str, Text()] = "train"
    """The split of a TFDS dataset."""
    text_field: Annotated[str, Text()] = "text"
    """The dataset's field with the text."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with the arguments `argv`, by default those of the process.

    Returns the exit code.
    """
    return run_flags(
        lambda flags: make_index(**vars(flags)),
        Flags,
        argv,
        program="python -m specjax.corpus_index",
        documentation=__doc__,
        interrupted="interrupted; nothing is written",
    )


def make_index(
    input: str | tuple[Path, ...],
    tokenizer: str,
    output: Path,
    max_tokens: int,
    split: str,
    text_field: str,
) -> None:
    """Index the documents of `input` and write the index to the folder `output`.

    `input` is the name of a dataset, of which `split` and `text_field` are read, or paths of
    documents; `tokenizer` names a directory or model; at most `max_tokens` tokens are indexed.
    Raises InputError if the documents or the tokenizer cannot be read, or if `output` exists and is
    not empty.
    """
    folders.check_replaceable(output, KIND, f"output={str(output)!r}", overwrite=False)
    screen = Screen(Console(width=None if sys.stdout.isatty() else 120))
    documents, total = _open(input, split, text_field)
    encoder = open_tokenizer(tokenizer)
    token_arrays, num_tokens, begin = [], 0, time.monotonic()
    for document in _encoded(documents, encoder):
        document = with_separator(document, token_dtype(encoder.vocab_size))
        token_arrays.append(document[: max_tokens - num_tokens])
        num_tokens += len(token_arrays[-1])
        share = max(len(token_arrays) / total, num_tokens / max_tokens)
        speed = num_tokens / max(time.monotonic() - begin, 1e-9)
        screen.progress("documents", len(token_arrays), total, speed, share)
        if num_tokens == max_tokens:
            break
    tokens, count = np.concatenate(token_arrays), len(token_arrays)
    del token_arrays

    def metadata(positions: int) -> IndexMetadata:
        source = input if isinstance(input, str) else ",".join(path.name for path in input)
        vocabulary = encoder.vocab_size, encoder.vocabulary_hash
        return IndexMetadata(source, count, num_tokens, positions, *vocabulary)

    begin = time.monotonic()

    def tell(done: int, all: int) -> None:
        speed = done / max(time.monotonic() - begin, 1e-9)
        screen.progress("sorting", done, all, speed, done / all)

    written = write_index(output, tokens, metadata, tell)
    truncated = f" (the first {count} of {total})" if count < total else ""
    screen.say(
        f"{written.tokens} tokens of {count} documents{truncated}, "
        f"{written.positions} positions to copy from: {output}"
    )


def _open(
    input: str | tuple[Path, ...], split: str, text_field: str
) -> tuple[Iterable[str | Int32[np.ndarray, "T"]], int]:
    """Return the documents of an input and their number; raise InputError if there are none."""
    if isinstance(input, str):
        names = FieldNames("input", "text_field", "files, or tfds: and a dataset")
        texts = open_texts(input, None, split, text_field, names)
        documents, total = (text for text, _ in texts), len(texts)
    else:
        files = document_files(input, "input")
        documents, total = texts_or_tokens(files), num_documents(files)
    if not total:
        raise InputError("input: holds no documents; give at least one")
    return documents, total


def _encoded(
    documents: Iterable[str | Int32[np.ndarray, "T"]], tokenizer: Tokenizer
) -> Iterator[Sequence[int] | Int32[np.ndarray, "T"]]:
    """Yield the token ids of each document; raise InputError for ids outside the vocabulary."""
    documents, size = iter(documents), tokenizer.vocab_size
    while batch := list(itertools.islice(documents, _TOGETHER)):
        texts = [document for document in batch if isinstance(document, str)]
        encoded = iter(encode_documents(tokenizer, texts))
        for document in batch:
            ids = next(encoded) if isinstance(document, str) else document
            if not isinstance(document, str) and (most := int(ids.max(initial=0))) >= size:
                raise InputError(
                    f"input: a document has the token id {most}, and the tokenizer {size} tokens; "
                    "name the tokenizer that made them"
                )
            yield ids


if __name__ == "__main__":
    raise SystemExit(main())
