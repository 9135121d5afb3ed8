"""Responses of OpenAI's completions API, as a whole or as chunks of a stream."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from specjax import metrics
from specjax.apps.command_line.console import Marker
from specjax.apps.serve.requests import Completion, RequestError
from specjax.engine.outputs import ABORTED, NO_TOKEN_LEFT, Delta, Output
from specjax.loading.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True)
class ResponseWriter:
    """A writer of the response to one request, in which the model is called `model`.

    Tokens have no text, and are left out of log-probabilities, if the model has no `tokenizer`.
    `drafters` are the names of the engine's drafters, and `max_length` is its maximum number of
    tokens of a prompt and its output.
    """

    request: Completion
    model: str
    tokenizer: Tokenizer | None
    drafters: Sequence[str]
    max_length: int
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def stream(self) -> bool:
        """Whether the response is a stream of events."""
        return self.request.stream

    async def whole(self, reply: AsyncIterable[tuple[int, Delta]]) -> dict[str, Any]:
        """Return the response once all samples have ended. Raises RequestError for failed ones."""
        outputs: dict[int, Output] = {}
        async for prompt, delta in reply:
            if delta.output is not None:
                _check(delta.output)
                outputs[self._index(prompt, delta)] = delta.output
        choices = []
        for index, output in sorted(outputs.items()):
            whole = Delta(
                output.id, output.sample, output.token_ids, output.drafter_of_tokens(), output.text
            )
            content: dict[str, Any] = {"text": output.text}
            if self.request.chat:
                content = {"message": {"role": "assistant", "content": output.text}}
            choices.append(
                {
                    "index": index,
                    **content,
                    "logprobs": self._logprobs(output.token_ids, output.logprobs),
                    "finish_reason": output.finish_reason,
                    "specjax": {
                        **self._tokens(whole, Marker(self.tokenizer)),
                        **_figures(output),
                        "warning": self._warning(index // self.request.n, output),
                    },
                }
            )
        kind = "chat.completion" if self.request.chat else "text_completion"
        completion = sum(len(output.token_ids) for output in outputs.values())
        return {**self._head(kind), "choices": choices, "usage": self._usage(completion)}

    async def events(self, reply: AsyncIterable[tuple[int, Delta]]) -> AsyncIterator[bytes]:
        """Yield the server-sent events of the response; a failure is the last of them."""
        completion, markers = 0, {}
        try:
            async for prompt, delta in reply:
                if delta.output is not None:
                    _check(delta.output)
                completion += len(delta.token_ids)
                index = self._index(prompt, delta)
                first = index not in markers
                marker = markers.setdefault(index, Marker(self.tokenizer))
                choice = self._delta_choice(index, delta, first=first)
                choice["specjax"] = self._tokens(delta, marker)
                if delta.output is not None:
                    choice["specjax"] |= _figures(delta.output)
                    choice["specjax"]["warning"] = self._warning(prompt, delta.output)
                yield self._event([choice])
        except RequestError as error:
            yield _event(error.body())
        else:
            if self.request.include_usage:
                yield self._event([], self._usage(completion))
        yield b"data: [DONE]\n\n"

    def _warning(self, prompt: int, output: Output) -> str | None:
        """Return why a sample of a prompt ended before `max_tokens`, if it is for lack of room."""
        count, most = len(self.request.prompts[prompt]), self.request.sampling.max_new_tokens
        room = self.max_length - count
        if output.finish_reason != "length" or room >= most:
            return None
        return (
            f"max_tokens={most}: the prompt has {count} tokens, which leaves room for {room} in "
            f"max_length={self.max_length}, the most tokens of a prompt and its answer here"
        )

    def _index(self, prompt: int, delta: Delta) -> int:
        return prompt * self.request.n + delta.sample

    def _delta_choice(self, index: int, delta: Delta, *, first: bool) -> dict[str, Any]:
        content: dict[str, Any] = {"text": delta.text}
        if self.request.chat:
            role = {"role": "assistant"} if first else {}
            content = {"delta": {**role, "content": delta.text}}
        return {
            "index": index,
            **content,
            "logprobs": self._logprobs(delta.token_ids, delta.logprobs),
            "finish_reason": delta.finish_reason,
        }

    def _event(
        self, choices: Sequence[dict[str, Any]], usage: dict[str, Any] | None = None
    ) -> bytes:
        kind = "chat.completion.chunk" if self.request.chat else "text_completion"
        # As in OpenAI's API, every chunk has the field where the last one has its value.
        with_usage = {"usage": usage} if self.request.include_usage else {}
        return _event({**self._head(kind), "choices": choices, **with_usage})

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _usage(self, completion: int) -> dict[str, int]:
        prompt = sum(map(len, self.request.prompts))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    def _logprobs(
        self, tokens: Sequence[int], logprobs: Sequence[float] | None
    ) -> dict[str, Any] | None:
        if not self.request.logprobs or logprobs is None:
            return None
        texts = [self._token_bytes(token) for token in tokens]
        shown = [text.decode(errors="replace") for text in texts]
        if not self.request.chat:
            return {"tokens": shown, "token_logprobs": list(logprobs), "top_logprobs": None}
        return {
            "content": [
                {"token": name, "logprob": logprob, "bytes": list(text), "top_logprobs": []}
                for name, logprob, text in zip(shown, logprobs, texts, strict=True)
            ]
        }

    def _tokens(self, delta: Delta, marker: Marker) -> dict[str, Any]:
        """The tokens of a delta, and the pieces of its text, each with the name of its drafter."""
        names = dict(enumerate(self.drafters))
        return {
            "token_ids": delta.token_ids,
            "drafted": delta.drafted,
            "drafter": [names.get(index) for index in delta.drafter],
            "pieces": [[text, names.get(index)] for text, index in marker.mark(delta)],
        }

    def _token_bytes(self, token: int) -> bytes:
        """Return the UTF-8 of a token within a text, or of its id without a tokenizer."""
        if self.tokenizer is None:
            return str(token).encode()
        return self.tokenizer.detokenizer.piece(token, token) or b""


def _figures(output: Output) -> dict[str, Any]:
    """Return a sample's acceptance and its times in seconds (`Times`), JSON-ready.

    It has vLLM's counts, the figures of `specjax.metrics`, and the counts of each round.
    """
    rounds = output.rounds
    drafted, accepted, emitted = (
        counts[None] for counts in (rounds.drafted, rounds.accepted, rounds.emitted)
    )
    return {
        "num_drafts": metrics.num_drafts(drafted),
        "num_draft_tokens": metrics.num_draft_tokens(drafted),
        "num_accepted_tokens": metrics.num_accepted_tokens(accepted),
        "acceptance_rate": metrics.acceptance_rate(drafted, accepted),
        "acceptance_length": metrics.acceptance_length(accepted),
        "rounds": {
            "drafted": drafted[0].tolist(),
            "accepted": accepted[0].tolist(),
            "emitted": emitted[0].tolist(),
        },
        "times": vars(output.times),
        "lossy": output.lossy,
    }


def _check(output: Output) -> None:
    """Raise RequestError for a sample that was aborted or has failed."""
    if output.finish_reason == ABORTED:
        raise RequestError(503, "the server is shutting down: send the request again later")
    if output.error is not None:
        # What a request itself rules out is no failure of the server.
        raise RequestError(400 if output.text_error == NO_TOKEN_LEFT else 500, output.error)


def _event(value: dict[str, Any]) -> bytes:
    """Return a server-sent event whose data is `value` as JSON."""
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"
