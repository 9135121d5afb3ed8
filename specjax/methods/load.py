"""Loading of the drafter of a method: from options alone, a trained head, or a whole model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from specjax.core.drafter import LoadedDrafter
from specjax.errors import InputError
from specjax.files.path_checks import user_path
from specjax.loading.model import Model
from specjax.loading.quantize import DRAFT_WEIGHTS
from specjax.methods.find_head import kind_of_head, open_head, shipped_head
from specjax.methods.heads.complete_parameters import complete_parameters
from specjax.methods.heads.head import Head
from specjax.methods.method import Method

DraftWeights = Annotated[
    str,
    DRAFT_WEIGHTS,
    "How the drafter's kernels are stored; auto: int8 if the target has few bits, for a separate "
    "model as for a target.",
]
"""The storage of a trained drafter's kernels."""


def load(method: Method, target: Model, path: Any = None, **options: Any) -> LoadedDrafter:
    """Return the drafter of a method for a target, with weights from `path`, if any.

    Raises InputError for invalid options, and as `load_trained` does.
    """
    if method.head is not None:
        return load_trained(method, target, path, **options)
    if method.of_target is not None:
        return method.of_target(target, **options)
    return LoadedDrafter(method.drafter(**options))


def option_sources(method: Method) -> tuple[Callable[..., Any], ...]:
    """Return the callables whose keyword-only parameters are the options of a method."""
    if method.head is not None:
        return (method.drafter, load_trained)
    return (method.drafter,) if method.of_target is None else (method.drafter, method.of_target)


def load_trained(
    method: Method,
    target: Model,
    path: Any = None,
    *,
    weights: DraftWeights = "auto",
    **options: Any,
) -> LoadedDrafter:
    """Return the drafter of a method with trained weights, from `path` or by default specjax's own.

    For a method that takes whole models, `path` may also be a `Model` or anything that `load_model`
    accepts. `weights` is the storage of the kernels (`DRAFT_WEIGHTS`). Raises InputError if there
    are none, for a head of another kind or target, and for invalid options.
    """
    if method.of_model is not None and not _names_head(path):
        return method.of_model(path, target, weights, **options)
    head = _head(method, path, target)
    return method.drafter.of_head(
        head, complete_parameters(head, target, weights), target, **options
    )


def _names_head(path: Any) -> bool:
    """Return whether weights at `path` are a head's: those of None come with specjax."""
    if isinstance(path, Model):
        return False
    return path is None or kind_of_head(user_path("drafter.path", path)) is not None


def _head(method: Method, path: Any, target: Model) -> Head:
    """Return the head at `path`, or by default the target's own or the one of specjax."""
    if path is not None or method.own_head is None:
        return open_head(method.name, path, target)
    head = method.own_head.head(target) or shipped_head(method.name, target)
    if head is None:
        raise InputError(
            f"drafter.name={method.name}: {target.name} has no {method.own_head.what}, and none "
            "come with specjax for it; give trained ones as drafter.path=, or use another drafter"
        )
    return head
