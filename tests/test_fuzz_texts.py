"""Lines of JSONL, reports and chat templates by anyone: they are used, or refused in one line."""

import json

import reports
from bad_input import VALUES, changed, examples, outcome
from hypothesis import given
from hypothesis import strategies as st

from specjax.apps.report import csv_jsonl, tables
from specjax.apps.report.runs import Entry, labels
from specjax.apps.rows.records import read_reports
from specjax.loading.texts.questions import read_questions
from specjax.loading.tokenizers import chat_templates, template_process
from train.generation.prompts import read_requests
from train.import_responses import read_rows

LINES = (
    {"question_id": 1, "category": "qa", "turns": ["a", "b"]},
    {"prompt": "a", "category": "c", "source": "s", "licence": "l"},
    {"messages": [{"role": "user", "content": "a"}]},
    {
        "id": 1,
        "category": "qa",
        "source": "own",
        "licence": "CC0-1.0",
        "temperature": 0.5,
        "prompt_token_ids": [5, 6],
        "response_token_ids": [8],
    },
)
READERS = (read_questions, read_requests, lambda path: list(read_rows(path)))


def read_all(path):
    for read in READERS:
        outcome(lambda read=read: read(path), memory=8_000_000)


@examples(40)
@given(data=st.data())
def test_changed_lines(tmp_path, data):
    path = tmp_path / "a.jsonl"
    documents = data.draw(st.lists(st.sampled_from(LINES).flatmap(changed), min_size=1, max_size=3))
    path.write_text("\n".join(map(json.dumps, documents)))
    read_all(path)


@examples(60)
@given(content=st.binary(max_size=200), start=st.sampled_from([b"", b"\x1f\x8b\x08", b'{"turns"']))
def test_files_of_any_bytes(tmp_path, content, start):
    path = tmp_path / "a.jsonl"
    path.write_bytes(start + content)
    read_all(path)
    outcome(lambda: read_reports(path), memory=8_000_000)


@examples(60)
@given(data=st.data())
def test_changed_reports(tmp_path, data):
    path = tmp_path / "a.jsonl"
    auto = reports.content("ngram+eagle3", "auto")
    lines = [*map(json.loads, reports.as_lines(reports.content(), auto).splitlines())]
    found = data.draw(changed(lines).filter(lambda one: isinstance(one, list)))
    path.write_text("".join(json.dumps(one) + "\n" for one in found))
    for run in outcome(lambda: read_reports(path), memory=8_000_000) or ():
        # What was read can be shown.
        outcome(lambda run=run: show(run), memory=8_000_000)


def show(run):
    entry = Entry.of(run, labels([run])[0], None)
    shown = [tables.markdown([entry], {}), tables.leaderboard([entry])]
    return [*shown, csv_jsonl.csv_text([entry]), csv_jsonl.jsonl_text(entry)]


MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
QUICK = template_process.TemplateLimits(seconds=1, memory=256 << 20, text=1 << 20)
SIZES = st.sampled_from(["0", "1", "3", "9", "99", "2000", "99999", "3000000000", "-1", "10**20"])
NAMES = ["messages", "messages[0].content", "m", "m.role", "bos_token", "none", "'x'", "[]", "n.x"]
OPERATORS = st.sampled_from(["+", "*", "~", "%", "**", "in"])
FILTERS = st.sampled_from(
    ["length", "tojson", "list", "join", "reverse", "trim", "string", "select", "sort", "pprint"]
) | st.sampled_from(["center(99999)", "indent(9999)", "batch(9)", "wordwrap(3)", "map('upper')"])
FIELDS = st.sampled_from(
    ["__class__", "__init__.__globals__", "append(1)", "items()", "split('l')", "format()"]
)
EXPRESSIONS = st.recursive(
    st.sampled_from(NAMES) | SIZES,
    lambda inner: st.one_of(
        st.builds("({} {} {})".format, inner, OPERATORS, inner),
        st.builds("range({})".format, inner),
        st.builds("({}).ljust({})".format, inner, SIZES),
        st.builds("({} | {})".format, inner, FILTERS),
        st.builds("({})[{}]".format, inner, inner),
        st.builds("('%' ~ {} ~ 'd') % 1".format, SIZES),
        st.builds("'{{:{}}}'.format(1)".format, SIZES),
        st.builds("({}).{}".format, inner, FIELDS),
    ),
    max_leaves=5,
)
TEMPLATES = st.recursive(
    st.builds("{{{{ {} }}}}".format, EXPRESSIONS)
    | st.text(max_size=5)
    | st.sampled_from(["{{ f() }}", "{% break %}", "{{ raise_exception('no') }}", "{%", "{{"]),
    lambda inner: st.one_of(
        st.builds("{}{}".format, inner, inner),
        st.builds("{{% for m in {} %}}{}{{% endfor %}}".format, EXPRESSIONS, inner),
        st.builds("{{% for m in range({}) %}}{}{{% endfor %}}".format, SIZES, inner),
        st.builds("{{% if {} %}}{}{{% endif %}}".format, EXPRESSIONS, inner),
        st.builds("{{% set n = namespace(x={}) %}}{}".format, EXPRESSIONS, inner),
        st.builds("{{% set n.x = n.x ~ {} %}}{}".format, EXPRESSIONS, inner),
        st.builds("{{% macro f() %}}{}{{% endmacro %}}{{{{ f() }}}}".format, inner),
        st.builds("{{% generation %}}{}{{% endgeneration %}}".format, inner),
    ),
    max_leaves=6,
)


@examples(60)
@given(template=TEMPLATES)
def test_chat_templates(template, monkeypatch):
    with monkeypatch.context() as patch:
        render = template_process.render
        patch.setattr(template_process, "render", lambda request: render(request, QUICK))
        text = outcome(lambda: chat_templates.render(template, MESSAGES, {"bos_token": "<s>"}))
        assert text is None or len(text) <= QUICK.text
        # The next template is not affected.
        assert chat_templates.render("{{ messages[1].content }}", MESSAGES, {}) == "hello"


@examples(40)
@given(
    value=VALUES, messages=st.lists(st.dictionaries(st.sampled_from(["role", "content"]), VALUES))
)
def test_templates_and_messages_of_any_kind(value, messages):
    template = outcome(lambda: chat_templates.check_template("a.json: chat_template", value))
    assert (template is None) == (not isinstance(value, str) or any(map(is_half, value)))
    outcome(lambda: chat_templates.render("{{ messages | tojson }}", messages, {}))


def is_half(char):
    return "\ud800" <= char <= "\udfff"
