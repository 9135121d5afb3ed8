"""The drafters by name, and how names are joined."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable

from specjax.drafters.base import Drafter, LoadedDrafter
from specjax.drafters.draft_model import DraftModel
from specjax.drafters.eagle import EagleDrafter
from specjax.drafters.early_exit import EarlyExit
from specjax.drafters.lookup.ngram import Ngram
from specjax.drafters.lookup.token_recycling import TokenRecycling
from specjax.drafters.medusa import MedusaDrafter
from specjax.drafters.merged import Merged, merge_drafters
from specjax.drafters.mtp import MtpDrafter
from specjax.drafters.none import NoDrafter
from specjax.drafters.simulated import Simulated
from specjax.drafters.turns import take_turns
from specjax.errors import InputError, shown

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


def all_registered(drafters: Iterable[Drafter]) -> bool:
    """Whether drafters are specjax's own, and none a user's."""
    return all(
        all_registered(one.parts) if isinstance(one, Merged) else type(one) in DRAFTERS.values()
        for one in drafters
    )


def registered(name: str) -> type[Drafter]:
    """The drafter's class by its name alone. Raises InputError for an unknown one."""
    if name not in DRAFTERS:
        near = difflib.get_close_matches(name, DRAFTERS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise InputError(
            f"drafter={shown(name)} is unknown: {hint}use {', '.join(DRAFTERS)} or "
            "package.module:function"
        )
    return DRAFTERS[name]


def joint_of(name: str) -> str:
    """What joins the drafters of a name, "" for a single one. Raises InputError for two kinds."""
    found = [joint for joint in JOINTS if joint in name]
    if len(found) > 1:
        raise InputError(
            f"drafter={name!r}: join all of them by {' or all by '.join(JOINTS)}; for both use "
            "specjax.drafters.take_turns and merge_drafters"
        )
    return found[0] if found else ""


def parts_of(name: str) -> list[str]:
    """The drafters of a name."""
    joint = joint_of(name)
    return name.split(joint) if joint else [name]
