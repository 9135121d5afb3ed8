"""Search for stop strings, which end an output and its counts, and decide which text is final.

The compiled loop knows only token ids; between steps the host searches the decoded text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specjax import metrics
from specjax.core.state import Rounds
from specjax.core.turn_taking import NO_DRAFTER
from specjax.loading.tokenizers.tokenizer import StreamDecoder, Tokenizer


class OutputText:
    """The text of a growing output, up to the first of its stop strings.

    Stop strings are searched for both in the visible text and in the text with special tokens, so
    that they may contain a special token. An incomplete character is not searched.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self.stopped = False
        """Whether a stop string was found."""
        self._decoder, self._special = StreamDecoder(tokenizer), tokenizer.detokenizer.special
        self._stops = tuple(stops)
        self._margin = max(map(len, self._stops), default=1) - 1
        self._text, self._taken = "", 0
        # The end of the text with special tokens: each character with its index in the shown text.
        self._whole: list[tuple[str, int]] = []

    def feed(self, tokens: Sequence[int]) -> int:
        """Add tokens; return how many of them belong to the output: all, or up to a stop string."""
        if not self._stops:
            self._text += self._decoder.feed(tokens)
            return len(tokens)
        for count, token in enumerate(tokens, 1):
            fresh, shown = self._decoder.feed([token]), len(self._text)
            self._text += fresh
            self._whole += [(char, shown + at) for at, char in enumerate(fresh)]
            self._whole += [(char, len(self._text)) for char in self._special.get(token, "")]
            end = self._first_stop(len(fresh))
            if end is not None:
                self._text, self.stopped = self._text[:end], True
                return count
            del self._whole[: max(len(self._whole) - self._margin, 0)]
        return len(tokens)

    def _first_stop(self, fresh: int) -> int | None:
        """Return the index in the shown text where a stop string begins, or None.

        The last `fresh` characters of the shown text are new.
        """
        first = max(len(self._text) - fresh - self._margin, 0)
        whole = "".join(char for char, _ in self._whole)
        starts = []
        for stop in self._stops:
            if (at := self._text.find(stop, first)) >= 0:
                starts.append(at)
            if (at := whole.find(stop)) >= 0:
                starts.append(self._whole[at][1])
        return min(starts, default=None)

    def take(self, *, ended: bool) -> str:
        """Return the new final text since the last call, or all that remains if the output `ended`.

        Before the end, trailing characters that may begin a stop string are withheld.
        """
        if ended and not self.stopped:
            self._text += self._decoder.flush()
        kept_back = 0 if ended or self.stopped else self._margin
        text = self._text[self._taken : max(len(self._text) - kept_back, self._taken)]
        self._taken += len(text)
        return text


def truncate_rounds(rounds: Rounds, kept: np.ndarray) -> Rounds:
    """Return the counts [B, R] of each row's first `kept` [B] new tokens; -1 keeps all."""
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
