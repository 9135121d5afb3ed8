"""Drafters, which propose the tokens that the target verifies, by name or as values.

    make_drafter("eagle3", model)            by name, with options; "a+b" takes turns, "a|b" merges
    drafter_options("ngram")                 the options of a drafter and their defaults
    head_drafter(head, model)                for a head that was loaded or trained
    take_turns, merge_drafters               combine existing drafters
    Drafter                                  subclass it: `propose`, optionally `init`, `observe`

    specjax.generate(model, prompts, drafter=make_drafter("ngram", model, prompt_lookup_max=3))

`DRAFTERS` maps names to classes, and `TRAINED` lists the names of those that need weights. A
`Drafter` is a frozen dataclass with pure methods; a `LoadedDrafter` combines it with its arrays.
`Context` is what a drafter may read, and `Accepted` what it observes. `python -m specjax.decode
--list` shows all names and options; docs/extending.md shows how to write a drafter.

After this text `help` lists classes, then functions; `help(make_drafter)` explains one of them.
"""

from specjax.core.draft_length import DRAFT_TOKENS
from specjax.core.drafter import Accepted, Context, Drafter, LoadedDrafter, Noise
from specjax.core.drafter_check import DRAFTER_KIND
from specjax.core.growth.tree_options import TreeOptions
from specjax.core.merged import Merged, merge_drafters
from specjax.core.turn_taking import Turns, take_turns
from specjax.methods.make import head_drafter, make_drafter
from specjax.methods.options import (
    check_options,
    divide_options,
    drafter_options,
    option_type,
)
from specjax.methods.registry import DRAFTERS, TRAINED
from specjax.methods.token_recycling import TokenRecycling

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
