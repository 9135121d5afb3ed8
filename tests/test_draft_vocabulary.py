"""The draft's vocabulary: the commonest labels of the training conversations, counted once."""

import os

import numpy as np
import pytest

from specjax.errors import InputError
from train.data import vocabulary
from train.data.combined_datasets import open_sources
from train.data.examples import Example, target_metadata
from train.data.vocabulary import COUNTS, count_labels, draft_vocabulary
from train.data.write_responses import write_responses

V = 61


def conversation(number, prompt, answer):
    tokens = np.array([*prompt, *answer], np.int32)
    return Example(tokens=tokens, loss_mask=np.arange(len(tokens)) >= len(prompt), id=number)


@pytest.fixture
def folder(tiny, tmp_path):
    """Two parts; id 50 is held out, and says 60 only."""
    parts = (
        [conversation(1, [9] * 9, [5, 5, 7]), conversation(50, [9], [60] * 20)],
        [conversation(51, [8] * 7, [7, 5, 3, 3])],
    )
    for number, part in enumerate(parts):
        write_responses(tmp_path / f"part-{number}", part, target_metadata(tiny))
    return tmp_path


def test_labels_of_the_training_conversations_count(folder):
    data = open_sources([folder])
    counts = count_labels(data, V)
    assert dict(zip(*(np.flatnonzero(counts), counts[counts > 0]), strict=True)) == {
        3: 2,
        5: 3,
        7: 2,
    }
    ids = draft_vocabulary(data, 2, V)
    assert ids.tolist() == [3, 5]
    assert ids.dtype == np.int32
    # Tokens that never occur fill up, the lowest first.
    assert draft_vocabulary(data, 5, V).tolist() == [0, 1, 3, 5, 7]
    # One dataset alone is read likewise.
    assert draft_vocabulary(data.parts[1], 1, V).tolist() == [3]


def test_the_whole_vocabulary_needs_no_map(folder):
    data = open_sources([folder])
    assert draft_vocabulary(data, None, V) is None
    assert draft_vocabulary(data, V, V) is None
    assert not list(folder.glob(f"*/{COUNTS}"))


@pytest.mark.parametrize("size", [0, V + 1])
def test_sizes_out_of_range(folder, size):
    with pytest.raises(InputError, match=rf"draft_vocab_size={size}: must be in 1\.\.{V}"):
        draft_vocabulary(open_sources([folder]), size, V)


def test_records_are_read_once(folder, monkeypatch):
    wanted = count_labels(open_sources([folder]), V)
    assert [path.name for path in sorted(folder.glob("*/token_counts.npy"))] == [COUNTS] * 2

    def unread(self, index):
        raise AssertionError("read again")

    monkeypatch.setattr(vocabulary.Responses, "__getitem__", unread)
    np.testing.assert_array_equal(count_labels(open_sources([folder]), V), wanted)
    with pytest.raises(AssertionError, match="read again"):
        count_labels(open_sources([folder]), V + 1)


def test_a_damaged_count_is_made_again(folder):
    wanted = count_labels(open_sources([folder]), V)
    for damage in (b"", b"no array", np.zeros(3).tobytes()):
        (folder / "part-0" / COUNTS).write_bytes(damage)
        np.testing.assert_array_equal(count_labels(open_sources([folder]), V), wanted)
    np.save(folder / "part-0" / COUNTS, np.zeros(V))
    np.testing.assert_array_equal(count_labels(open_sources([folder]), V), wanted)
    assert np.load(folder / "part-0" / COUNTS).sum() == 3


def test_a_directory_that_cannot_be_written(folder, monkeypatch):
    def refused(*_):
        raise OSError("read-only")

    monkeypatch.setattr(os, "replace", refused)
    assert draft_vocabulary(open_sources([folder]), 1, V).tolist() == [5]
    assert not [p for p in (folder / "part-0").iterdir() if COUNTS in p.name]
