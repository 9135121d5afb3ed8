"""The prompts of each category, as endless streams of a seed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from train.generation import corpus_templates as templates
from train.generation.corpus_sources import Passage, code_files, functions, leads, reference

Item = TypeVar("Item")
_OWN = ("specjax templates", "Apache-2.0")

_CODE = (
    "Explain step by step what this Python function does.",
    "Add a docstring to this function and return it.",
    "Add type hints to this function. Return the complete function.",
    "Write unit tests for this function.",
    "Find possible bugs in this code and show a corrected version.",
    "Rewrite this function with clearer variable names.",
    "Return this function with a comment on each line, and change nothing else.",
    "Translate this Python function to JavaScript.",
    "Make this function log what it does. Return the whole function.",
    "What could go wrong when this function is called? Answer briefly.",
    "Rename the function to something that says more, and repeat the code.",
    "Simplify this code without changing what it does.",
    "Give an example of how this function is called, and what it returns.",
)
_FINISH = (
    "Complete this Python function.",
    "Continue this code.",
    "Write the rest of this function, then explain it in one sentence.",
)
_SUMMARIZE = (
    "Summarize: {text}",
    "Summarize the following text in two sentences.\n\n{text}",
    "{text}\n\nTL;DR",
    "What is this text about? Answer in a short paragraph.\n\n{text}",
    "Write a headline and a summary of three sentences for this text:\n\n{text}",
    "Give the main points of the text below.\n\n{text}",
    "Shorten this text to about half of its length:\n\n{text}",
)
_TECHNICAL = (
    "Explain this paragraph about {title} in simple words.\n\n{text}",
    "Rewrite this documentation so that a beginner understands it.\n\n{text}",
    "Turn this text about {title} into bullet points.\n\n{text}",
    "Give a code example for what is described here.\n\n{text}",
    "Correct the style of this text and repeat it in full.\n\n{text}",
    "Which questions does this paragraph answer? List them.\n\n{text}",
    "What does this passage say about {title}?\n\n{text}",
)
_EXTRACT = (
    "List the names, places and dates in this text.\n\n{text}",
    "Extract the key facts of this text as JSON.\n\n{text}",
    "Make a table with the facts in the following text.\n\n{text}",
    "Copy the most important sentence of this text, word for word.\n\n{text}",
    "Write three questions that this text answers, with their answers.\n\n{text}",
)
_GROUNDED = (
    "{passages}\n\nUse the passages above to answer: what is {title}?",
    "Context:\n{passages}\n\nQuestion: What does the context say about {title}?\nAnswer:",
    "Answer from these passages only, and quote what you use.\n\n{passages}\n\nQ: Why is {title} "
    "worth knowing?",
    "Read the following passages.\n\n{passages}\n\nWhich of them is about {title}, and what does "
    "it say?",
)
_ABOUT = (
    "What is {title}?",
    "Tell me about {title}.",
    "Who or what is {title}, and why does it matter?",
    "When and where did {title} begin?",
    "Give three facts about {title}.",
    "How would you explain {title} to a child?",
    "What is {title} best known for?",
    "Is there a connection between {title} and {second}?",
)
_INTO = ("French", "Spanish", "German", "Italian", "Portuguese")
_LONG_TEXT = (1500, 4200)
"""Characters of a long text, about 350 to 1,000 tokens."""
DEFAULT_MIX = {
    "coding": 0.19,
    "technical": 0.05,
    "qa": 0.13,
    "rag": 0.11,
    "summarization": 0.11,
    "extraction": 0.05,
    "math_reasoning": 0.12,
    "translation": 0.12,
    "dialogue": 0.06,
    "writing": 0.06,
}
"""The share of each category."""


@dataclass(frozen=True)
class PromptText:
    """A prompt's text, where it comes from, and under which licence."""

    text: str
    source: str
    licence: str


@dataclass(frozen=True)
class Texts:
    """What prompts give to read: with Wikipedia's leads or Python's own texts only.

    `long` is the share of long texts, among the tasks that are given texts.
    """

    wikipedia: bool = True
    long: float = 0.35

    def passages(self) -> tuple[Passage, ...]:
        """All that there are."""
        return leads() if self.wikipedia else reference()


Stream = Callable[[random.Random, Texts], Iterator[PromptText]]
"""Takes the noise, and the texts to be read."""


def _coding(rng: random.Random, texts: Texts) -> Iterator[PromptText]:
    files = list(code_files())
    while True:
        rng.shuffle(files)
        for file in files:
            found = functions(file)
            # A few of each file: some hold hundreds that are all alike.
            for one in rng.sample(found, min(len(found), 4)):
                yield _code_prompt(one, rng)
                if rng.random() < 0.25:
                    yield PromptText(templates.fill(rng.choice(templates.CODING), rng), *_OWN)


def _code_prompt(function: Passage, rng: random.Random) -> PromptText:
    task, code = rng.choice(_CODE), function.text
    if rng.random() < 0.25:
        lines = code.splitlines()
        task, code = rng.choice(_FINISH), "\n".join(lines[: max(2, len(lines) // 2)])
    return PromptText(f"{task}\n\n```python\n{code}\n```", function.source, function.licence)


def _given_text(tasks: Sequence[str], most: int) -> Stream:
    """Prompts that say what to do with a text of up to `most` characters, or with a long one."""

    def stream(rng: random.Random, texts: Texts) -> Iterator[PromptText]:
        passages = texts.passages()
        indices = range(len(passages))
        for index in _shuffled(rng, indices):
            passage = passages[index]
            text = passage.sentences(rng.randint(most // 4, most))
            if rng.random() < texts.long:
                text = _long_text(passages[index:], rng.randint(*_LONG_TEXT))
            prompt = rng.choice(tasks).format(text=text, title=passage.title)
            yield PromptText(prompt, passage.source, passage.licence)

    return stream


def _long_text(passages: Sequence[Passage], most: int) -> str:
    """The first passages, which are mostly of one subject, up to so many characters."""
    lengths = itertools.accumulate(len(passage.text) for passage in passages)
    fitting = sum(1 for _ in itertools.takewhile(lambda length: length <= most, lengths))
    return "\n\n".join(passage.text for passage in passages[: max(fitting, 1)])


def _technical(rng: random.Random, texts: Texts) -> Iterator[PromptText]:
    return _given_text(_TECHNICAL, 800)(rng, replace(texts, wikipedia=False))


def _grounded(rng: random.Random, texts: Texts) -> Iterator[PromptText]:
    passages = texts.passages()
    for one in _shuffled(rng, passages):
        long = rng.random() < texts.long
        shown = [one, *rng.sample(passages, rng.randint(3, 6) if long else rng.randint(0, 2))]
        rng.shuffle(shown)
        lines = [f"[{number}] {p.sentences(600)}" for number, p in enumerate(shown, start=1)]
        prompt = rng.choice(_GROUNDED).format(passages="\n\n".join(lines), title=one.title)
        yield PromptText(prompt, one.source, one.licence)


def _questions(rng: random.Random, texts: Texts) -> Iterator[PromptText]:
    passages = texts.passages()
    for one in _shuffled(rng, passages):
        if rng.random() < 0.3:
            yield PromptText(templates.fill(rng.choice(templates.QUESTIONS), rng), *_OWN)
            continue
        prompt = rng.choice(_ABOUT).format(title=one.title, second=rng.choice(passages).title)
        yield PromptText(prompt, one.source, one.licence)


def _translation(rng: random.Random, texts: Texts) -> Iterator[PromptText]:
    english = _shuffled(rng, texts.passages())
    foreign = {}
    if texts.wikipedia:
        foreign = {name: _shuffled(rng, leads(name)) for name in ("French", "Spanish")}
    while True:
        if foreign and rng.random() < 0.6:
            name = rng.choice(sorted(foreign))
            one, into = next(foreign[name]), "English"
            head = rng.choice((f"Translate {name} to English:", "Translate into English:"))
        else:
            one, into = next(english), rng.choice(_INTO)
            head = rng.choice((f"Translate English to {into}:", f"Translate to {into}:"))
        if rng.random() < 0.2:
            head = f"Translate the following text to {into}, sentence by sentence:\n\n"
        separator = "" if head.endswith("\n") else " "
        text = one.sentences(rng.randint(60, 400))
        yield PromptText(f"{head}{separator}{text}", one.source, one.licence)


def _filled(lines: Sequence[str]) -> Stream:
    def stream(rng: random.Random, texts: Texts) -> Iterator[PromptText]:
        while True:
            yield PromptText(templates.fill(rng.choice(lines), rng), *_OWN)

    return stream


def _shuffled(rng: random.Random, items: Sequence[Item]) -> Iterator[Item]:
    """All of them in a random order, and again in another one."""
    order = list(items)
    while True:
        rng.shuffle(order)
        yield from order


CATEGORIES: dict[str, Stream] = {
    "coding": _coding,
    "technical": _technical,
    "qa": _questions,
    "rag": _grounded,
    "summarization": _given_text(_SUMMARIZE, 1200),
    "extraction": _given_text(_EXTRACT, 900),
    "math_reasoning": _filled(templates.MATH),
    "translation": _translation,
    "dialogue": _filled(templates.DIALOGUE),
    "writing": _filled(templates.WRITING),
}
