"""Building and loading of the C++ kernels for CPUs, once per machine.

The first use on a machine takes some seconds and needs a C++ compiler; the library is kept in the
user's cache folder. If it cannot be built, callers use XLA instead (`available`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp

from specjax.errors import InputError
from specjax.files.atomic_writes import exclusive
from specjax.files.log import LOGGER
from specjax.files.path_checks import cache_folder

_SOURCES = sorted(Path(__file__).parent.glob("*.cc"))
_HEADERS = sorted(Path(__file__).parent.glob("*.h"))
_FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-w")
_SECONDS = 180
QUANTIZED_PRODUCT, ATTENTION = "specjax_quantized_product", "specjax_attention"
NORM = "specjax_norm"
"""The names of the custom calls in XLA, equal to those of the library's functions."""
_MOST_TOKENS = 64
"""The most tokens per row for which the library is used; XLA is faster for chunks of prompts."""


def is_for(tokens: int, dtype: jnp.dtype) -> bool:
    """Return whether the library is available and supports T `tokens` per row in this dtype."""
    return (
        tokens <= _MOST_TOKENS
        and dtype == jnp.float32
        and jax.default_backend() == "cpu"
        and jax.sharding.get_abstract_mesh().empty
        and available()
    )


@functools.cache
def available() -> bool:
    """Return whether the library can be used; the first call builds it if necessary.

    If there is no compiler, or no folder for the library, a line on stderr says so once.
    """
    try:
        library = ctypes.CDLL(str(_built()))
    except (InputError, OSError, subprocess.SubprocessError) as error:
        LOGGER.info("no kernels in C++ on this machine, so decoding is slower: %s", _reason(error))
        return False
    for name in (QUANTIZED_PRODUCT, ATTENTION, NORM):
        handler = jax.ffi.pycapsule(getattr(library, name))
        jax.ffi.register_ffi_target(name, handler, platform="cpu")
    return True


def _built() -> Path:
    """Return the path of the library for this machine, building it if it does not exist yet."""
    compiler = _compiler()
    machine = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    command = [compiler, *_FLAGS, machine]
    path = _folder() / f"cpu-{_digest(command)}.so"
    if not path.exists():
        with contextlib.ExitStack() as stack:
            # Of several processes one builds. Where files cannot be locked, each does.
            with contextlib.suppress(OSError):
                stack.enter_context(exclusive(path.parent, path.name))
            if not path.exists():
                _build(command, path)
    _check_owned(path)
    return path


def _build(command: list[str], path: Path) -> None:
    """Compile the library by a command, and move it to `path` once it is whole."""
    LOGGER.info("building kernels in C++, once on this machine")
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder, path.name)
        subprocess.run(
            [*command, f"-I{jax.ffi.include_dir()}", *map(str, _SOURCES), "-o", str(built)],
            check=True,
            capture_output=True,
            timeout=_SECONDS,
        )
        built.replace(path)


def _compiler() -> str:
    named = os.environ.get("CXX")
    for name in [named] if named else ["c++", "g++", "clang++"]:
        if (compiler := shutil.which(name)) is not None:
            return compiler
    raise FileNotFoundError(f"{named or 'a C++ compiler'} is not installed; install g++ or clang++")


def _digest(command: list[str]) -> str:
    """Return a digest of everything the library depends on: sources, compiler, processor, flags."""
    version = subprocess.run(
        [command[0], "--version"], check=True, capture_output=True, timeout=_SECONDS
    ).stdout
    texts = [path.read_bytes() for path in (*_SOURCES, *_HEADERS)]
    inputs = (*texts, version, _processor(), jax.__version__, *command)
    encoded = (item if isinstance(item, bytes) else str(item).encode() for item in inputs)
    return hashlib.sha256(b"\0".join(encoded)).hexdigest()[:20]


def _processor() -> str:
    """Return a text that differs between processors with different instruction sets."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _folder() -> Path:
    """Return the folder for libraries, which only this user may write; raise OSError otherwise."""
    folder = cache_folder("kernels")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_owned(folder)
    return folder


def _check_owned(path: Path) -> None:
    """Raise OSError unless `path` belongs to this user and is not writable by others."""
    status = path.stat(follow_symlinks=False)
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{path} may be written by other users; remove it")


def _reason(error: Exception) -> str:
    """Return an error's message; for a failed compiler, the first output line with "error"."""
    if isinstance(error, subprocess.CalledProcessError):
        lines = error.stderr.decode(errors="replace").splitlines()
        first_error = next((line for line in lines if "error" in line), "")
        return f"{error.cmd[0]} failed: {first_error}"
    return str(error)
