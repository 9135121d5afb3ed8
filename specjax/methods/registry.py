"""The registry of drafters by name, and the signs that join names."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable

from specjax.core.drafter import Drafter, LoadedDrafter
from specjax.core.merged import Merged, merge_drafters
from specjax.core.none import NoDrafter
from specjax.core.turn_taking import take_turns
from specjax.errors import InputError, shown
from specjax.methods.block.drafter import BlockDrafter
from specjax.methods.corpus.drafter import Corpus
from specjax.methods.draft_model.drafter import DraftModel
from specjax.methods.eagle.drafter import EagleDrafter
from specjax.methods.early_exit import EarlyExit
from specjax.methods.layer_skip import LayerSkip
from specjax.methods.lookahead import Lookahead
from specjax.methods.lookup import Lookup
from specjax.methods.medusa.drafter import MedusaDrafter
from specjax.methods.mtp import MtpDrafter
from specjax.methods.ngram import Ngram
from specjax.methods.quantized import Quantized
from specjax.methods.simulated import Simulated
from specjax.methods.sparse_kv import SparseKV
from specjax.methods.suffix import Suffix
from specjax.methods.token_recycling import TokenRecycling

DRAFTERS: dict[str, type[Drafter]] = {
    "none": NoDrafter,
    "ngram": Ngram,
    "suffix": Suffix,
    "corpus": Corpus,
    "draft_model": DraftModel,
    "early_exit": EarlyExit,
    "layer_skip": LayerSkip,
    "quantized": Quantized,
    "sparse_kv": SparseKV,
    "medusa": MedusaDrafter,
    "eagle": EagleDrafter,
    "eagle3": EagleDrafter,
    "mtp": MtpDrafter,
    "dflash": BlockDrafter,
    "dspark": BlockDrafter,
    "token_recycling": TokenRecycling,
    "lookahead": Lookahead,
    "lookup": Lookup,
    "simulated": Simulated,
}
"""The classes of drafters by name."""
JOINTS: dict[str, Callable[..., LoadedDrafter]] = {"+": take_turns, "|": merge_drafters}
"""The signs that join names of drafters, and the functions that join the drafters."""
TRAINED = tuple(name for name, kind in DRAFTERS.items() if kind.trained)
"""The names of drafters that need trained weights; some of these come with specjax."""


def all_registered(drafters: Iterable[Drafter]) -> bool:
    """Return whether all drafters are specjax's own rather than user-defined."""
    return all(
        all_registered(drafter.parts)
        if isinstance(drafter, Merged)
        else type(drafter) in DRAFTERS.values()
        for drafter in drafters
    )


def registered(name: str) -> type[Drafter]:
    """Return the class of the drafter `name`; raise InputError if it is unknown."""
    if name not in DRAFTERS:
        near = difflib.get_close_matches(name, DRAFTERS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise InputError(
            f"drafter={shown(name)} is unknown: {hint}use {', '.join(DRAFTERS)} or "
            "package.module:function"
        )
    return DRAFTERS[name]


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
