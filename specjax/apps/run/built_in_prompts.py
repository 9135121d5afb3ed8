"""Built-in prompts, one for each Spec-Bench task (written for specjax, Apache-2.0).

They were chosen because the default model's greedy answers to them are short and read well, not for
speed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from specjax.loading.texts.questions import Question, read_questions

_LIGHTHOUSE = (
    "The lighthouse at Gull Point was built in 1871, after three ships had been lost on the reef "
    "in a single winter. In 1961 the lamp was made electric, and the last keeper, Ada Moss, moved "
    "to the village, where she opened a small museum. Today the lighthouse is run by volunteers, "
    "who open it on Sundays."
)

_LIBRARY = (
    "The Harbour Library opened in 1924 in an old salt warehouse. It holds 80,000 books and a "
    "collection of 3,000 sea charts. The reading room is open from Tuesday to Saturday, from nine "
    "in the morning until six in the evening. Guided tours start every Thursday at four."
)

BUILT_IN = (
    Question(1, "writing", ("Describe a quiet morning at a lake in one sentence.",)),
    Question(2, "translation", ("Translate from Spanish to English: Mi casa es tu casa.",)),
    Question(3, "summarization", (f"Summarise this text in one short sentence: {_LIGHTHOUSE}",)),
    Question(
        4,
        "qa",
        ("What is the difference between weather and climate? Answer in two short sentences.",),
    ),
    Question(
        5,
        "math_reasoning",
        ("A ticket costs 8 dollars. How much do 5 tickets cost? Think step by step.",),
    ),
    Question(
        6,
        "rag",
        (f"Text: {_LIBRARY}\n\nQuestion: How many books does the library hold?",),
    ),
)


def questions_of(path: str | os.PathLike | None) -> Sequence[Question]:
    """Return the questions of a file, or the built-in ones if `path` is None.

    Raises InputError for a file that has no valid questions.
    """
    return BUILT_IN if path is None else read_questions(path)
