"""Outputs of an engine: deltas while a request runs, and the complete output at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float

from specjax.core.state import FAILED, FULL, STOPPED, Rounds
from specjax.core.turn_taking import NO_DRAFTER
from specjax.engine.stop_strings import OutputText, truncate_rounds
from specjax.loading.model import Model
from specjax.loading.tokenizers.tokenizer import Tokenizer

REASONS = {STOPPED: "stop", FULL: "length", FAILED: "error"}
ABORTED = "abort"
"""The finish reason of a request that was aborted."""
RequestId = int | str


@dataclass(frozen=True)
class Times:
    """Seconds from adding a request to reading its prompt, to its first token, and to its end.

    A time is None if the request ended before it.
    """

    waiting_s: float | None
    first_token_s: float | None
    total_s: float


class Failure(NamedTuple):
    """A row that ended with "error" after `new_tokens` tokens.

    Either the target's logits were not finite, or `text_error` says why the next tokens have no
    text.
    """

    new_tokens: int
    text_error: str | None = None


@dataclass(frozen=True)
class Output:
    """The complete output of a request.

    `token_ids` are the new tokens, stop token included. `finish_reason` is "stop", "length",
    "abort", or "error" if the target's logits were not finite or tokens have no text (then
    `text_error` says why). `rounds` are the counts of the row's own rounds, arrays [R], the first
    of which was the engine's round `first_round`. `logprobs` is None unless requested. `lossy` says
    that the rule, such as `typical`, changed the distribution of the tokens.
    """

    id: RequestId
    sample: int
    token_ids: list[int]
    text: str
    finish_reason: str
    logprobs: list[float] | None
    rounds: Rounds = field(repr=False)
    first_round: int
    times: Times
    text_error: str | None = None
    error: str | None = None
    """A message about the failure if the finish reason is "error", else None."""
    lossy: bool = False

    @property
    def failure(self) -> Failure | None:
        """The cause of the failure if the finish reason is "error", else None."""
        failed = self.finish_reason == REASONS[FAILED]
        return Failure(len(self.token_ids), self.text_error) if failed else None

    def was_drafted(self) -> list[bool]:
        """Return, for each new token, whether the drafter had proposed it."""
        return [drafter != NO_DRAFTER for drafter in self.drafter_of_tokens()]

    def drafter_of_tokens(self) -> list[int]:
        """Return, for each new token, the index of the drafter that had proposed it, or -1."""
        return drafter_of_tokens(self.rounds)


@dataclass(frozen=True)
class Delta:
    """The output that a step added to one request.

    `text` is final, but may lag behind `token_ids` by an incomplete character or a possible stop
    string. `drafter` is the index of the drafter that had proposed each token, or -1 for tokens of
    the target's own; `logprobs` are those of the tokens, None unless requested. `finish_reason` and
    `output` are None until the last delta of the request or its sample.
    """

    id: RequestId
    sample: int
    token_ids: list[int]
    drafter: list[int]
    text: str
    finish_reason: str | None = None
    output: Output | None = field(default=None, repr=False)
    logprobs: list[float] | None = None

    @property
    def drafted(self) -> list[bool]:
        """Whether a drafter had proposed the token, for each of `token_ids`."""
        return [drafter != NO_DRAFTER for drafter in self.drafter]


def drafter_of_tokens(rounds: Rounds) -> list[int]:
    """Return, for each token emitted by one row, the index of the drafter that proposed it.

    The index is -1 for tokens that the target chose itself, among them the last one of each round.
    `rounds` are the rounds of that row.
    """
    counts = (part.tolist() for part in (rounds.drafter, rounds.accepted, rounds.emitted))
    return [
        drafter if index < passed else NO_DRAFTER
        for drafter, passed, count in zip(*counts, strict=True)
        for index in range(max(count, 0))
    ]


def failure_message(target: Model, failed: Mapping[str, Failure]) -> str:
    """Return a message about rows that ended with "error", with one sentence per cause.

    `failed` maps the name of each row, as messages should show it, to its failure.
    """
    broken = [name for name, failure in failed.items() if failure.text_error is None]
    unreadable = [name for name, failure in failed.items() if failure.text_error is not None]
    sentences = []
    if broken:
        sentences.append(
            f"target={target.name}: its logits are not numbers (NaN or infinite) after "
            f"{failed[broken[0]].new_tokens} new tokens of {_and_others(broken)}, whose output "
            f"ends there; its weights are damaged, or {target.activation_dtype} cannot hold its "
            "activations: load it again, or with dtype=float32"
        )
    if unreadable:
        why = failed[unreadable[0]].text_error
        sentences.append(f"{_and_others(unreadable)}: {why}")
    return "; ".join(sentences)


def _and_others(names: Sequence[str]) -> str:
    first, others = names[0], len(names) - 1
    return f"{first} (and {others} other{'s' if others > 1 else ''})" if others else first


class Follower:
    """The output of one row as it grows step by step: token ids, text and counts.

    `stops` are the request's stop strings, and `logprobs` says whether log-probabilities are kept.
    Without a tokenizer there is no text.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, stops: Sequence[str], *, logprobs: bool
    ) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[float] | None = [] if logprobs else None
        self.finish_reason: str | None = None
        self.first_round: int | None = None
        self.text_error: str | None = None
        self._rounds: list[Rounds] = []
        self._text = None if tokenizer is None else OutputText(tokenizer, stops)
        self._shown: list[str] = []

    def follow(
        self,
        status: int,
        tokens: Sequence[int],
        logprobs: Float[np.ndarray, "T"] | None,
        rounds: Rounds,
        first_round: int,
    ) -> tuple[list[int], list[int], str]:
        """Add a step's tokens; return new tokens, the drafter of each or -1, and new text.

        `status` is the row's status after the step, and `rounds` are the step's counts [R], the
        first of which was the engine's round `first_round`. The text is final. If the row ended or
        a stop string was found, the output ends and `finish_reason` is set. Raises InputError,
        adding nothing, for tokens that have no text.
        """
        participated = rounds.emitted >= 0
        if self.first_round is None:
            self.first_round = first_round + int(np.argmax(participated))
        rounds = _columns(rounds, participated)
        reason = REASONS.get(status)
        fresh = list(tokens)
        # Decoding comes first, since it may raise, and then nothing may have been added.
        if self._text is not None:
            fresh = fresh[: self._text.feed(fresh)]
            if self._text.stopped:
                reason = REASONS[STOPPED]
                rounds = _first_tokens(rounds, len(fresh))
        text = self.end(reason)
        self.token_ids += fresh
        if self.logprobs is not None:
            self.logprobs += logprobs[: len(fresh)].tolist()
        if len(rounds.emitted):
            self._rounds.append(rounds)
        return fresh, drafter_of_tokens(rounds), text

    @property
    def num_rounds(self) -> int:
        """The number of the row's rounds so far."""
        return sum(len(rounds.emitted) for rounds in self._rounds)

    def newest_logprobs(self, count: int) -> list[float] | None:
        """Return the log-probabilities of the last `count` tokens, or None if not requested."""
        return None if self.logprobs is None else self.logprobs[len(self.logprobs) - count :]

    def end(self, reason: str | None) -> str:
        """Set the finish reason (None if the output continues); return the new final text.

        With a reason, this is all the remaining text.
        """
        self.finish_reason = reason
        text = "" if self._text is None else self._text.take(ended=reason is not None)
        self._shown.append(text)
        return text

    def end_without_text(self, why: str) -> None:
        """End the output with the reason "error".

        `why` says why the next tokens have no text.
        """
        self._text = None
        self.finish_reason, self.text_error = REASONS[FAILED], why

    def output(self, id: RequestId, sample: int, times: Times) -> Output:
        """Return the complete output of the row: sample number `sample` of the request `id`.

        Its text is the concatenation of all deltas' texts, and `times` are its latencies.
        """
        return Output(
            id,
            sample,
            self.token_ids,
            "".join(self._shown),
            self.finish_reason,
            self.logprobs,
            _joined(self._rounds),
            self.first_round or 0,
            times,
            self.text_error,
        )


def _columns(rounds: Rounds, which: Bool[np.ndarray, "R"]) -> Rounds:
    """Return the counts of the rounds that `which` marks."""
    return jax.tree.map(lambda counts: counts[which], rounds)


def _first_tokens(rounds: Rounds, count: int) -> Rounds:
    """Return a row's counts, arrays [R], truncated to the first `count` tokens emitted in them."""
    as_batch = jax.tree.map(lambda counts: counts[None], rounds)
    truncated = truncate_rounds(as_batch, np.array([count]))
    kept = jax.tree.map(lambda counts: counts[0], truncated)
    return _columns(kept, kept.emitted >= 0)


def _joined(rounds: Sequence[Rounds]) -> Rounds:
    if not rounds:
        nothing = np.zeros(0, np.int32)
        return Rounds(nothing, nothing, nothing, nothing, nothing)
    return jax.tree.map(lambda *counts: np.concatenate(counts), *rounds)
