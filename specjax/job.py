"""A decode config, checked and turned into the values that `session` takes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ml_collections
import numpy as np

from specjax.built_in import BUILT_IN
from specjax.drafters import Drafter, check_length, check_options, make_drafter
from specjax.errors import InputError
from specjax.heads.files import holds_head
from specjax.models.loading import load_model
from specjax.models.model import Model
from specjax.prompts import Prompt, Question, read_questions, select
from specjax.sampling_params import SamplingParams
from specjax.session import RULES, check_seed

SIMULATED = "simulated"
"""The drafter that needs a plain run before it can be made."""


@dataclass(frozen=True)
class Job:
    """What to decode, and how."""

    target: str
    dtype: str
    questions: tuple[Question, ...]
    all_turns: bool
    chat: Literal["auto", "true", "false"]
    drafter: str
    drafter_path: str | None
    drafter_replicated: bool
    drafter_options: Mapping[str, Any]
    sampling: SamplingParams
    seed: int
    compare: bool
    report: str | None
    session: Mapping[str, Any]
    """The arguments of `open_session` that do not change from turn to turn."""

    @property
    def num_turns(self) -> int:
        """How many turns the longest conversation has."""
        return max(len(question.turns) for question in self.questions) if self.all_turns else 1

    @property
    def comparable(self) -> bool:
        """Whether the output has to equal that of plain decoding, token for token."""
        return self.session["verify"] == "coupled" or self.sampling.temperature == 0

    @property
    def has_expectation(self) -> bool:
        """Whether to work out the acceptance that p and q imply, as they do under `rejection`."""
        sampled = self.sampling.temperature > 0 and self.session["verify"] == "rejection"
        return self.compare and sampled and self.drafter != "none"

    def turn(self, number: int) -> list[int]:
        """The places of the questions that have a turn of that number (from 0)."""
        return [i for i, question in enumerate(self.questions) if number < len(question.turns)]

    def turn_seeds(self, number: int) -> tuple[int, SamplingParams]:
        """Seed and sampling of a turn: later turns draw anew instead of repeating the first's."""
        if number == 0:
            return self.seed, self.sampling
        sampling = self.sampling
        if sampling.seed is not None:
            sampling = SamplingParams.of(vars(sampling) | {"seed": _mix(sampling.seed, number)})
        return _mix(self.seed, number), sampling


def read_job(config: ml_collections.ConfigDict) -> Job:
    """Check a config as far as that goes without the model. Raises InputError."""
    _require(config, "turns", ("first", "all"))
    _require(config, "chat", ("auto", "true", "false"))
    _require(config, "verify", RULES)
    for name in ("limit", "per_task"):
        value = config.get(name)
        if value is not None and value < 1:
            raise InputError(f"{name}={value}: use a whole number of at least 1, or leave it out")
    options = dict(config.drafter)
    name, path = options.pop("name"), options.pop("path", None)
    replicated = options.pop("replicated", False)
    if replicated and name != "draft_model":
        raise InputError(f"drafter.replicated=True: {name} is no draft_model; leave it out")
    options = {option: value for option, value in options.items() if value is not None}
    check_options(name, path, options, supplied=("continuations",))
    sampling = SamplingParams.of(dict(config.sampling))
    check_seed(config.seed)
    return Job(
        target=config.target,
        dtype=config.dtype,
        questions=tuple(_questions(config)),
        all_turns=config.turns == "all",
        chat=config.chat,
        drafter=name,
        drafter_path=path,
        drafter_replicated=replicated,
        drafter_options=options,
        sampling=sampling,
        seed=config.seed,
        compare=config.compare,
        report=config.get("report"),
        session={
            "num_speculative_tokens": _draft_length(config.num_speculative_tokens),
            "num_speculative_tokens_per_batch_size": _ladder(config),
            "verify": config.verify,
            "batch_size": config.batch_size,
            "max_length": config.get("max_length"),
        },
    )


def job_drafter(
    job: Job, target: Model, continuations: Sequence[Sequence[int]] | None = None
) -> Drafter:
    """The job's drafter; `continuations` are what plain decoding gave, for `simulated`."""
    options, path = dict(job.drafter_options), job.drafter_path
    if job.drafter == SIMULATED:
        options["continuations"] = [[0]] if continuations is None else continuations
    if job.drafter == "draft_model" and path is not None and not holds_head(Path(path)):
        if path == job.target and not job.drafter_replicated:
            path = target
        else:
            places = {"mesh": target.mesh, "replicated": job.drafter_replicated}
            path = load_model(path, dtype=job.dtype, **places)
    length = job.session["num_speculative_tokens"]
    options["num_speculative_tokens"] = length if isinstance(length, int) else None
    return make_drafter(job.drafter, target, path, **options)


def job_prompts(
    job: Job, target: Model, turn: int, answers: Mapping[int, Sequence[str]]
) -> list[Prompt]:
    """The prompts of a turn; `answers` are those given so far, by the question's place.

    Raises InputError where a chat template is needed and the model has none.
    """
    has_template = target.tokenizer is not None and target.tokenizer.chat_template is not None
    chat = has_template if job.chat == "auto" else job.chat == "true"
    if job.all_turns and not chat:
        raise InputError(
            "turns='all' needs a chat template: use turns=first"
            + (" or chat=auto" if has_template else f", since {target.name} has none")
        )
    prompts: list[Prompt] = []
    for place in job.turn(turn):
        said = job.questions[place].turns[: turn + 1]
        if not chat:
            prompts.append(said[0])
            continue
        messages = []
        for number, text in enumerate(said):
            messages.append({"role": "user", "content": text})
            if number < turn:
                messages.append({"role": "assistant", "content": answers[place][number]})
        prompts.append(messages)
    return prompts


def _questions(config: ml_collections.ConfigDict) -> Sequence[Question]:
    prompt, path = config.get("prompt"), config.get("prompts")
    if prompt is not None and path is not None:
        raise InputError(f"prompts={path!r}: prompt is given too; leave one of the two out")
    if prompt is not None:
        if not prompt.strip():
            raise InputError(f"prompt={prompt!r} is empty: give a text")
        return [Question(0, "", (prompt,))]
    questions = list(BUILT_IN) if path is None else read_questions(path)
    return select(questions, config.get("limit"), config.get("per_task"))


def _draft_length(value: Any) -> int | str | None:
    if value is None or value == "auto":
        return value
    length = int(value) if re.fullmatch(r"[+-]?\d{1,9}", str(value)) else value
    check_length(length)
    return length


def _ladder(config: ml_collections.ConfigDict) -> tuple[tuple[int, int, int], ...]:
    ladder = config.num_speculative_tokens_per_batch_size
    if not all(
        isinstance(step, tuple | list) and len(step) == 3 and all(isinstance(n, int) for n in step)
        for step in ladder
    ):
        raise InputError(
            f"num_speculative_tokens_per_batch_size={ladder!r}: use steps of (low, high, k), "
            "such as ((1, 4, 8), (5, 16, 2))"
        )
    return tuple(tuple(step) for step in ladder)


def _require(config: ml_collections.ConfigDict, name: str, known: Sequence[str]) -> None:
    if config[name] not in known:
        raise InputError(f"{name}={config[name]!r} is unknown: use {', '.join(known)}")


def _mix(seed: int, turn: int) -> int:
    return int(np.random.SeedSequence((seed, turn)).generate_state(1)[0])
