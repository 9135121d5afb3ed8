"""Prompts that need no text from elsewhere: sums, dialogues, writing, questions, coding tasks."""

from __future__ import annotations

import random
import re
from collections.abc import Callable


def _words(text: str) -> tuple[str, ...]:
    return tuple(" ".join(word.split()) for word in text.split(","))


_NAMES = _words(
    """
    Amina, Bruno, Chen, Dalia, Emeka, Farid, Greta, Hana, Ines, Jonas, Kofi, Lena, Mateo, Nadia,
    Omar, Priya, Quentin, Rosa, Sven, Tariq, Uma, Viktor, Wanda, Yusuf, Zoe
    """
)
_THINGS = _words(
    """
    apples, books, pencils, tickets, marbles, stamps, candles, bricks, plants, shirts, cups,
    stickers, bottles, loaves of bread, postcards, batteries, tiles, cookies, chairs, notebooks
    """
)
_PLACES = _words(
    """
    school, the library, a bakery, a workshop, the market, a garden centre, an office, the
    museum, a farm, the harbour, a hospital, a small hotel
    """
)
_ROLES = _words(
    """
    a ship's captain, a patient teacher, a detective, a weather forecaster, a retired boxer, a
    medieval blacksmith, a robot that learns to cook, a travel agent, a strict editor, a
    lighthouse keeper, a sports commentator, an astronaut, a museum guide, a nervous inventor, a
    village doctor, a chess coach, a tired dragon, a polite ghost, a market trader, a beekeeper
    """
)
_PEOPLE = _words(
    """
    a child, a beginner, a friend, a customer, a new colleague, a journalist, your neighbour, a
    sceptical scientist, an old rival, a group of tourists, a student before an exam
    """
)
_TOPICS = _words(
    """
    solar energy, sleep, chess, the French Revolution, volcanoes, compound interest, honey bees,
    black holes, bread baking, public transport, vaccines, the printing press, tides, inflation,
    machine learning, the Silk Road, coral reefs, photography, gravity, recycling, earthquakes,
    democracy, jazz, antibiotics, the water cycle, bicycles, encryption, migratory birds,
    glaciers, the stock market, rainbows, trade unions, magnetism, memory, nuclear power,
    poetry, satellites, fermentation, evolution, cities in summer, remote work, saving money,
    public speaking, gardening, running, healthy breakfasts, learning a language, time
    management, board games, knitting
    """
)
_FORMS = _words(
    """
    a short story, a poem, a letter, a product description, an e-mail, a news report, a speech,
    a blog post, a list of tips, a film review, a diary entry, an advertisement, a fable, a
    recipe, a lesson plan, a press release
    """
)
_MOODS = _words(
    """
    cheerful, formal, dry, dramatic, gentle, funny, serious, hopeful, mysterious, plain
    """
)
_EVENTS = _words(
    """
    a lost suitcase, a power cut, the first snow, a surprise visit, a broken bridge, an old
    photograph, a job interview, a missed train, a village festival, a strange letter, a rescued
    dog, moving to another city, a long voyage, an unusual neighbour, a forgotten birthday
    """
)
_LANGUAGES = _words(
    """
    Python, Python, Python, Python, JavaScript, Java, C++, Go, SQL, Rust, bash
    """
)
_TASKS = _words(
    """
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
    records by two keys
    """
)

_WORDS = {
    "name": _NAMES,
    "other": _NAMES,
    "thing": _THINGS,
    "place": _PLACES,
    "role": _ROLES,
    "person": _PEOPLE,
    "topic": _TOPICS,
    "second": _TOPICS,
    "form": _FORMS,
    "mood": _MOODS,
    "event": _EVENTS,
    "language": _LANGUAGES,
    "task": _TASKS,
}
_NUMBERS: dict[str, Callable[[random.Random], int]] = {
    "few": lambda rng: rng.randint(2, 9),
    "some": lambda rng: rng.randint(11, 48),
    "many": lambda rng: 10 * rng.randint(6, 60),
    "tens": lambda rng: 10 * rng.randint(1, 9),
    "percent": lambda rng: 5 * rng.randint(1, 15),
}


def _lines(text: str) -> tuple[str, ...]:
    """One template a line; a backslash and an n stand for a line's end."""
    return tuple(line.replace("\\n", "\n") for line in text.strip().splitlines())


MATH = _lines(r"""
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
""")  # noqa: E501
DIALOGUE = _lines(r"""
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
""")  # noqa: E501
WRITING = _lines(r"""
Write {form} about {event} in a {mood} tone.
Write {form} for {person} about {topic}. Keep it {mood}.
Write the opening paragraph of {form} that begins at {place} with {event}.
Compose {form} in which {role} discovers {topic}.
Rewrite this sentence in three ways, one {mood}, one formal, one very short: "{name} forgot the {thing} at {place} because of {event}."
Give me {few1} titles for {form} about {topic} and {second}.
Describe {place} on the day of {event}, as {role} would.
Write an outline with headings for {form} about {topic}.
""")  # noqa: E501
QUESTIONS = _lines(r"""
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
""")  # noqa: E501
CODING = _lines(r"""
Write a {language} function that {task}.
Write a {language} function that {task}. Explain how it works and what it costs.
Write a {language} program that {task}, with a few tests.
I am new to {language}. How would I write something that {task}? Show the code step by step.
Show two ways in {language} to write a function that {task}, and compare them.
Write a {language} class with a method that {task} and another that {task2}.
""")


def fill(template: str, rng: random.Random) -> str:
    """A template with its words and numbers drawn; no word is drawn twice."""
    drawn: dict[str, str] = {}
    for field, kind in re.findall(r"(\{([a-z]+)\d*\})", template):
        if field in drawn:
            continue
        if kind in _NUMBERS:
            drawn[field] = str(_NUMBERS[kind](rng))
        else:
            used = set(drawn.values())
            drawn[field] = rng.choice([word for word in _WORDS[kind] if word not in used])
    whole = re.sub(r"\{[a-z]+\d*\}", lambda match: drawn[match[0]], template)
    return whole[0].upper() + whole[1:]
