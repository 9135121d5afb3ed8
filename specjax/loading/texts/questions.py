"""Questions of one or several turns, such as those of Spec-Bench, and JSONL files of them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specjax.errors import InputError, shown
from specjax.fields import Text
from specjax.files.json_files import read_json_lines
from specjax.files.path_checks import input_file

LARGEST_ID = 2**63 - 1
"""The largest whole number that a question's id may be."""
_LONGEST_NAME = 1000


@dataclass(frozen=True)
class Question:
    """A question of one or several turns, as in a line of Spec-Bench's prompt file."""

    question_id: int | str
    category: str
    turns: tuple[str, ...]

    @property
    def first_turn(self) -> list[dict[str, str]]:
        """The question's first turn as a conversation of one message."""
        return self.prompt(chat=True)

    def prompt(self, answers: Sequence[str] = (), *, chat: bool) -> str | list[dict[str, str]]:
        """Return the prompt of the turn that follows `answers` to the earlier ones.

        With `chat` it is a conversation up to the user's message, otherwise the first turn's text.
        """
        if not chat:
            return self.turns[0]
        messages = []
        for text, answer in zip(self.turns, answers, strict=False):
            messages += [{"role": "user", "content": text}]
            messages += [{"role": "assistant", "content": answer}]
        return [*messages, {"role": "user", "content": self.turns[len(answers)]}]


def digest(questions: Question | Sequence[Question]) -> str:
    """Return a hash of one or several questions, in 16 hexadecimal digits."""
    return hashlib.sha256(repr(questions).encode()).hexdigest()[:16]


def read_questions(path: str | os.PathLike) -> list[Question]:
    """Return the questions of a JSONL file, reading it line by line.

    Each line is {"question_id", "category", "turns": [...]}. Raises InputError with file and line
    for anything else, and for repeated question ids.
    """
    questions = []
    first: dict[int | str, str] = {}
    for where, row in read_json_lines(input_file("prompts", path, pipe=True), "prompts"):
        question = _question(row, where)
        earlier = first.setdefault(question.question_id, where)
        if earlier is not where:
            raise InputError(
                f"{where}: question_id={shown(question.question_id)} is taken, by {earlier}; "
                "give each question its own"
            )
        questions.append(question)
    if not questions:
        raise InputError(f"prompts={str(path)!r} holds no questions: one JSON object a line")
    return questions


def _question(row: dict[str, Any], where: str) -> Question:
    turns = row.get("turns")
    if (
        not isinstance(turns, list)
        or not turns
        or not all(isinstance(turn, str) and turn for turn in turns)
    ):
        raise InputError(f'{where}: "turns" must be a list of texts that are not empty')
    for turn in turns:
        Text().check(f"{where}: turns", turn)
    # Reports may round a float, and to Python `true` is the integer 1.
    number = row.get("question_id")
    whole = type(number) is int and abs(number) <= LARGEST_ID
    if not whole and not (isinstance(number, str) and len(number) <= _LONGEST_NAME):
        raise InputError(
            f"{where}: question_id={shown(number)}: must be a whole number of at most 64 bits, or "
            f"a text of at most {_LONGEST_NAME} characters"
        )
    category = row.get("category", "")
    if not isinstance(category, str) or len(category) > _LONGEST_NAME:
        raise InputError(
            f"{where}: category={shown(category)}: must be a text of at most {_LONGEST_NAME} "
            "characters, or left out"
        )
    return Question(number, category, tuple(turns))


MT_BENCH = frozenset(
    ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
)


def task_of(category: str) -> str:
    """Return the Spec-Bench task of a category; MT-bench's eight categories form one task."""
    return "mt_bench" if category in MT_BENCH else category


def spread(questions: Sequence[Question], count: int) -> list[Question]:
    """Return up to `count` questions, evenly spaced in the file so that all tasks occur."""
    count = min(count, len(questions))
    return [questions[i * len(questions) // count] for i in range(count)]


def stratified(questions: Sequence[Question], count: int) -> list[Question]:
    """Return `count` questions, equally many of each task and evenly spaced within it.

    They are in the order of `questions`. If a task has too few, the others have more. Raises
    InputError if `count` is less than the number of tasks.
    """
    tasks: dict[str, list[Question]] = {}
    for question in questions:
        tasks.setdefault(task_of(question.category), []).append(question)
    if count < len(tasks):
        raise InputError(
            f"questions={count}: there are {len(tasks)} tasks ({', '.join(tasks)}); use a number "
            "of at least that, or name tasks"
        )
    chosen: set[int | str] = set()
    left = min(count, len(questions))
    for number, task_questions in enumerate(sorted(tasks.values(), key=len)):
        share = spread(task_questions, left // (len(tasks) - number))
        left -= len(share)
        chosen |= {question.question_id for question in share}
    return [question for question in questions if question.question_id in chosen]


def select(
    questions: Sequence[Question], limit: int | None = None, per_task: int | None = None
) -> list[Question]:
    """Return the first `per_task` questions of each task, and of these the first `limit`.

    None stands for all.
    """
    seen: dict[str, int] = {}
    chosen = []
    for question in questions:
        task = task_of(question.category)
        seen[task] = seen.get(task, 0) + 1
        if per_task is None or seen[task] <= per_task:
            chosen.append(question)
    return chosen if limit is None else chosen[:limit]
