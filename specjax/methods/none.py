"""Plain decoding, as a method that drafts nothing."""

from __future__ import annotations

from specjax.core.none import NoDrafter
from specjax.methods.method import Method

NONE = Method(
    name=NoDrafter.name,
    paper="",
    drafter=NoDrafter,
    alone="it drafts nothing",
    in_all=False,
)
