"""`generate` and `stream`, which decode prompts into text and raw counts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jax.sharding import Mesh

from specjax import metrics
from specjax.controllers import Limits, Recorded
from specjax.core.state import Rounds
from specjax.core.turn_taking import NO_DRAFTER
from specjax.drafters import Drafter, LoadedDrafter, make_drafter
from specjax.engine.engine import Engine
from specjax.engine.options import DecodeOptions, Sampling, read_arguments
from specjax.engine.outputs import (
    Delta,
    Failure,
    Output,
    RequestId,
    Times,
    drafter_of_tokens,
    failure_message,
)
from specjax.engine.plan import DecodePlan, plan_requests, plan_rows
from specjax.engine.requests import Prompts, Request, SamplingParams, one_per_prompt
from specjax.fields import Function, Whole, optional, takes_options
from specjax.loading.load import place_model
from specjax.loading.model import Model


@dataclass(frozen=True, repr=False)
class Generation:
    """The result of `generate`: one list entry, or one row of an array, per prompt.

    `token_ids` are the new tokens, stop token included. `finish_reasons` are "stop", "length", or
    "error" if the target's logits were not finite or tokens have no text. `logprobs` are None
    unless requested. `width`, `drafted`, `accepted` and `emitted` are counts [B, R] of each row's
    own rounds, -1 after its last one. `drafter` [B, R] is the index of the drafter whose turn it
    was, -1 if none drafted. `first_round` [B] is the call's round in which each row began, and
    `times` are the rows' latencies. `prefill_s`, `decode_s` and `compile_s` are the seconds of
    reading prompts, running rounds and compiling; they do not overlap. `lossy` says that the rule,
    such as `typical`, changed the distribution of the tokens.
    """

    token_ids: list[list[int]]
    texts: list[str]
    finish_reasons: list[str]
    logprobs: list[list[float] | None]
    width: np.ndarray
    drafted: np.ndarray
    accepted: np.ndarray
    emitted: np.ndarray
    drafter: np.ndarray
    first_round: np.ndarray
    times: list[Times]
    prefill_s: float
    decode_s: float
    compile_s: float = 0.0
    lossy: bool = False
    longest_path: int | None = None
    """The maximum number of nodes on a path of a draft."""
    step_limits: tuple[tuple[Limits, int], ...] = ()
    """The draft limits and the number of rounds of each step; `controllers.Recorded` replays them.
    """
    failed_rows: dict[int, Failure] = field(default_factory=dict)
    """The failure of each row that ended with the reason "error", by row."""

    def __repr__(self) -> str:
        """Return the numbers of rows and tokens, the speed, and the tokens per target pass."""
        count, tau = len(self.token_ids), self.summary().acceptance_length
        rows = f"{count} row{'s' * (count != 1)}"
        per_pass = "" if tau is None else f", {tau:.2f} tokens per pass"
        speed = f", {self.tokens_per_second:.1f} tokens/s" if self.decode_s else ""
        return f"Generation({rows}, {self.new_tokens} new tokens{speed}{per_pass})"

    @property
    def new_tokens(self) -> int:
        """The total number of generated tokens."""
        return sum(map(len, self.token_ids))

    @property
    def tokens_per_second(self) -> float:
        """The new tokens per second of decoding, without prefill and compiling."""
        return self.new_tokens / self.decode_s

    def summary(self) -> metrics.Summary:
        """Return acceptance over all rows and rounds, as defined in `specjax.metrics`."""
        counts = self.drafted, self.accepted, self.emitted, self.width
        return metrics.summarize(*counts, self.longest_path)

    def was_drafted(self, row: int) -> list[bool]:
        """Return, for each new token of a row, whether the drafter had proposed it."""
        return [drafter != NO_DRAFTER for drafter in self.drafter_of_tokens(row)]

    def drafter_of_tokens(self, row: int) -> list[int]:
        """Return, for each new token of a row, the index of the drafter that proposed it, or -1."""
        counts = (self.width, self.drafted, self.accepted, self.emitted, self.drafter)
        return drafter_of_tokens(Rounds(*(part[row] for part in counts)))

    def passes(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the width and the number of rows of each pass of the target, [R] each."""
        rounds = self.width.shape[1]
        widths = np.zeros(rounds + int(self.first_round.max(initial=0)), self.width.dtype)
        rows = np.zeros_like(widths)
        for first, row in zip(self.first_round.tolist(), self.width, strict=True):
            here = slice(first, first + rounds)
            widths[here] = np.maximum(widths[here], row)
            rows[here] += row > 0
        return widths[rows > 0], rows[rows > 0]


@dataclass(frozen=True)
class Progress:
    """The progress of a call: finished rows, the number of all rows, and new tokens so far."""

    finished: int
    total: int
    new_tokens: int


@takes_options(DecodeOptions, SamplingParams)
def generate(
    target: Model,
    prompts: Prompts,
    *,
    drafter: LoadedDrafter | Drafter | str | None = None,
    sampling: Sampling = SamplingParams(),  # noqa: B008 - frozen
    progress: Callable[[Progress], None] | None = None,
    mesh: Mesh | None = None,
    **options: Any,
) -> Generation:
    """Decode prompts with a drafter; the output has exactly the target's distribution.

    The exception is `verify="typical"`, which changes it; the result is then marked `lossy`.

    A prompt is a string, a list of messages (through the chat template) or a list of token ids; a
    single prompt needs no list. `sampling` applies to all prompts, or is a list with one entry per
    prompt. `options` are keyword arguments: fields of `SamplingParams`, such as
    `max_new_tokens=100, temperature=0.8`, which then hold for all prompts, and of `DecodeOptions`,
    such as `verify="coupled", batch_size=16`. Unless draft lengths are fixed, a row decoded with
    `rejection` or `block` may draw different tokens (of the same distribution) in another batch or
    on another machine. `progress` is called between steps. On a `mesh` (`sharding.make_mesh`; by
    default that of the target) rows are sharded over `data`, and weights, caches and logits over
    `model`. A row whose logits are not finite ends with the reason "error" and a RuntimeWarning;
    other rows are unaffected. Raises InputError for bad input.
    """
    optional(Function("use a function of a Progress")).check("progress", progress)
    plan, requests = _plan(target, prompts, drafter, sampling, mesh, options)
    result = decode_requests(plan, requests, progress=progress)
    failed = {f"prompts[{row}]": failure for row, failure in result.failed_rows.items()}
    if failed:
        warnings.warn(failure_message(plan.model, failed), RuntimeWarning, stacklevel=2)
    return result


@takes_options(DecodeOptions, SamplingParams)
def compile(
    target: Model,
    drafter: LoadedDrafter | Drafter | str | None = None,
    *,
    num_tokens: int = 256,
    sampling: SamplingParams | Mapping[str, Any] = SamplingParams(),  # noqa: B008 - frozen
    mesh: Mesh | None = None,
    **options: Any,
) -> float:
    """Compile the programs that `generate` needs for rows of up to `num_tokens` tokens.

    The tokens of a row are its prompt and its output. Later calls of `generate` with the same
    target, drafter and `options` start at once, for `batch_size` prompts (by default 8; pass 1 for
    a single prompt) or a number with the same next power of two. Greedy decoding has its own
    programs; all other sampling parameters share theirs. Returns the seconds spent, near zero if
    the programs existed. Raises InputError for bad input.
    """
    num_tokens = Whole(2).check("num_tokens", num_tokens)
    options, sampling = read_arguments(options, sampling)
    sampling = one_per_prompt(sampling, 1)
    target, drafter = _loaded(target, drafter, mesh, options)
    with Engine.of(plan_rows(target, drafter, options, num_tokens, sampling)) as engine:
        engine.compile()
        return engine.statistics.compile_s


def open_engine(plan: DecodePlan, rounds_per_step: int | None = None) -> Engine:
    """Return an engine for requests that are all there, tuned for throughput rather than latency.

    `rounds_per_step`, if given, overrides that of the plan's options.
    """
    options = plan.options.offline()
    if rounds_per_step is not None:
        options = replace(options, rounds_per_step=rounds_per_step)
    return Engine.of(replace(plan, options=options))


def decode_requests(
    plan: DecodePlan,
    requests: Sequence[Request],
    *,
    engine: Engine | None = None,
    progress: Callable[[Progress], None] | None = None,
    follow: Callable[[list[Delta]], None] | None = None,
) -> Generation:
    """Decode requests and return the result, in their order.

    `engine`, by default a new one for the plan, must have no other requests. `progress` is called
    after every step, and `follow` with the step's deltas.
    """
    engine = engine or open_engine(plan)
    compile_s_before = engine.statistics.compile_s
    engine.compile()
    before = replace(engine.statistics)
    steps_before = len(engine.step_limits)
    engine.submit(requests)
    ended: dict[RequestId, Output] = {}
    new_tokens = 0
    while engine.num_unfinished:
        deltas = engine.step()
        new_tokens += sum(len(delta.token_ids) for delta in deltas)
        ended |= {delta.id: delta.output for delta in deltas if delta.output is not None}
        if follow is not None:
            follow(deltas)
        if progress is not None:
            progress(Progress(len(ended), len(requests), new_tokens))
    outputs = [ended[request.number] for request in requests]
    counts = {
        name: _padded([getattr(output.rounds, name) for output in outputs])
        for name in ("width", "drafted", "accepted", "emitted", "drafter")
    }
    return Generation(
        token_ids=[output.token_ids for output in outputs],
        texts=[output.text for output in outputs],
        finish_reasons=[output.finish_reason for output in outputs],
        logprobs=[output.logprobs for output in outputs],
        **counts,
        first_round=np.array([output.first_round - before.rounds for output in outputs]),
        times=[output.times for output in outputs],
        prefill_s=engine.statistics.prefill_s - before.prefill_s,
        decode_s=engine.statistics.decode_s - before.decode_s,
        compile_s=engine.statistics.compile_s - compile_s_before,
        lossy=any(output.lossy for output in outputs),
        longest_path=plan.loop.drafter.num_speculative_tokens,
        step_limits=tuple(engine.step_limits[steps_before:]),
        failed_rows={
            row: output.failure for row, output in enumerate(outputs) if output.failure is not None
        },
    )


def _padded(rows: Sequence[np.ndarray], value: float = NO_DRAFTER) -> np.ndarray:
    """Return arrays of different lengths as rows of one array, padded at the end with `value`."""
    longest = max(map(len, rows))
    array = np.full((len(rows), longest, *rows[0].shape[1:]), value, rows[0].dtype)
    for into, row in zip(array, rows, strict=True):
        into[: len(row)] = row
    return array


def expected_acceptance(
    plan: DecodePlan, requests: Sequence[Request], results: Sequence[Generation] = ()
) -> metrics.ExpectedAcceptance:
    """Return the acceptance that the requests' distributions imply, with its standard error.

    Decodes once more, recording sum_x min(p, q) at every node that `rejection` tests. If `results`
    of the requests are given, their draft limits are replayed in order, since limits that depend on
    the clock would not recur.
    """
    recording = replace(plan, loop=replace(plan.loop, overlaps=True))
    overlaps: list[np.ndarray] = []
    left = list(requests)
    for result in results or [None]:
        replay, count = recording, len(left)
        if result is not None:
            replay = recording.controlled_by(Recorded(result.step_limits))
            count = len(result.token_ids)
        engine, now = open_engine(replay), left[:count]
        engine.submit(now)
        ended = {delta.id: delta.output for delta in engine if delta.output is not None}
        recorded = [ended[request.number].rounds.overlaps for request in now]
        # A row whose first logits are not numbers has no round, and so no overlaps.
        overlaps += [row_overlaps for row_overlaps in recorded if row_overlaps is not None]
        del left[:count]
    return metrics.expected_acceptance(_padded(overlaps or [np.zeros((0, 1))], np.nan))


@takes_options(DecodeOptions, SamplingParams)
def stream(
    target: Model,
    prompts: Prompts,
    *,
    drafter: LoadedDrafter | Drafter | str | None = None,
    sampling: Sampling = SamplingParams(),  # noqa: B008 - frozen
    mesh: Mesh | None = None,
    **options: Any,
) -> Iterator[Delta]:
    """Decode prompts as `generate` does, yielding new tokens and text after every step.

    The arguments are those of `generate` except `progress`; a step has one round by default
    (`rounds_per_step`). Each delta says which of its tokens were drafted. Raises InputError for bad
    input when called. A row that fails ends with the reason "error" and a RuntimeWarning.
    """
    options = {"rounds_per_step": 1, **options}
    return _stream(*_plan(target, prompts, drafter, sampling, mesh, options))


def _stream(plan: DecodePlan, requests: Sequence[Request]) -> Iterator[Delta]:
    """Yield the deltas of requests, and warn of each row that ends with the reason "error"."""
    engine = Engine.of(plan)
    engine.submit(requests)
    for delta in engine:
        yield delta
        if delta.output is not None and delta.output.failure is not None:
            failed = {f"prompts[{delta.id}]": delta.output.failure}
            warnings.warn(failure_message(plan.model, failed), RuntimeWarning, stacklevel=2)


def _plan(
    target: Model,
    prompts: Prompts,
    drafter: LoadedDrafter | Drafter | str | None,
    sampling: Sampling,
    mesh: Mesh | None,
    arguments: Mapping[str, Any],
) -> tuple[DecodePlan, list[Request]]:
    options, sampling = read_arguments(arguments, sampling)
    target, drafter = _loaded(target, drafter, mesh, options)
    return plan_requests(target, prompts, drafter=drafter, options=options, sampling=sampling)


def _loaded(
    target: Model,
    drafter: LoadedDrafter | Drafter | str | None,
    mesh: Mesh | None,
    options: DecodeOptions,
) -> tuple[Model, LoadedDrafter | Drafter | None]:
    """Return the target, on the mesh if one is given, and the drafter, made if it is a name."""
    target = target if mesh is None else place_model(target, mesh)
    if isinstance(drafter, str):
        drafter = make_drafter(drafter, target, num_speculative_tokens=options.fixed_draft_length)
    return target, drafter
