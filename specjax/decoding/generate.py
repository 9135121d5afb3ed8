"""`generate` and `stream`: prompts in, text and raw counts out."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax.sharding import Mesh

from specjax import metrics, sampling
from specjax.decoding.executor import compile_session, run_session
from specjax.decoding.options import DecodeOptions
from specjax.decoding.plan import Session, plan_session
from specjax.decoding.prompts import Prompt
from specjax.decoding.sampling_params import SamplingParams
from specjax.decoding.snapshot import Snapshot
from specjax.decoding.state import FAILED, FULL, STOPPED, Rounds
from specjax.decoding.stop_strings import final_length
from specjax.drafters import Drafter, LoadedDrafter, make_drafter
from specjax.fields import Function, Instance, Whole, optional
from specjax.loading.load import place_model
from specjax.loading.model import Model
from specjax.loading.tokenizers.tokenizer import StreamDecoder

_REASONS = {STOPPED: "stop", FULL: "length", FAILED: "error"}
Requests = SamplingParams | Mapping[str, Any] | Sequence[SamplingParams | Mapping[str, Any]]


@dataclass(frozen=True)
class Generation:
    """What was generated: one list entry, or one row of an array, per prompt.

    `token_ids` are the new tokens, the stop token included; `finish_reasons` are "stop", "length",
    or "error" where the target's next logits were not numbers; `logprobs` are None where not asked
    for. `width`, `drafted`, `accepted` and `emitted` are [B, R] counts per round, -1 where a row
    was finished already; `drafter` is the number of the drafter whose turn it was, in the order of
    their names, -1 where none drafted. `prefill_s` and `decode_s` are seconds of the batch a row
    was in, and `batch` the batch's number; `compile_s` is outside of them. `lossy` says that the
    rule, as `typical` does, changed the distribution that the tokens come from.
    """

    token_ids: list[list[int]]
    texts: list[str]
    finish_reasons: list[str]
    logprobs: list[list[float] | None]
    width: np.ndarray = field(repr=False)
    drafted: np.ndarray = field(repr=False)
    accepted: np.ndarray = field(repr=False)
    emitted: np.ndarray = field(repr=False)
    drafter: np.ndarray = field(repr=False)
    batch: list[int]
    prefill_s: list[float]
    decode_s: list[float]
    compile_s: float = 0.0
    lossy: bool = False
    longest_path: int | None = None
    """Of a draft, in tokens."""

    @property
    def new_tokens(self) -> int:
        """Tokens generated in all."""
        return sum(map(len, self.token_ids))

    @property
    def total_decode_s(self) -> float:
        """Seconds of decoding, each batch counted once."""
        return sum(dict(zip(self.batch, self.decode_s, strict=True)).values())

    @property
    def tokens_per_second(self) -> float:
        """New tokens over seconds of decoding; prefill and compiling are apart."""
        return self.new_tokens / self.total_decode_s

    def summary(self) -> metrics.Summary:
        """Acceptance over all rows and rounds; definitions in `specjax.metrics`."""
        counts = self.drafted, self.accepted, self.emitted, self.width
        return metrics.summarize(*counts, self.longest_path)

    @property
    def failed_rows(self) -> dict[int, int]:
        """The new tokens of the rows that ended where the target's logits were not numbers."""
        return {
            row: len(self.token_ids[row])
            for row, reason in enumerate(self.finish_reasons)
            if reason == "error"
        }

    def was_drafted(self, row: int) -> list[bool]:
        """For each new token of a row, whether the drafter had proposed it."""
        return _was_drafted(self.accepted[row], self.emitted[row])


@dataclass(frozen=True)
class Delta:
    """What a few rounds added to one prompt's output.

    `text` is final text; it may lag behind `token_ids` by an unfinished character or a possible
    stop string. `finish_reason` is None until the last delta of the prompt.
    """

    index: int
    token_ids: list[int]
    drafted: list[bool]
    text: str
    finish_reason: str | None


def generate(
    target: Model,
    prompts: Sequence[Prompt] | str,
    *,
    drafter: LoadedDrafter | Drafter | str | None = None,
    num_speculative_tokens: int | str | None = None,
    num_speculative_tokens_per_batch_size: Sequence[tuple[int, int, int]] = (),
    verify: str | sampling.Rule = "rejection",
    sampling: Requests = SamplingParams(),  # noqa: B008 - frozen
    seed: int = 0,
    batch_size: int | None = None,
    max_length: int | None = None,
    replay: Generation | None = None,
    progress: Callable[[Snapshot], None] | None = None,
    mesh: Mesh | None = None,
) -> Generation:
    """Decode prompts with a drafter; the output has exactly the target's distribution.

    Only `verify="typical"` changes the distribution, and the result then says `lossy`.

    A prompt is raw text, a list of messages (through the chat template) or a list of token ids.
    `num_speculative_tokens` is the longest draft (K; the drafter's own by default), or "auto": up
    to so many, as long as one more is worth what it is expected to cost, by measured times, the
    drafter's confidence and acceptance so far (`draft_length.policy`). `replay` is an earlier
    result for the same prompts: its draft lengths are used again, round by round.
    `num_speculative_tokens_per_batch_size` caps it by the number of unfinished rows, as (low, high,
    k). With either, a row of `rejection` or `block` may draw other tokens (of the same
    distribution) beside other neighbours or on another machine. `verify` is "rejection", "block",
    "coupled" (the output depends on seed and prompt only, never on the drafter), "typical" (lossy),
    or a `sampling.Rule`, such as `Typical(epsilon, delta)` or one's own. `sampling` is one for all
    prompts or one per prompt. `batch_size` rows decode together (at most 16, by default);
    `max_length` bounds prompt and output.
    `progress` is called between steps. On a `mesh` (`sharding.make_mesh`; by default where the
    target was loaded) rows are spread over `data`, weights, caches and logits over `model`. Where
    the target's logits are not numbers, that row ends with the reason "error" and a RuntimeWarning;
    other rows are not affected. Raises InputError for bad input.
    """
    optional(Function("use a function of a Snapshot")).check("progress", progress)
    optional(Instance(Generation, "use an earlier result")).check("replay", replay)
    options = DecodeOptions(
        num_speculative_tokens=num_speculative_tokens,
        num_speculative_tokens_per_batch_size=num_speculative_tokens_per_batch_size,
        verify=verify,
        batch_size=batch_size,
        max_length=max_length,
    )
    session = _open(target, prompts, drafter, options, sampling, seed, mesh, replay)
    programs = compile_session(session)
    done = []
    for snapshot in run_session(session, None if progress is None else 16, programs):
        if progress is not None:
            progress(snapshot)
        if snapshot.finished:
            done.append(snapshot)
    result = collect(session, done, programs.seconds)
    failed = {f"prompts[{row}]": count for row, count in result.failed_rows.items()}
    if failed:
        warnings.warn(broken_logits(session.model, failed), RuntimeWarning, stacklevel=2)
    return result


def broken_logits(target: Model, failed: Mapping[str, int]) -> str:
    """The message for rows that ended where logits were not numbers: names, and new tokens."""
    (first, count), others = next(iter(failed.items())), len(failed) - 1
    also = f" (and {others} other{'s' if others > 1 else ''})" if others else ""
    return (
        f"target={target.name}: its logits are not numbers (NaN or infinite) after {count} new "
        f"tokens of {first}{also}, whose output ends there; its weights are damaged, or "
        f"{target.dtype} cannot hold its activations: load it again, or with dtype=float32"
    )


def collect(session: Session, batches: Sequence[Snapshot], compile_s: float = 0.0) -> Generation:
    """The result of finished batches, in input order."""
    counts = [snapshot.kept_rounds() for snapshot in batches]
    rows: dict[str, list] = {
        name: []
        for name in (
            "token_ids",
            "texts",
            "finish_reasons",
            "logprobs",
            "batch",
            "prefill_s",
            "decode_s",
        )
    }
    for number, snapshot in enumerate(batches):
        for row, prompt in enumerate(snapshot.index):
            request = session.requests[prompt]
            new = _new_tokens(session, snapshot, row)
            rows["token_ids"].append(new)
            rows["texts"].append(_text(session, new, request.stop))
            rows["finish_reasons"].append(_REASONS[int(snapshot.status[row])])
            first = len(session.prompts[prompt])
            logprobs = None
            if request.logprobs:
                logprobs = snapshot.logprobs[row, first : first + len(new)].tolist()
            rows["logprobs"].append(logprobs)
            rows["batch"].append(number)
            rows["prefill_s"].append(snapshot.prefill_s)
            rows["decode_s"].append(snapshot.decode_s)
    return Generation(
        **rows,
        width=np.concatenate([count.width for count in counts]),
        drafted=np.concatenate([count.drafted for count in counts]),
        accepted=np.concatenate([count.accepted for count in counts]),
        emitted=np.concatenate([count.emitted for count in counts]),
        drafter=np.concatenate([count.drafter for count in counts]),
        compile_s=compile_s,
        lossy=session.lossy,
        longest_path=session.plan.drafter.num_speculative_tokens,
    )


def stream(
    target: Model,
    prompts: Sequence[Prompt] | str,
    *,
    rounds_per_step: int = 1,
    drafter: LoadedDrafter | Drafter | str | None = None,
    sampling: Requests = SamplingParams(),  # noqa: B008 - frozen
    seed: int = 0,
    replay: Generation | None = None,
    mesh: Mesh | None = None,
    **options: Any,
) -> Iterator[Delta]:
    """`generate`, yielding each prompt's new tokens and text after every few rounds.

    Takes what `generate` takes. Each delta also says which of its tokens were drafted.
    """
    rounds_per_step = Whole(1).check("rounds_per_step", rounds_per_step)
    optional(Instance(Generation, "use an earlier result")).check("replay", replay)
    decoding = DecodeOptions(**options)
    session = _open(target, prompts, drafter, decoding, sampling, seed, mesh, replay)
    return stream_session(session, rounds_per_step)


def _open(
    target: Model,
    prompts: Sequence[Prompt] | str,
    drafter: LoadedDrafter | Drafter | str | None,
    options: DecodeOptions,
    requests: Requests,
    seed: int,
    mesh: Mesh | None,
    replay: Generation | None = None,
) -> Session:
    target = target if mesh is None else place_model(target, mesh)
    if isinstance(drafter, str):
        drafter = make_drafter(drafter, target, num_speculative_tokens=options.fixed_draft_length)
    return plan_session(
        target,
        prompts,
        drafter=drafter,
        options=options,
        requests=requests,
        seed=seed,
        replay=None if replay is None else (replay.drafted, replay.drafter),
    )


def stream_session(session: Session, rounds_per_step: int = 1) -> Iterator[Delta]:
    """The deltas of a session, batch by batch; within a step rows come in input order.

    A batch with rows that ended with "error" also gives `generate`'s warning.
    """
    followers: dict[int, Follower] = {}
    for snapshot in run_session(session, rounds_per_step):
        counts = snapshot.kept_rounds()
        for row, prompt in enumerate(snapshot.index):
            follower = followers.setdefault(prompt, Follower(session, prompt))
            delta = follower.follow(snapshot, counts, row)
            if delta is not None:
                yield delta
        failed = {
            f"prompts[{prompt}]": len(_new_tokens(session, snapshot, row))
            for row, prompt in enumerate(snapshot.index)
            if snapshot.finished and snapshot.status[row] == FAILED
        }
        if failed:
            warnings.warn(broken_logits(session.model, failed), RuntimeWarning, stacklevel=2)


class Follower:
    """Turns the growing output of one prompt into deltas, snapshot by snapshot."""

    def __init__(self, session: Session, prompt: int) -> None:
        tokenizer = session.model.tokenizer
        self._session, self._prompt = session, prompt
        self._stops = session.requests[prompt].stop
        self._decoder = None if tokenizer is None else StreamDecoder(tokenizer)
        self._tokens, self._rounds, self._text, self._shown, self._ended = 0, 0, "", 0, False

    def follow(self, snapshot: Snapshot, counts: Rounds, row: int) -> Delta | None:
        """What the snapshot adds in that row, if anything; `counts` are its `kept_rounds()`."""
        if self._ended:
            return None
        fresh = _new_tokens(self._session, snapshot, row, self._tokens)
        reason = _REASONS.get(int(snapshot.status[row]))
        if not fresh and reason is None:
            return None
        accepted, emitted = (
            part[row, self._rounds :] for part in (counts.accepted, counts.emitted)
        )
        there = int((emitted >= 0).sum())
        drafted = _was_drafted(accepted[:there], emitted[:there])
        self._tokens += len(fresh)
        self._rounds += there
        self._ended = reason is not None
        return Delta(self._prompt, fresh, drafted, self._advance(fresh), reason)

    def _advance(self, fresh: list[int]) -> str:
        if self._decoder is None:
            return ""
        self._text += self._decoder.feed(fresh)
        if self._ended:
            self._text += self._decoder.flush()
        end = max(final_length(self._text, self._stops, ended=self._ended), self._shown)
        fresh_text, self._shown = self._text[self._shown : end], end
        return fresh_text


def _new_tokens(session: Session, snapshot: Snapshot, row: int, known: int = 0) -> list[int]:
    """A row's new tokens after the first `known` ones."""
    first = len(session.prompts[snapshot.index[row]])
    last = snapshot.lengths[row]
    if snapshot.kept[row] >= 0:
        last = first + snapshot.kept[row]
    return snapshot.tokens[row, first + known : last].tolist()


def _text(session: Session, tokens: list[int], stops: Sequence[str]) -> str:
    if session.model.tokenizer is None:
        return ""
    text = session.model.tokenizer.decode(tokens)
    return text[: final_length(text, stops, ended=True)]


def _was_drafted(accepted: np.ndarray, emitted: np.ndarray) -> list[bool]:
    return [
        index < passed
        for passed, count in zip(accepted.tolist(), emitted.tolist(), strict=True)
        for index in range(max(count, 0))
    ]
