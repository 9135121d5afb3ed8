"""A corpus as token ids: its config, and datasets of pieces of documents that trainers read."""

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
from specjax.loading.tokenizers.tokenizer import Tokenizer
from train.data.examples import Example
from train.data.responses import VALIDATION_EVERY
from train.data.tfds_files import FieldNames, Texts, open_texts
from train.pretraining.documents import DocumentFiles, Documents, document_files
from train.pretraining.tokenizers import SMALLEST_VOCABULARY, TRAIN, encode_document


@dataclass(frozen=True)
class TfdsSection:
    """How a TFDS dataset of texts is read."""

    data_dir: Annotated[Path | None, optional(OutputFolder())]
    split: Annotated[str, Text()]
    text_field: Annotated[str, Text()]


@dataclass(frozen=True)
class CorpusConfig:
    """What to tokenize, and how; `configs/corpus.py` says what each field does."""

    workdir: Annotated[Path, OutputFolder()]
    files: Annotated[tuple[Path, ...] | None, optional(DocumentFiles())]
    dataset: Annotated[str | None, optional(PathOrName())]
    tfds: TfdsSection
    tokenizer: Annotated[str, PathOrName()]
    vocab_size: Annotated[int, Whole(SMALLEST_VOCABULARY, 1 << 20)]
    max_tokens: Annotated[int, Whole(4, 1 << 24)]
    documents_per_part: Annotated[int, Whole(2)]
    limit: Annotated[int | None, optional(Whole(2))]
    written: Mapping[str, Any] = field(default_factory=dict)
    """The values as the config file and the command line gave them, by section."""


def read_corpus_config(written: Mapping[str, Any]) -> CorpusConfig:
    """Check a config's values as far as that goes without reading texts. Raises InputError."""
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
    """The documents of a config, each a text with notes of it. Raises InputError."""
    if config.files is not None:
        return Documents(tuple(document_files(config.files)))
    assert config.dataset is not None
    section = config.tfds
    names = FieldNames("dataset", "tfds.text_field", "files of your own, or a dataset's split")
    return open_texts(config.dataset, section.data_dir, section.split, section.text_field, names)


def is_held_out(document: int) -> bool:
    """Whether a document is held out from training, by its number in the corpus."""
    return document % VALIDATION_EVERY == 0


class Numbering:
    """Numbers for pieces, such as datasets hold them out by: those of held-out documents first.

    A dataset holds out what has a number that divides by `VALIDATION_EVERY`, and all pieces of a
    document must share its fate.
    """

    def __init__(self) -> None:
        self._held_out = self._trained = 0

    def next(self, held_out: bool) -> int:
        """A number that no piece has yet."""
        if held_out:
            self._held_out += 1
            return VALIDATION_EVERY * (self._held_out - 1)
        self._trained += 1
        return self._trained + (self._trained - 1) // (VALIDATION_EVERY - 1)


def examples(
    documents: Iterable[tuple[int, tuple[str, Mapping[str, str]]]],
    tokenizer: Tokenizer,
    max_tokens: int,
) -> Iterator[Example]:
    """Pieces of at most `max_tokens` tokens of numbered documents; every token is a label.

    The last piece of a document ends with the token that ends a text.
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
