"""The range of draft lengths."""

from __future__ import annotations

from specjax.fields import Whole

DRAFT_TOKENS = Whole(0, 1024, remedy="use a whole number from 0 to 1024")
"""The range of draft lengths, in tokens."""
