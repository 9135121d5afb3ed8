"""The registry of drafters by name, and the signs that join names."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable

from specjax.drafters.base import Drafter, LoadedDrafter
from specjax.drafters.draft_model import DraftModel
from specjax.drafters.heads.block import BlockDrafter
from specjax.drafters.heads.eagle import EagleDrafter
from specjax.drafters.heads.medusa import MedusaDrafter
from specjax.drafters.heads.mtp import MtpDrafter
from specjax.drafters.lookup.corpus import Corpus
from specjax.drafters.lookup.lookahead import Lookahead
from specjax.drafters.lookup.lookup import Lookup
from specjax.drafters.lookup.ngram import Ngram
from specjax.drafters.lookup.suffix import Suffix
from specjax.drafters.lookup.token_recycling import TokenRecycling
from specjax.drafters.merged import Merged, merge_drafters
from specjax.drafters.none import NoDrafter
from specjax.drafters.self_speculation.early_exit import EarlyExit
from specjax.drafters.self_speculation.layer_skip import LayerSkip
from specjax.drafters.self_speculation.quantized import Quantized
from specjax.drafters.self_speculation.sparse_kv import SparseKV
from specjax.drafters.simulated import Simulated
from specjax.drafters.turn_taking import take_turns
from specjax.errors import InputError, shown

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
