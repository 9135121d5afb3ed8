"""Construction of drafters by name, from a head, or by a user-defined function."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from specjax.core.draft_length import DRAFT_TOKENS
from specjax.core.drafter import Drafter, LoadedDrafter
from specjax.core.growth.tree_options import TreeOptions
from specjax.core.turn_taking import Turns
from specjax.errors import InputError, one_line, shown
from specjax.fields import optional
from specjax.loading.model import MODEL_KIND, Model
from specjax.loading.user_messages import note
from specjax.methods.acceptance_rates import known_acceptance
from specjax.methods.heads.complete_parameters import complete_parameters
from specjax.methods.heads.head import Head
from specjax.methods.heads.own_cache import OwnCacheDrafter
from specjax.methods.load import load
from specjax.methods.method import Method
from specjax.methods.options import check_options, constructor, divide_joined
from specjax.methods.registry import JOINTS, METHODS, joint_of


def make_drafter(
    name: str,
    target: Model,
    path: str | os.PathLike | Model | None = None,
    *,
    num_speculative_tokens: int | None = None,
    **options: Any,
) -> LoadedDrafter:
    """Return a drafter for a target by name, or by a function "package.module:function".

    `path` is a trained head, exported by training or in a published layout
    (`methods.published_layouts`); by default it is the head that comes with specjax for the
    target. For `draft_model` it may also be anything that `load_model` accepts, or a loaded model.
    A function is called as function(target, **options), with path=path if given, and returns a
    Drafter or a LoadedDrafter; instead it may be a class of drafters. Drafters that run a model
    accept a `tree`, such as {"kind": "dynamic"} (`TreeOptions`). Names joined by + ("ngram+eagle3")
    take turns (`turns.take_turns`); names joined by | draft together (`merged.merge_drafters`).
    Each option goes to the drafters that accept it, `num_speculative_tokens` to all. Raises
    InputError for an unknown drafter or option, and for a head or draft model of another target.
    """
    MODEL_KIND.check("target", target)
    length = optional(DRAFT_TOKENS).check("num_speculative_tokens", num_speculative_tokens)
    options = check_options(name, path, options)
    if joint := joint_of(name):
        return JOINTS[joint](
            *(
                make_drafter(part, target, part_path, num_speculative_tokens=length, **part_options)
                for part, part_path, part_options in divide_joined(name, path, options)
            )
        )
    made_by = constructor(name)
    if isinstance(made_by, Method):
        if length is not None:
            options["num_speculative_tokens"] = length
        tree = options.get("tree")
        if isinstance(tree, TreeOptions) and tree.acceptance is None:
            options["tree"] = replace(tree, acceptance=known_acceptance(name, target, path))
        make = functools.partial(load, made_by, target, path, **options)
        return _say_positions(make() if name in METHODS else _call_own(name, make), target)
    path_option = {} if path is None else {"path": path}
    loaded = _call_own(name, functools.partial(made_by, target, **path_option, **options))
    _say_positions(loaded, target)
    if length is None:
        return loaded
    if isinstance(loaded.drafter, Turns):
        return loaded._replace(drafter=loaded.drafter.limited(length))
    return loaded._replace(drafter=replace(loaded.drafter, num_speculative_tokens=length))


def head_drafter(head: Head, target: Model, **options: Any) -> LoadedDrafter:
    """Return the drafter for a trained head and its target, sharing the target's arrays.

    `options` are those of the drafter for this kind of head. Raises InputError for a head of
    another target and for invalid options.
    """
    params = complete_parameters(head, target)
    loaded = METHODS[head.kind].drafter.of_head(head, params, target, **options)
    return _say_positions(loaded, target)


def _say_positions(loaded: LoadedDrafter, target: Model) -> LoadedDrafter:
    """Return `loaded`; log a line for each drafter with fewer positions than its target."""
    drafter, longest = loaded.drafter, target.config.max_positions
    for part in drafter.parts if isinstance(drafter, Turns) else (drafter,):
        positions = part.max_positions
        if positions is None or positions >= longest:
            continue
        remedy = ""
        if isinstance(part, OwnCacheDrafter) and part.slides:
            remedy = f"; drafter.sliding_window={positions} drafts on, from the latest tokens"
        note(
            f"{part.name} drafts in the first {positions} positions, and {target.name} has "
            f"{longest}: longer rows continue without drafts{remedy}"
        )
    return loaded


def _call_own(name: str, make: Callable[[], Any]) -> LoadedDrafter:
    """Return the drafter that `make` returns, which calls the user-defined `name`.

    Raises InputError if that fails or returns anything else.
    """
    try:
        drafter = make()
    except InputError:
        raise
    except SystemExit as ended:  # its code may be any value, even the model
        raise InputError(
            f"drafter={name!r} calls sys.exit({shown(ended.code)}); call it in Python to see where"
        ) from ended
    except Exception as error:  # a user-defined function may raise anything
        raise InputError(
            f"drafter={name!r} fails ({type(error).__name__}: {one_line(error):.120}); call it in "
            "Python to see where"
        ) from error
    if isinstance(drafter, Drafter | Turns):
        return LoadedDrafter(drafter)
    if isinstance(drafter, LoadedDrafter):
        return drafter
    raise InputError(
        f"drafter={name!r} returned {type(drafter).__name__}, not a Drafter; return one, or a "
        "LoadedDrafter"
    )
