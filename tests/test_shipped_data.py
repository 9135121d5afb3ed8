"""The answers that come with specjax: what they are, how they are opened, how they were chosen."""

import collections
import gzip
import json
import shutil

import numpy as np
import pytest
from conftest import tiny_config
from script_modules import script_module

from specjax.errors import InputError
from specjax.loading.load import DEFAULT_MODEL, random_model
from train.data import shipped
from train.data.examples import Example
from train.data.json_lines import read_rows, row_of
from train.data.sources import DataFolders, open_sources


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
        assert row_of(data[index]) | {"temperature": None} == rows[index] | {"temperature": None}
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


def conversations():
    """Rows of two licences, categories and temperatures, with 10 response tokens each."""
    for number in range(160):
        mask = np.arange(14) >= 4
        yield Example(
            tokens=np.full(14, number % 50, np.int32),
            loss_mask=mask,
            category=("qa", "coding")[number % 2],
            temperature=(0.0, 1.0)[number // 2 % 2],
            id=number,
            source="templates",
            licence=("CC0", "MIT")[number // 4 % 2],
        )


def test_the_choice_is_balanced_and_repeats():
    with script_module("data.make_training_data") as script:
        chosen = script.choose(conversations(), "CC0", 400, seed=0)
        again = script.choose(reversed(list(conversations())), "CC0", 400, seed=0)
        other = script.choose(conversations(), "CC0", 400, seed=1)
        with pytest.raises(InputError, match="licence='GPL': no row has it"):
            script.choose(conversations(), "GPL", 400, seed=0)
        with pytest.raises(InputError, match="tokens=4000: coding at temperature 0 has 200"):
            script.choose(conversations(), "CC0", 4000, seed=0)
    numbers = [row.id for row in chosen]
    assert numbers == sorted(numbers) == [row.id for row in again]
    assert numbers != [row.id for row in other]
    assert {row.licence for row in chosen} == {"CC0"}
    counts = collections.Counter((row.category, row.temperature) for row in chosen)
    assert set(counts.values()) == {10}


def test_the_script_writes_the_same_bytes(tmp_path, monkeypatch, capsys):
    lines = [json.dumps(row_of(row)) + "\n" for row in conversations()]
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    with script_module("data.make_training_data") as script:
        model = random_model(tiny_config(), 0, dtype="float32")
        monkeypatch.setattr(script, "load_model", lambda name, *, field: model)
        command = [f"--input={tmp_path / 'rows.jsonl'}", f"--output={tmp_path / 'out'}"]
        assert script.main([*command, "--tokens=400"]) == 0
        assert "40 conversations, 400 response tokens" in capsys.readouterr().out
        first = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
        shutil.rmtree(tmp_path / "out")
        assert script.main([*command, "--tokens=400"]) == 0
        assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == first
    assert sorted(first) == [shipped.METADATA.name, shipped.ROWS.name]
    assert len(list(read_rows(tmp_path / "out" / shipped.ROWS.name))) == 40
