"""Outputs of an engine: deltas while a request runs, and the complete output at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from specjax.core.state import Rounds
from specjax.core.turn_taking import NO_DRAFTER
from specjax.loading.model import Model

ABORTED, ERROR, GRAMMAR = "abort", "error", "grammar"
"""The finish reasons of a request that was aborted, and of one that failed."""
NO_TOKEN_LEFT = "its sampling parameters, or processors, allow no further token"
"""Why a row failed that its own request left no token."""
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
    "abort", "grammar" if other constraints allow none of the tokens with which its grammar
    continues, or "error" if the target's logits were not finite or tokens have no text (then
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
        failed = self.finish_reason == ERROR
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
