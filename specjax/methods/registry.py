"""The registry of methods by name, and the signs that join names."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable

from specjax.core.drafter import Drafter, LoadedDrafter
from specjax.core.merged import Merged, merge_drafters
from specjax.core.turn_taking import take_turns
from specjax.errors import InputError, shown
from specjax.methods.block.method import DFLASH, DSPARK
from specjax.methods.corpus.method import CORPUS
from specjax.methods.draft_model.method import DRAFT_MODEL
from specjax.methods.eagle.method import EAGLE, EAGLE3
from specjax.methods.early_exit import EARLY_EXIT
from specjax.methods.forced import FORCED
from specjax.methods.layer_skip import LAYER_SKIP
from specjax.methods.lookahead import LOOKAHEAD
from specjax.methods.lookup import LOOKUP
from specjax.methods.medusa.method import MEDUSA
from specjax.methods.method import Method
from specjax.methods.mtp import MTP
from specjax.methods.ngram import NGRAM
from specjax.methods.none import NONE
from specjax.methods.peagle.method import PEAGLE
from specjax.methods.quantized import QUANTIZED
from specjax.methods.simulated import SIMULATED
from specjax.methods.sparse_kv import SPARSE_KV
from specjax.methods.suffix import SUFFIX
from specjax.methods.token_recycling import TOKEN_RECYCLING
from specjax.models.head_config import HeadConfig

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        NONE,
        NGRAM,
        SUFFIX,
        CORPUS,
        DRAFT_MODEL,
        EARLY_EXIT,
        LAYER_SKIP,
        QUANTIZED,
        SPARSE_KV,
        MEDUSA,
        EAGLE,
        EAGLE3,
        PEAGLE,
        MTP,
        DFLASH,
        DSPARK,
        TOKEN_RECYCLING,
        LOOKAHEAD,
        LOOKUP,
        FORCED,
        SIMULATED,
    )
}
"""The records of all methods by name, in the order in which they are listed."""
DRAFTERS: dict[str, type[Drafter]] = {name: method.drafter for name, method in METHODS.items()}
"""The classes of drafters by name."""
TRAINED = tuple(name for name, method in METHODS.items() if method.needs.weights)
"""The names of drafters that need trained weights; some of these come with specjax."""
HEADS: dict[str, type[HeadConfig]] = {
    name: method.head for name, method in METHODS.items() if method.head is not None
}
"""The classes of the configs of heads by kind, the name of the method that they are for."""
JOINTS: dict[str, Callable[..., LoadedDrafter]] = {"+": take_turns, "|": merge_drafters}
"""The signs that join names of drafters, and the functions that join the drafters."""


def all_registered(drafters: Iterable[Drafter]) -> bool:
    """Return whether all drafters are specjax's own rather than user-defined."""
    return all(
        all_registered(drafter.parts)
        if isinstance(drafter, Merged)
        else type(drafter) in DRAFTERS.values()
        for drafter in drafters
    )


def registered(name: str) -> Method:
    """Return the record of the method `name`; raise InputError if it is unknown."""
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise InputError(
            f"drafter={shown(name)} is unknown: {hint}use {', '.join(METHODS)} or "
            "package.module:function"
        )
    return METHODS[name]


def joint_of(name: str) -> str:
    """Return the sign that joins the drafters in a name, "+" or "|"; "" for a single drafter.

    Raises InputError if both signs are used.
    """
    joints = [joint for joint in JOINTS if joint in name]
    if len(joints) > 1:
        raise InputError(
            f"drafter={name!r}: join all of them by {' or all by '.join(JOINTS)}; for both use "
            "specjax.drafters.take_turns and merge_drafters"
        )
    return joints[0] if joints else ""


def parts_of(name: str) -> list[str]:
    """Return the names of the single drafters in a name, such as "ngram" and "eagle3"."""
    joint = joint_of(name)
    return name.split(joint) if joint else [name]
