"""The options of drafters constructed by name, and the checks of their values."""

from __future__ import annotations

import difflib
import importlib
import inspect
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from specjax.core.drafter import Drafter
from specjax.core.growth.tree_options import TreeOptions
from specjax.errors import InputError, one_line, shown
from specjax.fields import Kind, Unchecked, field_meanings, kind_of, meaning_in, type_hints
from specjax.files.path_checks import user_path
from specjax.loading.model import Model
from specjax.methods.load import option_sources
from specjax.methods.method import Method
from specjax.methods.registry import METHODS, joint_of, parts_of, registered

_KEYWORD_ONLY = (inspect.Parameter.KEYWORD_ONLY,)
_BY_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_NOT_OPTIONS = ("num_speculative_tokens", "path")
"""The arguments of `make_drafter` itself."""


def drafter_options(name: str) -> dict[str, inspect.Parameter]:
    """Return the options of the drafter called `name`: parameters with annotations, by name.

    Those of a method or a class are its keyword-only fields, and the keyword-only arguments of what
    loads the method; those of a function are its arguments after the first one, the target.
    `num_speculative_tokens` and `path` are arguments of `make_drafter` itself. Raises InputError
    for an unknown drafter, and for a function that takes no target.
    """
    made_by = constructor(name)
    options: dict[str, inspect.Parameter] = {}
    if isinstance(made_by, Method):
        for function in option_sources(made_by):
            options |= _with_annotations(function, _parameters(name, function), _KEYWORD_ONLY)
    else:
        _, *others = _parameters(name, made_by, takes_target=True)
        options = _with_annotations(made_by, others, _BY_KEYWORD)
    return {option: each for option, each in options.items() if option not in _NOT_OPTIONS}


def option_type(parameter: inspect.Parameter) -> type | None:
    """Return the type that an option has on a command line: bool, int, float, str or tuple.

    `parameter` is one of `drafter_options`. The type is `object`, for a Python literal or else a
    text, if there are several, or no annotation. Returns None for an option that only Python can
    set.
    """
    if parameter.annotation is inspect.Parameter.empty:
        return object
    found = {each for each in _types_in(parameter.annotation) if each in _OF_A_TEXT}
    return found.pop() if len(found) == 1 else object if found else None


_OF_A_TEXT = (bool, int, float, str, tuple)
"""The types of values that a command line can give."""


def _types_in(annotation: Any) -> Iterator[Any]:
    """Yield the types that an annotation names: of a union all, of literals their own."""
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        yield from _types_in(inside[0])
    elif origin is Literal:
        yield from map(type, inside)
    elif origin in (Union, UnionType):
        for member in inside:
            yield from _types_in(member)
    else:
        yield origin or annotation


def option_kind(parameter: inspect.Parameter) -> Kind:
    """Return the kind of an option; one whose annotation declares no kind is not checked."""
    try:
        kind = kind_of(parameter.annotation)
    except TypeError:  # a plain number or text
        kind = None
    return kind if isinstance(kind, Kind) else Unchecked(option_type(parameter) or object)


def option_meanings(name: str) -> dict[str, str]:
    """Return what the options of a drafter mean, by name; "" where nothing says so.

    An annotation may hold the meaning as a text, as in `Annotated[int, Whole(), "The first one."]`;
    a field of a class may have a docstring instead.
    """
    made_by = constructor(name)
    fields = field_meanings(made_by.drafter) if isinstance(made_by, Method) else {}
    return {
        option: meaning_in(parameter.annotation) or fields.get(option, "")
        for option, parameter in drafter_options(name).items()
    }


def check_options(
    name: str, path: Any, options: Mapping[str, Any], supplied: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Return the options of the drafter `name`, checked and converted.

    `path` is the path of its weights, if any. Required options that are in `supplied` may be
    missing. Raises InputError for an unknown drafter, an option that it does not accept, a value of
    the wrong kind, and a path that is invalid or not accepted. Options of a user-defined function
    are checked only if the function declares kinds.
    """
    if not isinstance(name, str):
        raise InputError(f"drafter={shown(name)}: use a name: {', '.join(METHODS)}")
    if path is not None and not isinstance(path, Model):
        user_path("drafter.path", path)
    if joint_of(name):
        checked: dict[str, Any] = {}
        for part_name, part_path, part_options in divide_joined(name, path, options):
            checked |= check_options(part_name, part_path, part_options)
        return checked
    known = drafter_options(name)
    checked = dict(options)
    for option, value in options.items():
        if option in known:
            checked[option] = option_kind(known[option]).check(_field(option), value)
        elif _is_chain(value):
            del checked[option]
        elif not _takes_any(name):
            takes = f"it takes {', '.join(known)}" if known else "it takes no options"
            near = difflib.get_close_matches(option, ["num_speculative_tokens", *known], n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise InputError(f"{_given(option, value)}: {name} does not take it; {hint}{takes}")
    for option, parameter in known.items():
        if parameter.default is inspect.Parameter.empty and option not in (*options, *supplied):
            raise InputError(f"drafter.{option} is missing: {name} needs it")
    if name in METHODS:
        METHODS[name].check_options(checked)
    if path is not None and not (_trained(name) or _takes_any(name)):
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
        made_by = constructor(part_name)
        if isinstance(made_by, Method) and made_by.alone:
            raise InputError(
                f"drafter={name!r}: {part_name} cannot be joined by name: {made_by.alone}"
            )
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


def constructor(name: str) -> Method | Callable[..., Any]:
    """Return the record of the drafter `name`, or the function "package.module:function".

    A class of drafters in place of the function has a record, too, without weights. Raises
    InputError if there is none.
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
        if isinstance(function, type) and issubclass(function, Drafter):
            return Method(name=name, paper="", drafter=function)
        return function
    return registered(name)


def _taken(name: str) -> Collection[str]:
    """Return the names of the options that the drafter, or any of the joined drafters, accepts."""
    return {option for part_name in parts_of(name) for option in drafter_options(part_name)}


def _trained(name: str) -> list[str]:
    """Return those of the drafters in `name`, by name, that accept a path."""
    return [part_name for part_name in parts_of(name) if _takes_path(part_name)]


def _takes_path(name: str) -> bool:
    made_by = constructor(name)
    if isinstance(made_by, Method):
        return made_by.needs.weights
    return any(parameter.name == "path" for parameter in _parameters(name, made_by))


def _takes_any(name: str) -> bool:
    """Return whether a drafter is a user-defined function that takes any options."""
    made_by = constructor(name)
    return not isinstance(made_by, Method) and any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in _parameters(name, made_by)
    )


def _parameters(
    name: str, function: Callable[..., Any], *, takes_target: bool = False
) -> list[inspect.Parameter]:
    """Return the parameters of what makes the drafter `name`.

    Raises InputError if it has no signature and, with `takes_target`, if it takes no argument.
    """
    try:
        signature = inspect.signature(function)
        if takes_target:
            signature.bind_partial(None)
    except (TypeError, ValueError) as error:  # ValueError: a C function without a signature
        raise InputError(
            f"drafter={name!r} is no drafter ({one_line(error)}): use a function that takes "
            "the target and the drafter's options, and returns a Drafter"
        ) from None
    return list(signature.parameters.values())


def _with_annotations(
    function: Callable[..., Any], parameters: Sequence[inspect.Parameter], kinds: Collection[Any]
) -> dict[str, inspect.Parameter]:
    """Return the parameters of the given kinds by name, with their annotations resolved."""
    try:
        hints = type_hints(function)
    except Exception:  # annotations are code, and may use undefined names
        hints = {}
    return {
        parameter.name: parameter.replace(
            annotation=hints.get(parameter.name, inspect.Parameter.empty)
        )
        for parameter in parameters
        if parameter.kind in kinds
    }


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
