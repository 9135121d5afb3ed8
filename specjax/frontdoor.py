"""What the command lines share: config files with overrides, and errors without tracebacks."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_collections
from absl import flags
from ml_collections import config_flags

from specjax.errors import InputError, one_line

BAD_INPUT, INTERRUPTED = 2, 130
"""Exit codes of a bad input and of Ctrl-C."""


def run(
    main: Callable[[ml_collections.ConfigDict], int],
    argv: Sequence[str] | None = None,
    *,
    default: str,
) -> int:
    """Parse `--config=FILE[:size] --config.field=value ...`, call `main`, return the exit code.

    `default` is the config file where none is given. An InputError is printed on one line.
    """
    try:
        return main(read_config(list(sys.argv[1:] if argv is None else argv), default))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def read_config(argv: list[str], default: str) -> ml_collections.ConfigDict:
    """The config file with its overrides, locked. Raises InputError for whatever does not fit."""
    if not any(argument.startswith("--config=") for argument in argv):
        if not Path(default).exists():
            raise InputError(f"--config is missing: pass --config={default}, or a file of your own")
        argv = [f"--config={default}", *argv]
    for argument in argv:
        if not argument.startswith("--config"):
            raise InputError(f"{argument!r} is not understood: use --config=FILE --config.field=value")
    for argument in argv:
        if argument.startswith("--config="):
            path = argument.removeprefix("--config=").split(":")[0]
            if not Path(path).is_file():
                raise InputError(f"config={path!r}: there is no such file; try --config={default}")
    overrides = [argument for argument in argv if argument.startswith("--config.")]
    config = _parse([argument for argument in argv if argument not in overrides])
    for override in overrides:
        _check_override(config, override)
    return _parse(argv)


def _parse(argv: list[str]) -> ml_collections.ConfigDict:
    values = flags.FlagValues()
    line = ["specjax", *argv]
    config_flags.DEFINE_config_file("config", flag_values=values, lock_config=True, sys_argv=line)
    try:
        rest = values(line)[1:]
        config = values.config
    except flags.IllegalFlagValueError as error:
        raise InputError(f"{_told(error)}; give a value of the field's type") from None
    except (AttributeError, KeyError, OSError, TypeError, ValueError, flags.Error) as error:
        raise InputError(f"config: {_told(error)}") from None
    if rest:
        raise InputError(f"{rest[0]!r} is not understood: use --config=FILE --config.field=value")
    return config


def _check_override(config: ml_collections.ConfigDict, override: str) -> None:
    name, _, value = override.removeprefix("--config.").partition("=")
    node: Any = config
    for depth, part in enumerate(name.split(".")):
        fields = list(node) if isinstance(node, ml_collections.ConfigDict) else []
        if not fields:
            parent = ".".join(name.split(".")[:depth])
            raise InputError(f"config.{name}={value!r}: {parent} has no fields of its own")
        if part not in fields:
            prefix = "".join(f"{p}." for p in name.split(".")[:depth])
            near = difflib.get_close_matches(part, fields, n=1)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"known are {', '.join(fields)}"
            raise InputError(f"config.{name}={value!r}: there is no such field; {hint}")
        node = node[part]


def _told(error: Exception) -> str:
    return one_line(error).strip('"')


def use_compilation_cache() -> None:
    """Keep compiled programs on disk, under JAX_COMPILATION_CACHE_DIR or ~/.cache/specjax/xla."""
    import jax

    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        folder = Path(home).expanduser() / "specjax" / "xla"
        jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def optional(config: ml_collections.ConfigDict, name: str) -> Any:
    """A field's value; None where it was left empty."""
    value = config.get(name)
    return None if value in ("", None) else value
