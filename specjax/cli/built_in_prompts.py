"""A few prompts to begin with, one of each kind of work (written for specjax, Apache-2.0)."""

from __future__ import annotations

from specjax.decoding.prompts import Question

_CODE = """\
def mean(values):
    total = 0
    for value in values:
        total = total + value
    return total / len(values)


def variance(values):
    center = mean(values)
    total = 0
    for value in values:
        total = total + (value - center) ** 2
    return total / len(values)
"""

_STORY = (
    "The lighthouse at Gull Point was built in 1871, after three ships had been lost on the reef "
    "in a single winter. For ninety years a keeper climbed its 164 steps every evening to light "
    "the lamp and every morning to put it out. In 1961 the lamp was made electric, and the last "
    "keeper, Ada Moss, moved to the village, where she opened a small museum. Today the lighthouse "
    "is run by volunteers, who open it on Sundays and who have counted more than two hundred kinds "
    "of birds from its gallery."
)

BUILT_IN = (
    Question(
        1,
        "coding",
        (
            "Repeat this Python file exactly, but rename `total` to `result`:\n\n"
            f"```python\n{_CODE}```",
        ),
    ),
    Question(2, "summarization", (f"Summarise this text in two sentences:\n\n{_STORY}",)),
    Question(3, "qa", ("Why is the sky blue during the day and red in the evening?",)),
    Question(
        4,
        "translation",
        ("Translate to French: The train to the mountains leaves at seven in the morning.",),
    ),
    Question(
        5,
        "math_reasoning",
        (
            "A baker sells rolls at 2 dollars and cakes at 15 dollars. On Monday she sold 40 rolls "
            "and 6 cakes. How much money did she take? Think step by step.",
        ),
    ),
    Question(
        6,
        "writing",
        ("Write a packing list for a three-day hike in autumn, with a reason for each item.",),
    ),
)
