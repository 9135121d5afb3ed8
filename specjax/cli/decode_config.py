"""The config of `specjax.decode`: its fields, their checks, and its drafters and prompts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from jax.sharding import Mesh

from specjax.cli.built_in_prompts import questions_of
from specjax.cli.mesh_config import ONE_DEVICE, ONE_PROCESS, DistributedConfig, MeshConfig
from specjax.decoding.options import (
    AUTO,
    BATCH_SIZE,
    DRAFT_LENGTH,
    MAX_LENGTH,
    RULE_NAME,
    DecodeOptions,
    Ladder,
)
from specjax.decoding.prompts import (
    CHAT,
    Prompt,
    Question,
    encode_prompt,
    select,
)
from specjax.decoding.sampling_params import SEED, SamplingParams
from specjax.drafters import (
    DRAFTERS,
    LoadedDrafter,
    TreeOptions,
    check_options,
    divide_options,
    drafter_options,
    make_drafter,
    option_type,
)
from specjax.errors import InputError
from specjax.fields import (
    Fields,
    Flag,
    InputFile,
    Number,
    OutputFile,
    PathOrName,
    Text,
    Whole,
    fields_of,
    kind_of,
    optional,
    read_values,
)
from specjax.files.path_checks import user_path
from specjax.loading.find_head import kind_of_head
from specjax.loading.load import DEFAULT_MODEL, DTYPE, load_model
from specjax.loading.model import CACHE_DTYPE, Model
from specjax.loading.quantize import WEIGHTS
from specjax.sampling import RULES, Rule, Typical, derived_seed
from specjax.trees import FastestTree, RankedTree
from specjax.tuning import with_fastest_trees

SIMULATED = "simulated"
"""The drafter that needs a plain run before it can be made."""
_DRAFT_MODEL = "draft_model"
"""The drafter that is a model, which each device may hold whole."""
_THRESHOLD = optional(Number(0.0, above=True, remedy="use a number above 0"))


@dataclass(frozen=True)
class DraftLengthText:
    """`num_speculative_tokens` on a command line: "auto", "fixed", or a whole number."""

    remedy = DRAFT_LENGTH.remedy

    def check(self, name: str, value: Any) -> int | str:
        """Return the number, "auto" or "fixed"."""
        number = re.fullmatch(r"[+-]?\d{1,9}", value) if isinstance(value, str) else None
        return DRAFT_LENGTH.check(name, int(value) if number else value)


def _drafter_fields() -> Fields:
    """Return the kinds of the section `drafter`: the options of all drafters that are text."""
    options = {
        option: optional(kind_of(parameter.annotation))
        for name in DRAFTERS
        for option, parameter in drafter_options(name).items()
        if option_type(parameter) is not None
    }
    return {"name": Text(), "path": optional(PathOrName()), "replicated": Flag(), **options}


_TREE = fields_of(TreeOptions)
_DRAFTER_FIELDS = _drafter_fields()
_TREE_FIELDS = {**_TREE, "kind": optional(_TREE["kind"])}
_TYPICAL_FIELDS = {"epsilon": _THRESHOLD, "delta": _THRESHOLD}


@dataclass(frozen=True, kw_only=True)
class TargetFields:
    """The fields of a config that say which model is loaded, and how."""

    target: Annotated[str, PathOrName()] = DEFAULT_MODEL
    """A built-in name, a .gguf file, a Hugging Face directory, or org/name on the hub."""
    dtype: Annotated[str, DTYPE] = "auto"
    """Of activations and float weights; auto: float32 on a CPU, bfloat16 elsewhere."""
    weights: Annotated[str, WEIGHTS] = "auto"
    """The target's: float; int8 or int4; file, as a GGUF has them; or auto, file if possible."""
    kv_cache_dtype: Annotated[str, CACHE_DTYPE] = "auto"
    """How caches store keys and values; auto: as activations."""


@dataclass(frozen=True, kw_only=True)
class DrafterFields:
    """The field of a config that says which drafter drafts."""

    drafter: Annotated[Mapping[str, Any], _DRAFTER_FIELDS] = field(
        default_factory=lambda: {"name": "ngram", "replicated": False}
    )
    """`name` may be several for specjax.decode, as ngram,eagle3,ngram+eagle3, each compared with
    plain decoding; an option goes to those that take it (specjax.decode --list). `path` is a
    trained drafter's. With `replicated` each device holds a draft model whole."""


@dataclass(frozen=True, kw_only=True)
class DecodingFields(DrafterFields):
    """The fields of a config that say how an engine decodes."""

    tree: Annotated[Mapping[str, Any], _TREE_FIELDS] = field(default_factory=dict)
    """Several tokens after each, instead of a chain: static ones are the same ranks in each round,
    dynamic ones are chosen anew; auto is the static one that is fastest here (`TreeOptions`). By
    default as the drafter has it: token_recycling a static tree, the others a chain."""

    num_speculative_tokens: Annotated[int | str, DraftLengthText()] = AUTO
    """auto: as many as make decoding faster; fixed: as each drafter has it, which is what Python's
    functions do by default; or a number."""
    num_speculative_tokens_per_batch_size: Annotated[tuple, Ladder()] = ()
    """((low, high, k), ...): with low..high unfinished rows at most k draft tokens."""
    verify: Annotated[str, RULE_NAME] = "rejection"
    """The rule by which draft tokens are accepted; specjax.decode --list describes them."""
    typical: Annotated[Mapping[str, Any], _TYPICAL_FIELDS] = field(default_factory=dict)
    """The rule `typical` accepts p(x) > min(epsilon, delta exp(-H(p))); 0.09 and 0.3."""
    batch_size: Annotated[int, BATCH_SIZE] = 1
    """Rows that decode together; texts are shown as they come, and prompts timed alone, with 1."""
    max_length: Annotated[int | None, optional(MAX_LENGTH)] = None
    """The most tokens of a prompt and its output; by default the target's positions."""
    sampling: SamplingParams = SamplingParams()  # noqa: RUF009 - frozen
    seed: Annotated[int, SEED] = 0
    """Of all draws."""


@dataclass(frozen=True, kw_only=True)
class PromptFields:
    """The fields of a config that say what is decoded."""

    prompt: Annotated[str | None, optional(Text())] = None
    """One text."""
    prompts: Annotated[Path | None, optional(InputFile(pipe=True))] = None
    """A JSONL file in Spec-Bench's schema; without it and `prompt` a few built-in prompts."""
    turns: Literal["first", "all"] = "first"
    """With all, answers become the history of the next turn."""
    limit: Annotated[int | None, optional(Whole(1))] = None
    """The first prompts only."""
    per_task: Annotated[int | None, optional(Whole(1))] = None
    """The first prompts of each task only."""
    chat: Annotated[str, CHAT] = "auto"
    """Whether prompts go through the chat template; auto: where there is one."""


@dataclass(frozen=True, kw_only=True)
class DecodeFields(DecodingFields, PromptFields, TargetFields):
    """The fields of a decode config with their defaults; None means that specjax chooses."""

    compare: bool = True
    """Also decode plainly, for the speed-up, and check that the output is the same."""
    repeats: Annotated[int | None, optional(Whole(1))] = None
    """How often prompts are decoded both ways in turn; the median speed-up counts. By default three
    times where one prompt takes seconds, and once where there are more."""
    report: Annotated[Path | None, optional(OutputFile())] = None
    """A file of JSON lines; its folder is made."""

    mesh: MeshConfig = ONE_DEVICE
    """data x model devices: rows are spread over data, weights and heads split over model."""
    distributed: DistributedConfig = ONE_PROCESS
    """Several processes: coordinator_address, num_processes, process_id; or cluster=true, which
    asks the scheduler (Slurm, Kubernetes, TPU pods)."""


@dataclass(frozen=True)
class DrafterConfig:
    """One drafter of a config: its name, its path, and the options that it accepts."""

    name: str
    path: str | None
    options: Mapping[str, Any]
    replicated: bool


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(DecodeFields):
    """A checked config of `specjax.decode`, with its prompts read."""

    questions: tuple[Question, ...]
    drafters: tuple[DrafterConfig, ...]
    options: DecodeOptions
    written: Mapping[str, Any]
    """The values as the config file and the command line gave them, by section."""

    @property
    def num_turns(self) -> int:
        """The number of turns of the longest conversation."""
        if self.turns == "first":
            return 1
        return max(len(question.turns) for question in self.questions)

    @property
    def comparable(self) -> bool:
        """Whether the output must equal that of plain decoding token by token."""
        return self.options.verify.position_noise or self.sampling.temperature == 0

    @property
    def lossy(self) -> bool:
        """Whether the output distribution differs from the target's."""
        return not self.options.verify.exact and self.sampling.temperature > 0

    @property
    def has_expectation(self) -> bool:
        """Whether to compute the acceptance that p and q imply under `rejection`."""
        sampled = self.sampling.temperature > 0 and self.options.verify.name == "rejection"
        return self.compare and sampled

    def written_for(self, drafter: DrafterConfig) -> dict[str, Any]:
        """Return the config as it would be written for a single drafter."""
        alone = {"name": drafter.name, "path": drafter.path, "replicated": drafter.replicated}
        section = {
            name: alone.get(name, value if name in drafter.options else None)
            for name, value in self.written["drafter"].items()
        }
        tree = self.written["tree"]
        if "tree" not in drafter.options:
            tree = dict.fromkeys(tree)
        return {**self.written, "compare": self.compare, "drafter": section, "tree": tree}

    def turn(self, number: int) -> list[int]:
        """Return the indices of the questions that have turn `number` (from 0)."""
        return [i for i, question in enumerate(self.questions) if number < len(question.turns)]

    def prompt_name(self, question_id: int | str, turn: int) -> str:
        """Return the name of a turn (from 0) of a question in errors."""
        name = f"question {question_id}"
        return f"{name}, turn {turn + 1}" if self.num_turns > 1 else name

    def turn_seeds(self, number: int) -> tuple[int, SamplingParams]:
        """Return the seed and the sampling of a turn; each turn has different draws."""
        if number == 0:
            return self.seed, self.sampling
        sampling = self.sampling
        if sampling.seed is not None:
            sampling = replace(sampling, seed=derived_seed(sampling.seed, number))
        return derived_seed(self.seed, number), sampling


def read_decode_config(written: Mapping[str, Any]) -> DecodeConfig:
    """Return the checked config, except for checks that need the model. Raises InputError."""
    given = read_values(DecodeFields, written)
    drafters = _drafters(given.drafter, given.tree)
    compare = given.compare or len(drafters) > 1
    if given.repeats is not None and given.repeats > 1 and not compare:
        raise InputError(
            f"repeats={given.repeats}: compare=false measures no speed-up; leave out one of them"
        )
    options = DecodeOptions(
        num_speculative_tokens=given.num_speculative_tokens,
        num_speculative_tokens_per_batch_size=given.num_speculative_tokens_per_batch_size,
        verify=_rule(given.verify, given.typical),
        batch_size=given.batch_size,
        max_length=given.max_length,
    )
    return DecodeConfig(
        **{**vars(given), "compare": compare},
        questions=tuple(_questions(given)),
        drafters=drafters,
        options=options,
        written=written,
    )


def _rule(name: str, thresholds: Mapping[str, float | None]) -> Rule:
    """Return the rule of that name; `thresholds` are the section `typical`."""
    given = {option: value for option, value in thresholds.items() if value is not None}
    if name == Typical.name:
        return Typical(**given)
    for option, value in given.items():
        raise InputError(
            f"typical.{option}={value}: verify={name} does not take it; leave it out, or use "
            f"verify={Typical.name}"
        )
    return RULES[name]


def _drafters(section: Mapping[str, Any], tree: Mapping[str, Any]) -> tuple[DrafterConfig, ...]:
    """Return the drafters of the section `drafter`; an option and a tree go to those that take it.

    Where the section `tree` says nothing, each drafter has the tree or the chain that it has by
    default.
    """
    options = {name: value for name, value in section.items() if value is not None}
    written, path = options.pop("name"), options.pop("path", None)
    replicated = options.pop("replicated")
    if tree_options := {name: value for name, value in tree.items() if value is not None}:
        options["tree"] = TreeOptions(**tree_options)
    names = [name.strip() for name in written.split(",")]
    for name in names:
        if not name:
            raise InputError(f"drafter.name={written!r}: name drafters such as ngram,eagle3")
        if names.count(name) > 1:
            raise InputError(f"drafter.name={written!r}: {name} is given twice; name each once")
    if replicated and _DRAFT_MODEL not in names:
        none = f"{written} is no" if len(names) == 1 else f"none of {', '.join(names)} is a"
        raise InputError(f"drafter.replicated=True: {none} {_DRAFT_MODEL}; leave it out")
    parts = [(names[0], path, options)]
    if len(names) > 1:
        parts = divide_options(names, path, options)
    return tuple(
        DrafterConfig(
            name,
            part_path,
            check_options(name, part_path, part_options, supplied=("continuations",)),
            replicated and name == _DRAFT_MODEL,
        )
        for name, part_path, part_options in parts
    )


def load_target(config: TargetFields, mesh: Mesh | None) -> Model:
    """Return a config's target, on a mesh if there is one. Raises InputError."""
    return load_model(
        config.target,
        dtype=config.dtype,
        weights=config.weights,
        kv_cache_dtype=config.kv_cache_dtype,
        mesh=mesh,
        field="target",
    )


class ConfigDrafter(NamedTuple):
    """A drafter of a config, with the trees of its parts that `tree.kind=auto` chose.

    With greedy decoding, for which rates are measured, the trees include their predicted speed.
    """

    loaded: LoadedDrafter
    trees: Mapping[str, FastestTree | RankedTree]


def make_config_drafter(
    config: DecodeConfig,
    drafter: DrafterConfig,
    target: Model,
    continuations: Sequence[Sequence[int]] | None = None,
    tell: Callable[[str], Any] = lambda line: None,
) -> ConfigDrafter:
    """Return one of a config's drafters.

    `continuations` are plain decoding's tokens, for the drafter `simulated`. `tell` receives lines
    about the choice of a tree of the kind `auto` and its predicted speed.
    """
    options, path = dict(drafter.options), drafter.path
    tree = options.get("tree")
    if tree is not None and tree.kind == "auto":
        del options["tree"]
        if (length := config.options.fixed_draft_length) is not None:
            raise InputError(
                f"num_speculative_tokens={length}: tree.kind=auto chooses the longest path; use "
                "auto or fixed, and tree.depth as a limit"
            )
    if drafter.name == SIMULATED:
        options["continuations"] = [[0]] if continuations is None else continuations
    if (
        drafter.name == _DRAFT_MODEL
        and path is not None
        and kind_of_head(user_path("drafter.path", path)) is None
    ):
        if path == config.target and not drafter.replicated:
            path = target
        else:
            placement = {"mesh": target.mesh, "replicated": drafter.replicated}
            path = load_model(path, dtype=config.dtype, field="drafter.path", **placement)
    length = config.options.fixed_draft_length
    made = make_drafter(drafter.name, target, path, num_speculative_tokens=length, **options)
    if tree is None or tree.kind != "auto":
        return ConfigDrafter(made, {})
    prompts = turn_prompts(config, target, 0, {})
    lengths = [
        len(encode_prompt(target, prompt, f"prompts[{number}]"))
        for number, prompt in enumerate(prompts)
    ]
    made, found = with_fastest_trees(
        target,
        made,
        tree,
        path=drafter.path,
        batch_size=min(config.options.batch_size, len(prompts)),
        # Of the longest row, when half of its answer is there.
        context=max(lengths) + config.sampling.max_new_tokens // 2,
        tell=tell,
    )
    greedy = config.sampling.temperature == 0
    trees = {name: fastest if greedy else fastest.tree for name, fastest in found.items()}
    for name, chosen in trees.items():
        tell(f"{name}: tree.kind=auto: {chosen}")
    return ConfigDrafter(made, trees)


def turn_prompts(
    config: DecodeConfig, target: Model, turn: int, answers: Mapping[int, Sequence[str]]
) -> list[Prompt]:
    """Return the prompts of a turn; `answers` are those to earlier turns, by question index.

    Raises InputError if a chat template is required and the model has none.
    """
    has_template = target.tokenizer is not None and target.tokenizer.chat_template is not None
    chat = has_template if config.chat == "auto" else config.chat == "true"
    if config.turns == "all" and not chat:
        raise InputError(
            "turns='all' needs a chat template: use turns=first"
            + (" or chat=auto" if has_template else f", since {target.name} has none")
        )
    prompts: list[Prompt] = []
    for index in config.turn(turn):
        user_turns = config.questions[index].turns[: turn + 1]
        if not chat:
            prompts.append(user_turns[0])
            continue
        messages = []
        for number, text in enumerate(user_turns):
            messages.append({"role": "user", "content": text})
            if number < turn:
                messages.append({"role": "assistant", "content": answers[index][number]})
        prompts.append(messages)
    return prompts


def _questions(given: DecodeFields) -> Sequence[Question]:
    if given.prompt is None:
        return select(questions_of(given.prompts), given.limit, given.per_task)
    if given.prompts is not None:
        raise InputError(
            f"prompts={str(given.prompts)!r}: prompt is given too; leave one of the two out"
        )
    return [Question(0, "", (given.prompt,))]
