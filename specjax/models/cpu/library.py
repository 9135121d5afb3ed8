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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.errors import InputError
from specjax.files.atomic_writes import exclusive
from specjax.files.log import LOGGER
from specjax.files.path_checks import cache_folder

FOLDER = Path(__file__).parent
_PRODUCT = FOLDER / "tile_product.cc"
"""The source that is compiled for one format of tiles at a time."""
_SOURCES = sorted(FOLDER.glob("*.cc"))
_HEADERS = sorted(FOLDER.glob("*.h"))
NUM_FORMATS = 14
"""The number of formats of tiles (`tile_formats.h`)."""
_FLAGS = ("-std=c++17", "-fPIC", "-w")
_SECONDS = 600
TILE_PRODUCT, TILE_ROWS = "specjax_tile_product", "specjax_tile_rows"
ATTENTION, NORM = "specjax_attention", "specjax_norm"
"""The names of the custom calls in XLA, equal to those of the library's functions."""
_MOST_TOKENS = 64
"""The most tokens per row for which the library is used; XLA is faster for chunks of prompts."""


class Level(NamedTuple):
    """Instructions that the library is compiled for: their compiler flags, and what they need.

    `needs` are names of features as Linux lists them for a processor. `multiplies_bytes` says
    whether one instruction multiplies bytes and adds their products in groups of four.
    """

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str]
    multiplies_bytes: bool = False


_V3 = frozenset({"avx2", "fma", "f16c", "bmi2"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
# By feature, which older compilers than those that know x86-64-v3 and v4 take as well.
_V3_FLAGS = ("-mavx2", "-mfma", "-mf16c", "-mbmi2")
_V4_FLAGS = (*_V3_FLAGS, *(f"-mavx512{part}" for part in ("f", "bw", "cd", "dq", "vl")))
_ARM = frozenset({"asimddp", "fphp"})
_PORTABLE = Level("portable", ("-DSPECJAX_PORTABLE",), frozenset())
LEVELS = {
    "x86_64": (
        Level("avx512-vnni", (*_V4_FLAGS, "-mavx512vnni"), _V4 | {"avx512_vnni"}, True),
        Level("avx512", _V4_FLAGS, _V4),
        Level("avx-vnni", (*_V3_FLAGS, "-mavxvnni"), _V3 | {"avx_vnni"}, True),
        Level("avx2", _V3_FLAGS, _V3),
        _PORTABLE,
    ),
    "aarch64": (
        Level("i8mm", ("-march=armv8.2-a+fp16+dotprod+i8mm",), _ARM | {"i8mm"}, True),
        Level("dotprod", ("-march=armv8.2-a+fp16+dotprod",), _ARM, True),
        _PORTABLE,
    ),
}
"""The levels of each architecture, the fastest first."""


def is_for(tokens: int, dtype: jnp.dtype) -> bool:
    """Return whether the library is available and supports T `tokens` per row in this dtype."""
    return tokens <= _MOST_TOKENS and dtype == jnp.float32 and is_for_this_backend()


def is_for_this_backend() -> bool:
    """Return whether the library is available, and programs are for one CPU."""
    return jax.default_backend() == "cpu" and jax.sharding.get_abstract_mesh().empty and available()


@functools.cache
def available() -> bool:
    """Return whether the library can be used; the first call builds it if necessary.

    If there is no compiler, or no folder for the library, a line on stderr says so once.
    """
    try:
        library = loaded()
    except (InputError, OSError, subprocess.SubprocessError) as error:
        LOGGER.info("no kernels in C++ on this machine, so decoding is slower: %s", _reason(error))
        return False
    for name in (TILE_PRODUCT, TILE_ROWS, ATTENTION, NORM):
        handler = jax.ffi.pycapsule(getattr(library, name))
        jax.ffi.register_ffi_target(name, handler, platform="cpu")
    return True


@functools.cache
def loaded() -> ctypes.CDLL:
    """Return the library for this processor, building it if necessary.

    Raises InputError, OSError or subprocess.SubprocessError if it cannot be built.
    """
    return ctypes.CDLL(str(build(level())))


@functools.cache
def level() -> Level:
    """Return the fastest level that this processor has."""
    machine, known = platform.machine().lower(), features()
    levels = LEVELS.get({"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine), (_PORTABLE,))
    return next(level for level in levels if level.needs <= known)


def features() -> frozenset[str]:
    """Return the features of the processor, by the names that Linux gives them."""
    if platform.system() == "Darwin" and platform.machine() == "arm64":
        return _ARM  # all of Apple's processors
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return frozenset()
    stated = [line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))]
    return frozenset(stated[0].split()) if stated else frozenset()


def build(level: Level) -> Path:
    """Return the path of the library for a level, building it if it does not exist yet."""
    command = [_compiler(), *_FLAGS, *level.flags]
    path = _folder() / f"cpu-{level.name}-{_digest(command)}.so"
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
    LOGGER.info("building kernels in C++, once on this machine (some 20 s)")
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:

        def run(*arguments: str) -> None:
            subprocess.run(
                [*command, *arguments], check=True, capture_output=True, timeout=_SECONDS
            )

        def compiled(unit: tuple[Path, list[str]]) -> str:
            source, flags = unit
            output = str(Path(folder, f"{source.stem}{''.join(flags)}.o"))
            run(*flags, f"-I{jax.ffi.include_dir()}", "-c", str(source), "-o", output)
            return output

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compiled, _units()))
        built = Path(folder, path.name)
        run("-shared", *objects, "-o", str(built))
        built.replace(path)


def _units() -> Iterator[tuple[Path, list[str]]]:
    """Yield the sources with their flags."""
    for number in range(NUM_FORMATS):
        # Its loops are unrolled by hand: O3 takes twice the time to compile and runs no faster.
        yield _PRODUCT, ["-O2", f"-DSPECJAX_FORMAT={number}"]
    for source in _SOURCES:
        if source != _PRODUCT:
            yield source, ["-O3"]


def _compiler() -> str:
    named = os.environ.get("CXX")
    for name in [named] if named else ["c++", "g++", "clang++"]:
        if (compiler := shutil.which(name)) is not None:
            return compiler
    raise FileNotFoundError(f"{named or 'a C++ compiler'} is not installed; install g++ or clang++")


def _digest(command: list[str]) -> str:
    """Return a digest of everything the library depends on: sources, compiler, flags."""
    version = subprocess.run(
        [command[0], "--version"], check=True, capture_output=True, timeout=_SECONDS
    ).stdout
    texts = [path.read_bytes() for path in (*_SOURCES, *_HEADERS)]
    inputs = (*texts, version, jax.__version__, *command)
    encoded = (item if isinstance(item, bytes) else str(item).encode() for item in inputs)
    return hashlib.sha256(b"\0".join(encoded)).hexdigest()[:20]


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
