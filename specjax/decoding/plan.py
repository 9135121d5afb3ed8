"""From prompts to a session: everything checked, encoded and chosen before any long work."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Key

from specjax import sampling
from specjax.decoding.options import DecodeOptions
from specjax.decoding.prompts import Prompt, encode_prompt
from specjax.decoding.sampling_params import SEED, SamplingParams, one_per_prompt
from specjax.decoding.state import RUNNING, STOPPED, Plan, Replay, Rows
from specjax.decoding.verify import check_rule
from specjax.distributed.sharding import (
    DATA,
    Placement,
    axis_size,
    place_keys,
    place_rows,
    placement_of,
    spread,
)
from specjax.draft_length.limits import DraftLength
from specjax.drafters import DRAFTER_KIND, Drafter, LoadedDrafter
from specjax.drafters.base import Sampling
from specjax.drafters.none import NoDrafter
from specjax.drafters.turns import NO_DRAFTER, Turns
from specjax.errors import InputError, shown
from specjax.loading.model import MODEL_KIND, Model
from specjax.models.layers.attention import CACHE_BLOCK

MOST_ROWS = 16
"""Rows of a batch where the caller does not say."""
_PREFILL_CHUNKS = (32, 128, 256, 512)


@dataclass(frozen=True)
class Session:
    """Everything one call decodes: checked, encoded, and with its program chosen."""

    model: Model
    drafter: LoadedDrafter
    plan: Plan
    batch_size: int
    prompts: tuple[tuple[int, ...], ...]
    requests: tuple[SamplingParams, ...]
    seed: int
    num_stop_ids: int
    max_length: int
    replay: tuple[np.ndarray, np.ndarray] | None = None
    """[prompts, R] each: how much was drafted in every round of an earlier run, and by whom."""

    @property
    def params(self) -> tuple[Any, Any]:
        """(target's parameters, drafter's parameters)."""
        return self.model.params, self.drafter.params

    @property
    def mesh(self) -> Mesh | None:
        """The mesh that the session runs on, if there is one: the model's."""
        return self.model.mesh

    @property
    def placement(self) -> Placement:
        """Where the session runs: the model's mesh, or its device."""
        return placement_of(self.model.params, self.mesh)

    @property
    def num_rows(self) -> int:
        """Rows of a batch on the devices (B): as many on each along `data`, the rest finished."""
        return _round_up(self.batch_size, axis_size(self.mesh, DATA))

    def row_key(self, prompt: int) -> Key[Array, ""]:
        """The key that all draws of a prompt come from."""
        return sampling.row_key(self.seed, prompt, self.requests[prompt].seed)

    @property
    def lossy(self) -> bool:
        """Whether the rule changes the distribution of some row: greedy ones keep their tokens."""
        return not self.plan.rule.exact and self.plan.flags.sampled

    def batches(self) -> list[list[int]]:
        """The prompts' indices, batch by batch, in input order."""
        count = len(self.prompts)
        return [
            list(range(first, min(first + self.batch_size, count)))
            for first in range(0, count, self.batch_size)
        ]


class Programs(NamedTuple):
    """The two compiled functions of a plan, and what compiling them took."""

    start: Any
    run: Any
    seconds: float


def plan_session(
    target: Model,
    prompts: Sequence[Prompt],
    *,
    drafter: LoadedDrafter | Drafter | None = None,
    options: DecodeOptions = DecodeOptions(),  # noqa: B008 - frozen
    requests: Any = SamplingParams(),  # noqa: B008 - frozen
    seed: int = 0,
    replay: tuple[np.ndarray, np.ndarray] | None = None,
) -> Session:
    """Check, encode and choose a program, without measuring anything; see `generate.generate`.

    `requests` is one SamplingParams or dict for all prompts, or one for each. `replay` are the
    counts `drafted` and `drafter` of an earlier result. Raises InputError.
    """
    MODEL_KIND.check("target", target)
    if isinstance(prompts, str):
        prompts = [prompts]
    if getattr(prompts, "ndim", None) == 2:
        prompts = list(prompts)
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise InputError(f"prompts={shown(prompts)}: give a list of prompts")
    if not len(prompts):
        raise InputError("prompts is empty: give at least one")
    drafter = DRAFTER_KIND.check("drafter", NoDrafter() if drafter is None else drafter)
    drafter = drafter._replace(
        params=spread(drafter.params, placement_of(target.params, target.mesh))
    )
    seed = SEED.check("seed", seed)
    requests = one_per_prompt(requests, len(prompts))
    if target.tokenizer is None and any(request.stop for request in requests):
        raise InputError(f"sampling.stop: {target.name} has no tokenizer; use stop_token_ids")
    encoded = [encode_prompt(target, p, f"prompts[{i}]") for i, p in enumerate(prompts)]
    if replay is not None and len(replay[0]) != len(prompts):
        raise InputError(
            f"replay has {len(replay[0])} rows for {len(prompts)} prompts: give the result of a "
            "run with the same prompts"
        )
    longest = _longest(target, encoded, options.max_length)
    totals = [
        min(len(ids) + request.max_new_tokens, longest)
        for ids, request in zip(encoded, requests, strict=True)
    ]
    room = max(total - len(ids) for total, ids in zip(totals, encoded, strict=True))
    asked, ladder = options.num_speculative_tokens, options.num_speculative_tokens_per_batch_size
    most = drafter.drafter.num_speculative_tokens if asked in (None, "auto") else asked
    if ladder and asked is None:
        most = max(most, *(count for _, _, count in ladder))
    # Of a longer draft no row could emit all, with the target's own token after it.
    turns = drafter.drafter.limited(min(most, max(room - 1, 1)))
    most = turns.num_speculative_tokens
    if replay is not None:
        _check_replay(replay, turns)
    stop_ids = max(1, *(len(_stop_ids(target, request)) for request in requests))
    batch_size = min(options.batch_size or MOST_ROWS, len(prompts))
    plan = Plan(
        target=target.architecture,
        drafter=turns,
        rule=options.verify,
        draft_length=DraftLength(
            most,
            ladder,
            auto=asked == "auto" and most > 0 and replay is None,
            replayed=replay is not None,
        ),
        widths=widths(turns.num_nodes, _lengths(turns, ladder, auto=asked == "auto")),
        flags=_flags(requests),
        capacity=_round_up(max(totals), CACHE_BLOCK),
        max_rounds=_round_up(room, 64),
        chunk=_chunk(max(map(len, encoded))),
        logprobs=any(request.logprobs for request in requests),
    )
    rule = options.verify
    for part in turns.parts:
        if part.branches and not rule.takes_trees:
            raise InputError(
                f"verify={rule.name}: {part.name} drafts trees, and {rule.name} verifies chains; "
                "use rejection or coupled, or draft chains"
            )
    if type(options.verify) not in map(type, sampling.RULES.values()):
        check_rule(options.verify, batch_size, plan.widths, target.config.vocab_size)
    return Session(
        target,
        drafter,
        plan,
        batch_size,
        tuple(map(tuple, encoded)),
        tuple(requests),
        seed,
        stop_ids,
        longest,
        replay,
    )


def _check_replay(replay: tuple[np.ndarray, np.ndarray], turns: Turns) -> None:
    """Raise InputError for rounds that these drafters cannot draft again."""
    drafted, drafter = replay
    for number, part in enumerate(turns.parts):
        longest = int(drafted[drafter == number].max(initial=0))
        if longest > part.num_nodes:
            raise InputError(
                f"replay has a draft of {longest} tokens by {part.name}, which drafts at most "
                f"{part.num_nodes} here: give what the run was given"
            )
    if int(drafter.max(initial=NO_DRAFTER)) >= len(turns.parts):
        raise InputError(
            f"replay has drafts of {int(drafter.max()) + 1} drafters, not of {turns.name} alone: "
            "give what the run was given"
        )


def _lengths(
    turns: Turns, ladder: Sequence[tuple[int, int, int]], *, auto: bool
) -> tuple[int, ...]:
    """Draft lengths that get a compiled width of their own."""
    lengths = turns.lengths + tuple(count for _, _, count in ladder)
    if not auto:
        return lengths
    # Trees are large, and two or three of their nodes seldom worth a width of their own.
    least = 2 if any(part.branches for part in turns.parts) else 0
    return lengths + tuple(2**power for power in range(least, turns.num_nodes.bit_length()))


def widths(most: int, lengths: Sequence[int] = ()) -> tuple[int, ...]:
    """The window sizes that are compiled for drafts of up to `most` nodes, `lengths` among them.

    A drafter that names no lengths gets one of three tokens.
    """
    return tuple(sorted({1, *(1 + min(length, most) for length in (*(lengths or (3,)), most))}))


def batch_arguments(session: Session, index: list[int]) -> tuple:
    """`loop.start`'s arrays for one batch; rows without a prompt are finished from the start."""
    batch, plan = session.num_rows, session.plan
    spare = batch - len(index)
    prompts = [session.prompts[i] for i in index] + [(0,)] * spare
    requests = [session.requests[i] for i in index] + [SamplingParams()] * spare
    tokens = np.zeros((batch, plan.capacity), np.int32)
    stop_ids = np.full((batch, session.num_stop_ids), -1, np.int32)
    for row, (ids, request) in enumerate(zip(prompts, requests, strict=True)):
        tokens[row, : len(ids)] = ids
        stops = _stop_ids(session.model, request)[: session.num_stop_ids]
        stop_ids[row, : len(stops)] = stops
    length = np.array([len(ids) for ids in prompts], np.int32)
    numbers = np.array([*index, *[0] * spare], np.int32)
    room = np.array([request.max_new_tokens for request in requests], np.int64)
    keys = [session.row_key(i) for i in index] + [jax.random.key(session.seed)] * spare
    running = np.arange(batch) < len(index)
    status = np.where(running, RUNNING, STOPPED).astype(np.int32)
    where = session.placement
    placed = functools.partial(place_rows, where=where)
    rows = Rows(
        index=placed(numbers),
        prompt_length=placed(length),
        key=place_keys(keys, where),
        sampling=Sampling(
            temperature=placed(np.array([r.temperature for r in requests], np.float32)),
            top_k=placed(np.array([r.top_k for r in requests], np.int32)),
            top_p=placed(np.array([r.top_p for r in requests], np.float32)),
            min_p=placed(np.array([r.min_p for r in requests], np.float32)),
        ),
        max_length=placed(np.minimum(length + room, session.max_length).astype(np.int32)),
        stop_ids=placed(stop_ids),
        replay=None if session.replay is None else _replay(session, index),
    )
    return placed(tokens), rows, placed(length), placed(status)


def _replay(session: Session, index: list[int]) -> Replay:
    """The recorded rounds of a batch's rows, none in rows without a prompt."""
    shape = session.num_rows, session.plan.max_rounds
    parts = [np.zeros(shape, np.int32), np.full(shape, NO_DRAFTER, np.int32)]
    for part, recorded in zip(parts, session.replay, strict=True):
        count = min(recorded.shape[1], shape[1])
        part[: len(index), :count] = recorded[index, :count]
    drafted, drafter = (place_rows(part, session.placement) for part in parts)
    return Replay(drafted, drafter)


def _stop_ids(model: Model, request: SamplingParams) -> tuple[int, ...]:
    own = model.tokenizer.eos_ids if model.tokenizer and not request.ignore_eos else ()
    return tuple(dict.fromkeys((*own, *request.stop_token_ids)))


def _longest(target: Model, encoded: list[list[int]], max_length: int | None) -> int:
    longest = target.config.max_positions
    name = f"the {longest} positions of {target.name}"
    if max_length is not None:
        if max_length > longest:
            raise InputError(f"max_length={max_length} exceeds {name}: lower it")
        longest, name = max_length, f"max_length={max_length}"
    for i, ids in enumerate(encoded):
        if len(ids) >= longest:
            remedy = "shorten it" if max_length is None else "shorten it or raise max_length"
            raise InputError(
                f"prompts[{i}] has {len(ids)} tokens, which leaves no room for a new one in "
                f"{name}: {remedy}"
            )
    return longest


def _chunk(longest: int) -> int:
    """The prefill chunk: one of a few sizes, so that compiled programs are reused."""
    return next((size for size in _PREFILL_CHUNKS if size >= longest), _PREFILL_CHUNKS[-1])


def _flags(requests: Sequence[SamplingParams]) -> sampling.WarpFlags:
    return sampling.WarpFlags.of(
        np.array([r.temperature for r in requests]),
        np.array([r.top_k for r in requests]),
        np.array([r.top_p for r in requests]),
        np.array([r.min_p for r in requests]),
    )


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
