"""How commands end: signals, closed pipes, full disks, lack of memory, config files that fail."""

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest

from specjax import signals
from specjax.apps.command_line import command


def kill(number=signal.SIGTERM):
    os.kill(os.getpid(), number)
    time.sleep(0)  # a signal is received between two instructions


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_each_request_ends_like_ctrl_c(number, capsys):
    before = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
    code = command.run(lambda argv: kill(number), [], interrupted="stopped here")
    assert code == 130
    assert capsys.readouterr().err == "stopped here\n"
    after = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
    assert after == before


def test_a_signal_sent_twice_is_one_request(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    received = []
    with signals.received_by(received.append):
        for _ in range(3):
            kill()
        now[0] += 1.5
        kill(signal.SIGINT)
    assert received == [signal.SIGTERM, signal.SIGINT]


def test_a_signal_during_garbage_collection_is_not_lost():
    """Python goes on after an exception in a callback of its collector."""
    sent = []

    def callback(phase, info):
        if not sent:
            sent.append(phase)
            kill()

    def collect():
        gc.collect()
        time.sleep(20)

    gc.callbacks.append(callback)
    try:
        with signals.raised(), pytest.raises(KeyboardInterrupt):
            collect()
    finally:
        gc.callbacks.remove(callback)


def test_held_off_and_nested():
    with signals.raised():
        with signals.held_off():
            kill()
        with pytest.raises(KeyboardInterrupt):
            kill()


def test_what_was_ignored_is_ignored_still():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        received = []
        with signals.raised(), signals.received_by(received.append):
            kill(signal.SIGHUP)
            assert received == []
            # A handler: a program that is started does not inherit it.
            assert signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_other_threads_change_nothing():
    before = signal.getsignal(signal.SIGTERM)
    codes = []
    thread = threading.Thread(
        target=lambda: codes.append(
            command.run(lambda argv: int(signal.getsignal(signal.SIGTERM) != before), [])
        )
    )
    thread.start()
    thread.join()
    assert codes == [0]


def raising(error):
    def main(argv):
        raise error

    return command.run(main, [])


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        np._core._exceptions._ArrayMemoryError((1 << 60,), np.dtype("float32")),
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating\n4 bytes"),
    ],
)
def test_lack_of_memory_is_one_line(error, capsys):
    assert raising(error) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: out of memory (")
    assert message.endswith("); lower batch_size, max_length or num_speculative_tokens\n")
    assert message.count("\n") == 1


def test_bugs_stay_tracebacks():
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        raising(jax.errors.JaxRuntimeError("INTERNAL: no"))
    with pytest.raises(ZeroDivisionError):
        raising(ZeroDivisionError())
    with pytest.raises(SystemExit):
        raising(SystemExit(3))


PRINTING = """
import sys
from rich.console import Console
from specjax.apps.command_line import command
from specjax.apps.command_line.config_file import read_config

def main(argv):
    say = Console().print if argv[0] == "rich" else print
    for number in range(int(argv[1])):
        say("\\udcff line", number)
    return 0

raise SystemExit(command.run(main, sys.argv[1:]))
"""


def printing(how, lines, then):
    """A program that prints; what its exit code is, and what is on stderr."""
    command = f'"$0" -c "$1" {how} {lines} {then}'
    ran = subprocess.run(
        ["bash", "-c", command, sys.executable, PRINTING], capture_output=True, text=True
    )
    return ran


@pytest.mark.parametrize("how", ["rich", "print"])
def test_head_ends_it_quietly(how):
    ran = printing(how, 20_000, '| head -1; exit "${PIPESTATUS[0]}"')
    assert (ran.returncode, ran.stderr) == (141, "")
    assert ran.stdout == "\\udcff line 0\n"


def test_stdout_on_a_full_disk_is_an_error():
    ran = printing("print", 1, "> /dev/full")
    assert ran.returncode == 2
    assert ran.stderr == (
        "error: stdout, or a file that is being written: No space left on device; "
        "free space there\n"
    )


def test_no_stdout_at_all():
    ran = printing("print", 1, ">&-")
    assert (ran.returncode, ran.stderr) == (0, "")


JOINED = """
import os, signal, sys
from specjax.apps.command_line import command
from specjax.apps.command_line.config_file import read_config
from specjax.distributed import processes

def main(argv):
    processes.join(coordinator_address=argv[0], num_processes=1, process_id=0)
    os.kill(os.getpid(), signal.SIGTERM)
    for _ in range(1000):
        pass
    return 0

raise SystemExit(command.run(main, sys.argv[1:]))
"""


def test_sigterm_ends_one_of_several_processes():
    """JAX's own handler of preemptions is not in the way."""
    with socket.create_server(("localhost", 0)) as server:
        address = f"localhost:{server.getsockname()[1]}"
    ran = subprocess.run([sys.executable, "-c", JOINED, address], capture_output=True, text=True)
    assert ran.returncode == 130, ran
    assert ran.stderr.endswith("interrupted\n")
