"""Drafters by name."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from specjax.drafters.base import DRAFT_TOKENS, OWN_DRAFTER, Drafter, LoadedDrafter
from specjax.drafters.draft_model import DraftModel
from specjax.drafters.eagle import EagleDrafter
from specjax.drafters.early_exit import EarlyExit
from specjax.drafters.growth.options import TreeOptions
from specjax.drafters.lookup.ngram import Ngram
from specjax.drafters.lookup.token_recycling import TokenRecycling
from specjax.drafters.medusa import MedusaDrafter
from specjax.drafters.merged import Merged, merge_drafters
from specjax.drafters.mtp import MtpDrafter
from specjax.drafters.none import NoDrafter
from specjax.drafters.simulated import Simulated
from specjax.drafters.turns import Turns, take_turns
from specjax.errors import InputError, one_line, shown
from specjax.fields import kind_of, optional, type_hints
from specjax.files.paths import user_path
from specjax.loading.acceptance_rates import known_acceptance
from specjax.loading.heads.complete_parameters import complete_parameters
from specjax.loading.heads.head import Head
from specjax.loading.model import MODEL_KIND, Model

DRAFTERS: dict[str, type[Drafter]] = {
    "none": NoDrafter,
    "ngram": Ngram,
    "draft_model": DraftModel,
    "early_exit": EarlyExit,
    "medusa": MedusaDrafter,
    "eagle": EagleDrafter,
    "eagle3": EagleDrafter,
    "mtp": MtpDrafter,
    "token_recycling": TokenRecycling,
    "simulated": Simulated,
}
JOINTS: dict[str, Callable[..., LoadedDrafter]] = {"+": take_turns, "|": merge_drafters}
"""What names of drafters are joined by, and what makes one drafter of them."""
TRAINED = tuple(name for name, kind in DRAFTERS.items() if kind.trained)
"""Drafters that have weights of their own, and so a path; some come with specjax."""


@dataclass(frozen=True)
class DrafterKind:
    """A drafter: a value, or one with its parameters."""

    def check(self, name: str, value: Any) -> LoadedDrafter:
        """The drafters that take turns (mostly a single one), with their parameters."""
        loaded = LoadedDrafter(value) if isinstance(value, Drafter | Turns) else value
        pair = isinstance(loaded, tuple) and len(loaded) == 2
        if not pair or not isinstance(loaded[0], Drafter | Turns):
            raise InputError(f"{name}={shown(value)}: use a name, or {OWN_DRAFTER}")
        turns = take_turns(LoadedDrafter(*loaded))
        try:
            hash(turns.drafter)
        except TypeError as error:
            raise InputError(
                f"{name}={shown(value, 120)}: {one_line(error)}: fields are static, and arrays "
                "belong into the params of LoadedDrafter(drafter, params)"
            ) from error
        if len(turns.params) != len(turns.drafter.parts):
            raise InputError(
                f"{name}: {turns.drafter.name} has {len(turns.drafter.parts)} drafters and "
                f"{len(turns.params)} params; give each its own"
            )
        return turns


DRAFTER_KIND = DrafterKind()


def all_registered(drafters: Iterable[Drafter]) -> bool:
    """Whether drafters are specjax's own, and none a user's."""
    return all(
        all_registered(one.parts) if isinstance(one, Merged) else type(one) in DRAFTERS.values()
        for one in drafters
    )


def drafter_options(name: str) -> dict[str, inspect.Parameter]:
    """The options of a drafter by name: keyword-only fields and arguments, with their types."""
    kind = _registered(name)
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


def make_drafter(
    name: str,
    target: Model,
    path: str | os.PathLike | Model | None = None,
    *,
    num_speculative_tokens: int | None = None,
    **options: Any,
) -> LoadedDrafter:
    """The drafter of that name for a target, or what "package.module:function" makes of the target.

    `path` names what was trained: a head that training exported or a published layout
    (`specjax.loading.head_formats`), by default the one that comes with specjax for the target; for
    `draft_model` also anything `load_model` takes, or a loaded model. A function of one's own is
    called as function(target, **options), with path=path if one is given, and returns a Drafter or
    a LoadedDrafter. Drafters with a model take a `tree`, such as {"kind": "dynamic"}
    (`TreeOptions`). Drafters whose names are joined by + ("ngram+eagle3") take turns
    (`turns.take_turns`), those joined by | draft together (`merged.merge_drafters`): an option goes
    to those that take it, `num_speculative_tokens` to all. Raises InputError for an unknown drafter
    or option, and for a head or a draft model of another target.
    """
    MODEL_KIND.check("target", target)
    length = optional(DRAFT_TOKENS).check("num_speculative_tokens", num_speculative_tokens)
    options = check_options(name, path, options)
    if joint := _joint(name):
        return JOINTS[joint](
            *(
                make_drafter(part, target, at, num_speculative_tokens=length, **own)
                for part, at, own in _divide(name, path, options)
            )
        )
    if ":" not in name:
        if length is not None:
            options["num_speculative_tokens"] = length
        tree = options.get("tree")
        if isinstance(tree, TreeOptions) and tree.acceptance is None:
            options["tree"] = replace(tree, acceptance=known_acceptance(name, target, path))
        return DRAFTERS[name].load(name, target, path, **options)
    loaded = _call_own(name, target, {} if path is None else {"path": path}, options)
    if length is None:
        return loaded
    if isinstance(loaded.drafter, Turns):
        return loaded._replace(drafter=loaded.drafter.limited(length))
    return loaded._replace(drafter=replace(loaded.drafter, num_speculative_tokens=length))


def head_drafter(head: Head, target: Model, **options: Any) -> LoadedDrafter:
    """The drafter of a head for its target; what it borrows is the target's own arrays.

    Options are those of the drafter's kind. Raises InputError for a head of another target and for
    bad options.
    """
    params = complete_parameters(head, target)
    return DRAFTERS[head.kind].of_head(head, params, target, **options)


def _call_own(
    name: str, target: Model, path: Mapping[str, Any], options: Mapping[str, Any]
) -> LoadedDrafter:
    """What a function of the caller's own makes; raises InputError unless it is a drafter."""
    try:
        made = _constructor(name)(target, **path, **options)
    except InputError:
        raise
    except SystemExit as ended:  # its text may be any value's, the model's among them
        raise InputError(
            f"drafter={name!r} calls sys.exit({shown(ended.code)}); call it in Python to see where"
        ) from ended
    except Exception as error:  # whatever a function of somebody's own raises
        raise InputError(
            f"drafter={name!r} fails ({type(error).__name__}: {one_line(error):.120}); call it in "
            "Python to see where"
        ) from error
    if isinstance(made, Drafter | Turns):
        return LoadedDrafter(made)
    if isinstance(made, LoadedDrafter):
        return made
    raise InputError(
        f"drafter={name!r} returned {type(made).__name__}, not a Drafter; return one, or a "
        "LoadedDrafter"
    )


def _constructor(name: str) -> Callable[..., Any]:
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
    return _registered(name)


def _registered(name: str) -> type[Drafter]:
    if name not in DRAFTERS:
        near = difflib.get_close_matches(name, DRAFTERS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise InputError(
            f"drafter={shown(name)} is unknown: {hint}use {', '.join(DRAFTERS)} or "
            "package.module:function"
        )
    return DRAFTERS[name]


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
    if _joint(name):
        checked: dict[str, Any] = {}
        for part, at, own in _divide(name, path, options):
            checked |= check_options(part, at, own)
        return checked
    if ":" in name:
        try:
            function, given = _constructor(name), {} if path is None else {"path": path}
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


def _divide(
    name: str, path: Any, options: Mapping[str, Any]
) -> list[tuple[str, Any, dict[str, Any]]]:
    """`divide_options` of the parts of a name joined by + or |.

    Raises InputError for drafters that cannot be joined by name, too.
    """
    joint = _joint(name)
    parts = name.split(joint)
    if "" in parts or len(set(parts)) < len(parts):
        raise InputError(f"drafter={name!r}: join different drafters, as ngram{joint}eagle3")
    for part in parts:
        own = ":" in part
        call = f"specjax.drafters.{JOINTS[joint].__name__}"
        why = f"its options are its own; use {call}" if own else _registered(part).alone
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


def _joint(name: str) -> str:
    """What joins the drafters of a name, "" for a single one. Raises InputError for two kinds."""
    found = [joint for joint in JOINTS if joint in name]
    if len(found) > 1:
        raise InputError(
            f"drafter={name!r}: join all of them by {' or all by '.join(JOINTS)}; for both use "
            "specjax.drafters.take_turns and merge_drafters"
        )
    return found[0] if found else ""


def _parts(name: str) -> list[str]:
    """The drafters of a name."""
    joint = _joint(name)
    return name.split(joint) if joint else [name]


def _taken(name: str) -> Container[str]:
    """The options that a drafter takes, or one of those joined."""
    if _joint(name):
        return {option for part in _parts(name) for option in _taken(part)}
    return _arguments(name) if ":" in name else drafter_options(name)


def _trained(name: str) -> list[str]:
    """The trained drafters in a name, which a path may be of; one of the caller's own is one."""
    if ":" in name:
        return [name] if "path" in _arguments(name) else []
    return [part for part in _parts(name) if part in TRAINED]


def _arguments(name: str) -> list[str]:
    """The names of what a function of the caller's own takes beside the target."""
    try:
        _, *others = inspect.signature(_constructor(name)).parameters.values()
    except (TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        return []
    return [one.name for one in others if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
