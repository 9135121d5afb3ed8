"""Reads config files, which are Python, and applies the overrides of a command line.

A config is named by its file's path. The configs that come with specjax are also found by name, in
any working directory: `decode_smollm2`, or `configs/decode_smollm2.py`.
"""

from __future__ import annotations

import difflib
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_collections
from absl import flags
from ml_collections import config_dict, config_flags

from specjax.errors import InputError, one_line, shown
from specjax.files import paths

_TYPES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    tuple: "a tuple, such as (1, 2)",
}


def read_config(argv: list[str], default: str) -> ml_collections.ConfigDict:
    """The config of a command line, with its overrides, locked; `default` without --config.

    Raises InputError for a file, an override or a value that cannot be used.
    """
    argv = list(_joined(argv))
    files = [argument for argument in argv if re.match(r"--?config=", argument)]
    overrides = [argument for argument in argv if argument not in files]
    path = files[-1].partition("=")[2] if files else default
    config = _load(path, packaged_first=not files)
    for override in overrides:
        _check_override(config, override)
    config = _overridden(config, overrides)
    _check_values(path, config)  # some may be computed from what was overridden
    return config


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


def packaged_configs() -> dict[str, Path]:
    """The config files that come with specjax, by name."""
    package = Path(__file__).parents[1]
    # In a wheel they are inside the package, in the repository beside it.
    folder = next(one for one in (package / "configs", package.parent / "configs") if one.is_dir())
    return {file.stem: file for file in sorted(folder.glob("*.py"))}


def _find(name: str, packaged_first: bool) -> Path:
    """The file of a config: a path, or the name of one that comes with specjax."""
    own = packaged_configs()
    match = re.fullmatch(r"(?:configs/)?(\w+)(?:\.py)?", name)
    packaged = own.get(match[1]) if match else None
    if packaged and packaged_first:
        return packaged
    if paths.user_path("config", name).exists():
        return paths.input_file("config", name)
    if packaged:
        return packaged
    raise InputError(
        f"config={shown(name)}: no such file, and no config that comes with specjax; "
        f"use a file of your own, or one of {', '.join(own)}"
    )


def _load(path: str, packaged_first: bool = False) -> ml_collections.ConfigDict:
    """What a config file's `get_config` returns, given what follows a colon."""
    file, *size = path.split(":", 1)
    file = str(_find(file, packaged_first))
    what = "fails"
    try:
        get_config = runpy.run_path(file).get("get_config")
        if not callable(get_config):
            raise InputError(
                f"config={path!r} has no function get_config(); repair the config file"
            )
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
    except SystemExit as ended:  # not an Exception, and it would end the command without a message
        raise InputError(
            f"config={path!r} calls sys.exit({shown(ended.code)}); repair the config file"
        ) from None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a config file is Python and may raise anything
        said = f"{type(error).__name__}: {one_line(error)}"
        raise InputError(f"config={path!r} {what} ({said:.300}); repair the config file") from None
    if not isinstance(config, ml_collections.ConfigDict):
        raise InputError(
            f"config={path!r}: get_config() returns {shown(config)}, not a ConfigDict; "
            "repair the config file"
        )
    return config


def _check_names(path: str, config: ml_collections.ConfigDict) -> None:
    """Raise InputError unless all names in a config are texts; whatever else walking it raises."""
    try:
        odd = [name for name in config if not isinstance(name, str)]
    except TypeError:  # they are sorted, and some cannot be compared with others
        raise InputError(
            f"config={path!r} has names that are texts and names that are none; repair the config "
            "file"
        ) from None
    if odd:
        raise InputError(
            f"config={path!r} has the name {shown(odd[0])}, which is not a text; repair the config "
            "file"
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
                "repair the config file, or what overrides its values"
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
