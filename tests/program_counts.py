"""A plugin: count the programs that a session compiles, and what they cost; print both."""

import collections
import os
import time
from typing import NamedTuple

import jax
import pytest

_SECONDS = {
    "/jax/core/compile/jaxpr_trace_duration": "tracing",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lowering",
    "/jax/core/compile/backend_compile_duration": "compiling",
}
_SHOWN = 12


class Cost(NamedTuple):
    """The programs of a file's tests, the seconds of making them, and all processor seconds."""

    programs: int = 0
    tracing: float = 0.0
    lowering: float = 0.0
    compiling: float = 0.0
    processor: float = 0.0


_costs = collections.defaultdict(Cost)
_unnoticed = [0]
"""The programs compiled since `few_programs` last looked."""


def _file():
    return os.environ.get("PYTEST_CURRENT_TEST", "collecting::").split("::")[0]


def _add(file, **amounts):
    cost = _costs[file]
    _costs[file] = cost._replace(**{name: getattr(cost, name) + n for name, n in amounts.items()})


@jax.monitoring.register_event_duration_secs_listener
def _note(event, seconds, **_):
    kind = _SECONDS.get(event)
    if kind is not None:
        compiled = kind == "compiling"
        _unnoticed[0] += compiled
        _add(_file(), programs=compiled, **{kind: seconds})


def compiled():
    """Return the number of programs that this process has compiled."""
    return sum(cost.programs for cost in _costs.values())


def recently_compiled(most):
    """Return whether more than `most` programs were compiled since this was last True."""
    if _unnoticed[0] <= most:
        return False
    _unnoticed[0] = 0
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Add the processor time of a test, with its fixtures, to that of its file."""
    begin = time.process_time()
    result = yield
    _add(item.nodeid.split("::")[0], processor=time.process_time() - begin)
    return result


def pytest_sessionfinish(session):
    """Hand the counts of a worker to the process that prints them."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["programs"] = {file: tuple(cost) for file, cost in _costs.items()}


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Add what a worker has counted."""
    for file, cost in getattr(node, "workeroutput", {}).get("programs", {}).items():
        _add(file, **Cost(*cost)._asdict())


def pytest_terminal_summary(terminalreporter):
    """Print the number of programs, their cost, and the files that cost most."""
    total = Cost(*map(sum, zip(*_costs.values(), strict=True))) if _costs else Cost()
    terminalreporter.section("programs")
    terminalreporter.line(
        f"{total.programs} programs compiled: {total.tracing:.0f} s of tracing, "
        f"{total.lowering:.0f} of lowering, {total.compiling:.0f} of compiling, among "
        f"{total.processor:.0f} processor seconds"
    )
    by_time = sorted(_costs.items(), key=lambda item: -item[1].processor)
    for file, cost in by_time[:_SHOWN]:
        made = cost.tracing + cost.lowering + cost.compiling
        line = f"{cost.processor:7.0f} s, {made:.0f} of them for {cost.programs} programs: {file}"
        terminalreporter.line(line)
