"""Checks of error messages, and property tests of untrusted input.

An error is one line. A property is a Hypothesis test with `@examples(number)`: `make test` runs
that number of examples, always the same ones. With `--fuzz=MINUTES` (`make fuzz`) the properties
share the time: each is repeated with new random inputs until its share is over, and a table shows
how many there were.
"""

import collections
import copy
import functools
import time
import tracemalloc

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from specjax.errors import InputError


def refused(call, said):
    """Return the message of the InputError that `call` raises: one line with `said` in it."""
    with pytest.raises(InputError, match=said) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def refused_command(main, argv, capsys):
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    return error


_AT_A_TIME = 20
_ran = collections.Counter()
_fuzzing = False


def begin(config):
    """Note whether the session is a fuzzing session; called before tests are collected."""
    global _fuzzing
    _fuzzing = config.getoption("--fuzz") is not None
    config.addinivalue_line("markers", "fuzz: a property of untrusted input")


def examples(number):
    """Return the decorator of a property with the number of its examples in an ordinary session."""

    def decorate(test):
        inner = test.hypothesis.inner_test

        @functools.wraps(inner)
        def counted(*args, **kwargs):
            _ran[test.__name__] += 1
            return inner(*args, **kwargs)

        test.hypothesis.inner_test = counted
        chosen = settings(
            max_examples=_AT_A_TIME if _fuzzing else number,
            derandomize=not _fuzzing,
            database=None,
            deadline=None,
            print_blob=_fuzzing,
            suppress_health_check=list(HealthCheck),
        )
        return pytest.mark.fuzz(chosen(test))

    return decorate


def outcome(action, *, memory=16_000_000, seconds=30.0):
    """Return the result of an action, or None if it raises InputError.

    Other exceptions pass through. The message must be one printable line, and Python may allocate
    at most `memory` bytes and take at most `seconds`.
    """
    result, message, started = None, "", time.monotonic()
    tracemalloc.start()
    try:
        result = action()
    except InputError as error:
        message = str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert message.isprintable()
    assert len(message) < 2100
    assert peak < memory, f"{peak} bytes"
    took = time.monotonic() - started
    assert took < seconds, f"{took:.1f} seconds"
    return result


def choose(config, items):
    """Keep only the properties in `items` if the session is a fuzzing session."""
    if config.getoption("--fuzz") is not None:
        others = [item for item in items if "fuzz" not in item.keywords]
        items[:] = [item for item in items if "fuzz" in item.keywords]
        config.hook.pytest_deselected(items=others)


def pytest_pyfunc_call(pyfuncitem):
    """Repeat a property until its share of the time is over."""
    minutes = pyfuncitem.config.getoption("--fuzz")
    if minutes is None or "fuzz" not in pyfuncitem.keywords:
        return None
    until = time.monotonic() + minutes * 60 / len(pyfuncitem.session.items)
    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    while True:
        pyfuncitem.obj(**arguments)
        if time.monotonic() > until:
            return True


def pytest_terminal_summary(terminalreporter, config):
    """Print the number of examples of each property, and whether one failed."""
    if config.getoption("--fuzz") is None:
        return
    failed = {report.location[2].split("[")[0] for report in terminalreporter.getreports("failed")}
    terminalreporter.section("examples")
    for name, count in sorted(_ran.items()):
        found = "a finding, see above" if name in failed else "nothing found"
        terminalreporter.line(f"{count:10,} {name}: {found}")


# Values of JSON that files do not expect, and documents changed by them.
TEXTS = st.text(st.characters(exclude_categories=()), max_size=8)
NUMBERS = st.sampled_from(
    [
        0,
        1,
        -1,
        2**31 - 1,
        2**31,
        2**32,
        2**40,
        2**53 + 1,
        2**63,
        2**64,
        10**400,
        1e308,
        5e-324,
        -0.0,
    ]
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS
    | NUMBERS
    | st.sampled_from(["llama3", "linear", "longrope", "factor", "rope_type", "\ud800", "a\nb"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def changed(draw, content, changes=3):
    """Draw a document in which up to `changes` values are replaced, removed, renamed or doubled."""
    content = copy.deepcopy(content)
    for _ in range(draw(st.integers(1, changes))):
        content = _change(draw, content)
    return content


def _change(draw, node):
    if not isinstance(node, dict | list) or not node or draw(st.integers(0, 9)) == 0:
        return draw(VALUES)
    key = draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
    what = draw(st.sampled_from(["inside"] * 6 + ["remove", "double"]))
    if what == "inside":
        node[key] = _change(draw, node[key])
    elif isinstance(node, list):
        part = [] if what == "remove" else [node[key]] * 2
        node[key : key + 1] = part
    elif what == "remove":
        del node[key]
    else:
        node[draw(TEXTS)] = copy.deepcopy(node[key])
    return node
