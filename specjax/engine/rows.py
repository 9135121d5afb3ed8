"""Rows: requests in an engine, from when they are added until their output is complete.

The compiled loop knows only token ids. Between steps the host decodes them to text, and searches it
for stop strings, which end an output and its counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax
import numpy as np
from jaxtyping import Bool, Float

from specjax import metrics
from specjax.core.state import BARRED, FAILED, FULL, STOPPED, Rounds
from specjax.core.turn_taking import NO_DRAFTER
from specjax.engine.outputs import (
    ABORTED,
    ERROR,
    GRAMMAR,
    NO_TOKEN_LEFT,
    Delta,
    Output,
    RequestId,
    Times,
    drafter_of_tokens,
    failure_message,
)
from specjax.engine.plan import DecodePlan
from specjax.engine.requests import Request
from specjax.errors import InputError, shown
from specjax.grammars.token_table import TokenTable
from specjax.loading.tokenizers.tokenizer import StreamDecoder, Tokenizer

_REASONS = {STOPPED: "stop", FULL: "length", FAILED: ERROR, BARRED: ERROR}


class Row:
    """A request that waits, is being read, or decodes, and its output so far.

    `id` is that under which it was added; several samples of a request share it. `added`, `begun`,
    `first_token` and `last_token` are clock readings in seconds. `rounds_under_way` is the most
    rounds that it may run in the steps that have started, and `num_shared` the number of its first
    tokens that were in pages before it was read. Without a tokenizer there is no text.
    `grammar` is the table of the grammar that the output follows, if any.
    """

    def __init__(
        self,
        id: RequestId,
        request: Request,
        tokenizer: Tokenizer | None,
        added: float,
        grammar: TokenTable | None = None,
    ) -> None:
        self.id, self.request, self.added = id, request, added
        self.begun: float | None = None
        self.first_token: float | None = None
        self.last_token: float | None = None
        self.rounds_under_way = 0
        self.num_shared = 0
        self.token_ids: list[int] = []
        self.logprobs: list[float] | None = [] if request.sampling.logprobs else None
        self.finish_reason: str | None = None
        self.first_round: int | None = None
        self.text_error: str | None = None
        self._grammar = grammar
        self._rounds: list[Rounds] = []
        self._text = None if tokenizer is None else OutputText(tokenizer, request.sampling.stop)
        self._shown: list[str] = []

    @property
    def tokens(self) -> tuple[int, ...]:
        """The prompt and the output so far."""
        return (*self.request.prompt, *self.token_ids)

    @property
    def num_tokens(self) -> int:
        """The number of these tokens."""
        return len(self.request.prompt) + len(self.token_ids)

    def most_tokens(self, max_length: int) -> int:
        """Return the most tokens of the output, in rows of `max_length` tokens, prompt included."""
        return min(self.request.sampling.max_new_tokens, max_length - len(self.request.prompt))

    @property
    def ended(self) -> bool:
        """Whether the output is complete."""
        return self.finish_reason is not None

    def follow(
        self,
        status: int,
        tokens: Sequence[int],
        logprobs: Float[np.ndarray, "T"] | None,
        rounds: Rounds,
        first_round: int,
    ) -> Delta:
        """Add a step's tokens; return what is new.

        `status` is the row's status after the step, and `rounds` are the step's counts [R], the
        first of which was the engine's round `first_round`. The output ends if the row ended, at a
        stop string, and before tokens that have no text.
        """
        participated = rounds.emitted >= 0
        if self.first_round is None:
            self.first_round = first_round + int(np.argmax(participated))
        rounds = _columns(rounds, participated)
        reason = _REASONS.get(status)
        fresh = list(tokens)
        try:
            # Decoding comes first, since it may raise, and then nothing may have been added.
            if self._text is not None:
                fresh = fresh[: self._text.feed(fresh)]
                if self._text.stopped:
                    reason = _REASONS[STOPPED]
                    rounds = _first_tokens(rounds, len(fresh))
            text = self._end(reason)
        except InputError as refused:
            self._text = None
            self.finish_reason, self.text_error = ERROR, str(refused)
            return self._delta([], [], "")
        if reason == ERROR and status == BARRED:
            reason = self._without_a_token([*self.token_ids, *fresh])
            self.finish_reason = reason
        self.token_ids += fresh
        if self.logprobs is not None:
            self.logprobs += logprobs[: len(fresh)].tolist()
        if len(rounds.emitted):
            self._rounds.append(rounds)
        return self._delta(fresh, drafter_of_tokens(rounds), text)

    def _without_a_token(self, tokens: Sequence[int]) -> str:
        """Return the reason for which a row ends after `tokens`, where none is allowed."""
        if self._grammar is None:
            self.text_error = NO_TOKEN_LEFT
            return ERROR
        # Without a token that ends the output, a complete text ends like this.
        return _REASONS[STOPPED] if self._grammar.completed_by(tokens) else GRAMMAR

    def abort(self) -> Delta:
        """End the output; return the text that remains."""
        return self._delta([], [], self._end(ABORTED))

    def _end(self, reason: str | None) -> str:
        """Set the finish reason (None if the output continues); return the new final text.

        With a reason, this is all the remaining text.
        """
        self.finish_reason = reason
        text = "" if self._text is None else self._text.take(ended=reason is not None)
        self._shown.append(text)
        return text

    def _delta(self, fresh: list[int], drafter: list[int], text: str) -> Delta:
        newest = None
        if self.logprobs is not None:
            newest = self.logprobs[len(self.logprobs) - len(fresh) :]
        return Delta(self.id, self.request.sample, fresh, drafter, text, logprobs=newest)

    def resume_later(self) -> None:
        """Let the request begin with what was emitted, since the row gives up its slot."""
        rounds = sum(len(each.emitted) for each in self._rounds)
        self.request = replace(self.request, emitted=tuple(self.token_ids), rounds=rounds)

    def leave_out(self, seconds: float) -> None:
        """Leave the last `seconds`, such as those of compiling, out of the row's times."""
        for name in ("added", "begun", "first_token", "last_token"):
            if (time := getattr(self, name)) is not None:
                setattr(self, name, time + seconds)

    def see_tokens(self, count: int, now: float) -> float | None:
        """Record `count` new tokens; return the seconds per token since the previous ones.

        Tokens that arrive together count as evenly spaced. The result is None without new tokens
        and for the first ones.
        """
        if not count:
            return None
        before, self.last_token = self.last_token, now
        if before is None:
            self.first_token = now
            return None
        return (now - before) / count

    def output(self, plan: DecodePlan, now: float) -> Output:
        """Return the complete output of a row of a `plan` that ended at the clock reading `now`.

        Its text is the concatenation of all deltas' texts.
        """
        begun, first = (
            None if time is None else time - self.added for time in (self.begun, self.first_token)
        )
        output = Output(
            self.id,
            self.request.sample,
            self.token_ids,
            "".join(self._shown),
            self.finish_reason,
            self.logprobs,
            _joined(self._rounds),
            self.first_round or 0,
            Times(begun, first, now - self.added),
            self.text_error,
            lossy=plan.is_lossy(self.request.sampling),
        )
        if output.failure is None:
            return output
        failed = {f"request {shown(self.id)}": output.failure}
        return replace(output, error=failure_message(plan.model, failed))


def _columns(rounds: Rounds, which: Bool[np.ndarray, "R"]) -> Rounds:
    """Return the counts of the rounds that `which` marks."""
    return jax.tree.map(lambda counts: counts[which], rounds)


def _first_tokens(rounds: Rounds, count: int) -> Rounds:
    """Return a row's counts, arrays [R], truncated to the first `count` tokens emitted in them."""
    counts = (rounds.drafted, rounds.accepted, rounds.emitted, rounds.width)
    truncated = metrics.truncate_rounds(*(each[None] for each in counts), np.array([count]))
    drafted, accepted, emitted, width = (each[0] for each in truncated)
    drafter = np.where(drafted > 0, rounds.drafter, NO_DRAFTER)
    kept = rounds.replace(
        width=width, drafted=drafted, accepted=accepted, emitted=emitted, drafter=drafter
    )
    return _columns(kept, emitted >= 0)


def _joined(rounds: Sequence[Rounds]) -> Rounds:
    if not rounds:
        nothing = np.zeros(0, np.int32)
        return Rounds(nothing, nothing, nothing, nothing, nothing)
    return jax.tree.map(lambda *counts: np.concatenate(counts), *rounds)


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
