"""Pipes, devices and folders where a file is expected: refused by name; prompts may come in pipes.

An opening that waits would hang in a library's own code: the tests end it from outside.
"""

import faulthandler
import gzip
import os
import shutil
import threading
from pathlib import Path

import pytest
from heads import eagle_head
from toy_training import write_data

from specjax import decode
from specjax.decoding.prompts import read_questions
from specjax.errors import InputError
from specjax.fields import InputFile
from specjax.files import json_files, open_files
from specjax.loading.formats.gguf_file import open_gguf
from specjax.loading.head_formats import read_foreign, write_foreign
from specjax.loading.heads.head import read_head, save_head
from specjax.loading.load import load_model
from train.data.responses import open_responses
from train.generation.prompts import read_dataset, read_requests
from train.import_responses import read_rows

GOLDEN = Path(__file__).parent / "goldens" / "grouped_tied"
LINE = b'{"question_id": 1, "category": "qa", "turns": ["a"]}\n'


@pytest.fixture(autouse=True)
def no_hanging():
    """A hang ends the test session with a traceback; nothing milder reaches compiled code."""
    faulthandler.dump_traceback_later(120, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def a_pipe(path):
    os.mkfifo(path)


def a_folder(path):
    path.mkdir()


def a_device(path):
    path.symlink_to("/dev/zero")


KINDS = pytest.mark.parametrize(
    ("put", "what"), [(a_pipe, "a pipe"), (a_folder, "a folder"), (a_device, "a device")]
)


def instead(file, put):
    """Put something where a file is."""
    file.unlink(missing_ok=True)
    put(file)
    return file


def refused(read, file, what):
    with pytest.raises(InputError) as raised:
        read()
    assert str(raised.value).startswith(f"{file} is {what}, not a file; ")


@KINDS
@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "model.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
    ],
)
def test_in_the_folder_of_a_model(name, put, what, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(GOLDEN, folder)
    if name == "model.safetensors.index.json":
        (folder / "model.safetensors").unlink()
    file = instead(folder / name, put)
    refused(lambda: load_model(folder), file, what)


@KINDS
def test_in_the_folder_of_a_head_by_others(put, what, tmp_path, tiny):
    write_foreign(eagle_head(tiny), tmp_path / "head", "eagle3", tiny, verify=False)
    for name in ("config.json", "model.safetensors"):
        folder = shutil.copytree(tmp_path / "head", tmp_path / name)
        file = instead(folder / name, put)
        refused(lambda folder=folder: read_foreign(folder, tiny), file, what)


@pytest.mark.parametrize(("put", "what"), [(a_pipe, "a pipe"), (a_device, "a device")])
def test_in_a_checkpoint(put, what, tmp_path, tiny):
    save_head(eagle_head(tiny), tmp_path / "head")
    file = next(path for path in (tmp_path / "head").rglob("*") if path.name == "manifest.ocdbt")
    instead(file, put)
    refused(lambda: read_head(tmp_path / "head"), file, what)


@pytest.mark.parametrize(("put", "what"), [(a_pipe, "a pipe"), (a_device, "a device")])
@pytest.mark.parametrize("name", ["records.npy", "features.json", "specjax.json"])
def test_in_a_dataset(name, put, what, tmp_path):
    write_data(tmp_path / "data")
    assert (tmp_path / "data" / name).is_file()
    file = instead(tmp_path / "data" / name, put)
    refused(lambda: open_responses(tmp_path / "data"), file, what)
    refused(lambda: read_dataset(str(tmp_path / "data")), file, what)


@KINDS
def test_gguf_and_json(put, what, tmp_path):
    file = instead(tmp_path / "a.gguf", put)

    def read():
        with open_gguf(file):
            pass

    refused(read, file, what)
    refused(lambda: json_files.read_json_file(file), file, what)


def test_a_config_is_no_pipe(tmp_path, capsys):
    os.mkfifo(tmp_path / "config.py")
    assert decode.main([f"--config={tmp_path / 'config.py'}"]) == 2
    assert "config.py' is a pipe: name a file" in capsys.readouterr().err
    with pytest.raises(InputError, match=r"head='.*config.py' is a pipe: name a file"):
        InputFile().check("head", str(tmp_path / "config.py"))


READERS = pytest.mark.parametrize(
    "read", [read_questions, read_requests, lambda path: list(read_rows(path))]
)


@READERS
def test_a_pipe_without_a_writer_is_an_error(read, tmp_path, monkeypatch):
    monkeypatch.setattr(open_files, "WRITER_SECONDS", 0.1)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match=r"pipe: a pipe that nobody has written to for 0.1 s"):
        read(tmp_path / "pipe")


def written_to(path, pieces):
    """A thread that writes to a pipe, waiting for an event before each piece."""

    def write():
        with path.open("wb", buffering=0) as file:
            for event, piece in pieces:
                assert event.wait(30)
                file.write(piece)

    thread = threading.Thread(target=write)
    thread.start()
    return thread


@pytest.mark.parametrize("pack", [lambda text: text, gzip.compress])
def test_a_pipe_is_read_to_its_end(pack, tmp_path, monkeypatch):
    """Its writer takes longer than a writer may take to come."""
    monkeypatch.setattr(open_files, "WRITER_SECONDS", 0.2)
    os.mkfifo(tmp_path / "pipe")
    content = pack(LINE + LINE.replace(b"1", b"2") + b"\n" * 200_000)
    first, second, third = threading.Event(), threading.Event(), threading.Event()
    thread = written_to(
        tmp_path / "pipe", [(first, b""), (second, content[:1]), (third, content[1:])]
    )
    first.set()
    threading.Timer(0.5, second.set).start()
    threading.Timer(0.7, third.set).start()
    assert [one.question_id for one in read_questions(tmp_path / "pipe")] == [1, 2]
    thread.join()


def test_stdin_may_be_a_pipe_or_a_file(tmp_path):
    """/dev/stdin and /proc/self/fd/N are treated as the files they refer to."""
    source, sink = os.pipe()
    os.write(sink, LINE)
    os.close(sink)
    path = Path(f"/proc/self/fd/{source}")
    assert InputFile(pipe=True).check("prompts", str(path)) == path
    assert len(read_questions(path)) == 1
    with pytest.raises(InputError, match="holds no questions"):
        read_questions(path)  # at its end: it has no writer left
    with pytest.raises(InputError, match="is a pipe: name a file"):
        InputFile().check("config", str(path))
    os.close(source)
    (tmp_path / "a.jsonl").write_bytes(LINE)
    with (tmp_path / "a.jsonl").open("rb") as file:
        assert len(read_questions(f"/proc/self/fd/{file.fileno()}")) == 1
    with pytest.raises(InputError, match="is a device: name a file"):
        read_questions("/dev/null")
