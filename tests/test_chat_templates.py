"""What templates are given: parts, tool calls and reasoning, as in transformers."""

import json
from pathlib import Path

import pytest

from specjax.errors import InputError
from specjax.loading.tokenizers import chat_templates

GOLDEN = json.loads((Path(__file__).parent / "goldens" / "chats.json").read_text(encoding="utf-8"))
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
PARTS = [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]


def render(template, messages):
    return chat_templates.render(template, messages, NAMES)


def all_parts_are_in(text, chat):
    contents = [message.get("content") for message in chat]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    shown = all(part["text"].strip() in text for part in parts)
    return shown and "{'type'" not in text and "[]" not in text


@pytest.mark.parametrize("row", GOLDEN["rows"], ids=lambda row: f"{row['template']} {row['chat']}")
def test_as_in_transformers_where_it_prints_all(row):
    template, chat = GOLDEN["templates"][row["template"]], GOLDEN["chats"][row["chat"]]
    expected = row["text"]
    if expected is None or not all_parts_are_in(expected, chat):
        expected = row["joined"]
    if expected is not None:
        assert render(template, chat) == expected
        return
    with pytest.raises(InputError, match="^chat template: it fails on these messages"):
        render(template, chat)


def test_the_goldens_have_all_cases():
    rows = GOLDEN["rows"]
    assert {row["template"] for row in rows if row["text"] is None} >= {"added", "parts"}
    different = {row["template"] for row in rows if row["text"] not in (None, row["joined"])}
    assert different >= {"texts_and_tools", "trimmed", "parts", "macro"}


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ messages[0].content[1].text }}|{{ messages[0].content[0].text }}", "Two.|One."),
        ("{{ messages[0].content | map(attribute='text') | join(' ') }}", "One. Two."),
        ("{{ messages[0].content | tojson }}", json.dumps(PARTS)),
        ("{{ messages[0].content[0] }}", "O"),
        ("{{ messages[0].content | length }}", "9"),
        ("{{ messages[1].content }}", "more"),
    ],
)
def test_a_template_gets_parts_where_it_prints_them(template, text):
    chat = [{"role": "system", "content": PARTS}, {"role": "user", "content": "more"}]
    assert render(template, chat) == text


def test_each_role_has_its_own_form():
    template = (
        "{{ '[' + messages[0].content + ']' }}{% for message in messages[1:] %}"
        "{% for part in message.content %}{{ part.text }};{% endfor %}{% endfor %}"
    )
    chat = [{"role": role, "content": PARTS} for role in ("system", "user")]
    assert render(template, chat) == "[One.\nTwo.]One.;Two.;"


def test_messages_are_not_changed():
    chat = [{"role": "user", "content": tuple(PARTS), "name": None, "thinking": "x"}]
    before = json.dumps(chat)
    assert render("{{ messages[0] | tojson }}", chat) == json.dumps(
        {"thinking": "x", "role": "user", "content": PARTS, "reasoning_content": "x"}
    )
    assert json.dumps(chat) == before


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ("text", "messages[1]='text': must be a dict with string 'role'"),
        ({"content": "x"}, "messages[1]={'content': 'x'}: must be a dict with string 'role'"),
        ({"role": "user"}, "messages[1].content is missing"),
        ({"role": "user", "content": None}, "messages[1].content is missing"),
        ({"role": "assistant", "tool_calls": []}, "messages[1].content is missing"),
        ({"role": "assistant", "tool_calls": "f()"}, "messages[1].tool_calls='f()': must be a"),
        ({"role": "assistant", "tool_calls": ["f()"]}, "messages[1].tool_calls=['f()']: must be a"),
        ({"role": "user", "content": 3}, "messages[1].content=3: must be a text, or a list"),
        ({"role": "user", "content": {"text": "x"}}, "messages[1].content={'text': 'x'}: must be"),
        ({"role": "user", "content": ["x"]}, "messages[1].content[0]='x': must be a text part"),
        ({"role": "user", "content": [*PARTS, {"type": "image_url", "image_url": {}}]},
         "messages[1].content[2].type='image_url': must be a text part"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0]={'type':"),
        ({"role": "user", "content": [{"type": "text", "text": None}]}, "messages[1].content[0]={"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(message, problem):
    with pytest.raises(InputError) as error:
        chat_templates.check_messages([{"role": "user", "content": "x"}, message])
    assert str(error.value).startswith(problem)
    assert "\n" not in str(error.value)
