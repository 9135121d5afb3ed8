"""Convert text to a dataset of tokens, to train models from scratch.

    python -m train.corpus --config.files=FOLDER,FILE --config.workdir=W
    python -m train.corpus --config.dataset=TFDS --config.tfds.split=train --config.workdir=W

Documents are your own texts (one per file, or JSON lines with the key text), or those of a TFDS
dataset. Their token ids, in pieces, are written to W/tokens together with the tokenizer; to train
on them use --config.data=W/tokens. Finished parts are kept, so that the same command resumes. Exit
codes: 0; 2 for bad input; 130 after Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from specjax.apps.command_line import command
from specjax.apps.command_line.console import Screen
from specjax.distributed import folder_lock
from specjax.errors import InputError
from specjax.files import folder_checksums, folders
from specjax.loading.texts.documents import Documents
from specjax.loading.texts.text_tokens import open_tokenizer
from specjax.loading.texts.tfds_texts import Texts
from specjax.loading.tokenizers.tokenizer import Tokenizer
from train.data.combined_datasets import open_sources
from train.data.examples import METADATA, Example, text_metadata
from train.data.responses import open_responses
from train.data.write_responses import write_responses
from train.pretraining.tokenizers import TRAIN, train_tokenizer
from train.pretraining.tokens import (
    CorpusConfig,
    examples,
    is_held_out,
    open_documents,
    read_corpus_config,
)
from train.run.workdir import check_same_run, write_file

CONFIG = "corpus"
TOKENS = "tokens"
"""The folder of datasets in the work folder."""
_KIND = "tokens"
_MAY_DIFFER = ("workdir",)
_TOKENIZER_BYTES = 256 << 20
"""The approximate size of the documents, spread over the corpus, on which a tokenizer is trained.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv`, by default the process's arguments; return its exit code."""
    return command.run_config(
        make_corpus,
        argv,
        default=CONFIG,
        read=read_corpus_config,
        documentation=__doc__,
        source=CorpusConfig,
    )


def make_corpus(config: CorpusConfig, console: Console | None = None) -> int:
    """Make the dataset of tokens that a config describes, and return the command's exit code.

    Progress is printed on `console`, by default the terminal. Raises InputError.
    """
    root, where = config.workdir, f"workdir={str(config.workdir)!r}"
    folders.check_claimable(root, _KIND, where)
    given = None
    if config.tokenizer != TRAIN:
        given = open_tokenizer(config.tokenizer, f"use another one, or {TRAIN}")
    screen = Screen(console or Console(width=None if sys.stdout.isatty() else 120))
    with folder_lock.hold(root, _KIND, where):
        documents = open_documents(config)
        count = len(documents) if config.limit is None else min(config.limit, len(documents))
        if count < 2:
            raise InputError(
                f"files, dataset: {count} documents, and the first is held out; give at least two"
            )
        _record(config, documents, root)
        parts = _parts(root, count, config.documents_per_part)
        tokenizer = _kept_tokenizer(parts) or given
        if tokenizer is None:
            with screen.working(f"training a tokenizer of {config.vocab_size} tokens"):
                tokenizer = train_tokenizer(_to_learn_from(documents, count), config.vocab_size)
        _write_parts(config, documents, parts, tokenizer, screen)
    _summary(root / TOKENS, tokenizer, screen)
    return 0


def _record(config: CorpusConfig, documents: Documents | Texts, root: Path) -> None:
    """Record the settings of a run in its folder.

    Raises InputError if an earlier run in the folder had other settings.
    """
    if isinstance(documents, Documents):
        text: dict[str, Any] = {"files": _digest(documents.files)}
    else:
        text = {"documents": len(documents), "bytes": documents.num_bytes}
    file, record = root / "config.json", {"config": dict(config.written), "text": text}
    if (root / TOKENS).exists():
        check_same_run(file, record, _MAY_DIFFER)
    write_file(file, json.dumps(record, indent=1) + "\n")


def _digest(files: Sequence[Path]) -> str:
    """Return a hash of the contents of files, in their order."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(folder_checksums.record_of(file).sha256.encode())
    return digest.hexdigest()


def _parts(root: Path, count: int, size: int) -> dict[Path, range]:
    """Return the numbers of each dataset's documents, by the dataset's directory.

    `count` documents are divided into datasets of `size`; the last one may have fewer. Raises
    InputError if the folder has other datasets.
    """
    parts = {
        root / TOKENS / f"part-{number:05d}": range(first, min(first + size, count))
        for number, first in enumerate(range(0, count, size))
    }
    if surplus := sorted(set((root / TOKENS).glob("part-*")) - set(parts)):
        raise InputError(f"{surplus[0]}: no part of this corpus; delete {root / TOKENS}")
    return parts


def _kept_tokenizer(parts: Mapping[Path, range]) -> Tokenizer | None:
    """Return the tokenizer of the datasets that an earlier run wrote, or None if there are none."""
    written = next((path for path in parts if (path / METADATA).exists()), None)
    return None if written is None else open_responses(written).tokenizer


def _to_learn_from(documents: Documents | Texts, count: int) -> Iterator[str]:
    """Yield the documents on which a tokenizer is trained, none of them held out."""
    stride = max(1, -(-documents.num_bytes // _TOKENIZER_BYTES))
    numbered = enumerate(itertools.islice(documents, count))
    trained = (text for number, (text, _) in numbered if not is_held_out(number))
    return itertools.islice(trained, 0, None, stride)


def _write_parts(
    config: CorpusConfig,
    documents: Documents | Texts,
    parts: Mapping[Path, range],
    tokenizer: Tokenizer,
    screen: Screen,
) -> None:
    """Write the datasets that do not exist yet."""
    metadata = text_metadata(documents.label, tokenizer)
    generation = {"text": documents.label, "max_tokens": config.max_tokens}
    written = [path for path in parts if (path / METADATA).exists()]
    if written:
        screen.say(f"resuming: {len(written)} of {len(parts)} parts are written")
    count, done, tokens, begin = sum(map(len, parts.values())), 0, 0, time.monotonic()
    numbered = enumerate(documents)

    def pieces(part: range) -> Iterator[Example]:
        nonlocal tokens
        for piece in examples(counted(part), tokenizer, config.max_tokens):
            yield piece
            tokens += len(piece.tokens)
            speed = tokens / max(time.monotonic() - begin, 1e-9)
            screen.progress("documents", done, count, speed, done / count)

    def counted(part: range) -> Iterator[tuple[int, tuple[str, Mapping[str, str]]]]:
        nonlocal done
        for document in itertools.islice(numbered, len(part)):
            yield document
            done += 1

    for path, part in parts.items():
        if path in written:
            done += sum(1 for _ in itertools.islice(numbered, len(part)))
        else:
            write_responses(
                path, pieces(part), metadata, generation=generation, tokenizer=tokenizer
            )
    screen.rest()


def _summary(tokens: Path, tokenizer: Tokenizer, screen: Screen) -> None:
    data = open_sources([tokens])
    held_out = int(data.lengths[data.validation].sum())
    screen.say(
        f"{int(data.lengths.sum())} tokens in {len(data)} pieces, of a vocabulary of "
        f"{tokenizer.vocab_size}; {held_out} tokens are held out: {tokens}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
