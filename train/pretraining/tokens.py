"""The config of a corpus of token ids, and the division of its documents into pieces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from specjax.errors import InputError
from specjax.fields import (
    OutputFolder,
    PathOrName,
    Text,
    Whole,
    optional,
    read_values,
)
from specjax.files.path_checks import user_path
from specjax.loading.texts.documents import DocumentFiles, Documents, document_files
from specjax.loading.texts.text_tokens import encode_document
from specjax.loading.texts.tfds_texts import FieldNames, SplitLocation, Texts, open_texts
from specjax.loading.tokenizers.tokenizer import Tokenizer
from train.data.examples import Example
from train.data.responses import VALIDATION_EVERY, Numbering
from train.pretraining.tokenizers import SMALLEST_VOCABULARY, TRAIN


@dataclass(frozen=True, kw_only=True)
class TfdsSection(SplitLocation):
    """The location of texts in a TFDS dataset."""

    text_field: Annotated[str, Text()] = "text"
    """The field with the text."""


@dataclass(frozen=True, kw_only=True)
class CorpusConfig:
    """The config of `train.corpus`."""

    workdir: Annotated[Path, OutputFolder()]
    """The folder for the datasets; the same command resumes."""
    files: Annotated[tuple[Path, ...] | None, optional(DocumentFiles())] = None
    """Files and folders of texts of your own, such as texts,more.jsonl.gz."""
    dataset: Annotated[str | None, optional(PathOrName())] = None
    """A TFDS dataset, in place of files: the directory that holds it, or its name."""
    tfds: TfdsSection
    tokenizer: Annotated[str, PathOrName()] = TRAIN
    """A model, or a directory with its tokenizer; train means a byte-level BPE of these texts."""
    vocab_size: Annotated[int, Whole(SMALLEST_VOCABULARY, 1 << 20)] = 8192
    """The vocabulary size of a tokenizer that is trained."""
    max_tokens: Annotated[int, Whole(4, 1 << 24)] = 512
    """The maximum length of a piece in tokens; a trainer's row_tokens should be at least that."""
    documents_per_part: Annotated[int, Whole(2)] = 10_000
    """The number of documents that are written at a time; an interrupted run repeats no more."""
    limit: Annotated[int | None, optional(Whole(2))] = None
    """The number of documents to use, from the first one; by default all."""
    written: Mapping[str, Any] = field(default_factory=dict)
    """The values of the config file and the command line as they were given, by section."""


def read_corpus_config(written: Mapping[str, Any]) -> CorpusConfig:
    """Return the checked config, given the fields of a config file by section.

    Checks that read texts are made later. Raises InputError for an invalid field.
    """
    config = replace(read_values(CorpusConfig, written), written=written)
    if (config.files is None) == (config.dataset is None):
        both = "missing" if config.files is None else "both given"
        raise InputError(
            f"files, dataset: {both}; pass --config.files=FOLDER for texts of your own, or "
            "--config.dataset=DIRECTORY for a TFDS dataset"
        )
    if config.files is not None:
        document_files(config.files)
    if config.tokenizer != TRAIN:
        user_path("tokenizer", config.tokenizer)
    return config


def open_documents(config: CorpusConfig) -> Documents | Texts:
    """Return the documents of a config, each a (text, notes) pair; notes are strings by name.

    Raises InputError if they cannot be opened.
    """
    if config.files is not None:
        return Documents(tuple(document_files(config.files)))
    assert config.dataset is not None
    section = config.tfds
    names = FieldNames("dataset", "tfds.text_field", "files of your own, or a dataset's split")
    return open_texts(config.dataset, section.data_dir, section.split, section.text_field, names)


def is_held_out(document: int) -> bool:
    """Return whether the document with this number in the corpus is held out from training."""
    return document % VALIDATION_EVERY == 0


def examples(
    documents: Iterable[tuple[int, tuple[str, Mapping[str, str]]]],
    tokenizer: Tokenizer,
    max_tokens: int,
) -> Iterator[Example]:
    """Yield numbered documents in pieces of at most `max_tokens` tokens; all tokens are labels.

    `documents` are pairs of a number and a (text, notes) pair. The last piece of a document ends
    with the end-of-text token.
    """
    numbering = Numbering()
    for document, (text, notes) in documents:
        tokens = np.array(encode_document(tokenizer, text), np.int32)
        for first in range(0, len(tokens), max_tokens):
            piece = tokens[first : first + max_tokens]
            yield Example(
                tokens=piece,
                loss_mask=np.ones(len(piece), bool),
                category="text",
                id=numbering.next(is_held_out(document)),
                source=notes.get("source", ""),
                licence=notes.get("licence", "unknown"),
            )
