"""Read config files, which are Python, and apply command-line overrides.

A config is given as the path of a file. Bundled configs are also found by name, from any working
directory: `decode_smollm2`, or `configs/decode_smollm2.py`.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
import runpy
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_collections
from absl import flags
from ml_collections import config_flags
from ml_collections.config_dict import placeholder

from specjax.errors import InputError, one_line, shown
from specjax.fields import (
    DependentFields,
    Either,
    Fields,
    Flag,
    Items,
    Kind,
    Number,
    OptionalSection,
    Shared,
    Unchecked,
    Whole,
    dataclass_in,
    fields_of,
    inline_in,
    type_hints,
)
from specjax.files import path_checks

_TYPES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    tuple: "a tuple, such as (1, 2)",
}


def read_config(
    argv: list[str], default: str, source: type | None = None
) -> ml_collections.ConfigDict:
    """Return the config named on a command line, locked, with the command line's overrides.

    `default` is the config if none is named. `source` is the dataclass that declares the fields, of
    which some may depend on the values of others. Raises InputError for an invalid file, override
    or value.
    """
    argv = list(_joined(argv))
    files = [argument for argument in argv if re.match(r"--?config=", argument)]
    overrides = [argument for argument in argv if argument not in files]
    path = files[-1].partition("=")[2] if files else default
    config = overridden(_load(path, packaged_first=not files), overrides, source)
    _check_values(path, config)  # again, since values may depend on those that were overridden
    return config


def overridden(
    config: ml_collections.ConfigDict, overrides: Sequence[str], source: type | None = None
) -> ml_collections.ConfigDict:
    """Return a config with overrides `--config.field=value` applied, locked.

    The dataclass `source`, if given, declares the fields. Raises InputError.
    """
    for override in overrides:
        if not re.match(_CONFIG_FLAG, override):
            raise InputError(_not_understood(config, override))
    for section, fields in _dependent(source).items():
        _add_fields(config, section, fields, overrides)
    for override in overrides:
        _check_override(config, override)
    return _overridden(config, overrides)


def deciding(argv: Sequence[str], source: type) -> list[str]:
    """Return the arguments that name a config, or decide which fields it has."""
    prefixes = ["config"]
    prefixes += [f"config.{name}.{fields.on}" for name, fields in _dependent(source).items()]
    named = [(argument, argument.lstrip("-").partition("=")[0]) for argument in _joined(list(argv))]
    return [argument for argument, name in named if name in prefixes]


def _dependent(source: type | None) -> dict[str, DependentFields]:
    """Return the sections of a dataclass whose fields depend on the value of one of them."""
    kinds = {} if source is None else fields_of(source)
    return {name: kind for name, kind in kinds.items() if isinstance(kind, DependentFields)}


def _add_fields(
    config: ml_collections.ConfigDict,
    name: str,
    dependent: DependentFields,
    overrides: Sequence[str],
) -> None:
    """Add the fields to a section that it has once the overrides are applied.

    An unset field gets the type that its values will have. Raises InputError.
    """
    section = config.get(name)
    if not isinstance(section, ml_collections.ConfigDict):
        return  # refused where it is read
    deciding = re.compile(rf"--?config\.{name}\.{dependent.on}=(.*)", re.DOTALL)
    given = [found[1] for override in overrides if (found := deciding.fullmatch(override))]
    kinds = dependent.of(given[-1] if given else section.get(dependent.on))
    with section.unlocked():
        for field, kind in kinds.items():
            value_type = _value_type(kind)
            if field in section:
                if section[field] is not None or section.get_type(field) is value_type:
                    continue
                del section[field]  # of another type
            section[field] = placeholder(value_type)


_CONFIG_FLAG = r"--?(no)?config([.=]|$)"


def _joined(argv: list[str]) -> Iterator[str]:
    """Yield the arguments, with `--config.field value` joined as `--config.field=value`."""
    waiting = None
    for argument in argv:
        if waiting is not None and not argument.startswith("--"):
            yield f"{waiting}={argument}"
            waiting = None
            continue
        if waiting is not None:
            yield waiting
            waiting = None
        if not re.match(_CONFIG_FLAG, argument) or "=" in argument or argument.startswith("--no"):
            yield argument
        else:
            waiting = argument
    if waiting is not None:
        yield waiting


def config_of(source: type) -> ml_collections.ConfigDict:
    """Return the config declared by a dataclass of annotated fields, with its default values.

    A field that is a dataclass or a dict becomes a section. A dict's annotation has the kinds of
    the section's fields. A section that may be absent, `D | None`, is left out if it is None by
    default, and a field without a default is unset.
    """
    return _config(fields_of(source), _defaults(source))


def _defaults(source: type) -> dict[str, Any]:
    """Return the defaults of a dataclass's fields, those of inline dataclasses among them.

    A section without a default has the defaults of its own fields; other fields without one are
    left out.
    """
    defaults: dict[str, Any] = {}
    hints = type_hints(source)
    for field in dataclasses.fields(source):
        section = dataclass_in(hints[field.name])
        if (inline := inline_in(hints[field.name])) is not None:
            inside = {**_defaults(section), **inline.defaults}
            defaults |= {key: inside[key] for key in inside.keys() - {*inline.without}}
        elif field.default_factory is not dataclasses.MISSING:
            defaults[field.name] = field.default_factory()
        elif field.default is not dataclasses.MISSING:
            defaults[field.name] = field.default
        elif section is not None:
            defaults[field.name] = _defaults(section)
    return defaults


def _config(kinds: Fields, values: Mapping[str, Any]) -> ml_collections.ConfigDict:
    """Return a config with the fields of `kinds`; `values` are the defaults by name."""
    config = ml_collections.ConfigDict()
    for name, kind in kinds.items():
        value = values.get(name)
        if isinstance(kind, OptionalSection):
            if value is None:
                continue
            kind = kind.fields
        if isinstance(kind, DependentFields):
            kind = kind.of(value.get(kind.on))
        if isinstance(kind, Mapping):
            section = value if isinstance(value, Mapping) else vars(value)
            config[name] = _config(kind, section)
        else:
            config[name] = placeholder(_value_type(kind)) if value is None else value
    return config


def _value_type(kind: Kind) -> type:
    """Return the type of a command line's values for fields of a kind."""
    if isinstance(kind, Either | Shared):
        inside = kind.kinds if isinstance(kind, Either) else kind.checks
        types = {_value_type(each) for each in inside or [use.kind for use in kind.uses]}
        return types.pop() if len(types) == 1 else object  # a Python literal, or else a text
    if isinstance(kind, Unchecked):
        return kind.type
    return next((type_ for known, type_ in _TYPE_OF.items() if isinstance(kind, known)), str)


_TYPE_OF = {Flag: bool, Whole: int, Number: float, Items: tuple}
"""The value types of kinds; other kinds have text values."""


def packaged_configs() -> dict[str, Path]:
    """Return the paths of the config files that come with specjax, by name without ".py"."""
    package = Path(__file__).parents[2]
    # In a wheel they are inside the package, in the repository beside it.
    folders = package / "configs", package.parent / "configs"
    folder = next(folder for folder in folders if folder.is_dir())
    return {file.stem: file for file in sorted(folder.glob("*.py"))}


def _find(name: str, packaged_first: bool) -> Path:
    """Return the file of a config, given as a path or as the name of a bundled config.

    If both exist, `packaged_first` prefers the bundled one. Raises InputError if there is none.
    """
    packaged_files = packaged_configs()
    match = re.fullmatch(r"(?:configs/)?(\w+)(?:\.py)?", name)
    packaged = packaged_files.get(match[1]) if match else None
    if packaged and packaged_first:
        return packaged
    if path_checks.user_path("config", name).exists():
        return path_checks.input_file("config", name)
    if packaged:
        return packaged
    raise InputError(
        f"config={shown(name)}: no such file, and no config that comes with specjax; "
        f"use a file of your own, or one of {', '.join(packaged_files)}"
    )


def _load(path: str, packaged_first: bool = False) -> ml_collections.ConfigDict:
    """Return the config of a file's `get_config`, called with the text after a colon in `path`."""
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
            _check_values(path, config)
    except InputError:
        raise
    except SystemExit as ended:  # not an Exception, and it would end the command without a message
        raise InputError(
            f"config={path!r} calls sys.exit({shown(ended.code)}); repair the config file"
        ) from None
    except Exception as error:  # a config file is Python and may raise anything
        message = f"{type(error).__name__}: {one_line(error)}"
        if size and what == "get_config() fails":
            raise InputError(
                f"config={path!r}: get_config({size[0]!r}) fails ({message:.300}); correct what "
                "is after the colon, or leave it out"
            ) from None
        raise InputError(
            f"config={path!r} {what} ({message:.300}); repair the config file"
        ) from None
    if not isinstance(config, ml_collections.ConfigDict):
        raise InputError(
            f"config={path!r}: get_config() returns {shown(config)}, not a ConfigDict; "
            "repair the config file"
        )
    return config


def _check_values(path: str, config: ml_collections.ConfigDict) -> None:
    """Raise InputError if a required value is not set, or a computed value fails."""
    for name in field_names(config):
        try:
            field_value(config, name)
        except Exception as error:  # the config file's own function may raise anything
            raise InputError(
                f"config={path!r}: {name} fails ({type(error).__name__}: {one_line(error):.200}); "
                "repair the config file, or what overrides its values"
            ) from None


def _overridden(config: ml_collections.ConfigDict, overrides: Sequence[str]) -> Any:
    """Return the config after parsing overrides as flags of ml_collections. Raises InputError."""
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
    """Return the type of a field by its dotted name."""
    section, _, field = name.rpartition(".")
    return (field_value(config, section) if section else config).get_type(field)


def _check_override(config: ml_collections.ConfigDict, override: str) -> None:
    """Raise InputError if an override names no field of the config."""
    name, _, value = re.sub(r"^--?(no)?config\.?", "", override).partition("=")
    fields = field_names(config)
    inside = [field for field in fields if field.startswith(f"{name}.")]
    if inside:
        hint = f"did you mean config.{name}.name? " if f"{name}.name" in inside else ""
        raise InputError(
            f"config.{name}={value!r}: {name} is a section; {hint}set one of {', '.join(inside)}"
        )
    if name not in fields:
        near = _nearest(name, fields)
        hint = f"did you mean {near}?" if near else f"use {', '.join(fields)}"
        raise InputError(f"config.{name}={value!r}: there is no such field; {hint}")


_LEAST_LIKENESS = 0.6
"""The minimum `difflib` ratio of a name that is suggested in an error."""


def _nearest(name: str, fields: Sequence[str]) -> str | None:
    """Return the field most similar to `name`, by its dotted name or the last part of it.

    Returns None if no field is similar.
    """

    def likeness(field: str) -> float:
        pairs = ((name, field), (name.rpartition(".")[2], field.rpartition(".")[2]))
        return max(difflib.SequenceMatcher(None, *pair).ratio() for pair in pairs)

    near = max(fields, key=likeness)
    return near if likeness(near) >= _LEAST_LIKENESS else None


def _not_understood(config: ml_collections.ConfigDict, argument: str) -> str:
    """Return the error message for an argument that names no field, with a suggestion."""
    fields = field_names(config)
    name, _, value = argument.lstrip("-").partition("=")
    if not argument.startswith("-"):
        near, value = ("prompt" if "prompt" in fields else None), argument
    elif f"{name}.name" in fields:
        near = f"{name}.name"
    else:
        near = _nearest(name, fields)
    hint = (
        f"did you mean --config.{near}={shlex.quote(value) if value else 'VALUE'}? " if near else ""
    )
    return (
        f"{argument!r} is not understood: {hint}use --config=FILE and --config.FIELD=VALUE; "
        "--help lists the fields"
    )


def field_names(config: ml_collections.ConfigDict, prefix: str = "") -> list[str]:
    """Return the dotted names of all fields of a config, such as "drafter.name".

    `prefix` precedes each name. Fields of sections come after the other fields. Values that a
    config computes on access are not computed.
    """
    values = dict(config.items(preserve_field_references=True))
    sections = {
        name: value
        for name, value in values.items()
        if isinstance(value, ml_collections.ConfigDict)
    }
    names = [prefix + name for name in values if name not in sections]
    for name, section in sections.items():
        names += field_names(section, f"{prefix}{name}.")
    return names


def field_value(config: ml_collections.ConfigDict, name: str) -> Any:
    """Return the value of a config's field, given its dotted name, such as "drafter.name"."""
    return functools.reduce(lambda section, part: section[part], name.split("."), config)
