"""Copies of golden models, changed as a tool or an accident might, and the errors they give."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from specjax.errors import InputError
from specjax.loading.load import load_model

GOLDENS = Path(__file__).parent / "goldens"
WEIGHTS = "model.safetensors"


def edit_json(path, **fields):
    """Merge fields into a JSON file; None drops one."""
    content = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def edit_tensors(path, change):
    """Replace the tensors of a safetensors file by what `change` makes of them."""
    save_file(change(dict(load_file(path))), path)


def changed(source, folder, tensors=None, **fields):
    """A copy of a golden model, with its config and its tensors changed."""
    path = Path(shutil.copytree(GOLDENS / source, folder / "model"))
    edit_json(path / "config.json", **fields)
    if tensors is not None:
        edit_tensors(path / WEIGHTS, tensors)
    return path


def without(*starts):
    """A change of tensors: those whose names start so are left out."""
    return lambda tensors: {
        name: value for name, value in tensors.items() if not name.startswith(starts)
    }


def refusal(source):
    """The message of the error that loading gives: one printable line that names the source."""
    with pytest.raises(InputError) as caught:
        load_model(source)
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 1000
    assert str(source) in message
    return message
