"""Prompts: what may be given as one, and the JSONL files that hold many."""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specjax.errors import InputError, shown
from specjax.fields import INT32_MAX, Choice, Items, Whole
from specjax.models.model import Model

CHAT = Choice(("auto", "true", "false"))
"""Whether prompts go through the chat template; auto: where there is one."""
_TOKEN_IDS = Items(
    Whole(-INT32_MAX), remedy="use text, token ids, or messages with role and content"
)
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Raw text, token ids, or a conversation for the chat template."""


def encode_prompt(model: Model, prompt: Prompt, name: str = "prompt") -> list[int]:
    """Token ids of a prompt; `name` is what errors call it.

    Raises InputError for an empty prompt, ids outside the vocabulary, or a missing tokenizer.
    """
    listed = isinstance(prompt, Sequence | np.ndarray) and not isinstance(prompt, bytes)
    if not listed and not isinstance(prompt, Mapping):
        raise InputError(
            f"{name}={shown(prompt)}: use text, token ids, or messages with role and content"
        )
    if isinstance(prompt, str | Mapping) or (len(prompt) and isinstance(prompt[0], Mapping)):
        if model.tokenizer is None:
            raise InputError(f"{name}: {model.name} has no tokenizer; give token ids")
        encode = model.tokenizer.encode if isinstance(prompt, str) else model.tokenizer.encode_chat
        try:
            ids = encode(prompt)
        except InputError as error:
            raise InputError(f"{name}: {error}") from None
    else:
        # Any type of integers will do: Python's, NumPy's, JAX's.
        whole = [operator.index(one) if hasattr(one, "__index__") else one for one in prompt]
        ids = list(_TOKEN_IDS.check(name, whole))
    if not ids:
        raise InputError(f"{name} is empty: give at least one token")
    for token in (min(ids), max(ids)):
        if not 0 <= token < model.config.vocab_size:
            raise InputError(
                f"{name}: token id {token} is outside the vocabulary of "
                f"{model.config.vocab_size} tokens"
            )
    return ids


@dataclass(frozen=True)
class Question:
    """One line of a prompt file in Spec-Bench's schema."""

    question_id: int | str
    category: str
    turns: tuple[str, ...]


def read_questions(path: str | os.PathLike) -> list[Question]:
    """The questions of a JSONL file: {"question_id", "category", "turns": [...]} a line.

    Raises InputError with the line's number for anything else; the file is read line by line.
    """
    questions = []
    try:
        with open(path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    questions.append(_question(line, f"{path}, line {number}"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"prompts={str(path)!r} cannot be read: {error}") from None
    if not questions:
        raise InputError(f"prompts={str(path)!r} holds no questions: one JSON object a line")
    return questions


def _question(line: str, where: str) -> Question:
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"{where} is not JSON: {error}") from None
    turns = row.get("turns") if isinstance(row, dict) else None
    if (
        not isinstance(turns, list)
        or not turns
        or not all(isinstance(turn, str) and turn for turn in turns)
    ):
        raise InputError(f'{where}: "turns" must be a list of texts that are not empty')
    number, category = row.get("question_id"), row.get("category", "")
    if not isinstance(number, int | str) or not isinstance(category, str):
        raise InputError(f'{where}: needs a "question_id" and, if any, a text as "category"')
    return Question(number, category, tuple(turns))


MT_BENCH = frozenset(
    ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
)


def task_of(category: str) -> str:
    """Spec-Bench's task of a category: MT-bench's eight categories form one."""
    return "mt_bench" if category in MT_BENCH else category


def select(
    questions: Sequence[Question], limit: int | None = None, per_task: int | None = None
) -> list[Question]:
    """The first `per_task` questions of each task, then the first `limit` of those, in order."""
    seen: dict[str, int] = {}
    chosen = []
    for question in questions:
        task = task_of(question.category)
        seen[task] = seen.get(task, 0) + 1
        if per_task is None or seen[task] <= per_task:
            chosen.append(question)
    return chosen if limit is None else chosen[:limit]
