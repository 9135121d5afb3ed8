"""Commands: as processes, and scripts as modules of this process."""

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
    """A script beside which others can be imported, all of them forgotten afterwards."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        yield importlib.import_module(name)
    finally:
        sys.path.remove(str(SCRIPTS))
        for other, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            if file and Path(file).is_relative_to(SCRIPTS):
                del sys.modules[other]
                for flag in flags.FLAGS.flags_by_module_dict().get(other, ()):
                    if flag.name in flags.FLAGS:  # another module may have had one of that name
                        delattr(flags.FLAGS, flag.name)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def start(arguments, *, program=("-m", "specjax.decode"), devices=1, folder=ROOT):
    """A process of its own with so many fake devices; what it prints is kept."""
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
    """As a disk that is full: no file of this process may become larger."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
