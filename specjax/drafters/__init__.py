"""Drafters: one file each, found by name in `by_name`."""

from specjax.drafters.base import DRAFT_TOKENS, Accepted, Context, Drafter, LoadedDrafter, Noise
from specjax.drafters.by_name.drafter_kind import DRAFTER_KIND
from specjax.drafters.by_name.make import head_drafter, make_drafter
from specjax.drafters.by_name.options import (
    check_options,
    divide_options,
    drafter_options,
    option_type,
)
from specjax.drafters.by_name.registry import DRAFTERS, TRAINED
from specjax.drafters.growth.options import TreeOptions
from specjax.drafters.lookup.token_recycling import TokenRecycling
from specjax.drafters.merged import Merged, merge_drafters
from specjax.drafters.turns import Turns, take_turns

__all__ = [
    "DRAFTERS",
    "DRAFTER_KIND",
    "DRAFT_TOKENS",
    "TRAINED",
    "Accepted",
    "Context",
    "Drafter",
    "LoadedDrafter",
    "Merged",
    "Noise",
    "TokenRecycling",
    "TreeOptions",
    "Turns",
    "check_options",
    "divide_options",
    "drafter_options",
    "head_drafter",
    "make_drafter",
    "merge_drafters",
    "option_type",
    "take_turns",
]
