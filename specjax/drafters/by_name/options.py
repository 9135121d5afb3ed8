"""The options of drafters constructed by name, and the checks of their values."""

from __future__ import annotations

import difflib
import importlib
import inspect
import itertools
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from specjax.drafters.by_name.registry import (
    DRAFTERS,
    JOINTS,
    TRAINED,
    joint_of,
    parts_of,
    registered,
)
from specjax.drafters.growth.tree_options import TreeOptions
from specjax.errors import InputError, one_line, shown
from specjax.fields import kind_of, type_hints
from specjax.files.path_checks import user_path
from specjax.loading.model import Model


def drafter_options(name: str) -> dict[str, inspect.Parameter]:
    """Return the options of the drafter called `name`: parameters with annotations, by name.

    They are the keyword-only fields of its class and the keyword-only arguments of its `load`,
    except `num_speculative_tokens`, which is an argument of `make_drafter` itself. Raises
    InputError for an unknown drafter.
    """
    kind = registered(name)
    options: dict[str, inspect.Parameter] = {}
    for function in (kind, kind.load):
        hints = type_hints(function)
        for option, parameter in inspect.signature(function).parameters.items():
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
                options[option] = parameter.replace(annotation=hints[option])
    del options["num_speculative_tokens"]
    return options


def option_type(parameter: inspect.Parameter) -> type | None:
    """Return the type that a drafter's option has on a command line: bool, int, float or str.

    `parameter` is one of `drafter_options`. Returns None for an option that only Python can set.
    """
    for candidate in (parameter.annotation, *get_args(parameter.annotation)):
        candidate = get_args(candidate)[0] if get_origin(candidate) is Annotated else candidate
        candidate = type(get_args(candidate)[0]) if get_origin(candidate) is Literal else candidate
        if candidate in (bool, int, float, str):
            return candidate
    return None


def check_options(
    name: str, path: Any, options: Mapping[str, Any], supplied: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Return the options of the drafter `name`, checked and converted.

    `path` is the path of its weights, if any. Required options that are in `supplied` may be
    missing. Raises InputError for an unknown drafter, an option that it does not accept, a value of
    the wrong kind, and a path that is invalid or not accepted. Options of a user-defined function
    ("package.module:function") are checked only if the function declares kinds.
    """
    if not isinstance(name, str):
        raise InputError(f"drafter={shown(name)}: use a name: {', '.join(DRAFTERS)}")
    if path is not None and not isinstance(path, Model):
        user_path("drafter.path", path)
    if joint_of(name):
        checked: dict[str, Any] = {}
        for part_name, part_path, part_options in divide_joined(name, path, options):
            checked |= check_options(part_name, part_path, part_options)
        return checked
    if ":" in name:
        try:
            function, path_argument = constructor(name), {} if path is None else {"path": path}
            inspect.signature(function).bind(None, **path_argument, **options)
        except (TypeError, ValueError) as error:  # ValueError: a C function without a signature
            if isinstance(error, InputError):
                raise
            raise InputError(
                f"drafter={name!r} is no drafter ({one_line(error)}): use a function that takes "
                "the target and the drafter's options, and returns a Drafter"
            ) from None
        hints = _hints(function)
        return {
            option: _checked(hints.get(option), option, value) for option, value in options.items()
        }
    known = drafter_options(name)
    checked = dict(options)
    for option, value in options.items():
        if option not in known:
            if _is_chain(value):
                del checked[option]
                continue
            takes = f"it takes {', '.join(known)}" if known else "it takes no options"
            near = difflib.get_close_matches(option, ["num_speculative_tokens", *known], n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise InputError(f"{_given(option, value)}: {name} does not take it; {hint}{takes}")
        if (kind := kind_of(known[option].annotation)) is not None:
            checked[option] = kind.check(_field(option), value)
    for option, parameter in known.items():
        if parameter.default is inspect.Parameter.empty and option not in (*options, *supplied):
            raise InputError(f"drafter.{option} is missing: {name} needs it")
    DRAFTERS[name].check_together(**checked)
    if name not in TRAINED and path is not None:
        raise InputError(f"drafter.path={shown(str(path))}: {name} does not take it; leave it out")
    return checked


def divide_joined(
    name: str, path: Any, options: Mapping[str, Any]
) -> list[tuple[str, Any, dict[str, Any]]]:
    """Return (name, path, options) for each drafter in a name joined by + or |.

    Raises InputError as `divide_options` does, and for drafters that cannot be joined by name.
    """
    joint = joint_of(name)
    parts = name.split(joint)
    if "" in parts or len(set(parts)) < len(parts):
        raise InputError(f"drafter={name!r}: join different drafters, as ngram{joint}eagle3")
    for part_name in parts:
        is_callers_own = ":" in part_name
        call = f"specjax.drafters.{JOINTS[joint].__name__}"
        if is_callers_own:
            reason = f"its options are its own; use {call}"
        else:
            reason = registered(part_name).alone
        if reason:
            raise InputError(f"drafter={name!r}: {part_name} cannot be joined by name: {reason}")
    return divide_options(parts, path, options)


def divide_options(
    names: Sequence[str], path: Any, options: Mapping[str, Any]
) -> list[tuple[str, Any, dict[str, Any]]]:
    """Return (name, path, options) for each of several drafters, with the options that it accepts.

    Raises InputError for an unknown drafter, an option that none accepts, and a path unless exactly
    one kind of drafter among them accepts one.
    """
    listed = ", ".join(names)
    options_by_name = {name: _taken(name) for name in names}
    for option, value in options.items():
        is_taken = any(option in option_names for option_names in options_by_name.values())
        if not is_taken and not _is_chain(value):
            raise InputError(f"{_given(option, value)}: none of {listed} takes it; leave it out")
    trained_by_name = {name: _trained(name) for name in names}
    kinds = list(dict.fromkeys(itertools.chain.from_iterable(trained_by_name.values())))
    if path is not None and len(kinds) != 1:
        raise InputError(
            f"drafter.path={str(path)!r}: of {listed} {', '.join(kinds) or 'none'} could take it; "
            "leave it out, or make the drafters in Python (specjax.make_drafter)"
        )
    return [
        (
            name,
            path if trained_by_name[name] else None,
            {option: value for option, value in options.items() if option in options_by_name[name]},
        )
        for name in names
    ]


def constructor(name: str) -> Callable[..., Any]:
    """Return the class of the drafter `name`, or the function "package.module:function".

    Raises InputError if there is none.
    """
    if ":" in name:
        module, _, attribute = name.partition(":")
        try:
            function = getattr(importlib.import_module(module), attribute)
        except (Exception, SystemExit) as error:  # importing runs the user's module
            raise InputError(
                f"drafter={name!r}: {type(error).__name__}: {one_line(error):.160}; use "
                "package.module:function of something importable"
            ) from error
        if not callable(function):
            raise InputError(f"drafter={name!r} is {shown(function)}, no function; name a function")
        return function
    return registered(name)


def _taken(name: str) -> Container[str]:
    """Return the names of the options that the drafter, or any of the joined drafters, accepts."""
    if joint_of(name):
        return {option for part_name in parts_of(name) for option in _taken(part_name)}
    return _arguments(name) if ":" in name else drafter_options(name)


def _trained(name: str) -> list[str]:
    """Return those of the drafters in `name`, by name, that accept a path."""
    if ":" in name:
        return [name] if "path" in _arguments(name) else []
    return [part_name for part_name in parts_of(name) if part_name in TRAINED]


def _arguments(name: str) -> list[str]:
    """Return the parameters of a user-defined function, by name, except the first: the target."""
    try:
        _, *parameters = inspect.signature(constructor(name)).parameters.values()
    except (TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        return []
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [parameter.name for parameter in parameters if parameter.kind in by_keyword]


def _is_chain(value: Any) -> bool:
    """Return whether `value` asks for a chain, which drafters without trees draft anyway."""
    return value == TreeOptions()


def _field(option: str) -> str:
    """Return the name of an option's field for messages; `tree` is a section, not an option."""
    return option if option == "tree" else f"drafter.{option}"


def _given(option: str, value: Any) -> str:
    """Return an option and its value in the form used by error messages."""
    if isinstance(value, TreeOptions):
        return f"tree.kind={value.kind}"
    return f"{_field(option)}={shown(value)}"


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations of a user-defined function, or none if they cannot be resolved."""
    try:
        return get_type_hints(function, include_extras=True)
    except Exception:  # annotations are code, and may use undefined names
        return {}


def _checked(annotation: Any, option: str, value: Any) -> Any:
    """Return an option's value, checked if the annotation declares a kind."""
    try:
        kind = kind_of(annotation)
    except TypeError:  # a plain number or text
        kind = None
    return value if kind is None else kind.check(f"drafter.{option}", value)
