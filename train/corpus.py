"""Turn text into a dataset of tokens, to train models on from scratch.

    python -m train.corpus --config.files=FOLDER,FILE --config.workdir=W
    python -m train.corpus --config.dataset=TFDS --config.tfds.split=train --config.workdir=W

Texts of your own (each file a document, or JSON lines with the key text) become a TFDS dataset in
W/text; a TFDS dataset is read where it is. W/tokens then holds the documents in pieces of token
ids, with the tokenizer: --config.data=W/tokens. A part that is there is kept, so that the same
command resumes. Exit codes: 0; 2 for bad input; 130 after Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from specjax.cli import command
from specjax.cli.console import Screen
from specjax.distributed import folder_lock
from specjax.errors import InputError
from specjax.files import folder_marker, folders
from specjax.loading.tokenizers.tokenizer import Tokenizer
from train.data.examples import METADATA, Example, text_metadata
from train.data.responses import open_responses
from train.data.sources import open_sources
from train.data.tfds_files import Texts
from train.data.writing import write_responses
from train.pretraining.documents import document_files, read_documents, write_documents
from train.pretraining.tokenizers import TRAIN, open_tokenizer, train_tokenizer
from train.pretraining.tokens import (
    CorpusConfig,
    examples,
    is_held_out,
    read_corpus_config,
    read_texts,
)
from train.run.workdir import check_same_run, write_file

CONFIG = "corpus"
TEXT, TOKENS = "text", "tokens"
"""The folders of both datasets in the work folder."""
_KIND = "tokens"
_MAY_DIFFER = ("workdir",)
_TOKENIZER_BYTES = 256 << 20
"""A tokenizer is trained on documents of about so many bytes, spread over the corpus."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    return command.run_config(
        make_corpus, argv, default=CONFIG, read=read_corpus_config, documentation=__doc__
    )


def make_corpus(config: CorpusConfig, console: Console | None = None) -> int:
    """Run a config; returns the exit code. Raises InputError."""
    root, where = config.workdir, f"workdir={str(config.workdir)!r}"
    folders.check_claimable(root, _KIND, where)
    given = None if config.tokenizer == TRAIN else open_tokenizer(config.tokenizer)
    screen = Screen(console or Console(width=None if sys.stdout.isatty() else 120))
    with folder_lock.hold(root, _KIND, where):
        texts = _texts(config, root, screen)
        count = len(texts) if config.limit is None else min(config.limit, len(texts))
        parts = _parts(root, count, config.documents_per_part)
        tokenizer = _kept_tokenizer(parts) or given
        if tokenizer is None:
            with screen.working(f"training a tokenizer of {config.vocab_size} tokens"):
                tokenizer = train_tokenizer(_to_learn_from(texts, count), config.vocab_size)
        _write_parts(config, texts, parts, tokenizer, screen)
    _summary(root / TOKENS, tokenizer, screen)
    return 0


def _texts(config: CorpusConfig, root: Path, screen: Screen) -> Texts:
    """The documents; a user's own files become a TFDS dataset first. Records what the run is."""
    own = root / TEXT
    if config.files is not None:
        record: dict[str, Any] = {"files": _digest(config.files)}
        texts = None
    else:
        assert config.dataset is not None
        texts = read_texts(config, config.dataset)
        record = {"documents": len(texts), "bytes": texts.num_bytes}
    file, record = root / "config.json", {"config": dict(config.written), "text": record}
    if (root / TOKENS).exists():
        check_same_run(file, record, _MAY_DIFFER)
    write_file(file, json.dumps(record, indent=1) + "\n")
    if texts is not None:
        return texts
    assert config.files is not None
    if not (root / TOKENS).exists() or folder_marker.read_marker(own) is None:
        with screen.working(f"writing {own}"):
            write_documents(own, read_documents(config.files))
    return read_texts(config, str(own))


def _digest(files: Sequence[Path]) -> str:
    """A hash of the contents of files, in their order."""
    digest = hashlib.sha256()
    for path in document_files(files):
        digest.update(folder_marker.record_of(path).sha256.encode())
    return digest.hexdigest()


def _parts(root: Path, count: int, size: int) -> dict[Path, range]:
    """The documents of each dataset by its directory; raises InputError for surplus datasets."""
    parts = {
        root / TOKENS / f"part-{number:05d}": range(first, min(first + size, count))
        for number, first in enumerate(range(0, count, size))
    }
    if surplus := sorted(set((root / TOKENS).glob("part-*")) - set(parts)):
        raise InputError(f"{surplus[0]}: no part of this corpus; delete {root / TOKENS}")
    return parts


def _kept_tokenizer(parts: Mapping[Path, range]) -> Tokenizer | None:
    """The tokenizer of an earlier run; every part keeps the same one."""
    there = next((path for path in parts if (path / METADATA).exists()), None)
    return None if there is None else open_responses(there).tokenizer


def _to_learn_from(texts: Texts, count: int) -> Iterator[str]:
    """The documents that a tokenizer is trained on: none that is held out."""
    stride = max(1, -(-texts.num_bytes // _TOKENIZER_BYTES))
    trained = (number for number in range(count) if not is_held_out(number))
    return (texts[number][0] for place, number in enumerate(trained) if place % stride == 0)


def _write_parts(
    config: CorpusConfig,
    texts: Texts,
    parts: Mapping[Path, range],
    tokenizer: Tokenizer,
    screen: Screen,
) -> None:
    """Write the datasets that are not there."""
    metadata = text_metadata(texts.label, tokenizer)
    generation = {"text": texts.label, "max_tokens": config.max_tokens}
    missing = {path: numbers for path, numbers in parts.items() if not (path / METADATA).exists()}
    if len(missing) < len(parts):
        screen.say(f"resuming: {len(parts) - len(missing)} of {len(parts)} parts are written")
    left = sum(map(len, missing.values()))
    earlier = sum(map(len, parts.values())) - left
    done = tokens = 0
    begin = time.monotonic()

    def documents(numbers: range) -> Iterator[tuple[int, str, Mapping[str, str]]]:
        nonlocal done
        for number in numbers:
            yield number, *texts[number]
            done += 1

    for path, numbers in missing.items():

        def pieces(numbers: range = numbers) -> Iterator[Example]:
            nonlocal tokens
            for piece in examples(documents(numbers), tokenizer, config.max_tokens):
                yield piece
                tokens += len(piece.tokens)
                speed = tokens / max(time.monotonic() - begin, 1e-9)
                screen.progress("documents", earlier + done, earlier + left, speed, done / left)

        write_responses(path, pieces(), metadata, generation=generation, tokenizer=tokenizer)
    screen.rest()


def _summary(tokens: Path, tokenizer: Tokenizer, screen: Screen) -> None:
    data = open_sources([tokens])
    held_out = int(data.lengths[data.validation].sum())
    screen.say(
        f"{int(data.lengths.sum())} tokens of {tokenizer.vocab_size}, in {len(data)} pieces; "
        f"{held_out} tokens are held out: {tokens}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
