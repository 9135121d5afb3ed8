"""The frame around every command: help, signals, exit codes, error messages."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import jax

from specjax import signals
from specjax.apps.command_line.config_file import deciding, read_config
from specjax.apps.command_line.config_help import config_help
from specjax.errors import NO_SPACE, InputError, one_line
from specjax.files import program_cache
from specjax.files.log import LOGGER

DIFFERENT, BAD_INPUT, INTERRUPTED, NO_READER = 1, 2, 130, 141
"""Exit codes: other tokens than plain decoding, bad input, Ctrl-C or SIGTERM, a closed stdout."""
_HELP = frozenset({"-h", "--help"})


def run_config(
    main: Callable[..., int],
    argv: Sequence[str] | None = None,
    *,
    default: str,
    read: Callable[[dict[str, Any]], Any],
    source: type,
    documentation: str | None = None,
    flags: Mapping[str, str] = MappingProxyType({}),
) -> int:
    """Parse `--config=FILE[:size] --config.field=value ...`, call `main`, return the exit code.

    `default` is the config if none is given. `read` checks the config's values, by section, and
    returns the argument of `main`; it raises InputError. `flags` maps the names of flags to their
    meanings; `main` receives them by name, such as `verbose=True` for --verbose. `--help` prints
    `documentation`, the flags, and the fields with the meanings declared in the dataclass `source`.
    Otherwise like `run`.
    """

    def run_parsed(argv: list[str]) -> int:
        if set(argv) & _HELP:
            config = read_config(deciding(argv, source), default, source)
            print(config_help(documentation or "", config, source, flags))
            return 0
        flag_values = {name: f"--{name}" in argv for name in flags}
        argv = [argument for argument in argv if argument.removeprefix("--") not in flags]
        return main(read(read_config(argv, default, source).to_dict()), **flag_values)

    return run(run_parsed, argv)


def run(
    main: Callable[[list[str]], int],
    argv: Sequence[str] | None,
    documentation: str | None = None,
    *,
    interrupted: str = "interrupted",
) -> int:
    """Call `main` with command-line arguments (by default the process's); return the exit code.

    `--help` prints the documentation. Ctrl-C, SIGTERM and a closed terminal raise KeyboardInterrupt
    in `main`; unless `main` catches it, `interrupted` is printed. An InputError, lack of memory and
    a full disk are printed as one line; a closed pipe on stdout ends without a message. Characters
    that stdout or stderr cannot encode are escaped.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    LOGGER.setLevel("WARNING")  # commands print their own progress
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    if documentation and set(argv) & _HELP:
        main = lambda argv: print(documentation.strip()) or 0  # noqa: E731
    try:
        with signals.raised():
            code = main(argv)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except InputError as error:
        return _ended(BAD_INPUT, f"error: {one_line(error)}")
    except KeyboardInterrupt:
        return _ended(INTERRUPTED, interrupted)
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        remedy = "lower batch_size, max_length or num_speculative_tokens"
        return _ended(BAD_INPUT, f"error: out of memory ({one_line(error):.200}); {remedy}")
    except BrokenPipeError:
        return _without_reader()
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        _discard_stdout()
        where = error.filename or "stdout, or a file that is being written"
        return _ended(BAD_INPUT, f"error: {where}: {error.strerror}; free space there")
    except SystemExit as ended:
        # Rich raises SystemExit if its console's pipe is closed.
        if isinstance(ended.__context__, BrokenPipeError):
            return _without_reader()
        raise


def _ended(code: int, line: str) -> int:
    """Print a line on stderr and return the exit code."""
    _tell(line)
    return code


def _tell(line: str) -> None:
    """Print a line on stderr, unless the terminal was closed."""
    with suppress(OSError):
        print(line, file=sys.stderr)


def _without_reader() -> int:
    """Discard further output, since the reader of stdout has gone; return the exit code."""
    _discard_stdout()
    return NO_READER


def _discard_stdout() -> None:
    """Redirect stdout to the null device, since Python flushes it once more when it exits."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def use_compilation_cache() -> None:
    """Make JAX cache compiled programs on disk, so that later runs of a command start sooner.

    The folder is JAX_COMPILATION_CACHE_DIR, or ~/.cache/specjax/xla.
    """
    program_cache.keep(_tell)
