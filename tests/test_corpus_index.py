"""The index of a corpus: sorted as by hand, whole or not there, and refused for another model."""

import functools
import gzip
import json
import re
import shutil

import numpy as np
import pytest
from bad_input import refused, refused_command
from commands import files_limited_to
from hypothesis import given, settings
from hypothesis import strategies as st
from model_files import GOLDENS, edit_json
from test_pretraining import write_documents
from test_retrieval import drafts_of

from specjax import generate, make_drafter
from specjax.apps import corpus_index
from specjax.distributed import device_memory
from specjax.drafters import LoadedDrafter
from specjax.files.folder_checksums import MARKER, seal
from specjax.loading.texts.text_tokens import encode_documents
from specjax.methods.corpus import sorted_text as sorting
from specjax.methods.corpus.index_folder import open_index

TEXTS = ["The tide rises twice a day.", "The tide falls", "", "a<|im_end|>b"]


def sorted_by_hand(tokens):
    """Positions of tokens with a successor, by the 16 tokens that end there, the last one first."""
    end = np.iinfo(tokens.dtype).max
    text = tokens.tolist()
    chosen = [at for at in range(len(text) - 1) if end not in text[at : at + 2]]
    padded = [end] * 15 + text
    return sorted(chosen, key=lambda at: padded[at : at + 16][::-1])


@settings(max_examples=60, deadline=None)
@given(
    documents=st.lists(st.lists(st.sampled_from([0, 1, 2, 70_000]), max_size=40), max_size=6),
    dtype=st.sampled_from([np.uint16, np.int32]),
    chunk=st.sampled_from([1, 7, 1 << 20]),
)
def test_positions_are_sorted_as_by_hand(documents, dtype, chunk):
    if dtype == np.uint16:
        documents = [[token % 60_000 for token in document] for document in documents]
    parts = [sorting.with_separator(document, dtype) for document in documents]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sorting, "_CHUNK", chunk)
        text = sorting.sorted_text(parts, sum(map(len, parts)) + 5, dtype)
    assert text.order[: text.count].tolist() == sorted_by_hand(text.tokens)


def test_the_smallest_dtype_has_room_for_a_separator():
    assert sorting.token_dtype(65_535) == np.uint16
    assert sorting.token_dtype(65_536) == np.int32


TOKENIZER = GOLDENS / "grouped_tied"


def make(output, source, *more, tokenizer=TOKENIZER):
    return corpus_index.main(
        [f"--input={source}", f"--tokenizer={tokenizer}", f"--output={output}", *more]
    )


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """The same documents as files, as JSON lines and as a TFDS dataset."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "files").mkdir()
    for number, text in enumerate(TEXTS):
        (folder / "files" / f"{number}.txt").write_text(text)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    (folder / "texts.jsonl").write_text(lines)
    with gzip.open(folder / "texts.jsonl.gz", "wt") as file:
        file.write(lines)
    write_documents(
        folder / "tfds", [{"text": text, "source": "", "licence": ""} for text in TEXTS]
    )
    return folder


@pytest.fixture(scope="module")
def index(inputs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("index") / "index"
    assert make(folder, inputs / "files") == 0
    return folder


@pytest.fixture(scope="module")
def parts(chatty):
    return encode_documents(chatty.tokenizer, TEXTS)


def joined(documents):
    return np.concatenate([sorting.with_separator(document, np.uint16) for document in documents])


def test_documents_are_separated(index, chatty, parts):
    text = open_index("corpus", str(index), chatty)
    assert text.tokens.tolist() == joined(parts).tolist()
    assert text.order.tolist() == sorted_by_hand(text.tokens)
    assert text.count == len(text.order)
    assert isinstance(text.tokens, np.memmap)
    # What looks like the end of a text is text.
    assert all(part[:-1].count(chatty.tokenizer.eos_ids[0]) == 0 for part in parts)


@pytest.mark.parametrize("source", ["texts.jsonl.gz", "texts.jsonl,files", "tfds"])
def test_every_source(source, inputs, parts, chatty, tmp_path, capsys):
    if source == "tfds":
        given = f"tfds:{inputs / source}"
    else:
        given = ",".join(str(inputs / part) for part in source.split(","))
    assert make(tmp_path / "new", given) == 0
    documents = parts * (1 + source.count(","))
    assert f"{len(joined(documents))} tokens of {len(documents)} doc" in capsys.readouterr().out
    text = open_index("corpus", str(tmp_path / "new"), chatty)
    assert text.tokens.tolist() == joined(documents).tolist()


def test_tokens_of_conversations(chatty, tmp_path):
    rows = [{"prompt_token_ids": [5, 6], "response_token_ids": [7]}, {"response_token_ids": [8, 9]}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert make(tmp_path / "new", tmp_path / "rows.jsonl") == 0
    text = open_index("corpus", str(tmp_path / "new"), chatty)
    assert text.tokens.tolist() == joined([[5, 6, 7], [8, 9]]).tolist()


def test_the_first_tokens_only(inputs, parts, chatty, tmp_path, capsys):
    count = len(parts[0]) + 4
    assert make(tmp_path / "new", inputs / "texts.jsonl", f"--max_tokens={count}") == 0
    assert "documents (the first 2 of 4)" in capsys.readouterr().out
    text = open_index("corpus", str(tmp_path / "new"), chatty)
    assert text.tokens.tolist() == joined(parts)[:count].tolist()
    assert text.order.tolist() == sorted_by_hand(text.tokens)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"response_token_ids": [5]}', "no document of two tokens or more; give more text"),
        ("", "holds no documents; give at least one"),
        ('{"txt": "a"}', "line 1: text=None: use a text"),
        ('{"response_token_ids": [1, 2.5]}', "line 1: response_token_ids=.*: use a list of token"),
        ('{"response_token_ids": "ab"}', "line 1: response_token_ids='ab': use a list of token"),
        ('{"response_token_ids": [-1, 2]}', "line 1: response_token_ids=.*: use a list of token"),
        ('{"response_token_ids": [1, 60000]}', "has the token id 60000, and the tokenizer [0-9]+"),
        ("{", "line 1 is not JSON"),
    ],
)
def test_what_is_no_corpus(line, said, tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text(line + "\n" if line else "")
    error = refused_command(
        corpus_index.main,
        [
            f"--input={tmp_path / 'rows.jsonl'}",
            f"--tokenizer={TOKENIZER}",
            f"--output={tmp_path / 'new'}",
        ],
        capsys,
    )
    assert re.search(said, error)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_an_index_is_not_replaced_and_not_left_unfinished(index, inputs, tmp_path, capsys):
    flags = [f"--input={inputs / 'files'}", f"--tokenizer={TOKENIZER}"]
    error = refused_command(corpus_index.main, [*flags, f"--output={index}"], capsys)
    assert "holds a corpus index already; delete it, or write elsewhere" in error
    with files_limited_to(64):
        error = refused_command(corpus_index.main, [*flags, f"--output={tmp_path / 'new'}"], capsys)
    assert "free space" in error
    assert not any(tmp_path.iterdir())


def flip(folder):
    content = bytearray((folder / "tokens.npy").read_bytes())
    content[-1] ^= 1
    (folder / "tokens.npy").write_bytes(content)


def shorten(folder):
    content = (folder / "order.npy").read_bytes()
    (folder / "order.npy").write_bytes(content[:-4])


def say(folder, **changes):
    """Change what a folder says of itself, checksums included."""
    edit_json(folder / "index.json", **changes)
    seal(folder, "corpus index")


def replace_array(folder):
    np.save(folder / "order.npy", np.zeros(3))
    seal(folder, "corpus index")


def replace_file(folder):
    (folder / "order.npy").write_bytes(b"text")
    seal(folder, "corpus index")


DAMAGE = [
    (flip, "tokens.npy is not as it was written: its SHA-256 differs; copy it again, whole, or"),
    (shorten, "order.npy has [0-9]+ bytes, [0-9]+ were written; copy it again"),
    (lambda folder: (folder / "index.json").unlink(), "index.json: no such file"),
    (
        lambda folder: (folder / MARKER).unlink(),
        "holds no index of a corpus; make one by python -m",
    ),
    (lambda folder: seal(folder, "dataset"), "holds no index of a corpus; make one by python -m"),
    (
        functools.partial(say, vocab_size=99),
        "made with a tokenizer of 99 tokens, and .* has [0-9]+",
    ),
    (functools.partial(say, tokenizer="0" * 64), "made with another tokenizer than that of"),
    (functools.partial(say, tokens=None), "'tokens' is missing"),
    (replace_array, "tokens.npy and order.npy are those of no index"),
    (replace_file, "cannot be read"),
]


@pytest.mark.parametrize(("damage", "said"), DAMAGE)
def test_damaged_and_of_others(damage, said, index, chatty, tmp_path):
    folder = shutil.copytree(index, tmp_path / "index")
    damage(folder)
    error = refused(lambda: make_drafter("corpus", chatty, corpus=str(folder)), said)
    assert str(folder) in error
    assert error.startswith("drafter.corpus=")


def test_another_vocabulary_without_a_tokenizer(index, tiny):
    said = f"made with a tokenizer of [0-9]+ tokens, and {tiny.name} has 61; make one with its tok"
    refused(lambda: make_drafter("corpus", tiny, corpus=str(index)), said)


def test_larger_than_memory(index, chatty, monkeypatch):
    monkeypatch.setattr(device_memory, "free_bytes", lambda: 100)
    said = (
        r"GiB are needed on the device, and 0.0 GiB are free; make a smaller index \(--max_tokens"
    )
    refused(lambda: make_drafter("corpus", chatty, corpus=str(index)), said)


def test_drafts_come_from_it(index, chatty):
    """The text after the same words, up to the end of its document."""
    made = make_drafter("corpus", chatty, corpus=str(index), suffix_decoding_max_spec_factor=4.0)
    ids = encode_documents(chatty.tokenizer, TEXTS)[0]
    loaded = LoadedDrafter(made.drafter, made.params)
    rest = ids[:9], ids[:-2]
    assert drafts_of(loaded, rest, limit=8) == [ids[9:17], ids[-2:]]


@pytest.mark.usefixtures("one_width")
def test_lookup_reads_it_too(index, chatty):
    """Merged with what the row and the target said; without an index it is as before."""
    made = make_drafter("lookup", chatty, corpus=str(index))
    assert [part.name for part in made.drafter.parts] == ["suffix", "token_recycling", "corpus"]
    assert len(make_drafter("lookup", chatty).drafter.parts) == 2
    ids = encode_documents(chatty.tokenizer, TEXTS)[0]
    options = dict(max_new_tokens=12, temperature=0.0)
    rounds = {}
    for drafter in (None, make_drafter("lookup", chatty), made):
        got = generate(chatty, [ids[:9]], drafter=drafter, **options)
        name = "plain" if drafter is None else len(drafter.drafter.parts)
        rounds[name] = got.token_ids, int(np.maximum(got.drafted, 0).sum())
    assert rounds["plain"][0] == rounds[2][0] == rounds[3][0]
    assert rounds[3][1] > rounds[2][1]
