"""Conversations on disk: what goes in comes out, and what is damaged says so."""

import gzip
import json
import os
import resource
import subprocess
import sys

import numpy as np
import pytest
from bad_input import refused_command
from conftest import tiny_config

from specjax.errors import InputError
from specjax.files import folder_checksums
from specjax.loading.load import random_model
from train import import_responses
from train.data.combined_datasets import open_sources
from train.data.examples import Example, target_metadata
from train.data.responses import open_responses
from train.data.write_responses import write_responses

WIDTH, V = 24, 61
NAMES = ("layer_input:2", "final_norm")


@pytest.fixture(scope="module")
def metadata(tiny):
    return target_metadata(tiny)


def example(number, length=20, prompt=6, names=(), **changes):
    rng = np.random.default_rng(number)
    made = Example(
        tokens=rng.integers(0, V, length).astype(np.int32),
        loss_mask=np.arange(length) >= prompt,
        features={name: rng.standard_normal((length, WIDTH)).astype(np.float16) for name in names},
        category="coding",
        temperature=0.7,
        id=number,
        source="templates",
        licence="CC0-1.0",
    )
    for name, value in changes.items():
        object.__setattr__(made, name, value)  # past the checks of types that tests switch on
    return made


@pytest.mark.parametrize("path", ["~nosuchuser/x", "a" * 300, "", "a\0b"])
def test_texts_that_are_no_paths(path, metadata):
    for field, use in (
        ("data", lambda: open_responses(path)),
        ("data", lambda: open_sources([path])),
        ("output", lambda: write_responses(path, [], metadata)),
    ):
        with pytest.raises(InputError, match=f"^{field}='"):
            use()


def same(one, other):
    assert set(one.features) == set(other.features)
    for name in one.features:
        np.testing.assert_array_equal(one.features[name], other.features[name])
        assert other.features[name].dtype == np.float16
    for field in ("tokens", "loss_mask"):
        np.testing.assert_array_equal(getattr(one, field), getattr(other, field))
        assert getattr(one, field).dtype == getattr(other, field).dtype
    for field in ("category", "source", "licence", "id"):
        assert getattr(one, field) == getattr(other, field)
    assert one.temperature == pytest.approx(other.temperature)


def test_round_trip_in_order(tmp_path, metadata):
    examples = [example(7 * i, 10 + i, 4, NAMES) for i in range(40)]
    settings = {"seed": 3}
    write_responses(tmp_path / "d", iter(examples), metadata, NAMES, generation=settings)
    responses = open_responses(tmp_path / "d", metadata)
    assert len(responses) == 40
    assert responses.feature_names == NAMES
    assert responses.target == metadata
    assert responses.generation == settings
    assert responses.lengths.tolist() == [10 + i for i in range(40)]
    assert responses.num_labels.tolist() == [6 + i for i in range(40)]
    assert responses.ids[responses.validation].tolist() == [0]
    for index in (39, 0, 17, -1):
        same(examples[index], responses[index])
    with pytest.raises(IndexError):
        responses[40]


def test_a_dataset_named_twice_counts_twice(tmp_path, metadata):
    parts = {"a": [example(50), example(1)], "b": [example(2), example(3, 30), example(4)]}
    for name, part in parts.items():
        write_responses(tmp_path / name, part, metadata, NAMES[:0])
    data = open_sources([tmp_path / name for name in ("a", "b", "a")], metadata)
    order = [*parts["a"], *parts["b"], *parts["a"]]
    assert len(data) == 7
    assert data.lengths.tolist() == [20, 20, 20, 30, 20, 20, 20]
    assert data.num_labels.sum() == sum(one.loss_mask.sum() for one in order)
    assert np.flatnonzero(data.validation).tolist() == [0, 5]
    for index, one in enumerate(order):
        same(one, data[index])


def test_any_reader_of_tfds_opens_it(tmp_path, metadata):
    import tensorflow_datasets as tfds

    write_responses(tmp_path / "d", [example(i) for i in range(5)], metadata)
    source = tfds.builder_from_directory(tmp_path / "d").as_data_source("conversations")
    assert len(source) == 5
    np.testing.assert_array_equal(source[3]["tokens"], example(3).tokens)


def test_tensorflow_is_never_imported_and_tfds_only_to_read_a_record(tmp_path, metadata):
    write_responses(tmp_path / "d", [example(1)], metadata)
    script = (
        "import sys; from train.data.responses import open_responses; "
        f"data = open_responses({str(tmp_path / 'd')!r}); data.lengths, data.num_labels; "
        "assert 'tensorflow_datasets' not in sys.modules; data[0]; "
        "assert 'tensorflow' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokens": np.full(20, V, np.int32)}, "token id 61 is outside the vocabulary of 61"),
        ({"tokens": np.full(20, -1, np.int32)}, "token id -1"),
        ({"tokens": np.zeros(0, np.int32), "loss_mask": np.zeros(0, bool)}, "no tokens"),
        ({"loss_mask": np.ones(19, bool)}, "19"),
        ({"id": 0}, "ids must differ"),
        ({"id": -3}, "at least 0"),
        ({"features": {}}, "brings the features"),
        ({"features": {"final_norm": np.zeros((20, WIDTH + 1), np.float16)}}, "25"),
        ({"features": {"final_norm": np.full((20, WIDTH), np.inf, np.float16)}}, "not finite"),
    ],
)
def test_what_is_not_the_targets_is_refused_and_nothing_left(tmp_path, metadata, changes, said):
    names = ("final_norm",)
    wrong = example(1, names=names, **changes)
    with pytest.raises(InputError, match=said):
        write_responses(tmp_path / "d", [example(0, names=names), wrong], metadata, names)
    assert not list(tmp_path.iterdir())


def changed_table(change):
    """Damage: another table of records."""

    def damage(path):
        np.save(path / "records.npy", change(np.load(path / "records.npy")))

    return damage


def truncated(name, size):
    """Damage: the file of that name has only its beginning."""

    def damage(path):
        (file,) = path.glob(name)
        os.truncate(file, size)

    return damage


DAMAGES = {
    # what is done, and whether the marker knows; the error of opening it or reading an example
    "masked": (changed_table(lambda table: table * [[1, 1, 0]]), False, "fully masked"),
    "empty": (changed_table(lambda table: table[:0]), True, "empty dataset"),
    "a record less": (changed_table(lambda table: table[:-1]), True, "3 records where"),
    "half a table": (truncated("records.npy", 100), False, "damaged"),
    "another format": (truncated("specjax.json", 0), True, "specjax.json is not JSON"),
    "half the data": (truncated("*array_record*", 1000), True, "cannot be read"),
    "no data": (lambda path: next(path.glob("*array_record*")).unlink(), True, "write"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found(damage, tmp_path, metadata):
    path = tmp_path / "d"
    write_responses(path, [example(number) for number in range(4)], metadata)
    change, sealed, said = DAMAGES[damage]
    change(path)
    if sealed:
        folder_checksums.seal(path, "dataset")
    with pytest.raises(InputError, match=said) as caught:
        open_responses(path)[0]
    assert "\n" not in str(caught.value)


def test_what_is_no_dataset(tmp_path, metadata):
    with pytest.raises(InputError, match="not a single conversation"):
        write_responses(tmp_path / "d", [], metadata)
    masked = example(0, loss_mask=np.zeros(20, bool))
    with pytest.raises(InputError, match="no token of any"):
        write_responses(tmp_path / "d", [masked], metadata)
    with pytest.raises(InputError, match="no such directory"):
        open_responses(tmp_path / "nowhere")
    with pytest.raises(InputError, match="not a dataset of responses"):
        open_responses(tmp_path)
    write_responses(tmp_path / "d", [masked, example(1)], metadata)
    (tmp_path / "d" / "specjax.json").write_text("{}")
    folder_checksums.seal(tmp_path / "d", "dataset")
    with pytest.raises(InputError, match="not of a format"):
        open_responses(tmp_path / "d")


def test_another_target(tmp_path, metadata, chatty):
    write_responses(tmp_path / "d", [example(1)], metadata)
    for changes in ({"hidden_size": 32}, {"num_layers": 2}, {"vocab_size": 62}):
        with pytest.raises(InputError, match=f"another target.*{next(iter(changes))}"):
            open_responses(tmp_path / "d", metadata | changes)
    open_responses(tmp_path / "d", metadata | {"name": "a copy elsewhere"})
    theirs = target_metadata(chatty)
    write_responses(tmp_path / "e", [example(1)], theirs)
    with pytest.raises(InputError, match="another target.*tokenizer"):
        open_responses(tmp_path / "e", theirs | {"tokenizer": "0" * 64})


def test_an_earlier_dataset_is_never_lost(tmp_path, metadata):
    path = tmp_path / "d"
    write_responses(path, [example(1)], metadata)
    with pytest.raises(InputError, match="holds a dataset already"):
        write_responses(path, [example(2)], metadata)

    def dies():
        yield example(3)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_responses(path, dies(), metadata, overwrite=True)
    assert open_responses(path)[0].id == 1
    write_responses(path, [example(2)], metadata, overwrite=True)
    assert open_responses(path)[0].id == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["d"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("keep me")
    with pytest.raises(InputError, match="other: holds 'letter.txt', which specjax has"):
        write_responses(tmp_path / "other", [example(2)], metadata, overwrite=True)


def test_a_full_disk_is_named(tmp_path, metadata):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    examples = (example(i, 300, names=("final_norm",)) for i in range(200))
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, limits[1]))
    try:
        with pytest.raises(InputError, match="cannot be written"):
            write_responses(tmp_path / "d", examples, metadata, ("final_norm",))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


def row(number, **changes):
    return {
        "id": number,
        "category": "qa",
        "source": "own",
        "licence": "CC0-1.0",
        "temperature": 0.0,
        "prompt_token_ids": [5, 6, 7],
        "response_token_ids": [8, 9],
        **changes,
    }


@pytest.fixture
def small_target(monkeypatch):
    monkeypatch.setattr(
        import_responses, "load_model", lambda name, *, field: random_model(tiny_config(), 0)
    )


def test_rows_are_imported(tmp_path, small_target, capsys):
    lines = "\n".join(json.dumps(row(i)) for i in range(7)) + "\n\n"
    file = tmp_path / "rows.jsonl.gz"
    file.write_bytes(gzip.compress(lines.encode()))
    assert import_responses.main([f"--input={file}", f"--output={tmp_path / 'd'}"]) == 0
    assert "7 conversations, 35 tokens, 14 of them" in capsys.readouterr().out
    responses = open_responses(tmp_path / "d")
    assert responses[6].tokens.tolist() == [5, 6, 7, 8, 9]
    assert responses[6].loss_mask.tolist() == [False] * 3 + [True] * 2
    file.with_suffix("").write_text(lines)
    arguments = [f"--input={file.with_suffix('')}", f"--output={tmp_path / 'e'}", "--limit=2"]
    assert import_responses.main(arguments) == 0
    assert len(open_responses(tmp_path / "e")) == 2


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2 is not JSON"),
        ("[]", "line 2 is []; put one JSON object in a line"),
        (json.dumps(row(1, licence=None)), "line 2: licence=None"),
        (json.dumps(row(0)), "line 2: id=0 is taken, by "),
        (json.dumps(row(2**63)), "line 2: id=9223372036854775808"),
        (json.dumps(row(-1)), "line 2: id=-1"),
        (json.dumps(row(1, temperature=-1)), "line 2: temperature=-1"),
        (json.dumps(row(1, temperature=10**400)), "line 2: temperature=1000"),
        (json.dumps(row(1)).replace("0.0", "1e999"), "line 2 is not JSON"),
        (json.dumps(row(1)).replace("0.0", "1" * 5000), "line 2 is not JSON"),
        (json.dumps(row(1, source="\ud800")), "line 2: source: character 0 is '\\ud800'"),
        (json.dumps(row(1, prompt_token_ids=[2**31])), "line 2: prompt_token_ids=[2147483648]"),
        (json.dumps(row(1, id=True)), "id=True"),
        (json.dumps(row(1, response_token_ids=[])), "response_token_ids"),
        (json.dumps(row(1, prompt_token_ids=[1.5])), "prompt_token_ids"),
        (json.dumps(row(1, response_token_ids=[61])), "outside the vocabulary"),
    ],
)
def test_rows_of_no_use(tmp_path, small_target, capsys, line, said):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row(0)) + "\n" + line + "\n")
    assert said in refused_command(
        import_responses.main, [f"--input={file}", f"--output={tmp_path / 'd'}"], capsys
    )
    assert not (tmp_path / "d").exists()


def test_files_of_no_use(tmp_path, small_target, capsys):
    (tmp_path / "empty").write_text("")
    (tmp_path / "torn").write_bytes(gzip.compress(b"{}" * 1000)[:-20])
    for name, said in (("none", "no such file"), ("empty", "no rows"), ("torn", "")):
        arguments = [f"--input={tmp_path / name}", f"--output={tmp_path / 'd'}"]
        assert said in refused_command(import_responses.main, arguments, capsys)
