"""The options that drafters take by name: which they are, and whether values fit."""

from __future__ import annotations

import importlib
import inspect
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
from specjax.drafters.growth.options import TreeOptions
from specjax.errors import InputError, one_line, shown
from specjax.fields import kind_of, type_hints
from specjax.files.paths import user_path
from specjax.loading.model import Model


def drafter_options(name: str) -> dict[str, inspect.Parameter]:
    """The options of a drafter by name: keyword-only fields and arguments, with their types."""
    kind = registered(name)
    found: dict[str, inspect.Parameter] = {}
    for function in (kind, kind.load):
        hints = type_hints(function)
        for option, parameter in inspect.signature(function).parameters.items():
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
                found[option] = parameter.replace(annotation=hints[option])
    del found["num_speculative_tokens"]
    return found


def option_type(parameter: inspect.Parameter) -> type | None:
    """The type a command line gives an option in; None for those that only code can give."""
    for one in (parameter.annotation, *get_args(parameter.annotation)):
        one = get_args(one)[0] if get_origin(one) is Annotated else one
        one = type(get_args(one)[0]) if get_origin(one) is Literal else one
        if one in (bool, int, float, str):
            return one
    return None


def check_options(
    name: str, path: Any, options: Mapping[str, Any], supplied: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The options of a drafter, checked; `supplied` come later.

    Raises InputError for an unknown drafter, for options that it does not take and values of
    another kind, and for a path that it does not take or that is none. One of the caller's own
    ("package.module:function") checks its options itself.
    """
    if not isinstance(name, str):
        raise InputError(f"drafter={shown(name)}: use a name: {', '.join(DRAFTERS)}")
    if path is not None and not isinstance(path, Model):
        user_path("drafter.path", path)
    if joint_of(name):
        checked: dict[str, Any] = {}
        for part, at, own in divide_joined(name, path, options):
            checked |= check_options(part, at, own)
        return checked
    if ":" in name:
        try:
            function, given = constructor(name), {} if path is None else {"path": path}
            inspect.signature(function).bind(None, **given, **options)
        except (TypeError, ValueError) as error:  # ValueError: a function of C without a signature
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
            raise InputError(f"{_given(option, value)}: {name} does not take it; {takes}")
        if (kind := kind_of(known[option].annotation)) is not None:
            checked[option] = kind.check(_field(option), value)
    for option, parameter in known.items():
        if parameter.default is inspect.Parameter.empty and option not in (*options, *supplied):
            raise InputError(f"drafter.{option} is missing: {name} needs it")
    if name not in TRAINED and path is not None:
        raise InputError(f"drafter.path={shown(str(path))}: {name} does not take it; leave it out")
    return checked


def divide_joined(
    name: str, path: Any, options: Mapping[str, Any]
) -> list[tuple[str, Any, dict[str, Any]]]:
    """`divide_options` of the parts of a name joined by + or |.

    Raises InputError for drafters that cannot be joined by name, too.
    """
    joint = joint_of(name)
    parts = name.split(joint)
    if "" in parts or len(set(parts)) < len(parts):
        raise InputError(f"drafter={name!r}: join different drafters, as ngram{joint}eagle3")
    for part in parts:
        own = ":" in part
        call = f"specjax.drafters.{JOINTS[joint].__name__}"
        why = f"its options are its own; use {call}" if own else registered(part).alone
        if why:
            raise InputError(f"drafter={name!r}: {part} cannot be joined by name: {why}")
    return divide_options(parts, path, options)


def divide_options(
    names: Sequence[str], path: Any, options: Mapping[str, Any]
) -> list[tuple[str, Any, dict[str, Any]]]:
    """Each of several drafters, by name, with its path and the options that it takes.

    Raises InputError for an unknown drafter, for an option that none takes, and for a path unless
    just one kind of drafter among them could take it.
    """
    listed = ", ".join(names)
    takes = {name: _taken(name) for name in names}
    for option, value in options.items():
        if not (any(option in taken for taken in takes.values()) or _is_chain(value)):
            raise InputError(f"{_given(option, value)}: none of {listed} takes it; leave it out")
    trained = {name: _trained(name) for name in names}
    kinds = list(dict.fromkeys(kind for found in trained.values() for kind in found))
    if path is not None and len(kinds) != 1:
        raise InputError(
            f"drafter.path={str(path)!r}: of {listed} {', '.join(kinds) or 'none'} could take it; "
            "leave it out, or make the drafters in Python (specjax.make_drafter)"
        )
    return [
        (
            name,
            path if trained[name] else None,
            {option: value for option, value in options.items() if option in takes[name]},
        )
        for name in names
    ]


def constructor(name: str) -> Callable[..., Any]:
    """A drafter's class by name, or the function that "package.module:function" names.

    Raises InputError where there is none.
    """
    if ":" in name:
        module, _, function = name.partition(":")
        try:
            found = getattr(importlib.import_module(module), function)
        except (Exception, SystemExit) as error:  # a module of somebody's own runs when imported
            raise InputError(
                f"drafter={name!r}: {type(error).__name__}: {one_line(error):.160}; use "
                "package.module:function of something importable"
            ) from error
        if not callable(found):
            raise InputError(f"drafter={name!r} is {shown(found)}, no function; name a function")
        return found
    return registered(name)


def _taken(name: str) -> Container[str]:
    """The options that a drafter takes, or one of those joined."""
    if joint_of(name):
        return {option for part in parts_of(name) for option in _taken(part)}
    return _arguments(name) if ":" in name else drafter_options(name)


def _trained(name: str) -> list[str]:
    """The trained drafters in a name, which a path may be of; one of the caller's own is one."""
    if ":" in name:
        return [name] if "path" in _arguments(name) else []
    return [part for part in parts_of(name) if part in TRAINED]


def _arguments(name: str) -> list[str]:
    """The names of what a function of the caller's own takes beside the target."""
    try:
        _, *others = inspect.signature(constructor(name)).parameters.values()
    except (TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        return []
    return [one.name for one in others if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]


def _is_chain(value: Any) -> bool:
    """Whether an option asks for a chain, which drafters without trees draft in any case."""
    return value == TreeOptions()


def _field(option: str) -> str:
    """What errors call an option: `tree` is a section of its own."""
    return option if option == "tree" else f"drafter.{option}"


def _given(option: str, value: Any) -> str:
    """An option and its value, as errors say them."""
    if isinstance(value, TreeOptions):
        return f"tree.kind={value.kind}"
    return f"{_field(option)}={shown(value)}"


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of a function of somebody's own, as far as they can be resolved."""
    try:
        return get_type_hints(function, include_extras=True)
    except Exception:  # annotations are code, and may name what is not there
        return {}


def _checked(annotation: Any, option: str, value: Any) -> Any:
    """An option's value, checked if its annotation declares a kind."""
    try:
        kind = kind_of(annotation)
    except TypeError:  # a plain number or text
        kind = None
    return value if kind is None else kind.check(f"drafter.{option}", value)
