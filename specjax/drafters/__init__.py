"""Drafters, which propose the tokens that the target verifies; each is found by its name.

    make_drafter("eagle3", model)            by name, with options; "a+b" takes turns, "a|b" merges
    drafter_options("ngram")                 the options of a drafter and their defaults
    head_drafter(head, model)                of a head that was read or trained
    take_turns, merge_drafters               join drafters that were made
    Drafter                                  subclass it: `propose`, perhaps `init` and `observe`

    specjax.generate(model, prompts, drafter=make_drafter("ngram", model, prompt_lookup_max=3))

`DRAFTERS` has the class of each name, `TRAINED` the names of those that need weights. A `Drafter`
is a frozen dataclass whose methods are pure functions; a `LoadedDrafter` is one with its arrays.
`Context` is what it may read, `Accepted` what it observes. `python -m specjax.decode --list` shows
all names and options; docs/extending.md writes a drafter.
"""

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
from specjax.drafters.growth.tree_options import TreeOptions
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
