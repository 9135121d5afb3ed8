"""Commands run as processes, and scripts imported as modules."""

import contextlib
import importlib
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

from absl import flags
from conftest import xla_flags

ROOT = Path(__file__).parent.parent
SCRIPTS = ROOT / "scripts"


@contextlib.contextmanager
def script_module(name):
    """Yield a script as a module that can import its neighbours; all are forgotten afterwards."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        yield importlib.import_module(name)
    finally:
        sys.path.remove(str(SCRIPTS))
        for other, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            if file and Path(file).is_relative_to(SCRIPTS):
                del sys.modules[other]
                for flag in list(flags.FLAGS.flags_by_module_dict().get(other, ())):
                    if flag.name in flags.FLAGS:  # another module may have had one of that name
                        delattr(flags.FLAGS, flag.name)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def start(arguments, *, program=("-m", "specjax.decode"), devices=1, folder=ROOT):
    """Return a process that runs a program with `devices` fake devices; its output is captured."""
    environment = {**os.environ, "XLA_FLAGS": xla_flags(devices), "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, *program, *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err


def joined(address, number, count=2, timeout=60):
    return [
        f"--config.distributed.coordinator_address={address}",
        f"--config.distributed.num_processes={count}",
        f"--config.distributed.process_id={number}",
        f"--config.distributed.timeout_s={timeout}",
    ]


@contextlib.contextmanager
def files_limited_to(size):
    """Limit the size of files that this process writes, to simulate a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
