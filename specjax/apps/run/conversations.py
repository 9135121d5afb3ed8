"""Questions of one or several turns as requests; answers become the history of later turns."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from specjax.drafters import LoadedDrafter
from specjax.engine.options import DecodeOptions
from specjax.engine.plan import (
    DecodePlan,
    NoRoomError,
    check_length,
    encode_requests,
    longest_row,
    plan_rows,
)
from specjax.engine.requests import Request, SamplingParams, encode_prompt
from specjax.loading.model import Model
from specjax.loading.texts.questions import Question


@dataclass(frozen=True)
class Turn:
    """One turn of some conversations: its number (from 0), the questions' indices and requests."""

    number: int
    questions: Sequence[int]
    requests: Sequence[Request]


@dataclass
class Conversations:
    """Questions for a target, of which the first `num_turns` turns are decoded, by default all.

    With `chat` prompts go through the chat template. A row has at most `max_length` tokens, by
    default as many as the target has positions. If there are `seeds`, each row has its own. The
    errors of later turns that leave no room for an answer are added to `refused`. Raises InputError
    for prompts that cannot be encoded, and NoRoomError for those that leave no room for an answer,
    however short earlier answers are.
    """

    model: Model
    questions: Sequence[Question]
    sampling: SamplingParams
    chat: bool
    num_turns: int | None = None
    max_length: int | None = None
    seeds: Sequence[int] = ()
    refused: list[NoRoomError] = field(default_factory=list)
    rows: list[int] = field(init=False)
    """The number of rows, that is turns, of all questions before each one, and of all together."""
    first: list[Sequence[int]] = field(init=False)
    """The token ids of each question's first prompt."""
    last: list[Sequence[int]] = field(init=False)
    """The token ids of each question's last prompt if all earlier answers were empty."""

    def __post_init__(self) -> None:
        counts = [len(question.turns[: self.num_turns]) for question in self.questions]
        self.rows = list(itertools.accumulate(counts, initial=0))
        prompts = [question.prompt(chat=self.chat) for question in self.questions]
        names = [self.name(question.question_id, 0) for question in self.questions]
        requests = encode_requests(
            self.model, prompts, sampling=self.sampling, max_length=self.max_length, names=names
        )
        self.first = [request.prompt for request in requests]
        self.last = list(self.first)
        longest = longest_row(self.model, self.max_length)
        for index, (question, count) in enumerate(zip(self.questions, counts, strict=True)):
            if count > 1:
                prompt = question.prompt([""] * (count - 1), chat=True)
                name = self.name(question.question_id, count - 1)
                self.last[index] = encode_prompt(self.model, prompt, name)
                check_length(self.model, name, len(self.last[index]), longest)

    def num_tokens(self, index: int) -> int:
        """Return the maximum number of tokens of a question's turns and answers.

        An answer's text is rarely encoded in more tokens than were decoded; see `plan`.
        """
        turns = self.rows[index + 1] - self.rows[index]
        return len(self.last[index]) + turns * self.sampling.max_new_tokens

    def name(self, question_id: int | str, turn: int) -> str:
        """Return what errors call a turn (from 0) of the question with this id."""
        name = f"question {question_id}"
        return f"{name}, turn {turn + 1}" if self.rows[-1] > len(self.questions) else name

    def plan(
        self,
        drafter: LoadedDrafter | None,
        options: DecodeOptions,
        sampling: SamplingParams | None = None,
    ) -> DecodePlan:
        """Return a plan for all turns, with other sampling if given. Raises InputError."""
        options = replace(options, batch_size=min(options.batch_size, len(self.questions)))
        one = [sampling or self.sampling]
        return plan_rows(self.model, drafter, options, self.most_tokens, one)

    @property
    def most_tokens(self) -> int:
        """The number of tokens for which a row of the longest conversation has room.

        Answers that are part of a later prompt may be encoded in a quarter more tokens than were
        decoded.
        """
        most = 0
        for index in range(len(self.questions)):
            earlier = self.rows[index + 1] - self.rows[index] - 1
            spare = -(-earlier * self.sampling.max_new_tokens // 4)
            most = max(most, self.num_tokens(index) + spare)
        return min(most, longest_row(self.model, self.max_length))

    def turn(self, number: int, answers: Mapping[int, Sequence[str]]) -> Turn | None:
        """Return turn `number` of those questions in `answers` that have it; None without any.

        `answers` are the texts of earlier turns by question. A question without some has ended.
        """
        requests: dict[int, Request] = {}
        for index, texts in answers.items():
            row = self.rows[index] + number
            if row < self.rows[index + 1] and len(texts) == number:
                try:
                    requests[index] = self._request(index, row, texts)
                except NoRoomError as error:
                    self.refused.append(error)
        return Turn(number, list(requests), list(requests.values())) if requests else None

    def _request(self, index: int, row: int, answers: Sequence[str]) -> Request:
        """Return the request of a question after `answers`; first turns have the index's number."""
        sampling, ids = self.sampling, self.first[index]
        if answers:
            question = self.questions[index]
            (request,) = encode_requests(
                self.model,
                [question.prompt(answers, chat=True)],
                sampling=sampling,
                max_length=self.max_length,
                names=[name := self.name(question.question_id, len(answers))],
            )
            ids = request.prompt
            check_length(self.model, name, len(ids), self.most_tokens, sampling)
        if self.seeds:
            sampling = replace(sampling, seed=self.seeds[row])
        return Request(len(answers) * len(self.questions) + index, tuple(ids), sampling)
