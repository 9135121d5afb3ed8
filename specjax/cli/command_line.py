"""What the command lines share: config files with overrides, and errors without tracebacks."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import jax
import ml_collections
from absl import flags
from jax.sharding import Mesh
from ml_collections import config_dict, config_flags

from specjax import signals
from specjax.cli import compiled_programs
from specjax.distributed import processes, sharding
from specjax.errors import NO_ROOM, InputError, one_line, shown
from specjax.fields import (
    Choice,
    CrossCheck,
    Either,
    Fields,
    Flag,
    Kind,
    Number,
    Text,
    Whole,
    check_values,
    optional,
)
from specjax.files import paths

BAD_INPUT, INTERRUPTED, NO_READER = 2, 130, 141
"""Exit codes of a bad input, of Ctrl-C or SIGTERM, and where nobody reads stdout any more."""

_TYPES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    tuple: "a tuple, such as (1, 2)",
}


def run(
    main: Callable[[ml_collections.ConfigDict], int],
    argv: Sequence[str] | None = None,
    *,
    default: str,
    fields: Fields,
    cross_checks: Sequence[CrossCheck] = (),
    documentation: str | None = None,
) -> int:
    """Parse `--config=FILE[:size] --config.field=value ...`, call `main`, return the exit code.

    `default` is the config file where none is given, `fields` says what each field may hold, and
    `cross_checks` how they must fit each other: all that is wrong is one error. The rest as
    `command` does.
    """

    def act(argv: list[str]) -> int:
        config = read_config(argv, default)
        check_values(fields, config.to_dict(), cross_checks=cross_checks)
        return main(config)

    return command(act, argv, documentation)


def command(
    main: Callable[[list[str]], int],
    argv: Sequence[str] | None,
    documentation: str | None = None,
    *,
    interrupted: str = "interrupted",
) -> int:
    """Call `main` with a command line's arguments (the process's, for None); return the exit code.

    `--help` prints the documentation. Ctrl-C, SIGTERM and a closed terminal raise KeyboardInterrupt
    in `main`, and print what `interrupted` says where it lets that through. An InputError is one
    line, and so is a lack of memory or of disk; a closed pipe on stdout ends without a word.
    Whatever stdout and stderr cannot encode is escaped.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    if documentation and set(argv) & {"-h", "--help"}:
        print(documentation.strip())
        return 0
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
        if error.errno not in NO_ROOM:
            raise
        _discard_stdout()
        where = error.filename or "stdout, or a file that is being written"
        return _ended(BAD_INPUT, f"error: {where}: {error.strerror}; make room there")
    except SystemExit as ended:
        # Rich ends the process where its console's pipe is closed.
        if isinstance(ended.__context__, BrokenPipeError):
            return _without_reader()
        raise


@dataclass(frozen=True)
class Listed:
    """Values of one kind between commas, as a flag has them; none at all where `empty` is set."""

    kind: Kind
    empty: bool = False

    def check(self, name: str, value: Any) -> tuple:
        """The values as a tuple."""
        parts = value.split(",") if isinstance(value, str) else value
        if self.empty and value == "":
            return ()
        return tuple(self.kind.check(name, part) for part in parts)


class Parser(argparse.ArgumentParser):
    """Flags without a config file, each of a kind; what does not fit raises InputError.

    `documentation` is what --help prints before the flags.
    """

    def __init__(self, prog: str, documentation: str | None) -> None:
        super().__init__(prog, description=documentation, allow_abbrev=False)
        self.formatter_class = argparse.RawDescriptionHelpFormatter
        self.fields: dict[str, Kind] = {}
        self.needed: list[str] = []

    def add_field(self, name: str, kind: Kind, help: str, *, default: Any = ...) -> None:
        """A flag --name=VALUE, needed without a default; --name or --noname for true or false."""
        self.fields[name] = kind
        if isinstance(kind, Flag):
            self.add_argument(f"--{name}", action="store_true", default=default, help=help)
            self.add_argument(f"--no{name}", action="store_false", dest=name)
            return
        if default is ...:
            self.needed.append(name)
        given = default is not ... and default is not None
        self.add_argument(
            f"--{name}",
            default=default if given else None,
            metavar="{" + ",".join(kind.names) + "}" if isinstance(kind, Choice) else "VALUE",
            help=f"{help} ({default})" if given else help,
        )

    def read(self, argv: Sequence[str]) -> dict[str, Any]:
        """The values of all flags, checked, and of other arguments; raises InputError."""
        given = vars(self.parse_args(argv))
        if missing := [name for name in self.needed if given[name] is None]:
            listed = [f"{name} is missing: pass --{name}=VALUE" for name in missing]
            raise InputError(f"{'; '.join(listed)}; --help lists the flags")
        others = {name: value for name, value in given.items() if name not in self.fields}
        values = {name: _typed(kind, given[name]) for name, kind in self.fields.items()}
        return {**others, **check_values(self.fields, values)}

    def error(self, message: str) -> NoReturn:
        """Called by argparse."""
        raise InputError(f"{message}; --help lists the flags")


def _typed(kind: Kind, value: Any) -> Any:
    """A flag's text as the number that its kind asks for, or as it is where it is none."""
    kind = kind.kinds[0] if isinstance(kind, Either) else kind
    if not isinstance(value, str) or not isinstance(kind, Whole | Number):
        return value
    try:
        return int(value) if isinstance(kind, Whole) else float(value)
    except ValueError:
        return value


def _ended(code: int, line: str) -> int:
    _tell(line)
    return code


def _tell(line: str) -> None:
    """A line on stderr, where the terminal is not what was closed."""
    with suppress(OSError):
        print(line, file=sys.stderr)


def _without_reader() -> int:
    _discard_stdout()
    return NO_READER


def _discard_stdout() -> None:
    """Python flushes stdout once more at its end: what is left goes nowhere."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def read_config(argv: list[str], default: str) -> ml_collections.ConfigDict:
    """The config file with its overrides, locked. Raises InputError for whatever does not fit."""
    argv = list(_joined(argv))
    files = [argument for argument in argv if re.match(r"--?config=", argument)]
    overrides = [argument for argument in argv if argument not in files]
    path = files[-1].partition("=")[2] if files else default
    if not files and not Path(default).is_file():
        raise InputError(f"--config is missing: pass --config={default}, or a file of your own")
    config = _load(path)
    for override in overrides:
        _check_override(config, override)
    config = _overridden(config, overrides)
    _check_values(path, config)  # some may be computed from what was overridden
    return config


MESH_FIELDS: Fields = {"data": sharding.DEVICES, "model": sharding.DEVICES}
DISTRIBUTED_FIELDS: Fields = {
    "cluster": Flag(),
    "coordinator_address": optional(Text()),
    "num_processes": optional(sharding.DEVICES),
    "process_id": optional(Whole()),
    "timeout_s": Number(0.0, 1e9, above=True, remedy="use seconds above 0"),
}
"""What the sections that `mesh_fields` and `distributed_fields` make may hold."""


def mesh_fields() -> ml_collections.ConfigDict:
    """The section `mesh` of a config: how many devices share rows, and how many share weights."""
    return ml_collections.ConfigDict({"data": 1, "model": 1})


def distributed_fields() -> ml_collections.ConfigDict:
    """The section `distributed` of a config: the arguments of `processes.join`."""
    return ml_collections.ConfigDict(
        {
            "cluster": False,
            "coordinator_address": config_dict.placeholder(str),
            "num_processes": config_dict.placeholder(int),
            "process_id": config_dict.placeholder(int),
            "timeout_s": 300.0,
        }
    )


def open_mesh(config: ml_collections.ConfigDict) -> Mesh | None:
    """Join the other processes of a config, if there are any, and make its mesh.

    Without either there is no mesh, and the first device does it all. Raises InputError, on all of
    them where two configs differ.
    """
    processes.join(**config.distributed)
    data, model = config.mesh.data, config.mesh.model
    if processes.count() == 1 and data == model == 1:
        return None
    return processes.together(lambda: sharding.make_mesh(data, model), shared_fields(config))


def shared_fields(config: ml_collections.ConfigDict) -> dict[str, Any]:
    """What every process of a run must have alike: all fields but those that tell them apart."""
    apart = ("distributed.process_id",)
    return {name: repr(_value(config, name)) for name in _fields(config) if name not in apart}


def _value(config: ml_collections.ConfigDict, name: str) -> Any:
    for part in name.split("."):
        config = config[part]
    return config


def _joined(argv: list[str]) -> Iterator[str]:
    """The arguments, `--config.field value` as `--config.field=value`."""
    waiting = None
    for argument in argv:
        if waiting is not None and not argument.startswith("--"):
            yield f"{waiting}={argument}"
            waiting = None
            continue
        if waiting is not None:
            yield waiting
            waiting = None
        if not re.match(r"--?(no)?config([.=]|$)", argument):
            raise InputError(
                f"{argument!r} is not understood: use --config=FILE --config.field=value"
            )
        if "=" in argument or argument.startswith("--no"):
            yield argument
        else:
            waiting = argument
    if waiting is not None:
        yield waiting


def _load(path: str) -> ml_collections.ConfigDict:
    """What a config file's `get_config` returns, given what follows a colon."""
    file, *size = path.split(":", 1)
    file = str(paths.input_file("config", file))
    what = "fails"
    try:
        get_config = runpy.run_path(file).get("get_config")
        if not callable(get_config):
            raise InputError(f"config={path!r} has no function get_config(); mend the config file")
        what = "get_config() fails"
        config = get_config(*size)
        if isinstance(config, ml_collections.FrozenConfigDict):
            config = ml_collections.ConfigDict(config)  # overrides are written into it
        if isinstance(config, ml_collections.ConfigDict):
            what = "cannot be used"
            _check_names(path, config)
            _check_values(path, config)
    except InputError:
        raise
    except SystemExit as ended:  # not an Exception, and it would end the command without a word
        raise InputError(
            f"config={path!r} calls sys.exit({shown(ended.code)}); mend the config file"
        ) from None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a config file is Python and may raise anything
        said = f"{type(error).__name__}: {one_line(error)}"
        raise InputError(f"config={path!r} {what} ({said:.300}); mend the config file") from None
    if not isinstance(config, ml_collections.ConfigDict):
        raise InputError(
            f"config={path!r}: get_config() returns {shown(config)}, not a ConfigDict; "
            "mend the config file"
        )
    return config


def _check_names(path: str, config: ml_collections.ConfigDict) -> None:
    """Raise InputError unless all names in a config are texts; whatever else walking it raises."""
    try:
        odd = [name for name in config if not isinstance(name, str)]
    except TypeError:  # they are sorted, and some cannot be compared with others
        raise InputError(
            f"config={path!r} has names that are texts and names that are none; mend the config "
            "file"
        ) from None
    if odd:
        raise InputError(
            f"config={path!r} has the name {shown(odd[0])}, which is no text; mend the config file"
        )
    for section in _sections(config):
        _check_names(path, config[section])


def _check_values(path: str, config: ml_collections.ConfigDict) -> None:
    """Raise InputError for a value that is required and not set, or computed and fails."""
    for name in _fields(config):
        try:
            _value(config, name)
        except config_dict.RequiredValueError:  # no flags can be made of a config without it
            raise InputError(
                f"config={path!r}: {name} has no value, and its placeholder needs one; give it one "
                "in the config file, or use config_dict.placeholder"
            ) from None
        except Exception as error:  # it may be a function of the config file's own
            raise InputError(
                f"config={path!r}: {name} fails ({type(error).__name__}: {one_line(error):.200}); "
                "mend the config file, or what overrides its values"
            ) from None


def _overridden(config: ml_collections.ConfigDict, overrides: list[str]) -> Any:
    values = flags.FlagValues()
    line = ["specjax", *overrides]
    config_flags.DEFINE_config_dict(
        "config", config, flag_values=values, lock_config=True, sys_argv=line
    )
    try:
        values(line)
    except flags.Error as error:
        wrong = re.match(r"flag --(config\.([\w.]+))=(.*?): ", one_line(error))
        if wrong is None:
            raise InputError(f"config: {one_line(error)}") from None
        kind = _TYPES.get(_field_type(config, wrong[2]), "a value of the field's type")
        raise InputError(f"{wrong[1]}={shown(wrong[3])}: use {kind}") from None
    return values.config


def _field_type(config: ml_collections.ConfigDict, name: str) -> type | None:
    section, _, field = name.rpartition(".")
    return (_value(config, section) if section else config).get_type(field)


def _check_override(config: ml_collections.ConfigDict, override: str) -> None:
    name, _, value = re.sub(r"^--?(no)?config\.?", "", override).partition("=")
    fields = list(_fields(config))
    inside = [field for field in fields if field.startswith(f"{name}.")]
    if inside:
        raise InputError(
            f"config.{name}={value!r}: {name} is a section; set one of {', '.join(inside)}"
        )
    if name not in fields:
        near = difflib.get_close_matches(name, fields, n=1)
        last = name.rpartition(".")[2]
        short = {field.rpartition(".")[2]: field for field in reversed(fields)}
        near = near or [short[one] for one in difflib.get_close_matches(last, short, n=1)]
        hint = f"did you mean {near[0]}?" if near else f"use {', '.join(fields)}"
        raise InputError(f"config.{name}={value!r}: there is no such field; {hint}")


def _fields(config: ml_collections.ConfigDict, prefix: str = "") -> Iterator[str]:
    """The dotted names of all fields, a section's after those outside of it."""
    sections = _sections(config)
    yield from (prefix + name for name in config if name not in sections)
    for name in sections:
        yield from _fields(config[name], f"{prefix}{name}.")


def _sections(config: ml_collections.ConfigDict) -> list[str]:
    """The names of a config's sections; no value is computed."""
    found = []
    for name, value in config.items(preserve_field_references=True):
        reference = isinstance(value, config_dict.FieldReference)
        kind = value.get_type() if reference else type(value)
        if issubclass(kind, ml_collections.ConfigDict):
            found.append(name)
    return found


def use_compilation_cache() -> None:
    """Keep compiled programs on disk, under JAX_COMPILATION_CACHE_DIR or ~/.cache/specjax/xla."""
    compiled_programs.keep(_tell)
