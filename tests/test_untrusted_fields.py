"""Fields of model files with values that nothing takes: one line with the file and the field."""

import json
import shutil
from pathlib import Path

import pytest

from specjax.errors import InputError
from specjax.loading import model_metadata
from specjax.loading.load import load_model
from specjax.loading.tokenizers.huggingface_tokenizer import read_tokenizer
from specjax.loading.tokenizers.tokenizer import Tokenizer

GOLDENS = Path(__file__).parent / "goldens"


@pytest.fixture
def directory(tmp_path):
    path = tmp_path / "model"
    shutil.copytree(GOLDENS / "grouped_tied", path)
    return path


def edit(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def refusal(directory):
    with pytest.raises(InputError) as caught:
        load_model(directory)
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 600
    return message


@pytest.mark.parametrize(
    "value",
    [
        *(5, True, {}, "\ud800", "x" * 2**21, [5]),
        [{"name": "default"}],
        [{"name": "default", "template": 5}],
    ],
)
def test_what_is_no_chat_template(directory, value):
    (directory / "chat_template.jinja").unlink()
    edit(directory / "tokenizer_config.json", chat_template=value)
    assert "tokenizer_config.json: chat_template" in refusal(directory)


def test_several_chat_templates(directory):
    (directory / "chat_template.jinja").unlink()
    entries = [{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]
    for value, template in ((entries, "b"), (entries[:1], None), ([], None), (None, None)):
        edit(directory / "tokenizer_config.json", chat_template=value)
        assert read_tokenizer(directory).chat_template == template


def test_a_template_file_of_no_use(directory):
    path = directory / "chat_template.jinja"
    for content, message in ((b"\xff", "cannot be read"), (b"x" * 2**21, "characters")):
        path.write_bytes(content)
        assert f"{path}" in refusal(directory)
        assert message in refusal(directory)


def test_a_template_in_our_own_checkpoint_is_bounded(directory):
    tokenizer = read_tokenizer(directory)
    content = model_metadata.tokenizer_metadata(tokenizer) | {"chat_template": "x" * 2**21}
    with pytest.raises(InputError, match="chat_template has 2097152 characters"):
        model_metadata.read_tokenizer(content)


@pytest.mark.parametrize("value", [2**31, 2**40, -1, 10**4000])
def test_end_ids_beyond_the_vocabulary(directory, value):
    edit(directory / "generation_config.json", eos_token_id=value)
    assert "eos_token_id=" in refusal(directory)


def test_numbers_that_no_float_holds(directory):
    path = directory / "config.json"
    path.write_text(path.read_text().replace("{", '{"rope_theta": 1e999, ', 1))
    assert "too large" in refusal(directory)
    path.write_text('{"hidden_size": ' + "1" * 5000 + "}")
    assert "is not JSON" in refusal(directory)


def test_a_vocabulary_with_one_enormous_id(directory):
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"]["far"] = 2**32 - 1
    path.write_text(json.dumps(content))
    assert "have ids up to 4294967295" in refusal(directory)


def test_a_panic_of_the_tokenizers_package_is_an_error(directory, capfd):
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["continuing_subword_prefix"] = "\0" * 10
    path.write_text(json.dumps(content))
    assert "not a tokenizer" in refusal(directory)
    capfd.readouterr()  # Rust prints of it what it likes


def test_an_unknown_token_that_is_none(directory):
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["unk_token"] = "no such token"
    path.write_text(json.dumps(content))
    tokenizer = read_tokenizer(directory)
    assert isinstance(tokenizer, Tokenizer)
    with pytest.raises(InputError, match="text: the tokenizer cannot encode it"):
        tokenizer.encode("\u4e16")


def test_messages_are_printable_and_bounded():
    for text in ("a\nb\r\t\x1b[2J\0\ud800\u2028", "x" * 10**6):
        message = str(InputError(text))
        assert message.isprintable()
        assert len(message) < 2100
    assert str(InputError("a\nb\x1b[2J\ud800")) == r"a b\x1b[2J\ud800"
    assert str(InputError("Ġ é ▁ 世")) == "Ġ é ▁ 世"
