"""Requests of OpenAI's completions API, read from HTTP bodies and checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from specjax.apps.serve.output_formats import FORMAT_FIELDS, sampling_fields
from specjax.engine.engine import Engine
from specjax.engine.plan import NoRoomError
from specjax.engine.requests import GRAMMARS, Prompt, SamplingParams
from specjax.errors import InputError, shown
from specjax.fields import Fields, Flag, Text, Whole, fields_of, unknown_name
from specjax.files.json_files import parse_json

_STOPS, _STOP_LENGTH = 16, 256
"""The most stop strings of a request, and their most characters: each token is searched for all."""

_OF_SAMPLING = {
    name: kind
    for name, kind in fields_of(SamplingParams).items()
    if name not in ("max_new_tokens", "logprobs")
}
"""The sampling fields of requests, named as in SamplingParams and vLLM."""
_SHARED: Fields = {
    **_OF_SAMPLING,
    "model": Text(),
    "n": Whole(1),
    "max_tokens": Whole(1),
    "stream": Flag(),
}
_ONLY_ONE_LOGPROB = "only that of the token itself is known"
_CHAT: Fields = {
    **_SHARED,
    "max_completion_tokens": Whole(1),
    "logprobs": Flag(),
    "top_logprobs": Whole(0, 0, remedy=f"use 0: {_ONLY_ONE_LOGPROB}"),
}
_TEXT: Fields = {
    **_SHARED,
    "logprobs": Whole(0, 0, remedy=f"use 0: {_ONLY_ONE_LOGPROB}"),
}
_WITHOUT_EFFECT = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "metadata": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "reasoning_effort": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}
"""Unsupported fields of OpenAI's and vLLM's APIs, with the values that have no effect."""
_IGNORED = ("user", "safety_identifier", "prompt_cache_key")
"""Fields that identify the user and are ignored."""


class RequestError(Exception):
    """A refused request: an HTTP status, a message, and the field and the error code if known."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        """Return the body of the response, with OpenAI's error object."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status, kind)
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }


@dataclass(frozen=True)
class Completion:
    """A checked request: `n` samples of each of the encoded `prompts`.

    `chat` says which of OpenAI's two APIs was called, `logprobs` whether log-probabilities are
    returned, `stream` whether the response is a stream of events, and `include_usage` whether its
    last event has the numbers of tokens.
    """

    chat: bool
    prompts: tuple[tuple[int, ...], ...]
    sampling: SamplingParams
    n: int
    logprobs: bool
    stream: bool
    include_usage: bool


@dataclass(frozen=True)
class RequestReader:
    """A reader of requests for an engine whose model is called `model_name`.

    `defaults` are the sampling parameters for fields that requests leave out; only if they have
    log-probabilities may requests ask for them. `capacity` is the maximum number of samples per
    request.
    """

    engine: Engine
    model_name: str
    defaults: SamplingParams
    capacity: int

    def read(self, body: bytes, *, chat: bool) -> Completion:
        """Return the checked request in a JSON body, of the chat or of the text API.

        May be called from any thread. Raises RequestError for an invalid body.
        """
        values = _read_object(body)
        field = "messages" if chat else "prompt"
        read_apart = (field, "stream_options", *FORMAT_FIELDS)
        given = _checked(values, _CHAT if chat else _TEXT, read_apart)
        format_field = next((name for name in FORMAT_FIELDS if name in values), None)
        with _refused(format_field):
            given |= sampling_fields(values)
        self.check_model(given.get("model", self.model_name))
        stream = given.get("stream", False)
        sampling, logprobs = self._sampling(given, format_field or "max_tokens", chat=chat)
        n = given.get("n", 1)
        if n > self.capacity:
            raise RequestError(400, f"n={n}: use at most {self.capacity}", "n")
        prompts = []
        for where, prompt in _prompts(values, field, self.capacity // n):
            with _refused(field):
                prompts.append(self.engine.encode(prompt, sampling, where))
        return Completion(
            chat=chat,
            prompts=tuple(prompts),
            sampling=sampling,
            n=n,
            logprobs=logprobs,
            stream=stream,
            include_usage=_include_usage(values, stream=stream),
        )

    def check_model(self, name: str) -> None:
        """Raise RequestError with status 404 unless `name` is the name of the served model."""
        if name != self.model_name:
            message = f"model={shown(name)} is not served here: use {self.model_name!r}"
            raise RequestError(404, message, "model", "model_not_found")

    def _sampling(
        self, given: Mapping[str, Any], field: str, *, chat: bool
    ) -> tuple[SamplingParams, bool]:
        """Return the sampling parameters, and whether log-probabilities are requested.

        Errors about parameters that contradict one another are about `field`.
        """
        changes = {name: given[name] for name in _OF_SAMPLING if name in given}
        for name in ("max_tokens", "max_completion_tokens"):
            if name in given:
                changes["max_new_tokens"] = given[name]
        logprobs = given.get("logprobs", False) if chat else "logprobs" in given
        if logprobs and not self.defaults.logprobs:
            raise RequestError(
                400,
                "logprobs: this server does not compute log-probabilities; leave it out, or start "
                "the server with --config.sampling.logprobs=true",
                "logprobs",
            )
        if "max_new_tokens" in changes and "min_tokens" not in changes:
            changes["min_tokens"] = min(self.defaults.min_tokens, changes["max_new_tokens"])
        if given.keys() & set(GRAMMARS):
            # A request's own grammar replaces that of the defaults.
            changes = dict.fromkeys(GRAMMARS) | changes
            if not any(changes[name] is not None for name in GRAMMARS):
                changes.setdefault("grammar_after", "")
        with _refused(field):
            return replace(self.defaults, **changes), logprobs


def _read_object(body: bytes) -> dict[str, Any]:
    """Return the fields of a JSON object that are not null. Raises RequestError."""
    with _refused(None):
        values = parse_json(body, "the body", "send a JSON object")
    if not isinstance(values, dict):
        raise RequestError(400, f"the body is {shown(values)}: send a JSON object")
    return {name: value for name, value in values.items() if value is not None}


def _checked(
    values: Mapping[str, Any], kinds: Fields, read_apart: tuple[str, ...]
) -> dict[str, Any]:
    """Return the values of the fields in `kinds`, checked.

    Fields in `read_apart` are read elsewhere. Raises RequestError, also for unsupported fields.
    """
    checked = {}
    for name, value in values.items():
        if name in kinds:
            value = [value] if name == "stop" and isinstance(value, str) else value
            with _refused(name):
                checked[name] = kinds[name].check(name, value)
        elif name in _WITHOUT_EFFECT:
            if not any(value == one for one in _WITHOUT_EFFECT[name]):
                message = f"{name}={shown(value)} is not supported: leave it out"
                raise RequestError(400, message, name)
        elif name not in (*read_apart, *_IGNORED):
            known = dict.fromkeys((*kinds, *read_apart))
            raise RequestError(400, unknown_name("", name, value, known), name)
    stops = checked.get("stop", ())
    if len(stops) > _STOPS or any(len(stop) > _STOP_LENGTH for stop in stops):
        message = f"stop: use at most {_STOPS} strings of at most {_STOP_LENGTH} characters"
        raise RequestError(400, message, "stop")
    return checked


@contextmanager
def _refused(field: str | None) -> Iterator[None]:
    """Turn an InputError in the context into a RequestError with status 400 about `field`."""
    try:
        yield
    except NoRoomError as error:
        raise RequestError(400, str(error), field, "context_length_exceeded") from None
    except InputError as error:
        raise RequestError(400, str(error), field) from None


def _prompts(values: Mapping[str, Any], field: str, most: int) -> list[tuple[str, Prompt]]:
    """Return the prompts of a request, at most `most`, each with its name in errors.

    `field` is the field that has them. Raises RequestError.
    """
    given = values.get(field)
    if given is None:
        raise RequestError(400, f"{field} is missing: give it a value", field)
    if field == "messages":
        if not isinstance(given, list) or not all(isinstance(one, dict) for one in given):
            message = f"messages={shown(given)}: use a list of objects with role and content"
            raise RequestError(400, message, field)
        return [(field, given)]
    if isinstance(given, str) or _is_token_ids(given):
        return [(field, given)]
    several = isinstance(given, list) and given
    if not several or not all(isinstance(one, str) or _is_token_ids(one) for one in given):
        message = f"prompt={shown(given)}: use a text, token ids, or a list of these"
        raise RequestError(400, message, field)
    if len(given) > most:
        message = f"prompt: {len(given)} prompts are too many for one request, use at most {most}"
        raise RequestError(400, message, field)
    return [(f"prompt[{index}]", one) for index, one in enumerate(given)]


def _is_token_ids(prompt: Any) -> bool:
    """Return whether a prompt is a non-empty list of token ids."""
    return isinstance(prompt, list) and bool(prompt) and all(isinstance(one, int) for one in prompt)


def _include_usage(values: Mapping[str, Any], *, stream: bool) -> bool:
    """Return whether a stream should end with the token counts. Raises RequestError."""
    options = values.get("stream_options")
    if options is None:
        return False
    known = {"include_usage": Flag()}
    if not stream or not isinstance(options, dict):
        message = f"stream_options={shown(options)}: use an object, with stream=true only"
        raise RequestError(400, message, "stream_options")
    for name, value in options.items():
        if name not in known:
            message = unknown_name("stream_options.", name, value, known)
            raise RequestError(400, message, "stream_options")
    with _refused("stream_options"):
        return Flag().check("stream_options.include_usage", options.get("include_usage", False))
