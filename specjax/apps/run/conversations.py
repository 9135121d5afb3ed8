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


@dataclass(frozen=True)
class Conversations:
    """Questions for a target, with all turns that a run decodes.

    `first[i]` are the token ids of question i's first prompt, and `last[i]` those of its last one
    if earlier answers were empty. `rows[i]` is the number of turns of all questions before i. With
    `chat` prompts go through the chat template. If there are `seeds`, each row has its own. The
    errors of later turns without room for an answer are added to `refused`.
    """

    model: Model
    questions: Sequence[Question]
    rows: Sequence[int]
    chat: bool
    sampling: SamplingParams
    max_length: int | None = None
    seeds: Sequence[int] = ()
    first: Sequence[Sequence[int]] = ()
    last: Sequence[Sequence[int]] = ()
    refused: list[NoRoomError] = field(default_factory=list)

    @classmethod
    def read(
        cls,
        model: Model,
        questions: Sequence[Question],
        sampling: SamplingParams,
        *,
        chat: bool,
        num_turns: int | None = None,
        max_length: int | None = None,
    ) -> Conversations:
        """Return the conversations of `questions`, the first `num_turns` turns of each.

        A row has at most `max_length` tokens, by default as many as the target has positions.
        Raises InputError for prompts that cannot be encoded, and NoRoomError for those that leave
        no room for an answer, however short earlier answers are.
        """
        counts = [len(question.turns[:num_turns]) for question in questions]
        rows = list(itertools.accumulate(counts, initial=0))
        one = cls(model, questions, rows, chat, sampling, max_length)
        prompts = [question.prompt(chat=chat) for question in questions]
        names = [one.name(question.question_id, 0) for question in questions]
        options = {"sampling": sampling, "max_length": max_length, "names": names}
        first = [request.prompt for request in encode_requests(model, prompts, **options)]
        last = [
            ids if count == 1 else one._last_prompt(question, count - 1)
            for question, count, ids in zip(questions, counts, first, strict=True)
        ]
        return replace(one, first=first, last=last)

    def _last_prompt(self, question: Question, turn: int) -> Sequence[int]:
        """Return the token ids of turn `turn` of a question after empty answers."""
        name = self.name(question.question_id, turn)
        ids = encode_prompt(self.model, question.prompt([""] * turn, chat=True), name)
        check_length(self.model, name, len(ids), longest_row(self.model, self.max_length))
        return ids

    @property
    def num_rows(self) -> int:
        """The number of turns of all questions."""
        return self.rows[-1]

    def num_turns(self, index: int) -> int:
        """Return the number of turns of a question."""
        return self.rows[index + 1] - self.rows[index]

    def num_tokens(self, index: int) -> int:
        """Return the maximum number of tokens of a question's turns and answers.

        An answer's text is rarely encoded in more tokens than were decoded.
        """
        return len(self.last[index]) + self.num_turns(index) * self.sampling.max_new_tokens

    def name(self, question_id: int | str, turn: int) -> str:
        """Return what errors call a turn (from 0) of the question with this id."""
        name = f"question {question_id}"
        return f"{name}, turn {turn + 1}" if self.num_rows > len(self.questions) else name

    def plan(self, drafter: LoadedDrafter | None, options: DecodeOptions) -> DecodePlan:
        """Return a plan for all turns. Raises InputError for bad input."""
        options = replace(options, batch_size=min(options.batch_size, len(self.questions)))
        most = max(map(self.num_tokens, range(len(self.questions))))
        return plan_rows(self.model, drafter, options, most, [self.sampling])

    def turn(self, number: int, answers: Mapping[int, Sequence[str]]) -> Turn | None:
        """Return turn `number` of those questions in `answers` that have it; None without any.

        `answers` are the texts of earlier turns by question. A question without some has ended.
        """
        requests: dict[int, Request] = {}
        for index, texts in answers.items():
            if number < self.num_turns(index) and len(texts) == number:
                try:
                    requests[index] = self._request(index, texts)
                except NoRoomError as error:
                    self.refused.append(error)
        return Turn(number, list(requests), list(requests.values())) if requests else None

    def _request(self, index: int, answers: Sequence[str]) -> Request:
        """Return the request of a question after `answers`; first turns have the index's number."""
        ids, sampling = self.first[index], self.sampling
        if answers:
            question = self.questions[index]
            (request,) = encode_requests(
                self.model,
                [question.prompt(answers, chat=True)],
                sampling=sampling,
                max_length=self.max_length,
                names=[self.name(question.question_id, len(answers))],
            )
            ids = request.prompt
        if self.seeds:
            sampling = replace(sampling, seed=self.seeds[self.rows[index] + len(answers)])
        return Request(len(answers) * len(self.questions) + index, tuple(ids), sampling)
