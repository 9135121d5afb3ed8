"""Drafters: one file each, found by name in `registry`."""

from specjax.drafters.base import Accepted, Context, Drafter, Noise, stateless, unmoved
from specjax.drafters.registry import (
    DRAFT_TOKENS,
    DRAFTER_KIND,
    DRAFTERS,
    TRAINED,
    check_options,
    check_tokenizers,
    drafter_options,
    make_drafter,
    option_type,
)

__all__ = [
    "DRAFTERS",
    "DRAFTER_KIND",
    "DRAFT_TOKENS",
    "TRAINED",
    "Accepted",
    "Context",
    "Drafter",
    "Noise",
    "check_options",
    "check_tokenizers",
    "drafter_options",
    "make_drafter",
    "option_type",
    "stateless",
    "unmoved",
]
