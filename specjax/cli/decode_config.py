"""The config of `specjax.decode`: its fields, its checked value, the drafter and prompts of it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from specjax.cli.built_in_prompts import BUILT_IN
from specjax.cli.mesh_config import DistributedConfig, MeshConfig
from specjax.decoding.options import BATCH_SIZE, DRAFT_LENGTH, RULE_NAME, DecodeOptions
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
from specjax.sampling import derived_seed

SIMULATED = "simulated"
"""The drafter that needs a plain run before it can be made."""


@dataclass(frozen=True)
class DecodeConfig:
    """A checked config of `specjax.decode`, with its prompts read."""

    target: str
    dtype: str
    questions: tuple[Question, ...]
    all_turns: bool
    chat: Literal["auto", "true", "false"]
    drafter: str
    drafter_path: str | None
    drafter_replicated: bool
    drafter_options: Mapping[str, Any]
    options: DecodeOptions
    sampling: SamplingParams
    seed: int
    compare: bool
    report: Path | None
    mesh: MeshConfig
    distributed: DistributedConfig
    written: Mapping[str, Any]
    """The values as the config file and the command line gave them, by section."""

    @property
    def num_turns(self) -> int:
        """How many turns the longest conversation has."""
        return max(len(question.turns) for question in self.questions) if self.all_turns else 1

    @property
    def comparable(self) -> bool:
        """Whether the output has to equal that of plain decoding, token for token."""
        return self.options.verify.position_noise or self.sampling.temperature == 0

    @property
    def has_expectation(self) -> bool:
        """Whether to compute the acceptance that p and q imply under the rule `rejection`."""
        sampled = self.sampling.temperature > 0 and self.options.verify.name == "rejection"
        return self.compare and sampled and self.drafter != "none"

    def turn(self, number: int) -> list[int]:
        """The indices of the questions that have a turn of that number (from 0)."""
        return [i for i, question in enumerate(self.questions) if number < len(question.turns)]

    def turn_seeds(self, number: int) -> tuple[int, SamplingParams]:
        """Seed and sampling of a turn: each turn has different random draws."""
        if number == 0:
            return self.seed, self.sampling
        sampling = self.sampling
        if sampling.seed is not None:
            sampling = replace(sampling, seed=derived_seed(sampling.seed, number))
        return derived_seed(self.seed, number), sampling


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
        **fields_of(DecodeOptions),
        "num_speculative_tokens": optional(DraftLengthText()),
        "verify": RULE_NAME,
        "batch_size": BATCH_SIZE,
        "sampling": fields_of(SamplingParams),
        "seed": SEED,
        "compare": Flag(),
        "report": optional(OutputFile()),
        "mesh": fields_of(MeshConfig),
        "distributed": fields_of(DistributedConfig),
    }


@dataclass(frozen=True)
class DraftLengthText:
    """`num_speculative_tokens` of a command line: "auto", or a whole number as a text."""

    def check(self, name: str, value: Any) -> int | str:
        """The number, or "auto"."""
        number = re.fullmatch(r"[+-]?\d{1,9}", value) if isinstance(value, str) else None
        return DRAFT_LENGTH.check(name, int(value) if number else value)


def read_decode_config(written: Mapping[str, Any]) -> DecodeConfig:
    """The checked config; checks that need the model are made later. Raises InputError."""
    values = check_values(decode_fields(), written)
    options = {name: value for name, value in values["drafter"].items() if value is not None}
    name, path = options.pop("name"), options.pop("path", None)
    replicated = options.pop("replicated")
    if replicated and name != "draft_model":
        raise InputError(f"drafter.replicated=True: {name} is no draft_model; leave it out")
    return DecodeConfig(
        target=values["target"],
        dtype=values["dtype"],
        questions=tuple(_questions(values)),
        all_turns=values["turns"] == "all",
        chat=values["chat"],
        drafter=name,
        drafter_path=path,
        drafter_replicated=replicated,
        drafter_options=check_options(name, path, options, supplied=("continuations",)),
        options=DecodeOptions(**{name: values[name] for name in fields_of(DecodeOptions)}),
        sampling=SamplingParams(**values["sampling"]),
        seed=values["seed"],
        compare=values["compare"],
        report=values["report"],
        mesh=MeshConfig(**values["mesh"]),
        distributed=DistributedConfig(**values["distributed"]),
        written=written,
    )


def make_config_drafter(
    config: DecodeConfig, target: Model, continuations: Sequence[Sequence[int]] | None = None
) -> LoadedDrafter:
    """The config's drafter; `continuations` are plain decoding's tokens, for `simulated`."""
    options, path = dict(config.drafter_options), config.drafter_path
    if config.drafter == SIMULATED:
        options["continuations"] = [[0]] if continuations is None else continuations
    if (
        config.drafter == "draft_model"
        and path is not None
        and not holds_head(user_path("drafter.path", path))
    ):
        if path == config.target and not config.drafter_replicated:
            path = target
        else:
            placement = {"mesh": target.mesh, "replicated": config.drafter_replicated}
            path = load_model(path, dtype=config.dtype, field="drafter.path", **placement)
    length = config.options.fixed_draft_length
    return make_drafter(config.drafter, target, path, num_speculative_tokens=length, **options)


def turn_prompts(
    config: DecodeConfig, target: Model, turn: int, answers: Mapping[int, Sequence[str]]
) -> list[Prompt]:
    """The prompts of a turn; `answers` are those to earlier turns, by the question's index.

    Raises InputError where a chat template is needed and the model has none.
    """
    has_template = target.tokenizer is not None and target.tokenizer.chat_template is not None
    chat = has_template if config.chat == "auto" else config.chat == "true"
    if config.all_turns and not chat:
        raise InputError(
            "turns='all' needs a chat template: use turns=first"
            + (" or chat=auto" if has_template else f", since {target.name} has none")
        )
    prompts: list[Prompt] = []
    for index in config.turn(turn):
        said = config.questions[index].turns[: turn + 1]
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
