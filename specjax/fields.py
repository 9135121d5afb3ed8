"""Kinds of user-supplied values and their checks, shared by command lines and the Python API.

A config field, a drafter option or a function argument declares its kind in a table of fields by
name or in its annotation, as in `top_k: Annotated[int, Whole()]`. The method `check(name, value)`
of every kind returns the value as a plain Python type, or raises InputError with a line that names
the field, the value and the remedy.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import sys
import textwrap
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    Protocol,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    runtime_checkable,
)

from specjax.errors import InputError, Problems, shown
from specjax.files import path_checks

T = TypeVar("T")
Callee = TypeVar("Callee", bound=Callable[..., Any])
_ABSENT = object()
INT32_MAX = 2**31 - 1
"""The largest value of the int32 arrays of token ids, positions and counts."""


@runtime_checkable
class Kind(Protocol):
    """The set of values that a field may have."""

    def check(self, name: str, value: Any) -> Any:
        """Return `value` converted to a plain type; raise InputError naming `name` if invalid."""


Fields = Mapping[str, "Kind | Fields | DependentFields | OptionalSection"]
"""The kind of each field by name; a nested mapping is a section of fields."""


@dataclass(frozen=True)
class Whole:
    """An integer from `least` to `most`, of Python, NumPy or JAX.

    `remedy` replaces the default advice in error messages.
    """

    least: int = 0
    most: int = INT32_MAX
    remedy: str = ""

    def check(self, name: str, value: Any) -> int:
        """Return `value` as an int, or raise InputError if it is not an integer in the range."""
        value = _plain(value)
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole or not self.least <= value <= self.most:
            small = whole and value < self.least
            raise InputError(f"{name}={shown(value)}: {self.says if small else self._remedy()}")
        return value

    @property
    def says(self) -> str:
        """Advice on which values are allowed; it omits the default 32-bit limit."""
        if self.most < INT32_MAX:
            return self._remedy()
        return self.remedy or f"use a whole number of at least {self.least}"

    def _remedy(self) -> str:
        return self.remedy or f"use a whole number from {self.least} to {self.most}"


@dataclass(frozen=True)
class Number:
    """A finite number from `least` to `most`.

    `above` excludes `least` itself, `zero` also allows 0, and `remedy` replaces the default advice
    in error messages.
    """

    least: float = 0.0
    most: float = 1e30
    above: bool = False
    zero: bool = False
    remedy: str = ""

    def check(self, name: str, value: Any) -> float:
        """Return `value` as a float, or raise InputError if it is not a number in the range."""
        value = _plain(value)
        real = isinstance(value, int | float)
        if not real or isinstance(value, bool) or not self._holds(value):
            raise InputError(f"{name}={shown(value)}: {self.says}")
        return float(value)

    def _holds(self, value: Any) -> bool:
        # A NaN fails every comparison.
        inside = self.least < value if self.above else self.least <= value
        return bool((inside and value <= self.most) or (self.zero and value == 0))

    @property
    def says(self) -> str:
        """Advice on which values are allowed."""
        if self.remedy:
            return self.remedy
        first = "0, or a number" if self.zero else "a number"
        if self.most >= 1e30:
            return f"use {first} {'above' if self.above else 'of at least'} {self.least:g}"
        return f"use {first} {'above' if self.above else 'from'} {self.least:g} to {self.most:g}"


@dataclass(frozen=True)
class Flag:
    """A boolean."""

    def check(self, name: str, value: Any) -> bool:
        """Return `value` as a bool, or raise InputError if it is not one."""
        value = _plain(value)
        if not isinstance(value, bool):
            raise InputError(f"{name}={shown(value)}: use true or false")
        return value


@dataclass(frozen=True)
class Choice:
    """One of a fixed set of names."""

    names: tuple[str, ...]

    def check(self, name: str, value: Any) -> str:
        """Return `value`, or raise InputError if it is not one of the names."""
        if not isinstance(value, str) or value not in self.names:
            raise InputError(f"{name}={shown(value)} is unknown: use {', '.join(self.names)}")
        return value


@dataclass(frozen=True)
class Text:
    """A string that UTF-8 can encode; `empty` and `blank` allow empty and all-space strings."""

    empty: bool = False
    blank: bool = False

    def check(self, name: str, value: Any) -> str:
        """Return `value`, or raise InputError if it is not a string of the allowed form."""
        if not isinstance(value, str):
            raise InputError(f"{name}={shown(value)}: use a text")
        if not self.empty and not (value if self.blank else value.strip()):
            raise InputError(f"{name}={value!r} is empty: give a text")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"{name}: character {error.start} is {value[error.start]!r}, half of a surrogate "
                "pair; repair the text's encoding"
            ) from None
        return value


@dataclass(frozen=True)
class Unchecked:
    """Any value; `type` is that of its text on a command line."""

    type: type = object

    def check(self, name: str, value: Any) -> Any:
        """Return `value` unchanged."""
        del name
        return value


@dataclass(frozen=True)
class Instance:
    """An instance of a class; for the Python API only."""

    type: type
    remedy: str

    def check(self, name: str, value: Any) -> Any:
        """Return `value`, or raise InputError if it is not an instance of the class."""
        if not isinstance(value, self.type):
            raise InputError(f"{name}={shown(value)}: {self.remedy}")
        return value


@dataclass(frozen=True)
class Function:
    """A callable."""

    remedy: str = "use a function"

    def check(self, name: str, value: Any) -> Any:
        """Return `value`, or raise InputError if it is not callable."""
        if not callable(value):
            raise InputError(f"{name}={shown(value)}: {self.remedy}")
        return value


@dataclass(frozen=True)
class InputFile:
    """The path of a file to read; with `pipe`, it may be a named pipe or piped standard input."""

    pipe: bool = False

    def check(self, name: str, value: Any) -> Path:
        """Return the absolute path, or raise InputError if no such file can be read."""
        return path_checks.input_file(name, value, pipe=self.pipe)


@dataclass(frozen=True)
class InputFolder:
    """The path of a folder to read."""

    def check(self, name: str, value: Any) -> Path:
        """Return `value` as an absolute path.

        Raises InputError, which calls the field `name`, if there is no such folder to be read.
        """
        return path_checks.input_folder(name, value)


@dataclass(frozen=True)
class OutputFile:
    """The path of a file to write."""

    def check(self, name: str, value: Any) -> Path:
        """Return the absolute path, or raise InputError if no file can be written there."""
        return path_checks.output_file(name, value)


@dataclass(frozen=True)
class OutputFolder:
    """The path of a folder to write into."""

    def check(self, name: str, value: Any) -> Path:
        """Return the absolute path, or raise InputError if no folder can be written there."""
        return path_checks.output_folder(name, value)


@dataclass(frozen=True)
class PathOrName:
    """A path, or a name that is looked up elsewhere; it need not exist."""

    def check(self, name: str, value: Any) -> str:
        """Return `value` as a string, or raise InputError unless it can be a path."""
        path_checks.user_path(name, value)
        return str(value)


@dataclass(frozen=True)
class Items:
    """A list, tuple or 1-D array with values of one kind.

    `length` fixes the number of values, and `least` is their minimum number.
    """

    kind: Kind
    length: int | None = None
    least: int = 0
    remedy: str = ""

    def check(self, name: str, value: Any) -> tuple:
        """Return the values as a tuple, or raise InputError if some value is invalid."""
        if getattr(value, "ndim", None) == 1:
            value = value.tolist()
        listed = isinstance(value, Sequence) and not isinstance(value, str | bytes)
        if not listed or len(value) < self.least or self.length not in (None, len(value)):
            count = self.length or (f"at least {self.least}" if self.least else None)
            default = f"use a list{f' of {count} values' if count else ''}, such as (1, 2)"
            raise InputError(f"{name}={shown(value)}: {self.remedy or default}")
        try:
            return tuple(self.kind.check(f"{name}[{at}]", item) for at, item in enumerate(value))
        except InputError:
            if not self.remedy:
                raise
            raise InputError(f"{name}={shown(value)}: {self.remedy}") from None


@dataclass(frozen=True)
class Either:
    """A value of any of several kinds; `none` allows None too."""

    kinds: tuple[Kind, ...]
    none: bool = False
    remedy: str = ""

    def check(self, name: str, value: Any) -> Any:
        """Return the value as converted by the first kind that accepts it.

        Raises the last kind's InputError, or one with `remedy`, if every kind rejects it.
        """
        if value is None and self.none:
            return None
        for kind in self.kinds:
            try:
                return kind.check(name, value)
            except InputError as error:
                problem = error
        if self.remedy:
            raise InputError(f"{name}={shown(value)}: {self.remedy}")
        raise problem


@dataclass(frozen=True)
class Use:
    """A use of a field: its user's name, the kind of values, their meaning, and the default."""

    user: str
    kind: Kind
    meaning: str
    default: Any = None


@dataclass(frozen=True)
class Shared:
    """A field with a kind and a meaning for each of its users, such as an option of drafters.

    `checks` are the kinds of the users that will get the value, each of which must accept it.
    """

    uses: tuple[Use, ...]
    checks: tuple[Kind, ...]

    def check(self, name: str, value: Any) -> Any:
        """Return the value as converted by the last kind, or raise InputError if one rejects it."""
        checked = [kind.check(name, value) for kind in self.checks]
        return checked[-1] if checked else value


@dataclass(frozen=True)
class DependentFields:
    """The fields of a section that depend on the value of one of them, `on`.

    `of(value)` returns all fields of the section, for any value, also an invalid one.
    """

    on: str
    of: Callable[[Any], Fields]


@dataclass(frozen=True)
class OptionalSection:
    """A section of a config that may be absent, declared as `D | None` for a dataclass D."""

    fields: Fields


@dataclass(frozen=True)
class Inline:
    """A mark on a nested dataclass: its fields appear among the outer fields, not in a section.

    For example `batches: Annotated[BatchConfig, Inline()]`. `defaults` replace defaults of the
    nested dataclass by name, and the fields `without` cannot be set.
    """

    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    without: tuple[str, ...] = ()


_INLINE = Inline()


def _plain(value: Any) -> Any:
    """Return a NumPy or JAX scalar as a Python number, and any other value unchanged."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def optional(*kinds: Kind) -> Either:
    """Return a kind that accepts the given kinds and None."""
    return Either(kinds, none=True)


@functools.cache
def type_hints(annotated: Callable[..., Any]) -> Mapping[str, Any]:
    """Return the annotations of a function or class by name, including those that are inherited."""
    return get_type_hints(annotated, include_extras=True)


def kind_of(annotation: Any) -> Any:
    """Return the kind that an annotation declares: for a dataclass its `Fields`, else None if none.

    Raises TypeError for a number or string without a kind, which could not be checked.
    """
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        kinds = (Kind, Mapping, DependentFields)
        return next((mark for mark in inside[1:] if isinstance(mark, kinds)), None)
    if origin is Literal:
        return Choice(tuple(map(str, inside)))
    if section := dataclass_in(annotation):
        fields = fields_of(section)
        return fields if section is annotation else OptionalSection(fields)
    if annotation is bool:
        return Flag()
    if annotation in (int, float, str):
        raise TypeError(
            f"an option or a field of type {annotation.__name__} needs a kind: annotate it as "
            f"Annotated[{annotation.__name__}, ...] with one of specjax.fields, such as Whole()"
        )
    if origin in (Union, types.UnionType):
        kinds = [kind_of(member) for member in inside if member is not types.NoneType]
        if all(kind is not None for kind in kinds):
            return Either(tuple(kinds), none=types.NoneType in inside)
    return None


def meaning_in(annotation: Any) -> str:
    """Return the meaning that an annotation holds as a text beside the kind, or ""."""
    marks = get_args(annotation)[1:] if get_origin(annotation) is Annotated else ()
    return next((mark for mark in marks if isinstance(mark, str)), "")


def field_meanings(source: type) -> dict[str, str]:
    """Return the docstrings below the fields of a dataclass and of its base classes, by field."""
    texts: dict[str, str] = {}
    for base in reversed(source.__mro__):
        if dataclasses.is_dataclass(base):
            texts |= _own_meanings(base)
    return texts


def _own_meanings(source: type) -> dict[str, str]:
    """Return the docstrings below the fields that a class of a module defines itself, by field."""
    body = _class_bodies(source.__module__).get(source.__qualname__, ())
    return {
        before.target.id: inspect.cleandoc(after.value.value)
        for before, after in itertools.pairwise(body)
        if isinstance(before, ast.AnnAssign)
        and isinstance(after, ast.Expr)
        and isinstance(after.value, ast.Constant)
    }


@functools.cache
def _class_bodies(module: str) -> dict[str, list[ast.stmt]]:
    """Return the statements of each class of a module by its name; none without its source."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (KeyError, OSError, TypeError, SyntaxError):
        return {}
    return {node.name: node.body for node in tree.body if isinstance(node, ast.ClassDef)}


FIELDS = "Fields:"
"""The line that `with_meanings` puts before the fields in the docstring of a class."""


def meaning_lines(source: type, names: Iterable[str]) -> str:
    """Return lines with the meanings of the fields `names` of a dataclass, for a docstring."""
    meanings, width = field_meanings(source), 96
    indents = {"initial_indent": "  ", "subsequent_indent": "      "}
    return "\n".join(
        textwrap.fill(" ".join(f"{name}: {meanings.get(name, '')}".split()), width, **indents)
        for name in names
    )


def with_meanings(source: type[T]) -> type[T]:
    """Append the meanings of a dataclass's fields to its docstring, which `help` shows."""
    names = [field.name for field in dataclasses.fields(source)]
    text = inspect.cleandoc(source.__doc__ or "")
    source.__doc__ = f"{text}\n\n{FIELDS}\n\n{meaning_lines(source, names)}"
    return source


def takes_options(*classes: type) -> Callable[[Callee], Callee]:
    """Document the fields of dataclasses as keyword arguments of a function with `**options`.

    Returns a decorator. It sets the signature that editors, notebooks and `help` show, and ends the
    docstring with the meanings of the fields. Of fields with equal names the first one counts.
    """

    def decorate(function: Callee) -> Callee:
        signature = inspect.signature(function)
        *explicit, _ = signature.parameters.values()
        arguments = {parameter.name: parameter for parameter in explicit}
        for options_class in classes:
            types = get_type_hints(options_class)
            parameters = inspect.signature(options_class).parameters
            added = [name for name in parameters if name not in arguments]
            for name in added:
                arguments[name] = parameters[name].replace(
                    kind=inspect.Parameter.KEYWORD_ONLY, annotation=types[name]
                )
            head = f"Keyword arguments that are fields of `{options_class.__name__}`:"
            lines = meaning_lines(options_class, added)
            function.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n\n{head}\n\n{lines}"
        function.__signature__ = signature.replace(parameters=list(arguments.values()))
        return function

    return decorate


def described(kinds: Mapping[str, Kind], source: type) -> dict[str, Shared]:
    """Return fields with the meanings that the dataclass `source` has below its own (see above).

    `kinds` are the kinds of the fields by name.
    """
    meanings = field_meanings(source)
    return {
        name: Shared((Use("", kind, meanings.get(name, "")),), (kind,))
        for name, kind in kinds.items()
    }


def fields_of(source: type) -> dict[str, Any]:
    """Return the kind of each annotated field of a dataclass, by name.

    A field that is a dataclass itself has its `Fields`, as a section of a config.
    """
    kinds: dict[str, Any] = {}
    for name, hint in _hints(source).items():
        if (inline := inline_in(hint)) is not None:
            inside = fields_of(dataclass_in(hint))
            kinds |= {key: kind for key, kind in inside.items() if key not in inline.without}
        elif (kind := kind_of(hint)) is not None:
            kinds[name] = kind
    return kinds


def _hints(source: type) -> dict[str, Any]:
    hints = type_hints(source)
    return {field.name: hints[field.name] for field in dataclasses.fields(source)}


def inline_in(hint: Any) -> Inline | None:
    """Return the mark `Inline` of a type annotation `Annotated[D, Inline()]`, None of others."""
    marks = get_args(hint) if get_origin(hint) is Annotated else ()
    return next((mark for mark in marks if isinstance(mark, Inline)), None)


def dataclass_in(hint: Any) -> Any:
    """Return D of an annotation D, `D | None` or `Annotated[D, Inline()]` for a dataclass D.

    Returns None for any other annotation.
    """
    if dataclasses.is_dataclass(hint):
        return hint
    if inline_in(hint) is not None:
        return get_args(hint)[0]
    if get_origin(hint) in (Union, types.UnionType):
        inside = [member for member in get_args(hint) if member is not types.NoneType]
        return inside[0] if len(inside) == 1 and dataclasses.is_dataclass(inside[0]) else None
    return None


def read_values(
    source: type[T], values: Mapping[str, Any], cross_checks: Sequence[CrossCheck] = ()
) -> T:
    """Return an instance of the dataclass `source` built from `values`, its fields' values by name.

    Nested mappings are the sections. Missing fields take their defaults. Each of `cross_checks`
    runs if all of its values are present and valid, and so does the `__post_init__` of each
    dataclass. Raises one InputError that lists every invalid value, as `check_values` does, and
    every inconsistency.
    """
    problems = Problems()
    checked = _checked(fields_of(source), values, "", problems)
    valid = {name: value for name, value in dotted(checked).items() if value is not _ABSENT}
    for cross_check in cross_checks:
        if valid.keys() >= set(cross_check.names):
            with problems.collect():
                cross_check.check(*(valid[name] for name in cross_check.names))
    instance = _made(source, checked, problems)
    problems.check()
    return instance


def _made(
    source: type, checked: Mapping[str, Any], problems: Problems, inline: Inline = _INLINE
) -> Any:
    """Return an instance of the dataclass `source`, or _ABSENT if some value of it is missing.

    `checked` maps the names of the valid fields to their values, and `inline` says which fields
    are not among them. Errors from constructors are added to `problems`.
    """
    arguments: dict[str, Any] = {}
    for name, hint in _hints(source).items():
        section = dataclass_in(hint)
        if name in inline.without:
            if name in inline.defaults:
                arguments[name] = inline.defaults[name]
        elif (mark := inline_in(hint)) is not None:
            arguments[name] = _made(section, checked, problems, mark)
        elif section is not None and name in checked:
            inside = checked[name]
            arguments[name] = _ABSENT if inside is _ABSENT else _made(section, inside, problems)
        elif section is not None and section is not hint:
            arguments[name] = None
        elif kind_of(hint) is not None:
            value = checked.get(name, _ABSENT)
            inside = value.values() if isinstance(value, Mapping) else ()
            arguments[name] = _ABSENT if any(each is _ABSENT for each in inside) else value
    if not any(value is _ABSENT for value in arguments.values()):
        with problems.collect():
            return source(**arguments)
    return _ABSENT


def check_instance(value: Any, prefix: str) -> None:
    """Check the fields of the frozen dataclass `value`, called from its `__post_init__`.

    The converted values replace the given ones. `prefix`, such as "sampling.", precedes the field's
    name in errors. Raises InputError for the first invalid value.
    """
    for name, hint in type_hints(type(value)).items():
        # A nested dataclass has checked itself.
        kind = None if dataclass_in(hint) else kind_of(hint)
        if kind is not None:
            object.__setattr__(value, name, kind.check(prefix + name, getattr(value, name)))


@dataclass(frozen=True)
class CrossCheck:
    """A check that involves several fields.

    `check` receives the values of the fields `names` (dotted names) in order, and raises InputError
    if they are inconsistent.
    """

    names: tuple[str, ...]
    check: Callable[..., object]


def check_values(fields: Fields, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the checked values of all fields and sections by name.

    `values` are the values by name, nested for sections. Raises one InputError that lists all
    invalid values, unknown names and missing names.
    """
    problems = Problems()
    checked = _checked(fields, values, "", problems)
    problems.check()
    return checked


def _checked(
    fields: Fields, values: Mapping[str, Any], prefix: str, problems: Problems
) -> dict[str, Any]:
    """Return the checked values; those of fields that are missing or invalid are `_ABSENT`."""
    for name, value in values.items():
        if name not in fields:
            problems.add(unknown_name(prefix, name, value, fields))
    checked: dict[str, Any] = {}
    for name, kind in fields.items():
        if isinstance(kind, OptionalSection):
            if name not in values:
                continue
            kind = kind.fields
        if isinstance(kind, DependentFields):
            section = values.get(name)
            kind = kind.of(section.get(kind.on) if isinstance(section, Mapping) else None)
        checked[name] = _ABSENT
        if name not in values:
            problems.add(f"{prefix}{name} is missing: give it a value")
        elif isinstance(kind, Mapping):
            if not isinstance(values[name], Mapping):
                problems.add(f"{prefix}{name}={shown(values[name])}: must be a section")
                continue
            checked[name] = _checked(kind, values[name], f"{prefix}{name}.", problems)
        else:
            with problems.collect():
                checked[name] = kind.check(prefix + name, values[name])
    return checked


def unknown_name(prefix: str, name: Any, value: Any, known: Mapping[str, Any]) -> str:
    """Return an error message for a field `name` that is not among the `known` ones.

    It suggests the closest known name. `prefix`, such as "sampling.", precedes the name.
    """
    near = difflib.get_close_matches(str(name), map(str, known), n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"{prefix}{name!s:.60}={shown(value)} is not supported: {hint}use {', '.join(known)}"


def dotted(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a nested dict by dotted name, such as "eval.every".

    `prefix` precedes each name.
    """
    values: dict[str, Any] = {}
    for name, value in tree.items():
        is_section = isinstance(value, Mapping)
        values |= dotted(value, f"{prefix}{name}.") if is_section else {prefix + name: value}
    return values


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the nested dict that has `values`, the reverse of `dotted`.

    Raises ValueError if a name is also that of a section, such as "eval" beside "eval.every".
    """
    root: dict[str, Any] = {}
    for name, value in values.items():
        *sections, last = name.split(".")
        node = root
        for section in sections:
            node = node.setdefault(section, {})
            if not isinstance(node, dict):
                break
        if not isinstance(node, dict) or last in node:
            raise ValueError(f"{name} is there twice, as a value and as a section")
        node[last] = value
    return root


def first_difference(first: Any, second: Any) -> tuple[str, Any, Any] | None:
    """Return the dotted name of the first field in which two dataclass instances differ.

    The values of `first` and `second` follow the name. Returns None if all fields are equal.
    """
    values, others = (dotted(dataclasses.asdict(instance)) for instance in (first, second))
    for name in {**values, **others}:
        if values.get(name) != others.get(name):
            return name, values.get(name), others.get(name)
    return None
