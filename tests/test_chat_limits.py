"""Chat templates may take a bounded time and memory, and leave no process."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from specjax.errors import InputError
from specjax.loading.tokenizers import chat_templates, template_process
from specjax.loading.tokenizers.template_process import TemplateLimits

MESSAGES = [{"role": "user", "content": "hello"}]
QUICK = TemplateLimits(seconds=1, memory=256 << 20, text=1 << 20)
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Limits that are reached sooner; the process with the usual ones is another's."""
    render = template_process.render
    monkeypatch.setattr(template_process, "render", lambda request: render(request, QUICK))


def error_of(template, messages=MESSAGES):
    with pytest.raises(InputError) as caught:
        chat_templates.render(template, messages, {})
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600
    return message


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (ENDLESS, "more than 1 seconds"),
        ("{{ 'x'.ljust(3000000000) }}", "more than 256 MiB of memory"),
        ("{{ 'x' * 10**9 }}", "more than 256 MiB of memory"),
        ("{{ '%1000000000d' % 3 }}", "more than 256 MiB of memory"),
        ("{{ '{:1000000000}'.format(1) }}", "more than 256 MiB of memory"),
        ("{{ 'x' | center(10**9) }}", "more than 256 MiB of memory"),
        ("{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}"
         # On a busy machine the second is over first.
         "{% endfor %}{{ n.x }}", "takes more than"),
        ("{% for i in range(99999) %}{{ 'twenty characters...' }}{% endfor %}",
         "more than 1048576 characters of text"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "recursion"),
        ("{{ raise_exception('no ' * 10**6) }}", "it fails on these messages"),
        ("{{ 10 ** 10000 }}", "it fails on these messages"),
    ],
)  # fmt: skip
def test_a_template_that_takes_too_much_is_one_line(template, message):
    started = time.monotonic()
    assert message in error_of(template)
    assert time.monotonic() - started < 10
    assert chat_templates.render("{{ messages[0].content }}", MESSAGES, {}) == "hello"


def test_the_process_is_kept_and_is_replaced_where_it_ended():
    chat_templates.render("x", MESSAGES, {})
    first = template_process._child.process
    error_of("{{ 1 / 0 }}")
    chat_templates.render("y", MESSAGES, {})
    assert template_process._child.process is first
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert chat_templates.render("z", MESSAGES, {}) == "z"
    error_of(ENDLESS)
    assert template_process._child is None


def test_an_interrupted_answer_is_not_the_next_ones(monkeypatch):
    chat_templates.render("x", MESSAGES, {})

    def interrupt(self, seconds):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(template_process._Child, "_receive", interrupt)
        with pytest.raises(KeyboardInterrupt):
            chat_templates.render("first", MESSAGES, {})
    assert chat_templates.render("second", MESSAGES, {}) == "second"


def test_the_process_ends_with_the_one_that_started_it():
    program = """
        import os
        from specjax.loading.tokenizers import chat_templates, template_process
        chat_templates.render("x", [{"role": "user", "content": "y"}], {})
        print(template_process._child.process.pid, flush=True)
        os._exit(0)  # no clean-up of any kind
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True
    )
    child = int(done.stdout)
    for _ in range(100):
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    # Where nobody collects orphans it stays in the table, ended.
    with open(f"/proc/{child}/stat") as file:
        assert file.read().split(")")[1].split()[0] == "Z"


def test_messages_that_cannot_be_sent_are_errors():
    circle = {"role": "user", "content": "x"}
    circle["self"] = circle
    for extra in (object(), {1, 2}, b"bytes", circle):
        message = {"role": "user", "content": "x", "extra": extra}
        assert "JSON" in error_of("x", [message])
    assert "shorten the conversation" in error_of("x", [{"role": "user", "content": "x" * 2**20}])


def test_no_interpreter_no_template(monkeypatch):
    template_process.close()
    for executable in ("/no/such/python", sys.executable + "-nothing", "/bin/false"):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", executable)
            assert "start" in error_of("x")


def test_texts_come_back_as_they_were():
    for text in ("a\nb\r\n\t\0", "é \U0001f600 \ud800", '"\\u0041"', ""):
        message = [{"role": "user", "content": text}]
        assert chat_templates.render("{{ messages[0].content }}", message, {}) == text


@pytest.mark.parametrize("value", [5, True, [], {}, ["x"], None, 1.5, "x" * 2**21, "\ud800"])
def test_what_is_no_template_is_refused(value):
    with pytest.raises(InputError, match=r"^a\.json: chat_template"):
        chat_templates.check_template("a.json: chat_template", value)
