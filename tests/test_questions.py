"""Prompt files of other people: every line that is off is named with file and line."""

import gzip
import json

import pytest

from specjax.engine.requests import encode_prompt
from specjax.errors import InputError
from specjax.files import json_files
from specjax.loading.texts.questions import read_questions


def question(**changes):
    return json.dumps({"question_id": 1, "category": "qa", "turns": ["a"], **changes})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "is not JSON"),
        ("[1]", r"is \[1\]; put one JSON object"),
        ("3", "is 3; put one JSON object"),
        ('{"question_id": 1e999, "turns": ["a"]}', "is not JSON.*too large"),
        ('{"question_id": NaN, "turns": ["a"]}', "is not JSON"),
        ('{"question_id": %s, "turns": ["a"]}' % ("1" * 5000), "is not JSON"),
        ('{"question_id": %s}' % ("[" * 100_000), "is not JSON"),
        (question(question_id=None), "question_id=None: must be a whole number"),
        (question(question_id=True), "question_id=True: must be a whole number"),
        (question(question_id=1.0), "question_id=1.0: must be a whole number"),
        (question(question_id=2**64), "question_id=18446744073709551616: must be"),
        (question(question_id="x" * 1001), "question_id='xxx.*: must be"),
        (question(question_id=[1]), r"question_id=\[1\]: must be"),
        (question(category=3), "category=3: must be a text"),
        (question(category="x" * 1001), "category='xxx.*: must be"),
        (question(turns=[]), '"turns" must be a list'),
        (question(turns=["a", ""]), '"turns" must be a list'),
        (question(turns="abc"), '"turns" must be a list'),
        (question(turns=["a", "b\ud800"]), "turns: character 1 is .*half of a surrogate pair"),
    ],
)
def test_a_line_of_no_use_is_named(tmp_path, line, message):
    path = tmp_path / "q.jsonl"
    path.write_text(question(question_id=0) + "\n\n" + line + "\n")
    with pytest.raises(InputError, match=rf"q\.jsonl, line 3:? .*{message}") as caught:
        read_questions(path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_two_questions_of_one_number(tmp_path):
    path = tmp_path / "q.jsonl"
    lines = [question(question_id=name) for name in (1, "1", "x", 2, "x")]
    path.write_text("\n".join(lines))
    with pytest.raises(InputError, match=r"line 5: question_id='x' is taken, by .*line 3"):
        read_questions(path)


def test_names_may_be_anything_that_json_spells(tmp_path):
    path = tmp_path / "q.jsonl.gz"
    names = (1, "1", -(2**63) + 1, "", "\ud800", "é")
    lines = [question(question_id=name, category="\udfff") for name in names]
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    assert tuple(one.question_id for one in read_questions(path)) == names


def test_files_that_cannot_be_read(tmp_path):
    for path, message in (
        (tmp_path, "is a folder"),
        (tmp_path / "none.jsonl", "no such file"),
        ("/dev/null", "is a device"),
    ):
        with pytest.raises(InputError, match=f"prompts=.*{message}"):
            read_questions(path)
    (tmp_path / "empty").write_text("\n \n")
    with pytest.raises(InputError, match="holds no questions"):
        read_questions(tmp_path / "empty")
    (tmp_path / "bytes").write_bytes(question().encode() + b"\n\xff\xfe\n")
    with pytest.raises(InputError, match="bytes, line 2 is not JSON"):
        read_questions(tmp_path / "bytes")
    (tmp_path / "torn").write_bytes(gzip.compress(question().encode() * 1000)[:-20])
    with pytest.raises(InputError, match="torn. cannot be read after line 0"):
        read_questions(tmp_path / "torn")


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text(question() + "\n", encoding="utf-8-sig")
    assert len(read_questions(path)) == 1
    path.write_text('{"a": 1}', encoding="utf-8-sig")
    assert json_files.read_json_file(path) == {"a": 1}
    assert json_files.parse_json(path.read_text(), "here") == {"a": 1}


def test_a_key_that_is_there_twice_is_refused_by_name(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text('{"turns": ["a"], "turns": ["b"]}\n')
    with pytest.raises(InputError, match=r"q.jsonl, line 1 is not JSON \(the key 'turns' is there"):
        read_questions(path)
    path.write_text('{"a": [{"b": 1, "c": 2, "b": 1}]}')
    with pytest.raises(InputError, match=r"is not JSON \(the key 'b' is there twice\); repair it"):
        json_files.read_json_file(path, "repair it")


def test_a_file_that_is_too_large_is_not_to_be_restored(tmp_path, monkeypatch):
    monkeypatch.setattr(json_files, "_LARGEST_FILE", 1 << 20)
    path = tmp_path / "a.json"
    path.write_bytes(b" " * ((1 << 20) + 1))
    with pytest.raises(InputError, match="a.json: too large: .* at most 1 MiB .* a smaller file$"):
        json_files.read_json_file(path, "restore it")


def test_what_a_prompt_is_called_is_in_every_error(chatty):
    with pytest.raises(InputError, match=r"^q\.jsonl, line 7: chat template"):
        encode_prompt(chatty, [{"role": "user\n", "content": "x"}], "q.jsonl, line 7")
    with pytest.raises(InputError, match="^here: text: .*half of a surrogate"):
        encode_prompt(chatty, "\ud800", "here")
    with pytest.raises(InputError, match="^here=.*: use text, token ids, or messages"):
        encode_prompt(chatty, [10**4000], "here")
