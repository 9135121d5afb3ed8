"""Prompts for a target to answer, made from texts that are already installed.

The texts are Python's library and reference, the first paragraphs of Wikipedia articles if a
package with them is installed, and templates. None are from Spec-Bench. The same seed gives the
same prompts with the same versions of Python and of that package.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from specjax.errors import InputError
from train.generation.passages import Passage, code_files, functions, leads, reference
from train.generation.prompt_templates import TEMPLATES, fill
from train.generation.prompts import Request

Item = TypeVar("Item")

_OWN = Passage("", "", "specjax templates", "Apache-2.0")
"""The source of prompts that are about no text."""
_INTO = ("French", "Spanish", "German", "Italian", "Portuguese")
"""The languages into which English texts are to be translated."""
_LONG_TEXT = (1500, 4200)
"""The minimum and maximum characters of a long text, about 350 to 1,000 tokens."""
_MOST_REPEATED = 2000
"""The number of known prompts in succession after which a stream is assumed to have no new ones."""


@dataclass(frozen=True)
class Texts:
    """The texts that prompts are made of: Python's own and, with `wikipedia`, Wikipedia's.

    `long` is the fraction of long texts among the prompts that contain a text.
    """

    wikipedia: bool = True
    long: float = 0.35

    def passages(self) -> tuple[Passage, ...]:
        """Return all passages of the source."""
        return leads() if self.wikipedia else reference()


def make_corpus(
    num_prompts: int, seed: int, mix: Mapping[str, float], texts: Texts
) -> list[Request]:
    """Return distinct prompts, shuffled, in the proportions that `mix` gives by category.

    Raises InputError if all proportions are 0, if a category has too few prompts, and if
    Wikipedia's texts are requested but not installed.
    """
    made = [
        replace(prompt, category=category)
        for category, size in sizes_of(num_prompts, mix).items()
        for prompt in _different(category, size, seed, texts)
    ]
    random.Random(f"{seed}:order").shuffle(made)
    return [replace(prompt, id=number) for number, prompt in enumerate(made)]


def sizes_of(num_prompts: int, mix: Mapping[str, float]) -> dict[str, int]:
    """Return the number of prompts of each category; they add up to `num_prompts`."""
    total = sum(mix.values())
    if not total:
        raise InputError("corpus.mix: all shares are 0; give a category a share")
    ends = np.round(np.cumsum([share / total for share in mix.values()]) * num_prompts)
    return dict(zip(mix, np.diff(ends, prepend=0).astype(int).tolist(), strict=True))


def _different(category: str, size: int, seed: int, texts: Texts) -> Iterator[Request]:
    """Yield the first `size` distinct prompts of a category; a larger `size` only adds to them."""
    stream = CATEGORIES[category](random.Random(f"{seed}:{category}"), texts)
    seen: set[str] = set()
    repeated = 0
    while len(seen) < size:
        text, passage = next(stream)
        if text not in seen:
            seen.add(text)
            repeated = 0
            group = "" if passage is _OWN else f"{passage.source}: {passage.title}"
            yield Request(0, text, source=passage.source, licence=passage.licence, group=group)
        elif (repeated := repeated + 1) > _MOST_REPEATED:
            raise InputError(
                f"corpus.mix.{category}: there are about {len(seen)} different prompts where "
                f"{size} are wanted; lower its share or corpus.num_prompts"
            )


# The prompts of each category.

Stream = Callable[[random.Random, Texts], Iterator[tuple[str, Passage]]]
"""Takes the noise, and the texts to be read; gives prompts without end, and what they are about."""


def _filled(rng: random.Random, kind: str) -> tuple[str, Passage]:
    return fill(rng.choice(TEMPLATES[kind]), rng), _OWN


def _only_templates(kind: str) -> Stream:
    def stream(rng: random.Random, texts: Texts) -> Iterator[tuple[str, Passage]]:
        while True:
            yield _filled(rng, kind)

    return stream


def _coding(rng: random.Random, texts: Texts) -> Iterator[tuple[str, Passage]]:
    files = list(code_files())
    while True:
        rng.shuffle(files)
        for file in files:
            found = functions(file)
            # A few of each file: some hold hundreds that are all alike.
            for function in rng.sample(found, min(len(found), 4)):
                yield _code_prompt(function, rng), function
                if rng.random() < 0.25:
                    yield _filled(rng, "coding")


def _code_prompt(function: Passage, rng: random.Random) -> str:
    task, code = rng.choice(TEMPLATES["code_tasks"]), function.text
    if rng.random() < 0.25:
        lines = code.splitlines()
        task = rng.choice(TEMPLATES["unfinished_code_tasks"])
        code = "\n".join(lines[: max(2, len(lines) // 2)])
    return f"{task}\n\n```python\n{code}\n```"


def _given_text(kind: str, most: int) -> Stream:
    """Return a stream of prompts that give a text of up to `most` characters, or a long one.

    `kind` names the templates, which say what to do with the text.
    """

    def stream(rng: random.Random, texts: Texts) -> Iterator[tuple[str, Passage]]:
        passages = texts.passages()
        for index in _shuffled(rng, range(len(passages))):
            passage = passages[index]
            text = passage.sentences(rng.randint(most // 4, most))
            if rng.random() < texts.long:
                text = _long_text(passages[index:], rng.randint(*_LONG_TEXT))
            yield rng.choice(TEMPLATES[kind]).format(text=text, title=passage.title), passage

    return stream


def _long_text(passages: Sequence[Passage], most: int) -> str:
    """Return the first passages, mostly on one subject, up to `most` characters."""
    lengths = itertools.accumulate(len(passage.text) for passage in passages)
    fitting = sum(1 for _ in itertools.takewhile(lambda length: length <= most, lengths))
    return "\n\n".join(passage.text for passage in passages[: max(fitting, 1)])


def _documentation(rng: random.Random, texts: Texts) -> Iterator[tuple[str, Passage]]:
    return _given_text("documentation_tasks", 800)(rng, replace(texts, wikipedia=False))


def _about_passages(rng: random.Random, texts: Texts) -> Iterator[tuple[str, Passage]]:
    passages = texts.passages()
    for passage in _shuffled(rng, passages):
        long = rng.random() < texts.long
        others = rng.sample(passages, rng.randint(3, 6) if long else rng.randint(0, 2))
        shown = [passage, *others]
        rng.shuffle(shown)
        lines = [f"[{number}] {one.sentences(600)}" for number, one in enumerate(shown, start=1)]
        question = rng.choice(TEMPLATES["passage_questions"])
        yield question.format(passages="\n\n".join(lines), title=passage.title), passage


def _questions(rng: random.Random, texts: Texts) -> Iterator[tuple[str, Passage]]:
    passages = texts.passages()
    for passage in _shuffled(rng, passages):
        if rng.random() < 0.3:
            yield _filled(rng, "questions")
        else:
            question = rng.choice(TEMPLATES["title_questions"])
            second = rng.choice(passages).title
            yield question.format(title=passage.title, second=second), passage


def _translation(rng: random.Random, texts: Texts) -> Iterator[tuple[str, Passage]]:
    english = _shuffled(rng, texts.passages())
    foreign = {}
    if texts.wikipedia:
        foreign = {name: _shuffled(rng, leads(name)) for name in ("French", "Spanish")}
    while True:
        if foreign and rng.random() < 0.6:
            name = rng.choice(sorted(foreign))
            passage, into = next(foreign[name]), "English"
            head = rng.choice((f"Translate {name} to English:", "Translate into English:"))
        else:
            passage, into = next(english), rng.choice(_INTO)
            head = rng.choice((f"Translate English to {into}:", f"Translate to {into}:"))
        if rng.random() < 0.2:
            head = f"Translate the following text to {into}, sentence by sentence:\n\n"
        separator = "" if head.endswith("\n") else " "
        yield f"{head}{separator}{passage.sentences(rng.randint(60, 400))}", passage


def _shuffled(rng: random.Random, items: Sequence[Item]) -> Iterator[Item]:
    """Yield all items in a random order, then all of them in another order, endlessly."""
    order = list(items)
    while True:
        rng.shuffle(order)
        yield from order


CATEGORIES: dict[str, Stream] = {
    "coding": _coding,
    "technical": _documentation,
    "qa": _questions,
    "rag": _about_passages,
    "summarization": _given_text("summary_tasks", 1200),
    "extraction": _given_text("extraction_tasks", 900),
    "math_reasoning": _only_templates("math"),
    "translation": _translation,
    "dialogue": _only_templates("dialogue"),
    "writing": _only_templates("writing"),
}
_SHARES = (0.19, 0.05, 0.13, 0.11, 0.11, 0.05, 0.12, 0.12, 0.06, 0.06)
DEFAULT_MIX = dict(zip(CATEGORIES, _SHARES, strict=True))
"""The share of each category."""
