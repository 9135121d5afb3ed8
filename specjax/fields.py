"""Kinds of user-supplied values and their checks, shared by command lines and the Python API.

A config field, a drafter option or a function argument declares its kind in a table of fields by
name or in its annotation, as in `top_k: Annotated[int, Whole()]`. The method `check(name, value)`
of every kind returns the value as a plain Python type, or raises InputError naming the field, the
value and the remedy.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import types
from collections.abc import Callable, Mapping, Sequence
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
_ABSENT = object()
INT32_MAX = 2**31 - 1
"""The largest number that arrays of token ids, positions and counts hold."""


@runtime_checkable
class Kind(Protocol):
    """The set of values that a field may have."""

    def check(self, name: str, value: Any) -> Any:
        """Return the value; raise InputError unless it is of this kind."""


Fields = Mapping[str, "Kind | Fields | OptionalSection"]
"""Kinds by name; a mapping inside is a section."""


@dataclass(frozen=True)
class Whole:
    """A whole number from `least` to `most`; NumPy and JAX integers count as whole numbers."""

    least: int = 0
    most: int = INT32_MAX
    remedy: str = ""

    def check(self, name: str, value: Any) -> int:
        """Return the number as an int."""
        value = _plain(value)
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole or not self.least <= value <= self.most:
            small = whole and value < self.least
            raise InputError(f"{name}={shown(value)}: {self.says if small else self._remedy()}")
        return value

    @property
    def says(self) -> str:
        """Return which values are allowed, omitting the default 32-bit limit."""
        if self.most < INT32_MAX:
            return self._remedy()
        return self.remedy or f"use a whole number of at least {self.least}"

    def _remedy(self) -> str:
        return self.remedy or f"use a whole number from {self.least} to {self.most}"


@dataclass(frozen=True)
class Number:
    """A finite number from `least` to `most`, or, with `above`, greater than `least`.

    With `zero`, 0 is allowed as well.
    """

    least: float = 0.0
    most: float = 1e30
    above: bool = False
    zero: bool = False
    remedy: str = ""

    def check(self, name: str, value: Any) -> float:
        """Return the number as a float."""
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
        """Return which values are allowed."""
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
        """Return the value as a bool."""
        value = _plain(value)
        if not isinstance(value, bool):
            raise InputError(f"{name}={shown(value)}: use true or false")
        return value


@dataclass(frozen=True)
class Choice:
    """One of a fixed set of names."""

    names: tuple[str, ...]

    def check(self, name: str, value: Any) -> str:
        """Return the name."""
        if not isinstance(value, str) or value not in self.names:
            raise InputError(f"{name}={shown(value)} is unknown: use {', '.join(self.names)}")
        return value


@dataclass(frozen=True)
class Text:
    """A string that UTF-8 can encode; `empty` and `blank` allow empty and all-space strings."""

    empty: bool = False
    blank: bool = False

    def check(self, name: str, value: Any) -> str:
        """Return the string."""
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
class Instance:
    """An instance of a class; for the Python API only."""

    type: type
    remedy: str

    def check(self, name: str, value: Any) -> Any:
        """Return the instance."""
        if not isinstance(value, self.type):
            raise InputError(f"{name}={shown(value)}: {self.remedy}")
        return value


@dataclass(frozen=True)
class Function:
    """A callable."""

    remedy: str = "use a function"

    def check(self, name: str, value: Any) -> Any:
        """Return the callable."""
        if not callable(value):
            raise InputError(f"{name}={shown(value)}: {self.remedy}")
        return value


@dataclass(frozen=True)
class InputFile:
    """The path of a file to read, or, with `pipe`, of a pipe."""

    pipe: bool = False

    def check(self, name: str, value: Any) -> Path:
        """Return the absolute path."""
        return path_checks.input_file(name, value, pipe=self.pipe)


@dataclass(frozen=True)
class InputFolder:
    """The path of a folder to read."""

    def check(self, name: str, value: Any) -> Path:
        """Return the absolute path."""
        return path_checks.input_folder(name, value)


@dataclass(frozen=True)
class OutputFile:
    """The path of a file to write."""

    def check(self, name: str, value: Any) -> Path:
        """Return the absolute path."""
        return path_checks.output_file(name, value)


@dataclass(frozen=True)
class OutputFolder:
    """The path of a folder to write into."""

    def check(self, name: str, value: Any) -> Path:
        """Return the absolute path."""
        return path_checks.output_folder(name, value)


@dataclass(frozen=True)
class PathOrName:
    """A path or a name to look up; it need not exist."""

    def check(self, name: str, value: Any) -> str:
        """Return the string; raise InputError unless it can be a path."""
        path_checks.user_path(name, value)
        return str(value)


@dataclass(frozen=True)
class Items:
    """A list, tuple or 1-D array of values of one kind; `length` fixes the number of values."""

    kind: Kind
    length: int | None = None
    least: int = 0
    remedy: str = ""

    def check(self, name: str, value: Any) -> tuple:
        """Return the values as a tuple."""
        if getattr(value, "ndim", None) == 1:
            value = value.tolist()
        listed = isinstance(value, Sequence) and not isinstance(value, str | bytes)
        if not listed or len(value) < self.least or self.length not in (None, len(value)):
            count = self.length or (f"at least {self.least}" if self.least else None)
            default = f"use a list{f' of {count} values' if count else ''}, such as (1, 2)"
            raise InputError(f"{name}={shown(value)}: {self.remedy or default}")
        try:
            return tuple(self.kind.check(f"{name}[{at}]", one) for at, one in enumerate(value))
        except InputError:
            if not self.remedy:
                raise
            raise InputError(f"{name}={shown(value)}: {self.remedy}") from None


@dataclass(frozen=True)
class Either:
    """A value of one of several kinds, or, with `none`, None."""

    kinds: tuple[Kind, ...]
    none: bool = False
    remedy: str = ""

    def check(self, name: str, value: Any) -> Any:
        """Return the value as converted by the first kind that accepts it."""
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
class OptionalSection:
    """An optional section of a config: `D | None` in a dataclass, for the section D."""

    fields: Fields


@dataclass(frozen=True)
class Inline:
    """Mark a nested dataclass whose fields appear beside the outer fields instead of in a section.

    For example `batches: Annotated[BatchConfig, Inline()]`.
    """


def _plain(value: Any) -> Any:
    """Return a number of NumPy or JAX as Python's own; anything else unchanged."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def optional(*kinds: Kind) -> Either:
    """Return a kind that accepts the given kinds and None."""
    return Either(kinds, none=True)


@functools.cache
def type_hints(annotated: Callable[..., Any]) -> Mapping[str, Any]:
    """Return the annotations of a function or class by name, inherited ones included."""
    return get_type_hints(annotated, include_extras=True)


def kind_of(annotation: Any) -> Any:
    """Return the kind or the section (`Fields`) that an annotation declares, or None.

    Raises TypeError for a number or string without a kind, which could not be checked.
    """
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return next((one for one in inside[1:] if isinstance(one, Kind | Mapping)), None)
    if origin is Literal:
        return Choice(tuple(map(str, inside)))
    if part := dataclass_in(annotation):
        fields = fields_of(part)
        return fields if part is annotation else OptionalSection(fields)
    if annotation is bool:
        return Flag()
    if annotation in (int, float, str):
        raise TypeError(
            f"an option or a field of type {annotation.__name__} needs a kind: annotate it as "
            f"Annotated[{annotation.__name__}, ...] with one of specjax.fields, such as Whole()"
        )
    if origin in (Union, types.UnionType):
        kinds = [kind_of(one) for one in inside if one is not types.NoneType]
        if all(kind is not None for kind in kinds):
            return Either(tuple(kinds), none=types.NoneType in inside)
    return None


def fields_of(source: type) -> dict[str, Any]:
    """Return the kinds of a dataclass's annotated fields by name; dataclasses are sections."""
    kinds: dict[str, Any] = {}
    for name, hint in _hints(source).items():
        if is_inline(hint):
            kinds |= fields_of(dataclass_in(hint))
        elif (kind := kind_of(hint)) is not None:
            kinds[name] = kind
    return kinds


def _hints(source: type) -> dict[str, Any]:
    hints = type_hints(source)
    return {field.name: hints[field.name] for field in dataclasses.fields(source)}


def is_inline(hint: Any) -> bool:
    """Return whether an annotation is `Annotated[D, Inline()]`."""
    return get_origin(hint) is Annotated and any(isinstance(one, Inline) for one in get_args(hint))


def dataclass_in(hint: Any) -> Any:
    """Return the D of an annotation D, `D | None` or `Annotated[D, Inline()]`, or None."""
    if dataclasses.is_dataclass(hint):
        return hint
    if is_inline(hint):
        return get_args(hint)[0]
    if get_origin(hint) in (Union, types.UnionType):
        inside = [one for one in get_args(hint) if one is not types.NoneType]
        return inside[0] if len(inside) == 1 and dataclasses.is_dataclass(inside[0]) else None
    return None


def read_values(
    source: type[T], values: Mapping[str, Any], cross_checks: Sequence[CrossCheck] = ()
) -> T:
    """Return a dataclass built from the values of its annotated fields, by section.

    Missing fields have their defaults. Each of `cross_checks` runs if all values that it takes are
    present and valid, and so do the checks in the `__post_init__` of a dataclass. Raises one
    InputError that lists every invalid value, as `check_values` does, and every inconsistency.
    """
    problems = Problems()
    checked = _checked(fields_of(source), values, "", problems)
    right = dotted(checked)
    for one in cross_checks:
        if right.keys() >= set(one.names):
            with problems.collect():
                one.check(*(right[name] for name in one.names))
    made = _made(source, checked, problems)
    problems.check()
    return made


def _made(source: type, checked: Mapping[str, Any], problems: Problems) -> Any:
    """Return the dataclass of checked values, or _ABSENT if one is, noting its problems."""
    given: dict[str, Any] = {}
    for name, hint in _hints(source).items():
        part = dataclass_in(hint)
        if is_inline(hint):
            given[name] = _made(part, checked, problems)
        elif part is not None and name in checked:
            given[name] = _made(part, checked[name], problems)
        elif part is not None and part is not hint:
            given[name] = None
        elif kind_of(hint) is not None:
            given[name] = checked.get(name, _ABSENT)
    if not any(value is _ABSENT for value in given.values()):
        with problems.collect():
            return source(**given)
    return _ABSENT


def check_instance(value: Any, prefix: str) -> None:
    """Check a frozen dataclass's annotated fields in its `__post_init__`; store the results.

    `prefix`, such as "sampling.", precedes the field's name in errors.
    """
    for name, hint in type_hints(type(value)).items():
        # A dataclass inside has checked itself.
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
    """Return the checked values of all fields and sections.

    Raises one InputError that lists all invalid values, unknown names and missing names.
    """
    problems = Problems()
    checked = _checked(fields, values, "", problems)
    problems.check()
    return checked


def _checked(
    fields: Fields, values: Mapping[str, Any], prefix: str, problems: Problems
) -> dict[str, Any]:
    for name, value in values.items():
        if name not in fields:
            problems.add(unknown_name(prefix, name, value, fields))
    checked: dict[str, Any] = {}
    for name, kind in fields.items():
        if isinstance(kind, OptionalSection):
            if name not in values:
                continue
            kind = kind.fields
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
    """Return the error message for an unknown field, with the closest known name."""
    near = difflib.get_close_matches(str(name), map(str, known), n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"{prefix}{name!s:.60}={shown(value)} is not supported: {hint}use {', '.join(known)}"


def dotted(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a nested dict by dotted name, the syntax of config overrides."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        inside = isinstance(value, Mapping)
        found |= dotted(value, f"{prefix}{name}.") if inside else {prefix + name: value}
    return found


def first_difference(one: Any, other: Any) -> tuple[str, Any, Any] | None:
    """Return the dotted name and both values of the first differing field, or None."""
    mine, theirs = (dotted(dataclasses.asdict(value)) for value in (one, other))
    for name in {**mine, **theirs}:
        if mine.get(name) != theirs.get(name):
            return name, mine.get(name), theirs.get(name)
    return None
