"""Options of decoding: rule, draft lengths, slots, seed, and length of steps."""

from __future__ import annotations

import difflib
import inspect
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal

from specjax import sampling
from specjax.controllers import Auto, ByBatch, Controller, Fixed
from specjax.core.processor import Processor
from specjax.drafters import DRAFT_TOKENS
from specjax.engine.processing import ProcessorField
from specjax.engine.requests import SEED, SamplingParams
from specjax.errors import InputError, shown
from specjax.fields import (
    INT32_MAX,
    Choice,
    Either,
    Flag,
    Instance,
    Items,
    Whole,
    check_instance,
    optional,
    with_meanings,
)

AUTO, FIXED = "auto", "fixed"
"""Draft lengths: the number of tokens that decodes fastest, or as many as the drafter proposes."""
_OWN_RULE = (
    "subclass specjax.sampling.UniformRule as a frozen dataclass with a method decide(self, "
    "tokens, num_valid, target, draft, uniforms) -> Decision, and pass an instance"
)
"""The instructions in error messages for users who write their own rule."""
RULE_NAME = Choice(tuple(sampling.RULES))
EXACT_RULE_NAME = Choice(tuple(name for name, rule in sampling.RULES.items() if rule.exact))


@dataclass(frozen=True)
class RuleField:
    """The field type of verification rules, which accepts a rule or its name."""

    remedy = f"use {', '.join(sampling.RULES)}"

    def check(self, name: str, value: Any) -> sampling.Rule:
        """Return `value` as a rule.

        Raises InputError, which names the field `name`, if it is neither a rule nor the name of
        one.
        """
        if isinstance(value, sampling.Rule):
            return value
        if callable(value):
            raise InputError(f"{name}={shown(value)}: a rule is a value; {_OWN_RULE}")
        return sampling.RULES[RULE_NAME.check(name, value)]


RULE = RuleField()


@dataclass(frozen=True)
class DraftLengthField:
    """The field type of draft lengths: "auto", "fixed", or a whole number, also as a text."""

    remedy = f'{DRAFT_TOKENS.remedy}, "fixed" or "auto"'

    def check(self, name: str, value: Any) -> int | str:
        """Return `value` as a number, "auto" or "fixed".

        Raises InputError, which names the field `name`, for any other value.
        """
        if isinstance(value, str) and value in (AUTO, FIXED):
            return value
        number = re.fullmatch(r"[+-]?\d{1,9}", value) if isinstance(value, str) else None
        try:
            return DRAFT_TOKENS.check(name, int(value) if number else value)
        except InputError:
            raise InputError(f"{name}={shown(value)}: {self.remedy}") from None


DRAFT_LENGTH = DraftLengthField()
BATCH_SIZE = Whole(1)
ROUNDS_PER_STEP = Whole(1, 10_000)
_SLOTS_PER_REFILL = 16
_PREFILL_BUDGET = 512
PAGE_SIZE = Either((Whole(64, 64), Whole(128, 128), Whole(256, 256)), remedy="use 64, 128 or 256")
"""The number of tokens of a page: kernels read blocks of 64 keys."""
NUM_PAGES = Whole(1, 1 << 24)
MAX_LENGTH = Whole(2, remedy="use 2 (a prompt and a new token) to the positions of the target")


@dataclass(frozen=True)
class ControllerField:
    """The field type of length controllers, which accepts an instance but not a class."""

    def check(self, name: str, value: Any) -> Controller:
        """Return `value` if it is a controller.

        Raises InputError, which names the field `name`, otherwise.
        """
        if isinstance(value, type) or not isinstance(value, Controller):
            raise InputError(
                f"{name}={shown(value)}: use a value of specjax.controllers, such as Auto() or "
                "Fixed(4), or of a frozen dataclass with init, choose and update"
            )
        return value


CONTROLLER = ControllerField()


@dataclass(frozen=True)
class LadderStep:
    """A step (low, high, k): at most k draft tokens while low to high rows are unfinished."""

    def check(self, name: str, value: Any) -> tuple[int, int, int]:
        """Return `value` as three numbers.

        Raises InputError, which names the field `name`, if it is no such step.
        """
        low, high, count = Items(Whole(), length=3).check(name, value)
        if not (1 <= low <= high and count <= DRAFT_TOKENS.most):
            raise InputError(
                f"{name}={shown(value)}: must be (low, high, k) with 1 <= low <= high and "
                f"0 <= k <= {DRAFT_TOKENS.most}"
            )
        return low, high, count


@dataclass(frozen=True)
class Ladder:
    """The field type of `num_speculative_tokens_per_batch_size`: steps with disjoint row ranges."""

    def check(self, name: str, value: Any) -> tuple[tuple[int, int, int], ...]:
        """Return `value`, a sequence of steps (low, high, k), as a tuple of tuples.

        Raises InputError, which names the field `name`, for any other value, and if the rows of two
        steps overlap.
        """
        remedy = "use steps of (low, high, k), such as ((1, 4, 8), (5, 16, 2))"
        Items(Instance(Sequence, remedy), remedy=remedy).check(name, value)
        steps = Items(LadderStep()).check(name, value)
        for (_, before, _), (low, *_) in itertools.pairwise(sorted(steps)):
            if low <= before:
                raise InputError(
                    f"{name}={shown(value)}: two steps hold for {low} rows; let them not overlap"
                )
        return steps


@with_meanings
@dataclass(frozen=True)
class DecodeOptions:
    """The options of `generate`, `stream` and `Engine`.

    Raises InputError for values out of range, and for options that contradict one another.
    """

    num_speculative_tokens: Annotated[int | str, DRAFT_LENGTH] = FIXED
    """The longest draft (K): "fixed" is the drafter's own K, and "auto" up to that K, the number
    that is fastest according to measured times and acceptance (`specjax.controllers.Auto`).
    """
    num_speculative_tokens_per_batch_size: Annotated[Sequence[tuple[int, int, int]], Ladder()] = ()
    """The longest draft by the number of unfinished rows, as steps (low, high, k)."""
    verify: Annotated[str | sampling.Rule, RULE] = "rejection"
    """The rule that accepts draft tokens: "rejection", "block", "coupled" (the output depends on
    seed and prompt only, never on the drafter), "typical" (lossy), or a `sampling.Rule`, such as
    `Typical(epsilon, delta)` or your own.
    """
    batch_size: Annotated[int, BATCH_SIZE] = 8
    """The number of rows that decode together; others wait for a slot."""
    max_length: Annotated[int | None, optional(MAX_LENGTH)] = None
    """The most tokens of a row's prompt plus output; by default the target's maximum number of
    positions, and at most 2048 in an engine.
    """
    controller: Controller | None = None
    """A controller of draft lengths, of `specjax.controllers` or your own;
    `Recorded(result.step_limits)` repeats the lengths of a run.
    """
    seed: Annotated[int, SEED] = 0
    """The seed from which the draws of a row derive, with the row's number and its own seed."""
    rounds_per_step: Annotated[int, ROUNDS_PER_STEP] = 16
    """The most rounds of a step, after which the host sees new tokens; 8 if a row has stop strings.
    """
    refill_rows: Annotated[int | None, optional(Whole(1))] = None
    """The number of rows that must finish to end a step while requests wait; by default a sixteenth
    of the slots.
    """
    max_prefill_tokens: Annotated[int | None, optional(Whole(1))] = None
    """The most prompt tokens that are read between two steps while rows decode, in whole chunks,
    but at least one smallest chunk. By default 512, and unlimited in `generate`, where latency of
    single tokens does not matter.
    """
    kv_page_size: Annotated[int | None, optional(PAGE_SIZE)] = None
    """The tokens of a page: 64, 128 or 256. All rows share the pages of a pool, and each holds
    those that its tokens fill, rather than a cache of `max_length` tokens.
    """
    num_kv_pages: Annotated[int | None, optional(NUM_PAGES)] = None
    """The size of the pool, by default as many pages as all rows can fill; on a mesh each device
    along `data` has an equal share, for its rows. Short of pages, requests wait, and the latest is
    put back and resumed later.
    """
    enable_prefix_caching: Annotated[bool, Flag()] = False
    """Whether requests share the full pages of equal beginnings, which are then read once."""
    processors: Sequence[Processor] = ()
    """Processors of your own, which change the logits of all rows, in this order, before those that
    sampling parameters ask for.
    """
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = "raw_logprobs"
    """Whether log-probabilities are the target's own, or those after processors and sampling
    parameters (but a temperature of 0), as in vLLM.
    """
    num_kept_states: Annotated[int | None, optional(Whole(1))] = None
    """The most beginnings after which the state of recurrent layers is kept, so that requests can
    share them, by default four per slot. It is kept at the end of a prompt's last full page, and
    every few pages before.
    """

    def __post_init__(self) -> None:
        check_instance(self, "")
        optional(CONTROLLER).check("controller", self.controller)
        processors = Items(ProcessorField()).check("processors", self.processors)
        object.__setattr__(self, "processors", processors)
        by_batch = self.num_speculative_tokens_per_batch_size
        if by_batch and self.num_speculative_tokens == AUTO:
            raise InputError(
                "num_speculative_tokens='auto': num_speculative_tokens_per_batch_size says how "
                'much to draft; use "fixed" or a number beside it'
            )
        most = self.fixed_draft_length
        if most is not None and any(count > most for _, _, count in by_batch):
            raise InputError(
                f"num_speculative_tokens_per_batch_size={shown(by_batch)}: a step drafts more than "
                f'num_speculative_tokens={most}; raise that, or use "fixed"'
            )
        if self.controller is not None and (by_batch or self.num_speculative_tokens == AUTO):
            raise InputError(
                f"controller={shown(self.controller)}: it chooses the lengths; leave out "
                'num_speculative_tokens="auto" and num_speculative_tokens_per_batch_size'
            )
        for name, default in (("num_kv_pages", None), ("enable_prefix_caching", False)):
            value = getattr(self, name)
            if self.kv_page_size is None and value != default:
                raise InputError(f"{name}={value}: caches have no pages; set kv_page_size")
        if self.num_kept_states is not None and not self.enable_prefix_caching:
            raise InputError(
                f"num_kept_states={self.num_kept_states}: requests share no beginnings; set "
                "enable_prefix_caching"
            )

    def without_drafts(self) -> DecodeOptions:
        """Return the same options for plain decoding."""
        return replace(self.controlled_by(None), num_speculative_tokens=FIXED)

    def controlled_by(self, controller: Controller | None) -> DecodeOptions:
        """Return the options with `controller` for draft lengths; None stands for fixed lengths."""
        length = self.fixed_draft_length
        return replace(
            self,
            num_speculative_tokens=FIXED if length is None else length,
            num_speculative_tokens_per_batch_size=(),
            controller=controller,
        )

    def offline(self) -> DecodeOptions:
        """Return the options for requests that are all present from the start.

        Their latencies do not matter, so that prompts are read as soon as slots are free, unless
        `max_prefill_tokens` is given.
        """
        return replace(self, max_prefill_tokens=self.max_prefill_tokens or INT32_MAX)

    @property
    def length_controller(self) -> Controller:
        """The controller that sets each step's draft lengths."""
        if self.controller is not None:
            return self.controller
        if self.num_speculative_tokens == AUTO:
            return Auto()
        if self.num_speculative_tokens_per_batch_size:
            return ByBatch(self.num_speculative_tokens_per_batch_size)
        return Fixed()

    @property
    def fixed_draft_length(self) -> int | None:
        """The value of `num_speculative_tokens` if it is a number, else None."""
        length = self.num_speculative_tokens
        return length if isinstance(length, int) else None

    @property
    def rows_per_refill(self) -> int:
        """The number of rows that must finish to end a step while requests wait."""
        return self.refill_rows or max(1, self.batch_size // _SLOTS_PER_REFILL)

    @property
    def prefill_budget(self) -> int:
        """The maximum number of prompt tokens to read between two steps."""
        return self.max_prefill_tokens or _PREFILL_BUDGET

    def chunks(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Return those of the chunk sizes, descending, that fit the budget for reading prompts.

        If none fits, it is the smallest.
        """
        return tuple(size for size in sizes if size <= self.prefill_budget) or sizes[-1:]


Sampling = SamplingParams | Mapping[str, Any] | Sequence[SamplingParams | Mapping[str, Any]]
"""Sampling parameters, or a dict of them, for all prompts or for each one."""
_SAMPLING_FIELDS = tuple(field.name for field in fields(SamplingParams) if field.name != "seed")
"""The fields that `generate` takes as arguments too; its argument `seed` is that of DecodeOptions.
"""


def read_arguments(
    arguments: Mapping[str, Any], sampling: Sampling | None = None
) -> tuple[DecodeOptions, Sampling | None]:
    """Return the options among keyword arguments, and `sampling` updated with the others.

    If `sampling` is None, arguments that are fields of SamplingParams are not accepted. Raises
    TypeError for unknown arguments, and InputError for values out of range.
    """
    sampling_fields = () if sampling is None else _SAMPLING_FIELDS
    _check_names(arguments, (*inspect.signature(DecodeOptions).parameters, *sampling_fields))
    changes = {name: value for name, value in arguments.items() if name in _SAMPLING_FIELDS}
    options = DecodeOptions(
        **{name: value for name, value in arguments.items() if name not in changes}
    )
    if not changes:
        return options, sampling
    if isinstance(sampling, SamplingParams | Mapping):
        return options, _changed(sampling, changes)
    if isinstance(sampling, Sequence) and not isinstance(sampling, str | bytes):
        return options, [_changed(each, changes) for each in sampling]
    return options, sampling  # refused where it is read


def _check_names(arguments: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise TypeError if a keyword argument is not among the known ones."""
    for name in arguments:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise TypeError(f"unexpected argument {name!r}{hint}")


def read_sampling(sampling: Any, arguments: Mapping[str, Any]) -> Any:
    """Return a request's sampling parameters, updated with keyword arguments.

    `sampling` is SamplingParams or a dict of its fields; another value is returned unchanged, to be
    refused where it is read. Raises TypeError for an argument that is no field of SamplingParams,
    and InputError for a value out of range.
    """
    _check_names(arguments, [field.name for field in fields(SamplingParams)])
    return _changed(sampling, arguments) if arguments else sampling


def _changed(sampling: Any, changes: Mapping[str, Any]) -> Any:
    if isinstance(sampling, Mapping):
        sampling = SamplingParams.of(sampling)
    if not isinstance(sampling, SamplingParams):
        return sampling  # refused where it is read
    return replace(sampling, **changes)
