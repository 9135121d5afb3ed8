"""A decode config, checked and turned into the values that `session` takes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import ml_collections
import numpy as np

from specjax.cli import command_line
from specjax.cli.built_in_prompts import BUILT_IN
from specjax.decoding.plan import BATCH_SIZE, DRAFT_LENGTH, LADDER, MAX_LENGTH, RULE_NAME
from specjax.decoding.prompts import CHAT, Prompt, Question, read_questions, select
from specjax.decoding.sampling_params import SEED, SamplingParams
from specjax.drafters import (
    DRAFTERS,
    LoadedDrafter,
    check_options,
    drafter_options,
    make_drafter,
    option_type,
)
from specjax.errors import InputError
from specjax.fields import (
    Choice,
    Fields,
    Flag,
    InputFile,
    Kind,
    OutputFile,
    PathOrName,
    Text,
    Whole,
    check_values,
    fields_of,
    kind_of,
    optional,
)
from specjax.files.paths import user_path
from specjax.loading.heads.find_head import holds_head
from specjax.loading.load import DTYPE, load_model
from specjax.loading.model import Model

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
        """The indices of the questions that have a turn of that number (from 0)."""
        return [i for i, question in enumerate(self.questions) if number < len(question.turns)]

    def turn_seeds(self, number: int) -> tuple[int, SamplingParams]:
        """Seed and sampling of a turn: later turns draw anew instead of repeating the first's."""
        if number == 0:
            return self.seed, self.sampling
        sampling = self.sampling
        if sampling.seed is not None:
            sampling = SamplingParams.of(vars(sampling) | {"seed": _mix(sampling.seed, number)})
        return _mix(self.seed, number), sampling


def decode_fields() -> Fields:
    """The kinds of a decode config's fields; the section `drafter` has the options of all."""
    options: dict[str, Kind] = {}
    for name in DRAFTERS:
        for option, parameter in drafter_options(name).items():
            if option_type(parameter) is not None:
                options[option] = optional(kind_of(parameter.annotation))
    return {
        "target": PathOrName(),
        "dtype": DTYPE,
        "prompt": optional(Text()),
        "prompts": optional(InputFile(pipe=True)),
        "turns": Choice(("first", "all")),
        "limit": optional(Whole(1)),
        "per_task": optional(Whole(1)),
        "chat": CHAT,
        "drafter": {
            "name": Text(),
            "path": optional(PathOrName()),
            "replicated": Flag(),
            **options,
        },
        "num_speculative_tokens": optional(DraftLengthText()),
        "num_speculative_tokens_per_batch_size": LADDER,
        "verify": RULE_NAME,
        "sampling": fields_of(SamplingParams),
        "batch_size": BATCH_SIZE,
        "max_length": optional(MAX_LENGTH),
        "seed": SEED,
        "compare": Flag(),
        "report": optional(OutputFile()),
        "mesh": command_line.MESH_FIELDS,
        "distributed": command_line.DISTRIBUTED_FIELDS,
    }


@dataclass(frozen=True)
class DraftLengthText:
    """`num_speculative_tokens` of a command line: "auto", or a whole number as a text."""

    def check(self, name: str, value: Any) -> int | str:
        """The number, or "auto"."""
        number = re.fullmatch(r"[+-]?\d{1,9}", value) if isinstance(value, str) else None
        return DRAFT_LENGTH.check(name, int(value) if number else value)


def read_job(config: ml_collections.ConfigDict) -> Job:
    """Check a config as far as that goes without the model. Raises InputError."""
    values = check_values(decode_fields(), config.to_dict())
    options = dict(values["drafter"])
    name, path = options.pop("name"), options.pop("path")
    replicated = options.pop("replicated")
    if replicated and name != "draft_model":
        raise InputError(f"drafter.replicated=True: {name} is no draft_model; leave it out")
    options = {option: value for option, value in options.items() if value is not None}
    options = check_options(name, path, options, supplied=("continuations",))
    return Job(
        target=values["target"],
        dtype=values["dtype"],
        questions=tuple(_questions(values)),
        all_turns=values["turns"] == "all",
        chat=values["chat"],
        drafter=name,
        drafter_path=path,
        drafter_replicated=replicated,
        drafter_options=options,
        sampling=SamplingParams.of(values["sampling"]),
        seed=values["seed"],
        compare=values["compare"],
        report=config["report"],
        session={
            name: values[name]
            for name in (
                "num_speculative_tokens",
                "num_speculative_tokens_per_batch_size",
                "verify",
                "batch_size",
                "max_length",
            )
        },
    )


def job_drafter(
    job: Job, target: Model, continuations: Sequence[Sequence[int]] | None = None
) -> LoadedDrafter:
    """The job's drafter; `continuations` are what plain decoding gave, for `simulated`."""
    options, path = dict(job.drafter_options), job.drafter_path
    if job.drafter == SIMULATED:
        options["continuations"] = [[0]] if continuations is None else continuations
    if (
        job.drafter == "draft_model"
        and path is not None
        and not holds_head(user_path("drafter.path", path))
    ):
        if path == job.target and not job.drafter_replicated:
            path = target
        else:
            placement = {"mesh": target.mesh, "replicated": job.drafter_replicated}
            path = load_model(path, dtype=job.dtype, field="drafter.path", **placement)
    length = job.session["num_speculative_tokens"]
    options["num_speculative_tokens"] = length if isinstance(length, int) else None
    return make_drafter(job.drafter, target, path, **options)


def job_prompts(
    job: Job, target: Model, turn: int, answers: Mapping[int, Sequence[str]]
) -> list[Prompt]:
    """The prompts of a turn; `answers` are those given so far, by the question's index.

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
    for index in job.turn(turn):
        said = job.questions[index].turns[: turn + 1]
        if not chat:
            prompts.append(said[0])
            continue
        messages = []
        for number, text in enumerate(said):
            messages.append({"role": "user", "content": text})
            if number < turn:
                messages.append({"role": "assistant", "content": answers[index][number]})
        prompts.append(messages)
    return prompts


def _questions(values: Mapping[str, Any]) -> Sequence[Question]:
    prompt, path = values["prompt"], values["prompts"]
    if prompt is not None and path is not None:
        raise InputError(f"prompts={str(path)!r}: prompt is given too; leave one of the two out")
    if prompt is not None:
        return [Question(0, "", (prompt,))]
    questions = list(BUILT_IN) if path is None else read_questions(path)
    return select(questions, values["limit"], values["per_task"])


def _mix(seed: int, turn: int) -> int:
    return int(np.random.SeedSequence((seed, turn)).generate_state(1)[0])
