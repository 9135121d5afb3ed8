"""Requests: prompts in all their forms, with how tokens are sampled and when to stop."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, TypeVar

import numpy as np
from jaxtyping import Array, Key

from specjax.errors import InputError, one_line, shown
from specjax.fields import (
    INT32_MAX,
    Choice,
    Items,
    Number,
    Text,
    Unchecked,
    Whole,
    check_instance,
    optional,
    unknown_name,
    with_meanings,
)
from specjax.files.json_files import parse_json
from specjax.grammars.json_schema import schema_pattern
from specjax.grammars.regular_expressions import parsed_expression
from specjax.loading.model import Model
from specjax.sampling import row_key, sample_key

Item = TypeVar("Item")
CHAT = Choice(("auto", "true", "false"))
"""Whether prompts go through the chat template; "auto" means if the tokenizer has one."""
_TOKEN_IDS = Items(
    Whole(-INT32_MAX), remedy="use text, token ids, or messages with role and content"
)
Prompt = str | Sequence[int] | np.ndarray | Sequence[Mapping[str, Any]]
"""Raw text, token ids, or a conversation for the chat template."""
Prompts = Sequence[Prompt] | Prompt
"""A list of prompts, a single prompt, or an array of token ids: one prompt, or one per row."""

SEED = Whole(0, 2**32 - 1)
"""The range of seeds, from which keys are made."""
# Outside this range float32 overflows, or cannot be divided by.
TEMPERATURE = Number(
    1e-30, 1e30, zero=True, remedy="use 0 for greedy decoding, or a number from 1e-30 to 1e30"
)
TOP_K = Whole(remedy="use 0 for off, or k >= 1 that fits 32 bits")
TOP_P = Number(1e-30, 1.0, remedy="use 1 for off, or a number in (0, 1]")
MIN_P = Number(0.0, 1.0, remedy="use 0 for off, or a number in [0, 1]")
PENALTY = Number(-2.0, 2.0, remedy="use 0 for off, or a number from -2 to 2")
REPETITION_PENALTY = Number(
    0.01, 100.0, remedy="use 1 for off, or a number from 0.01 to 100, above 1 against repetition"
)
_BIAS = Number(-100.0, 100.0, remedy="use a bias from -100 to 100; banned_token_ids bans tokens")


@dataclass(frozen=True)
class TokenBiases:
    """The field type of biases by token, as a dict or as pairs (token, bias)."""

    remedy = "use a dict of token ids and biases, such as {42: -5.0}"

    def check(self, name: str, value: Any) -> tuple[tuple[int, float], ...]:
        """Return `value` as pairs in the order of their tokens; ids may be texts, as in JSON.

        Raises InputError, which names the field `name`, for any other value, and for a token with
        two biases.
        """
        pairs = list(value.items()) if isinstance(value, Mapping) else value
        Items(Items(Unchecked(), length=2), remedy=self.remedy).check(name, pairs)
        checked: dict[int, float] = {}
        for token, bias in pairs:
            if isinstance(token, str) and token.isdecimal() and len(token) < 10:
                token = int(token)
            token = Whole(remedy=self.remedy).check(name, token)
            if token in checked:
                raise InputError(f"{name}: token {token} has two biases; give it one")
            checked[token] = _BIAS.check(f"{name}[{token}]", bias)
        return tuple(sorted(checked.items()))


@dataclass(frozen=True)
class JsonSchema:
    """The field type of JSON schemas, as their text or as the values that it stands for."""

    def check(self, name: str, value: Any) -> str:
        """Return a schema as its text. Raises InputError, which names the field `name`."""
        remedy = "use a JSON schema, as an object or its text"
        if isinstance(value, str):
            value = parse_json(value, name, remedy)
        if not isinstance(value, Mapping | bool):
            raise InputError(f"{name}={shown(value)}: {remedy}")
        try:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(f"{name}: {one_line(error):.160}; {remedy}") from None
        schema_expression(text, name)
        return text


@functools.lru_cache(maxsize=64)
def schema_expression(text: str, name: str) -> str:
    """Return the regular expression of a JSON schema's values; errors call the schema `name`."""
    return schema_pattern(parse_json(text, name), name)


@dataclass(frozen=True)
class Expression:
    """The field type of regular expressions."""

    def check(self, name: str, value: Any) -> str:
        """Return `value` if it is the text of one. Raises InputError, which names `name`."""
        Text().check(name, value)
        parsed_expression(value, f"{name}={shown(value, 80)}")
        return value


_STOP = Items(Text(blank=True), remedy="use strings that are not empty")
_CHOICE = Items(Text(blank=True), remedy="use texts that are not empty")
_TOKENS = Items(Whole(), remedy="use token ids, whole numbers of at least 0")

GRAMMARS = ("regex", "json_schema", "choice")
"""The fields that say which outputs there may be, of which a request has at most one."""
_LISTS = (
    "stop_token_ids",
    "logit_bias",
    "banned_token_ids",
    "forced_token_ids",
)
"""The fields for which None is the same as an empty list."""


@with_meanings
@dataclass(frozen=True)
class SamplingParams:
    """The sampling parameters of one request, named as in vLLM except `max_new_tokens`.

    Biases, penalties and constraints change the logits (docs/processors.md); then temperature,
    top_k, top_p and min_p apply in this order. The output ends at an end-of-sequence
    token of the model, unless `ignore_eos`, at one of `stop_token_ids`, before one of the `stop`
    strings, or after `max_new_tokens`. docs/support.md compares with vLLM. Raises InputError for
    values out of range.
    """

    temperature: Annotated[float, TEMPERATURE] = 0.0
    """What logits are divided by before a token is drawn; 0 is greedy decoding."""
    top_k: Annotated[int, TOP_K] = 0
    """The number of likeliest tokens among which a token is drawn; 0 is off."""
    top_p: Annotated[float, TOP_P] = 1.0
    """A token is drawn among the likeliest that together have this probability; 1 is off."""
    min_p: Annotated[float, MIN_P] = 0.0
    """A token is drawn among those that have this share of the likeliest one's probability."""
    max_new_tokens: Annotated[int, Whole(1)] = 128
    """The most tokens of the output."""
    stop: Annotated[str | Sequence[str] | None, _STOP] = ()
    """Strings before which the output ends; they may contain special tokens."""
    stop_token_ids: Annotated[Sequence[int] | None, _TOKENS] = ()
    """Tokens at which the output ends, beside those of the model."""
    seed: Annotated[int, SEED] | None = None
    """The seed of the request's own key; by default its key derives from its number."""
    logprobs: bool = False
    """Whether to return each token's log-probability; see `DecodeOptions.logprobs_mode`."""
    ignore_eos: bool = False
    """Whether the output continues after an end-of-sequence token of the model."""
    presence_penalty: Annotated[float, PENALTY] = 0.0
    """What is subtracted from the logits of tokens that the output has."""
    frequency_penalty: Annotated[float, PENALTY] = 0.0
    """What is subtracted from a token's logit for each time that the output has it."""
    repetition_penalty: Annotated[float, REPETITION_PENALTY] = 1.0
    """What the logits of tokens that prompt or output have are divided by, or multiplied by if they
    are negative; 1 is off.
    """
    logit_bias: Annotated[
        Mapping[int | str, float] | Sequence[Sequence[float]] | None, TokenBiases()
    ] = ()
    """Numbers from -100 to 100 that are added to the logits of tokens, by token id."""
    banned_token_ids: Annotated[Sequence[int] | None, _TOKENS] = ()
    """Tokens that the output does not have."""
    allowed_token_ids: Annotated[Sequence[int] | None, optional(_TOKENS)] = None
    """The only tokens that the output may have; by default all."""
    min_tokens: Annotated[int, Whole(0)] = 0
    """The least tokens of the output before a token may end it; stop strings may end it earlier."""
    no_repeat_ngram_size: Annotated[int, Whole(0, 256)] = 0
    """The size of n-grams that prompt and output together never have twice; 0 is off."""
    forced_token_ids: Annotated[Sequence[int] | None, _TOKENS] = ()
    """Tokens with which the output begins, whatever other parameters say."""
    regex: Annotated[str | None, optional(Expression())] = None
    """A regular expression that the whole output matches."""
    json_schema: Annotated[Mapping[str, Any] | str | bool | None, optional(JsonSchema())] = None
    """A JSON schema of which the output is a value."""
    choice: Annotated[Sequence[str] | None, optional(_CHOICE)] = None
    """Texts of which the output is one."""
    grammar_after: Annotated[str, Text(empty=True, blank=True)] = ""
    """The text after which `regex`, `json_schema` or `choice` begins, such as </think>."""

    def __post_init__(self) -> None:
        if isinstance(self.stop, str | None):
            object.__setattr__(self, "stop", (self.stop,) if self.stop is not None else ())
        for name in _LISTS:
            if getattr(self, name) is None:
                object.__setattr__(self, name, ())
        check_instance(self, "sampling.")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InputError(
                "sampling.allowed_token_ids=[]: no token is allowed; name some, or leave it out"
            )
        if len(self.forced_token_ids) > self.max_new_tokens:
            raise InputError(
                f"sampling.forced_token_ids: {len(self.forced_token_ids)} tokens exceed "
                f"max_new_tokens={self.max_new_tokens}; raise that, or force fewer"
            )
        if self.min_tokens > self.max_new_tokens:
            raise InputError(
                f"sampling.min_tokens={self.min_tokens} exceeds "
                f"max_new_tokens={self.max_new_tokens}; lower it"
            )

        asked = [name for name in GRAMMARS if getattr(self, name) is not None]
        if len(asked) > 1:
            raise InputError(
                f"sampling.{asked[1]}: sampling.{asked[0]} says already what outputs there are; "
                "leave one of the two out"
            )
        if self.choice is not None and not self.choice:
            raise InputError("sampling.choice=[]: no output is allowed; name some, or leave it out")
        if self.grammar_after and not asked:
            raise InputError(
                f"sampling.grammar_after={shown(self.grammar_after)}: nothing begins after it; "
                "give sampling.regex, json_schema or choice"
            )

    @property
    def grammar(self) -> str | None:
        """The name of the field that says which outputs there may be, if one does."""
        return next((name for name in GRAMMARS if getattr(self, name) is not None), None)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Return the parameters in a dict of fields. Raises InputError for an unknown name."""
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                raise InputError(
                    unknown_name("sampling.", name, values[name], dict.fromkeys(known))
                )
        return cls(**values)


def one_per_prompt(
    sampling: SamplingParams | Mapping[str, Any] | Sequence[SamplingParams | Mapping[str, Any]],
    count: int,
) -> list[SamplingParams]:
    """Return the parameters of each of `count` prompts, from one entry for all or one per prompt.

    Raises InputError if `sampling` is neither, or has another number of entries.
    """
    if isinstance(sampling, SamplingParams | Mapping):
        sampling = [sampling] * count
    if not isinstance(sampling, Sequence) or isinstance(sampling, str | bytes):
        raise InputError(
            f"sampling={shown(sampling)}: use SamplingParams, a dict of its fields, or one of "
            "these for each prompt"
        )
    if len(sampling) != count:
        raise InputError(
            f"sampling has {len(sampling)} entries for {count} prompts: pass one, or one per prompt"
        )
    requests = []
    for at, entry in enumerate(sampling):
        if isinstance(entry, Mapping):
            entry = SamplingParams.of(entry)
        if not isinstance(entry, SamplingParams):
            raise InputError(
                f"sampling[{at}]={shown(entry)}: use SamplingParams, or a dict of its fields"
            )
        requests.append(entry)
    return requests


def as_prompts(prompts: Prompts) -> Sequence[Prompt]:
    """Return a list of prompts; a single string, conversation or list of token ids is wrapped.

    Raises InputError if there is no prompt.
    """
    dimensions = getattr(prompts, "ndim", None)
    if isinstance(prompts, str) or dimensions == 1:
        return [prompts]
    if dimensions == 2:
        prompts = list(prompts)
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise InputError(f"prompts={shown(prompts)}: give a prompt, or a list of prompts")
    if not len(prompts):
        raise InputError("prompts is empty: give at least one")
    is_one = all(isinstance(entry, Mapping) for entry in prompts) or all(
        isinstance(entry, int | np.integer) and not isinstance(entry, bool) for entry in prompts
    )
    return [prompts] if is_one else prompts


def encode_prompt(model: Model, prompt: Prompt, name: str = "prompt") -> list[int]:
    """Return the token ids of a prompt; errors call it `name`.

    Raises InputError for an empty prompt, ids outside the vocabulary, or a missing tokenizer.
    """
    messages = isinstance(prompt, Sequence) and len(prompt) and isinstance(prompt[0], Mapping)
    if isinstance(prompt, str | Mapping) or messages:
        if model.tokenizer is None:
            raise InputError(f"{name}: {model.name} has no tokenizer; give token ids")
        encode = model.tokenizer.encode if isinstance(prompt, str) else model.tokenizer.encode_chat
        try:
            ids = encode(prompt)
        except InputError as error:
            raise InputError(f"{name}: {error}") from None
    else:
        ids = list(_TOKEN_IDS.check(name, prompt))
    if not ids:
        raise InputError(f"{name} is empty: give at least one token")
    size = model.config.vocab_size
    for token in (min(ids), max(ids)):
        if not 0 <= token < size:
            known = model.tokenizer and model.tokenizer.name_beyond(token)
            called = f" ({known!r:.60}, which has no row in the model's embedding)" if known else ""
            raise InputError(
                f"{name}: token id {shown(token)}{called} is outside the vocabulary of {size} "
                "tokens; leave it out"
            )
    if unused := set(model.config.unused_tokens).intersection(ids):
        raise InputError(
            f"{name}: token id {min(unused)} names no token of the tokenizer; leave it out"
        )
    return ids


def stop_ids(model: Model, sampling: SamplingParams) -> tuple[int, ...]:
    """Return the ids of the tokens that end a request's output."""
    end_ids = () if sampling.ignore_eos else model.ends
    return tuple(dict.fromkeys((*end_ids, *sampling.stop_token_ids)))


def groups(items: Sequence[Item], size: int) -> list[Sequence[Item]]:
    """Return items, such as requests, in their order, in groups of `size`; the last may be less."""
    return [items[first : first + size] for first in range(0, len(items), size)]


@dataclass(frozen=True)
class Request:
    """A prompt's token ids and its sampling parameters, for one row of a batch.

    `number` is that of the request, such as the index of its prompt in the input, and `sample` that
    of the sample in it. A row that was put back and resumes has `emitted` tokens already, in
    `rounds` rounds.
    """

    number: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    sample: int = 0
    emitted: tuple[int, ...] = ()
    rounds: int = 0

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens from which the row starts: the prompt, and what it has emitted."""
        return self.prompt + self.emitted

    def key(self, seed: int) -> Key[Array, ""]:
        """Return the key from which all draws of the row derive, in a call with this `seed`."""
        key = row_key(seed, self.number, self.sampling.seed, self.prompt)
        return sample_key(key, self.sample)
