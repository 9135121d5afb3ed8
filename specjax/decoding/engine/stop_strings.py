"""Stop strings: where output ends, which tokens and counts are kept, which text may be shown.

The loop knows token ids only; the host looks for stop strings between two steps, in decoded text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from specjax import metrics
from specjax.decoding.state import Rounds
from specjax.drafters.turns import NO_DRAFTER
from specjax.loading.tokenizers.tokenizer import StreamDecoder, Tokenizer


def first_stop(text: str, stops: Sequence[str]) -> int | None:
    """The index in a text where the first stop string begins; None if it has none."""
    starts = [start for start in (text.find(stop) for stop in stops) if start >= 0]
    return min(starts, default=None)


class StopFinder:
    """Looks for stop strings in an output that grows, at each token once."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self.count = 0
        """Tokens so far."""
        self._decoder, self._stops = StreamDecoder(tokenizer), stops
        self._margin = max(map(len, stops)) - 1
        self._end = ""

    def find(self, tokens: Iterable[int]) -> int | None:
        """After how many tokens in all, these being the next ones, the first stop string is there.

        None if it is not. A character that is unfinished so far is part of none.
        """
        for token in tokens:
            self.count += 1
            self._end += self._decoder.feed([token])
            if first_stop(self._end, self._stops) is not None:
                return self.count
            self._end = self._end[max(len(self._end) - self._margin, 0) :]
        return None


def truncate_rounds(rounds: Rounds, kept: np.ndarray) -> Rounds:
    """The counts [B, R] of the first `kept` [B] new tokens of each row; of all where it is -1."""
    if (kept < 0).all():
        return rounds
    new = np.where(kept < 0, np.iinfo(np.int32).max, kept)
    drafted, accepted, emitted, width = metrics.truncate_rounds(
        rounds.drafted, rounds.accepted, rounds.emitted, rounds.width, new
    )
    drafter = np.where(drafted > 0, rounds.drafter, NO_DRAFTER)
    return rounds.replace(
        width=width, drafted=drafted, accepted=accepted, emitted=emitted, drafter=drafter
    )


def final_length(text: str, stops: Sequence[str], *, ended: bool) -> int:
    """How many characters of an output are final.

    At its end those before a stop string; until then all but the last ones, which may begin one.
    """
    if not ended:
        return len(text) - max(map(len, stops), default=1) + 1
    end = first_stop(text, stops)
    return len(text) if end is None else end
