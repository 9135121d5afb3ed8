"""Pipes, devices and folders where a file is expected: refused by name; prompts may come in pipes.

An opening that waits would hang in a library's own code: the tests end it from outside.
"""

import faulthandler
import gzip
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
from bad_input import refused_command
from tiny_models import eagle_head, save_with_orbax
from toy_training import write_data

from specjax.apps.run import decode
from specjax.errors import InputError
from specjax.fields import InputFile
from specjax.files import json_files
from specjax.loading.checkpoints import load_drafter
from specjax.loading.formats.gguf_file import open_gguf
from specjax.loading.load import load_model
from specjax.loading.texts.questions import read_questions
from specjax.methods.published_layouts import read_foreign, write_foreign
from specjax.methods.saved_heads import read_head, save_head
from train.data.responses import open_responses
from train.generation.prompts import read_dataset

GOLDEN = Path(__file__).parent / "goldens" / "grouped_tied"
LINE = b'{"question_id": 1, "category": "qa", "turns": ["a"]}\n'


@pytest.fixture(autouse=True)
def no_hanging():
    """A hang ends the test session with a traceback; nothing milder reaches compiled code."""
    faulthandler.dump_traceback_later(120, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


PUT = {
    "a pipe": os.mkfifo,
    "a folder": os.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.fixture(scope="module")
def folders(tiny, tmp_path_factory):
    """A folder of each kind that is read, not to be changed."""
    root = tmp_path_factory.mktemp("folders")
    shutil.copytree(GOLDEN, root / "model")
    write_foreign(eagle_head(tiny), root / "head of others", "eagle3", tiny)
    save_head(eagle_head(tiny), root / "head")
    save_with_orbax(root / "head by Orbax", *load_drafter(root / "head"))
    write_data(root / "dataset")
    return root


def read_json(folder, _):
    json_files.read_json_file(folder / "config.json")


def read_gguf(folder, _):
    with open_gguf(folder / "config.json"):
        pass


FILES = {
    "model": (
        lambda folder, _: load_model(folder),
        "config.json model.safetensors model.safetensors.index.json tokenizer.json "
        "tokenizer_config.json chat_template.jinja generation_config.json",
    ),
    "head of others": (read_foreign, "config.json model.safetensors"),
    "head": (lambda folder, _: read_head(folder), "model.safetensors specjax_checkpoint.json"),
    "head by Orbax": (lambda folder, _: read_head(folder), "params/manifest.ocdbt"),
    "dataset": (
        lambda folder, _: open_responses(folder),
        "records.npy features.json specjax.json",
    ),
    "dataset of prompts": (
        lambda folder, _: read_dataset(str(folder)),
        "records.npy features.json specjax.json",
    ),
    "json": (read_json, "config.json"),
    "gguf": (read_gguf, "config.json"),
}
FOLDERS = {"dataset of prompts": "dataset", "json": "model", "gguf": "model"}


# Of checkpoints and datasets all files are looked at, folders inside them are not.
CASES = [
    (kind, name, what)
    for kind, (_, names) in FILES.items()
    for name in names.split()
    for what in PUT
    if what != "a folder" or kind not in ("head", "head by Orbax", "dataset", "dataset of prompts")
]


@pytest.mark.parametrize(("kind", "name", "what"), CASES)
def test_what_is_no_file_is_refused_by_name(kind, name, what, folders, tiny, tmp_path):
    folder = shutil.copytree(folders / FOLDERS.get(kind, kind), tmp_path / "copy")
    if name == "model.safetensors.index.json":
        (folder / "model.safetensors").unlink()
    (folder / name).unlink(missing_ok=True)
    PUT[what](folder / name)
    with pytest.raises(InputError) as raised:
        FILES[kind][0](folder, tiny)
    assert str(raised.value).startswith(f"{folder / name} is {what}, not a file; ")


def test_a_config_is_no_pipe(tmp_path, capsys):
    os.mkfifo(tmp_path / "config.py")
    assert "config.py' is a pipe: name a file" in refused_command(
        decode.main, [f"--config={tmp_path / 'config.py'}"], capsys
    )
    with pytest.raises(InputError, match=r"head='.*config.py' is a pipe: name a file"):
        InputFile().check("head", str(tmp_path / "config.py"))


@pytest.mark.parametrize("pack", [lambda text: text, gzip.compress])
def test_prompts_come_through_a_pipe(pack, tmp_path):
    """It is read once, to its end, however slowly it is written."""
    os.mkfifo(tmp_path / "pipe")
    content = pack(LINE + LINE.replace(b"1", b"2") + b"\n" * 200_000)

    def write():
        with (tmp_path / "pipe").open("wb", buffering=0) as file:
            file.write(content[:1])
            time.sleep(0.2)
            file.write(content[1:])

    writer = threading.Thread(target=write)
    writer.start()
    assert [question.question_id for question in read_questions(tmp_path / "pipe")] == [1, 2]
    writer.join()


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
