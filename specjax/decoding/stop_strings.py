"""Stop strings: where output ends, which tokens and counts are kept, which text may be shown.

The loop knows token ids only; the host looks for stop strings between two steps, in decoded text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specjax import metrics
from specjax.decoding.state import Rounds
from specjax.drafters.turns import NO_DRAFTER
from specjax.loading.tokenizers.tokenizer import Tokenizer


def first_stop(text: str, stops: Sequence[str]) -> int | None:
    """The index in a text where the first stop string begins; None if it has none."""
    starts = [start for start in (text.find(stop) for stop in stops) if start >= 0]
    return min(starts, default=None)


def tokens_to_stop(tokenizer: Tokenizer, tokens: Sequence[int], stops: Sequence[str]) -> int | None:
    """The number of new tokens that complete the first stop string; None if there is none."""
    if first_stop(tokenizer.decode(tokens), stops) is None:
        return None
    low, high = 1, len(tokens)
    while low < high:
        middle = (low + high) // 2
        if first_stop(tokenizer.decode(tokens[:middle]), stops) is None:
            low = middle + 1
        else:
            high = middle
    return low


def truncate_rounds(rounds: Rounds, kept: np.ndarray) -> Rounds:
    """The counts [B, R] of the first `kept` [B] new tokens of each row; of all where it is -1."""
    if (kept < 0).all():
        return rounds
    new = np.where(kept < 0, np.iinfo(np.int32).max, kept)
    drafted, accepted, emitted, width = metrics.truncate_rounds(
        rounds.drafted, rounds.accepted, rounds.emitted, rounds.width, new
    )
    drafter = np.where(drafted > 0, rounds.drafter, NO_DRAFTER)
    return Rounds(width, drafted, accepted, emitted, drafter)


def final_length(text: str, stops: Sequence[str], *, ended: bool) -> int:
    """How many characters of an output are final.

    At its end those before a stop string; until then all but the last ones, which may begin one.
    """
    if not ended:
        return len(text) - max(map(len, stops), default=1) + 1
    end = first_stop(text, stops)
    return len(text) if end is None else end
