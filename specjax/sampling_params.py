"""What a request asks for: how tokens are sampled, and when to stop."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from specjax.errors import InputError


@dataclass(frozen=True)
class SamplingParams:
    """One request's sampling, with the names and meanings that vLLM uses.

    The law is warped by temperature, then top_k, top_p and min_p; temperature 0 is greedy. Output
    ends at an end-of-sequence token of the model (unless `ignore_eos`), at one of `stop_token_ids`,
    where the text contains one of the `stop` strings (which is cut off), or after `max_new_tokens`.
    `seed` gives the request a key of its own; `logprobs` returns each token's log-probability under
    the target's unwarped law. Raises InputError for values out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_new_tokens: int = 128
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    seed: int | None = None
    logprobs: bool = False
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        _require(
            _real(self.temperature) and 0 <= self.temperature < math.inf,
            self,
            "temperature",
            "use 0 for greedy decoding, or a positive number",
        )
        _require(_whole(self.top_k) and self.top_k >= 0, self, "top_k", "use 0 for off, or k >= 1")
        _require(
            _real(self.top_p) and 0 < self.top_p <= 1,
            self,
            "top_p",
            "use 1 for off, or a number in (0, 1]",
        )
        _require(
            _real(self.min_p) and 0 <= self.min_p <= 1,
            self,
            "min_p",
            "use 0 for off, or a number in [0, 1]",
        )
        _require(
            _whole(self.max_new_tokens) and self.max_new_tokens >= 1,
            self,
            "max_new_tokens",
            "use a whole number of at least 1",
        )
        _require(
            all(isinstance(s, str) and s for s in self.stop),
            self,
            "stop",
            "use strings that are not empty",
        )
        _require(
            all(_whole(t) and t >= 0 for t in self.stop_token_ids),
            self,
            "stop_token_ids",
            "use token ids, whole numbers of at least 0",
        )
        _require(
            self.seed is None or (_whole(self.seed) and 0 <= self.seed < 2**32),
            self,
            "seed",
            "use a whole number from 0 to 2**32 - 1",
        )

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> SamplingParams:
        """From named values. Raises InputError for a name that is not supported."""
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]}? " if near else ""
                raise InputError(
                    f"sampling.{name}={values[name]!r} is not supported: {hint}"
                    f"use {', '.join(known)}"
                )
        return cls(**values)


def one_a_prompt(
    sampling: SamplingParams | Mapping[str, Any] | Sequence[SamplingParams | Mapping[str, Any]],
    count: int,
) -> list[SamplingParams]:
    """The parameters of each of `count` prompts. Raises InputError if their number differs."""
    if isinstance(sampling, SamplingParams | Mapping):
        sampling = [sampling] * count
    if len(sampling) != count:
        raise InputError(
            f"sampling has {len(sampling)} entries for {count} prompts: pass one, or one a prompt"
        )
    return [s if isinstance(s, SamplingParams) else SamplingParams.of(s) for s in sampling]


def _real(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _require(holds: bool, params: SamplingParams, field: str, remedy: str) -> None:
    if not holds:
        raise InputError(f"sampling.{field}={getattr(params, field)!r}: {remedy}")
