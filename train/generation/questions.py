"""Questions that a chat model asks itself, as prompts for it to answer (Magpie, 2406.08464).

Given its chat template up to where the user's text begins, the model writes what a user might ask.
Degenerate questions are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from specjax.engine.requests import TEMPERATURE
from specjax.errors import InputError
from specjax.fields import Whole
from specjax.loading.model import Model
from specjax.loading.tokenizers.tokenizer import Tokenizer
from train.data.responses import Numbering, held_out_groups
from train.generation.prompts import Request

NAME = "target_questions"
"""The name of the target's own questions in `prompts`; the section `questions` describes them."""
_NGRAM, _MOST_REPEATED = 4, 0.3
"""The length of n-grams in tokens, and the largest fraction of them that may repeat earlier ones.
"""
_OPENING = 40
"""The number of letters and digits in which questions that begin alike agree."""


@dataclass(frozen=True)
class QuestionsSection:
    """The options of questions that the target asks itself."""

    num_asked: Annotated[int, Whole(1, 10_000_000)] = 16_000
    """The number of questions that the target writes; degenerate ones are left out."""
    temperature: Annotated[float, TEMPERATURE] = 1.0
    """The temperature at which it writes them."""
    min_tokens: Annotated[int, Whole(1)] = 5
    """The minimum length of a question in tokens; shorter ones are left out."""
    max_tokens: Annotated[int, Whole(2)] = 128
    """The number of tokens within which the target must end a question; others are left out."""


def check_lengths(min_tokens: int, max_tokens: int) -> None:
    """Raise InputError unless a question may be as long as it must be."""
    if min_tokens >= max_tokens:
        raise InputError(
            f"questions.min_tokens={min_tokens}: no such question ends within "
            f"questions.max_tokens={max_tokens}; lower it"
        )


@dataclass(frozen=True)
class Frame:
    """The tokens around a user's text in a conversation of one message.

    `ends` are the tokens at which the text ends.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    ends: tuple[int, ...]


def frame_of(model: Model, chat: str) -> Frame:
    """Return the tokens of a model's chat template around a question.

    `chat` is the config's. Raises InputError if the model has no template, or if chat="false", or
    if the template does not show where a question begins.
    """
    remedy = "use other prompts, such as specjax_corpus"
    if chat == "false":
        raise InputError(f"chat=false: {NAME} are asked by the chat template; use chat=auto")
    tokenizer = model.tokenizer
    if tokenizer is None or tokenizer.chat_template is None:
        raise InputError(f"prompts={NAME!r}: {model.name} has no chat template; {remedy}")
    try:
        before, after = tokenizer.encode_around_question()
    except InputError as error:
        raise InputError(f"prompts={NAME!r}: {error}; or {remedy}") from None
    # In some templates a user's turn ends with a token that ends no sequence.
    own = [index for index in after[:1] if index in tokenizer.detokenizer.special]
    return Frame(tuple(before), tuple(after), tuple(dict.fromkeys([*tokenizer.eos_ids, *own])))


def requests_of(
    written: Sequence[Sequence[int]],
    model: Model,
    frame: Frame,
    section: QuestionsSection,
    max_prompt_tokens: int,
) -> tuple[list[Request], dict[str, int]]:
    """Return the questions of use as requests, and the number of the others by reason.

    `written` are the tokens of each question, empty if it failed. Questions that begin alike are
    held out together or not at all (`held_out_groups`). Raises InputError if no question is of use.
    """
    assert model.tokenizer is not None, "frame_of checks that"
    room = max_prompt_tokens - len(frame.before) - len(frame.after)
    texts: dict[str, str] = {}
    left_out: Counter[str] = Counter()
    for tokens in written:
        text = model.tokenizer.decode(tokens).strip()
        plain = "".join(filter(str.isalnum, text.casefold()))
        reason = _problem(tokens, text, plain, model.tokenizer, frame, section, room)
        if reason is None and plain in texts:
            reason = "duplicate"
        if reason is None:
            texts[plain] = text
        else:
            left_out[reason] += 1
    if not texts:
        raise InputError(
            f"prompts={NAME!r}: {model.name} asked nothing of use ({listed(left_out)}); raise "
            "questions.num_asked or questions.max_tokens, or use other prompts"
        )
    held_out, numbering = held_out_groups(plain[:_OPENING] for plain in texts), Numbering()
    requests = [
        Request(
            numbering.next(plain[:_OPENING] in held_out),
            text,
            category="question",
            source=f"asked by {model.name}",
            group=plain[:_OPENING],
        )
        for plain, text in texts.items()
    ]
    return requests, dict(left_out)


def _problem(
    tokens: Sequence[int],
    text: str,
    plain: str,
    tokenizer: Tokenizer,
    frame: Frame,
    section: QuestionsSection,
    room: int,
) -> str | None:
    """Return why a question is left out, or None; `plain` are the letters and digits of its text.

    `room` is the maximum number of its tokens.
    """
    if not tokens:
        return "failed"
    *body, last = tokens
    if last not in frame.ends:
        return "not ended"
    if not plain:
        return "empty"
    if len(body) < section.min_tokens:
        return "too short"
    if len(body) > room:
        return "too long"
    special = tokenizer.detokenizer.special
    if not special.keys().isdisjoint(body) or any(name in text for name in special.values()):
        return "special tokens"
    if "\ufffd" in text:
        return "broken characters"
    return "repeats itself" if _repeats(body) else None


def _repeats(tokens: Sequence[int]) -> bool:
    """Return whether many n-grams of a text equal earlier ones, as where a model loops."""
    grams = [tuple(tokens[first : first + _NGRAM]) for first in range(len(tokens) - _NGRAM + 1)]
    return len(grams) - len(set(grams)) > _MOST_REPEATED * len(grams)


def degenerate_answers(
    answers: Mapping[int, Sequence[int]], ends: Collection[int]
) -> dict[int, str]:
    """Return why an answer to a question is of no use, by the number of each such question.

    `answers` are token ids by number, none of them where decoding failed; `ends` end a sequence.
    """
    problems: dict[int, str] = {}
    for number, tokens in answers.items():
        body = [token for token in tokens if token not in ends]
        if not tokens:
            problems[number] = "failed"
        elif not body:
            problems[number] = "empty"
        elif _repeats(body):
            problems[number] = "repeats itself"
    return problems


def listed(counts: Mapping[str, int]) -> str:
    """Return counts by reason as a text, the largest first."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count} {reason}" for reason, count in ordered)
