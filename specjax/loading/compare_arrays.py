"""Comparison of arrays, by name, with those that a config requires."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax

from specjax.errors import InputError

Described = tuple[int, ...] | str
"""The description of an array to compare: its shape, or a text such as `float32[64, 32]`."""


def leaf_name(path: tuple) -> str:
    """Return the path of a leaf, as JAX's tree functions give it, as a dotted name."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def differences(
    found: Mapping[str, Described], wanted: Mapping[str, Described], optional: Iterable[str] = ()
) -> dict[str, list[str]]:
    """Return what differs between described arrays, as lists of text by kind of problem.

    `found` and `wanted` map names to the shapes and dtypes of arrays. "missing" are the names in
    `wanted` only, "unexpected" those in `found` only, except `optional` ones, and "mis-shaped" has
    a line for each name that is described differently.
    """
    known = {*wanted, *optional}
    return {
        "missing": [name for name in wanted if name not in found],
        "unexpected": [name for name in found if name not in known],
        "mis-shaped": [
            f"{name} {_text(found[name])}, not {_text(want)}"
            for name, want in wanted.items()
            if name in found and found[name] != want
        ],
    }


def in_words(problems: Mapping[str, list[str]], limit: int = 8) -> str:
    """Return `problems`, from `differences`, as text with at most `limit` names of each kind.

    The text is empty if there are none.
    """

    def some(names: list[str]) -> str:
        more = f" and {len(names) - limit} more" if len(names) > limit else ""
        return ", ".join(names[:limit]) + more

    return "; ".join(f"{label}: {some(names)}" for label, names in problems.items() if names)


def compare_arrays(where: Any, found: Any, wanted: Any, remedy: str) -> None:
    """Raise InputError if the arrays in two trees differ in names, shapes or dtypes.

    `found` is the tree that was read, and `wanted` the tree that it must be like, of arrays or of
    ShapeDtypeStruct. `where` begins the message and `remedy` ends it.
    """
    if listed := in_words(differences(_described(found), _described(wanted))):
        raise InputError(f"{where}: the parameters do not fit the config ({listed}); {remedy}")


def _described(tree: Any) -> dict[str, Described]:
    return {
        leaf_name(path): f"{leaf.dtype}{list(leaf.shape)}"
        for path, leaf in jax.tree.leaves_with_path(tree)
    }


def _text(described: Described) -> str:
    return described if isinstance(described, str) else str(list(described))
