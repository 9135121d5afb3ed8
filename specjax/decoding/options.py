"""What a caller chooses of decoding: rule, draft lengths, slots, seed, and the length of steps."""

from __future__ import annotations

import difflib
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, TypeVar, get_type_hints

from specjax import sampling
from specjax.controllers import Auto, ByBatch, Controller, Fixed
from specjax.decoding.sampling_params import SEED, SamplingParams
from specjax.drafters import DRAFT_TOKENS
from specjax.errors import InputError, shown
from specjax.fields import (
    INT32_MAX,
    Choice,
    Either,
    Instance,
    Items,
    Whole,
    check_instance,
    optional,
)

AUTO, FIXED = "auto", "fixed"
"""Draft lengths: as many tokens as make decoding faster, or as many as the drafter has."""
_OWN_RULE = (
    "subclass specjax.sampling.UniformRule as a frozen dataclass with a method decide(self, "
    "tokens, num_valid, target, draft, uniforms) -> Decision, and pass an instance"
)
"""How to write a rule of one's own, as errors say it."""
RULE_NAME = Choice(tuple(sampling.RULES))
EXACT_RULE_NAME = Choice(tuple(name for name, rule in sampling.RULES.items() if rule.exact))


@dataclass(frozen=True)
class RuleKind:
    """A verification rule, or the name of one."""

    def check(self, name: str, value: Any) -> sampling.Rule:
        """The rule."""
        if isinstance(value, sampling.Rule):
            return value
        if callable(value):
            raise InputError(f"{name}={shown(value)}: a rule is a value; {_OWN_RULE}")
        return sampling.RULES[RULE_NAME.check(name, value)]


RULE = RuleKind()
DRAFT_LENGTH = Either(
    (Choice((AUTO, FIXED)), DRAFT_TOKENS),
    remedy=f'{DRAFT_TOKENS.remedy}, "fixed" or "auto"',
)
BATCH_SIZE = Whole(1)
_ROUNDS_PER_STEP = Whole(1, 10_000)
_SLOTS_PER_REFILL = 16
_PREFILL_BUDGET = 512
MAX_LENGTH = Whole(2, remedy="use 2 (a prompt and a new token) to the positions of the target")


@dataclass(frozen=True)
class ControllerKind:
    """A length controller: a value, not its class."""

    def check(self, name: str, value: Any) -> Controller:
        """The controller."""
        if isinstance(value, type) or not isinstance(value, Controller):
            raise InputError(
                f"{name}={shown(value)}: use a value of specjax.controllers, such as Auto() or "
                "Fixed(4), or of a frozen dataclass with init, choose and update"
            )
        return value


CONTROLLER = ControllerKind()


@dataclass(frozen=True)
class LadderStep:
    """(low, high, k): at most k draft tokens while low..high rows are unfinished."""

    def check(self, name: str, value: Any) -> tuple[int, int, int]:
        """The three numbers."""
        low, high, count = Items(Whole(), length=3).check(name, value)
        if not (1 <= low <= high and count <= DRAFT_TOKENS.most):
            raise InputError(
                f"{name}={shown(value)}: must be (low, high, k) with 1 <= low <= high and "
                f"0 <= k <= {DRAFT_TOKENS.most}"
            )
        return low, high, count


@dataclass(frozen=True)
class Ladder:
    """`num_speculative_tokens_per_batch_size`: steps for numbers of rows that do not overlap."""

    def check(self, name: str, value: Any) -> tuple[tuple[int, int, int], ...]:
        """The steps."""
        remedy = "use steps of (low, high, k), such as ((1, 4, 8), (5, 16, 2))"
        Items(Instance(Sequence, remedy), remedy=remedy).check(name, value)
        steps = Items(LadderStep()).check(name, value)
        for (_, before, _), (low, *_) in itertools.pairwise(sorted(steps)):
            if low <= before:
                raise InputError(
                    f"{name}={shown(value)}: two steps hold for {low} rows; let them not overlap"
                )
        return steps


@dataclass(frozen=True)
class DecodeOptions:
    """The options of `generate`, `stream` and `Engine`.

    `num_speculative_tokens` is the longest draft (K), "fixed" (the drafter's own K) or "auto": up
    to that, as many as make decoding faster, by what steps have taken and what was accepted so far
    (`specjax.controllers.Auto`). `num_speculative_tokens_per_batch_size` says how many with low to
    high unfinished rows, as (low, high, k), and a `controller` is one of `specjax.controllers` or
    your own: `Recorded(result.step_limits)` repeats a run.

    `verify` is "rejection", "block", "coupled" (the output depends on seed and prompt only, never
    on the drafter), "typical" (lossy), or a `sampling.Rule`, such as `Typical(epsilon, delta)` or
    one of your own.

    `batch_size` rows decode together; others wait for a slot. `max_length` bounds a row's prompt
    and output in tokens: by default the target's positions, of an engine at most 2048. The draws
    of a row come from `seed`, its number and its own seed.

    A step, after which the host sees new tokens, ends after `rounds_per_step` rounds (8 where a
    row has stop strings), or when `refill_rows` rows have finished and requests wait: by default
    one of sixteen slots. Between two steps at most `max_prefill_tokens` tokens of prompts are read
    while rows decode, counted in whole chunks, or one chunk of the smallest size: by default 512,
    and in `generate`, where nobody waits for single tokens, as many as there are.

    Raises InputError for values out of range.
    """

    num_speculative_tokens: Annotated[int | str, DRAFT_LENGTH] = FIXED
    num_speculative_tokens_per_batch_size: Annotated[Sequence[tuple[int, int, int]], Ladder()] = ()
    verify: Annotated[str | sampling.Rule, RULE] = "rejection"
    batch_size: Annotated[int, BATCH_SIZE] = 8
    max_length: Annotated[int | None, optional(MAX_LENGTH)] = None
    controller: Annotated[Controller | None, optional(CONTROLLER)] = None
    seed: Annotated[int, SEED] = 0
    rounds_per_step: Annotated[int, _ROUNDS_PER_STEP] = 16
    refill_rows: Annotated[int | None, optional(Whole(1))] = None
    max_prefill_tokens: Annotated[int | None, optional(Whole(1))] = None

    def __post_init__(self) -> None:
        check_instance(self, "")
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

    def without_drafts(self) -> DecodeOptions:
        """The same for plain decoding."""
        return replace(self.controlled_by(None), num_speculative_tokens=FIXED)

    def controlled_by(self, controller: Controller | None) -> DecodeOptions:
        """The same with draft lengths chosen by a controller; without one they are fixed."""
        length = self.fixed_draft_length
        return replace(
            self,
            num_speculative_tokens=FIXED if length is None else length,
            num_speculative_tokens_per_batch_size=(),
            controller=controller,
        )

    def offline(self) -> DecodeOptions:
        """The same where all requests are there from the start, and none is to be served first.

        Unless `max_prefill_tokens` is given, prompts are then read as soon as slots are free.
        """
        return replace(self, max_prefill_tokens=self.max_prefill_tokens or INT32_MAX)

    @property
    def length_controller(self) -> Controller:
        """What chooses each step's draft lengths."""
        if self.controller is not None:
            return self.controller
        if self.num_speculative_tokens == AUTO:
            return Auto()
        if self.num_speculative_tokens_per_batch_size:
            return ByBatch(self.num_speculative_tokens_per_batch_size)
        return Fixed()

    @property
    def fixed_draft_length(self) -> int | None:
        """`num_speculative_tokens` where it is a number."""
        length = self.num_speculative_tokens
        return length if isinstance(length, int) else None

    @property
    def rows_per_refill(self) -> int:
        """How many rows finish before a step ends for waiting requests."""
        return self.refill_rows or max(1, self.batch_size // _SLOTS_PER_REFILL)

    @property
    def prefill_budget(self) -> int:
        """The tokens of prompts that are read between two steps."""
        return self.max_prefill_tokens or _PREFILL_BUDGET

    def chunks(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Those of the chunk sizes (descending) within the budget, or the smallest."""
        return tuple(size for size in sizes if size <= self.prefill_budget) or sizes[-1:]


Sampling = SamplingParams | Mapping[str, Any] | Sequence[SamplingParams | Mapping[str, Any]]
"""How all prompts are sampled, or each of them."""
_SAMPLING_FIELDS = tuple(field.name for field in fields(SamplingParams) if field.name != "seed")
"""Those that `generate` also takes as arguments; its `seed` is that of DecodeOptions."""


def read_arguments(
    arguments: Mapping[str, Any], sampling: Sampling | None = None
) -> tuple[DecodeOptions, Sampling | None]:
    """The options among keyword arguments, and `sampling` with the fields of its own among them.

    Without `sampling` none of its fields may be given. Raises TypeError for another argument,
    InputError for a value out of range.
    """
    sampling_fields = () if sampling is None else _SAMPLING_FIELDS
    known = (*inspect.signature(DecodeOptions).parameters, *sampling_fields)
    for name in arguments:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise TypeError(f"unexpected argument {name!r}{hint}")
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


def _changed(sampling: Any, changes: Mapping[str, Any]) -> Any:
    if isinstance(sampling, Mapping):
        sampling = SamplingParams.of(sampling)
    if not isinstance(sampling, SamplingParams):
        return sampling  # refused where it is read
    return replace(sampling, **changes)


_Function = TypeVar("_Function", bound=Callable[..., Any])


def takes_options(*classes: type) -> Callable[[_Function], _Function]:
    """Show the fields of dataclasses as the keyword arguments of a function with `**options`.

    Editors, notebooks and `help` read the signature that this sets.
    """

    def decorate(function: _Function) -> _Function:
        signature = inspect.signature(function)
        *explicit, _ = signature.parameters.values()
        arguments = {parameter.name: parameter for parameter in explicit}
        for each in classes:
            types = get_type_hints(each)
            for name, parameter in inspect.signature(each).parameters.items():
                option = parameter.replace(
                    kind=inspect.Parameter.KEYWORD_ONLY, annotation=types[name]
                )
                arguments.setdefault(name, option)
        function.__signature__ = signature.replace(parameters=list(arguments.values()))
        return function

    return decorate
