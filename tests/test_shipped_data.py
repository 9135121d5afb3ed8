"""The answers that come with specjax: what they are, how they are opened, how they were chosen."""

import collections
import gzip
import json

import numpy as np
import pytest

from specjax.errors import InputError
from specjax.loading.hub import DEFAULT_MODEL
from train.data import shipped
from train.data.combined_datasets import DataFolders, open_sources


@pytest.fixture(scope="module")
def rows():
    with gzip.open(shipped.ROWS) as file:
        return [json.loads(line) for line in file]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "specjax" / "data"


def test_what_is_in_it(rows):
    assert {row["licence"] for row in rows} == {"CC0"}
    assert {row["source"] for row in rows} == {"templates", "titles"}
    assert len({row["id"] for row in rows}) == len(rows)
    assert len({tuple(row["prompt_token_ids"]) for row in rows}) == len(rows)
    tokens = collections.Counter()
    for row in rows:
        tokens[row["category"], row["temperature"]] += len(row["response_token_ids"])
    assert len(tokens) == 6 * 3
    assert 300_000 <= tokens.total() < 303_000
    assert max(tokens.values()) - min(tokens.values()) < 160
    assert 20 <= sum(row["id"] % 50 == 0 for row in rows) <= 100
    files = shipped.ROWS.parent.glob("smollm2-135m-instruct*")
    assert sum(file.stat().st_size for file in files) < 1_000_000
    # The card names both numbers.
    card = shipped.ROWS.with_name("smollm2-135m-instruct.md").read_text()
    assert f"{len(rows):,} conversations with {tokens.total():,} response tokens" in card


def test_it_opens_like_any_dataset_and_is_written_once(rows, cache):
    data = open_sources([shipped.NAME])
    (part,) = data.parts
    assert part.directory.parent == cache
    assert part.target["name"] == DEFAULT_MODEL
    assert part.feature_names == ()
    np.testing.assert_array_equal(part.ids, [row["id"] for row in rows])
    np.testing.assert_array_equal(data.num_labels, [len(row["response_token_ids"]) for row in rows])
    assert data.validation.sum() == sum(row["id"] % 50 == 0 for row in rows)
    for index in (0, 7, len(rows) - 1):
        one, row = data[index], rows[index]
        assert one.tokens.tolist() == row["prompt_token_ids"] + row["response_token_ids"]
        assert (one.id, one.category, one.licence) == (row["id"], row["category"], row["licence"])
    written = (part.directory / "specjax.json").stat().st_mtime_ns
    both = open_sources([shipped.NAME, part.directory])
    assert len(both) == 2 * len(rows)
    assert (part.directory / "specjax.json").stat().st_mtime_ns == written


def test_a_damaged_copy_is_made_again(cache):
    said = []
    directory = shipped.shipped_dataset(said.append)
    records = directory / "records.npy"
    good = records.read_bytes()
    records.write_bytes(good[:-8] + b"\1" * 8)
    assert shipped.shipped_dataset(said.append) == directory
    assert records.read_bytes() == good
    assert [line.endswith("is made again") for line in said] == [True]


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(InputError, match="XDG_CACHE_HOME"):
        open_sources([shipped.NAME])


def test_several_folders_that_are_missing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    kind = DataFolders()
    assert kind.check("data", "here, shipped") == "here, shipped"
    with pytest.raises(InputError, match="data='one': no such folder.*data='two': no such folder"):
        kind.check("data", "one,here,two,shipped")
    with pytest.raises(InputError, match="data is missing: pass --config.data=DIRECTORY"):
        kind.check("data", None)
