"""The config of `specjax.decode`: its fields, their checks, and its drafters and prompts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from jax.sharding import Mesh

from specjax.apps.command_line.mesh_config import DeviceFields
from specjax.apps.run.built_in_prompts import questions_of
from specjax.apps.tuning.choose_tree import with_fastest_trees
from specjax.drafters import (
    LoadedDrafter,
    TreeOptions,
    check_options,
    divide_options,
    drafter_options,
    make_drafter,
    option_type,
)
from specjax.engine.options import DecodeOptions
from specjax.engine.plan import check_pages_on_mesh
from specjax.engine.requests import CHAT, Prompt, SamplingParams, encode_prompt
from specjax.errors import InputError
from specjax.fields import (
    DependentFields,
    Fields,
    Flag,
    Inline,
    InputFile,
    Number,
    OutputFile,
    PathOrName,
    Shared,
    Text,
    Use,
    Whole,
    described,
    fields_of,
    optional,
    read_values,
)
from specjax.files.path_checks import user_path
from specjax.loading.hub import DEFAULT_MODEL
from specjax.loading.load import DTYPE, load_draft_model, load_model
from specjax.loading.model import CACHE_DTYPE, Model
from specjax.loading.quantize import ACTIVATIONS, WEIGHTS
from specjax.loading.texts.questions import Question, select
from specjax.methods.find_head import kind_of_head
from specjax.methods.options import option_kind, option_meanings
from specjax.methods.registry import METHODS, parts_of
from specjax.sampling import Rule, Typical
from specjax.trees import FastestTree, RankedTree

_MODELS = tuple(name for name, method in METHODS.items() if method.of_model is not None)
"""The drafters that may be models of their own, which each device may hold whole."""
_OPTIONS = DecodeOptions(batch_size=1, rounds_per_step=4)
_THRESHOLD = optional(Number(0.0, above=True, remedy="use a number above 0"))


@dataclass(frozen=True, kw_only=True)
class _AnyDrafter:
    """The fields of the section `drafter` beside the options of drafters."""

    name: Annotated[str, Text()] = "ngram"
    """The drafter: a name of specjax.decode --list, package.module:function, or names joined by +
    or |; for specjax.decode several, with commas.
    """
    path: Annotated[str | None, optional(PathOrName())] = None
    """The weights of a trained drafter: a head, or for draft_model any model."""
    replicated: Annotated[bool, Flag()] = False
    """Whether each device of a mesh holds a whole draft model."""


def _drafter_fields(written: Any) -> Fields:
    """Return the kinds of the section `drafter` if its `name` is `written`.

    They are those of all drafters' options that a text can give, the caller's own drafters in
    `written` included. A value is checked by the named drafters that take the option, each in its
    own range; unknown names are refused elsewhere. Raises InputError for an own drafter that cannot
    be imported.
    """
    text = written if isinstance(written, str) else ""
    named = {part for name in text.split(",") for part in parts_of(name.strip())}
    own = [name for name in sorted(named) if ":" in name]
    uses: dict[str, list[Use]] = {}
    for name in (*METHODS, *own):
        meanings = option_meanings(name)
        for option, parameter in drafter_options(name).items():
            if option_type(parameter) is not None and option != "tree":
                use = Use(name, option_kind(parameter), meanings[option], parameter.default)
                uses.setdefault(option, []).append(use)
    options = {
        option: Shared(tuple(each), tuple(optional(use.kind) for use in each if use.user in named))
        for option, each in uses.items()
    }
    fields = described(fields_of(_AnyDrafter), _AnyDrafter)
    return fields | {option: kind for option, kind in options.items() if option not in fields}


_DRAFTER = DependentFields("name", _drafter_fields)
_TREE_KINDS = fields_of(TreeOptions)
_TREE = described({**_TREE_KINDS, "kind": optional(_TREE_KINDS["kind"])}, TreeOptions)
_TYPICAL = described({"epsilon": _THRESHOLD, "delta": _THRESHOLD}, Typical)


@dataclass(frozen=True, kw_only=True)
class TargetFields:
    """The fields of a config that name the target, and the dtypes of its weights and caches."""

    target: Annotated[str, PathOrName()] = DEFAULT_MODEL
    """A built-in name, a .gguf file, a Hugging Face directory, or org/name on the hub."""
    dtype: Annotated[str, DTYPE] = "auto"
    """The dtype of activations and float weights; auto: float32 on a CPU, bfloat16 elsewhere."""
    weights: Annotated[str, WEIGHTS] = "auto"
    """The form of the target's weights: float, int8, int4, or file, as stored in a GGUF file; auto
    is file if possible.
    """
    activations: Annotated[str, ACTIVATIONS] = "auto"
    """The bits to which products with kernels in few bits round their inputs on one CPU: float, 24,
    16 or 8; auto is as precise as float32, and with 8 the model is another one.
    """
    kv_cache_dtype: Annotated[str, CACHE_DTYPE] = "auto"
    """The dtype of keys and values in caches; auto: that of activations."""


@dataclass(frozen=True)
class DrafterConfig:
    """One drafter of a config.

    `path` has its weights, if it needs any, and `options` are the values of the fields in the
    section `drafter` that this drafter accepts. With `replicated`, each device of a mesh has all
    its weights.
    """

    name: str
    path: str | None
    options: Mapping[str, Any]
    replicated: bool

    @property
    def replays(self) -> bool:
        """Whether the drafter is made from the output of plain decoding."""
        return self.name in METHODS and METHODS[self.name].replays


@dataclass(frozen=True, kw_only=True)
class DrafterFields(TargetFields):
    """The fields of a config that say which drafters draft for a target, and how it decodes.

    Raises InputError for a drafter that cannot have its options.
    """

    drafter: Annotated[Mapping[str, Any], _DRAFTER] = field(
        default_factory=lambda: {"name": "ngram", "replicated": False}
    )
    """The drafter and its options. For specjax.decode `name` may list several, as
    ngram,eagle3,ngram+eagle3, each compared with plain decoding; an option applies to the drafters
    that accept it. --config.drafter.name=package.module:function --help adds the options of your
    own.
    """
    options: Annotated[DecodeOptions, Inline()] = DecodeOptions()  # noqa: RUF009 - frozen
    sampling: SamplingParams = SamplingParams()  # noqa: RUF009 - frozen

    def __post_init__(self) -> None:
        _ = self.drafters

    @functools.cached_property
    def drafters(self) -> tuple[DrafterConfig, ...]:
        """The drafters that `drafter.name` lists."""
        return _drafters(self.drafter, {})

    def tuning_prompts(self, target: Model) -> list[Prompt]:
        """Return the prompts for which `tree.kind=auto` chooses a tree."""
        chat = has_chat_template(target)
        return [question.prompt(chat=chat) for question in questions_of(None)]


@dataclass(frozen=True, kw_only=True)
class DecodingFields(DrafterFields):
    """The fields of a config that say how an engine decodes; drafts may be trees."""

    tree: Annotated[Mapping[str, Any], _TREE] = field(default_factory=dict)
    """Draft a tree instead of a chain: static trees have the same candidate ranks in each round,
    dynamic trees are chosen in each round, and auto is the static tree that is fastest here
    (`TreeOptions`). By default each drafter uses its own choice: token_recycling a static tree, all
    others a chain.
    """
    typical: Annotated[Mapping[str, Any], _TYPICAL] = field(default_factory=dict)
    """The thresholds of the rule `typical`, which accepts p(x) > min(epsilon, delta exp(-H(p))); by
    default 0.09 and 0.3.
    """

    def __post_init__(self) -> None:
        options = replace(self.options, verify=_with_thresholds(self.options.verify, self.typical))
        object.__setattr__(self, "options", options)
        super().__post_init__()

    @functools.cached_property
    def drafters(self) -> tuple[DrafterConfig, ...]:
        """The drafters that `drafter.name` lists, each with its own options and tree."""
        return _drafters(self.drafter, self.tree)


@dataclass(frozen=True, kw_only=True)
class PromptFields:
    """The fields of a config that say which prompts are decoded."""

    prompt: Annotated[str | None, optional(Text())] = None
    """A single prompt."""
    prompts: Annotated[Path | None, optional(InputFile(pipe=True))] = None
    """A JSONL file in Spec-Bench's format; without it and `prompt` a few built-in prompts are used.
    """
    turns: Literal["first", "all"] = "first"
    """The turns of each conversation to decode; with all, answers become the history of the next
    turn.
    """
    limit: Annotated[int | None, optional(Whole(1))] = None
    """The number of prompts to decode, from the first one; by default all."""
    per_task: Annotated[int | None, optional(Whole(1))] = None
    """The number of prompts of each task to decode, from the first one; by default all."""
    chat: Annotated[str, CHAT] = "auto"
    """Whether prompts go through the chat template; auto: if the tokenizer has one."""
    questions: tuple[Question, ...] = ()
    """The conversations to decode, read from `prompt` or `prompts` by `with_questions`."""

    def uses_chat(self, target: Model) -> bool:
        """Return whether prompts go through the target's chat template.

        Raises InputError if the model lacks one that is needed.
        """
        has_template = has_chat_template(target)
        chat = has_template if self.chat == "auto" else self.chat == "true"
        if self.turns == "all" and not chat:
            raise InputError(
                "turns='all' needs a chat template: use turns=first"
                + (" or chat=auto" if has_template else f", since {target.name} has none")
            )
        return chat

    def first_prompts(self, target: Model) -> list[Prompt]:
        """Return the prompts of the first turns. Raises InputError as `uses_chat` does."""
        chat = self.uses_chat(target)
        return [question.prompt(chat=chat) for question in self.questions]


OwnFields = TypeVar("OwnFields", bound=PromptFields)
"""The config class of a command with prompts."""


def with_questions(config: OwnFields) -> OwnFields:
    """Return a config with its questions read; raise InputError if they cannot be."""
    if config.prompt is None:
        chosen = select(questions_of(config.prompts), config.limit, config.per_task)
    elif config.prompts is None:
        chosen = [Question(0, "", (config.prompt,))]
    else:
        raise InputError(
            f"prompts={str(config.prompts)!r}: prompt is given too; leave one of the two out"
        )
    return replace(config, questions=tuple(chosen))


def has_chat_template(target: Model) -> bool:
    """Return whether a model's tokenizer has a chat template."""
    return target.tokenizer is not None and target.tokenizer.chat_template is not None


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(DeviceFields, DecodingFields, PromptFields):
    """The config of `specjax.decode`; None means that specjax chooses.

    Raises InputError for fields that contradict one another.
    """

    options: Annotated[DecodeOptions, Inline({"batch_size": 1, "rounds_per_step": 4})] = _OPTIONS
    compare: bool = True
    """Also decode plainly, to measure the speed-up and to check that the output is the same."""
    repeats: Annotated[int | None, optional(Whole(1))] = None
    """How often prompts are decoded plainly and with drafters; the median speed-up is reported, of
    an even number the lower of the two in the middle. By default three times for a single prompt,
    if that takes seconds, and once otherwise.
    """
    report: Annotated[Path | None, optional(OutputFile())] = None
    """The file of JSON lines to write; its folder is created."""
    written: Mapping[str, Any] = field(default_factory=dict)
    """The values of the config file and the command line as they were given, by section."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "compare", self.compare or len(self.drafters) > 1)
        if self.repeats is not None and self.repeats > 1 and not self.compare:
            raise InputError(
                f"repeats={self.repeats}: compare=false measures no speed-up; leave out one of them"
            )
        check_pages_on_mesh(self.options.num_kv_pages, self.mesh.data)

    def tuning_prompts(self, target: Model) -> list[Prompt]:
        """Return the prompts of the first turns."""
        return self.first_prompts(target)

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
        """Whether the acceptance expected from p and q can be computed: for sampled, compared rows.

        p and q are the distributions of target and drafter; the rule must be `rejection`.
        """
        sampled = self.sampling.temperature > 0 and self.options.verify.name == "rejection"
        return self.compare and sampled

    def written_for(self, drafter: DrafterConfig) -> dict[str, Any]:
        """Return the config, by section, of a command that would run only one of the drafters."""
        alone = {"name": drafter.name, "path": drafter.path, "replicated": drafter.replicated}
        section = {
            name: alone.get(name, value if name in drafter.options else None)
            for name, value in self.written["drafter"].items()
        }
        tree = self.written["tree"]
        if "tree" not in drafter.options:
            tree = dict.fromkeys(tree)
        return {**self.written, "compare": self.compare, "drafter": section, "tree": tree}


def read_decode_config(written: Mapping[str, Any]) -> DecodeConfig:
    """Return the checked config, given the fields of a config file by section.

    Files of prompts are read. Checks that need the model are made later. Raises InputError for an
    invalid field.
    """
    return with_questions(replace(read_values(DecodeConfig, written), written=written))


def _with_thresholds(rule: Rule, thresholds: Mapping[str, float | None]) -> Rule:
    """Return a rule with `thresholds`, the section `typical`.

    Raises InputError if another rule has thresholds.
    """
    set_thresholds = {option: value for option, value in thresholds.items() if value is not None}
    if isinstance(rule, Typical):
        return replace(rule, **set_thresholds)
    for option, value in set_thresholds.items():
        raise InputError(
            f"typical.{option}={value}: verify={rule.name} does not take it; leave it out, or use "
            f"verify={Typical.name}"
        )
    return rule


def _drafters(section: Mapping[str, Any], tree: Mapping[str, Any]) -> tuple[DrafterConfig, ...]:
    """Return the drafters that the section `drafter` names, each with the options it accepts.

    The section `tree`, unless it is empty, applies to the drafters that accept a tree; otherwise
    each drafter uses its default tree or chain. Raises InputError for invalid names and options.
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
    if replicated and not {*_MODELS} & {*names}:
        none = f"{written} is no" if len(names) == 1 else f"none of {', '.join(names)} is a"
        raise InputError(f"drafter.replicated=True: {none} {' or '.join(_MODELS)}; leave it out")
    parts = [(names[0], path, options)]
    if len(names) > 1:
        parts = divide_options(names, path, options)
    return tuple(
        DrafterConfig(
            name,
            part_path,
            check_options(name, part_path, part_options, supplied=("continuations",)),
            replicated and name in _MODELS,
        )
        for name, part_path, part_options in parts
    )


def load_target(config: TargetFields, mesh: Mesh | None) -> Model:
    """Return the target of a config, on `mesh` if given; raise InputError if that fails."""
    return load_model(
        config.target,
        dtype=config.dtype,
        weights=config.weights,
        activations=config.activations,
        kv_cache_dtype=config.kv_cache_dtype,
        mesh=mesh,
        field="target",
    )


class ConfigDrafter(NamedTuple):
    """A drafter of a config, and the trees that `tree.kind=auto` chose, by the drafter's parts.

    With greedy decoding, for which acceptance rates are measured, the trees include predicted
    speeds.
    """

    loaded: LoadedDrafter
    trees: Mapping[str, FastestTree | RankedTree]


def make_config_drafter(
    config: DrafterFields,
    drafter: DrafterConfig,
    target: Model,
    continuations: Sequence[Sequence[int]] | None = None,
    tell: Callable[[str], Any] = lambda line: None,
) -> ConfigDrafter:
    """Return one of a config's drafters, made for a target.

    `continuations` are the output tokens of plain decoding, for a drafter that `replays`. `tell` is
    called with lines about the choice of a tree by `tree.kind=auto`. Raises InputError.
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
    if drafter.replays:
        options["continuations"] = [[0]] if continuations is None else continuations
    if (
        drafter.name in _MODELS
        and path is not None
        and kind_of_head(user_path("drafter.path", path)) is None
    ):
        if path == config.target and not drafter.replicated:
            path = target
        else:
            path = load_draft_model(
                path,
                target,
                options.pop("weights", "auto"),
                dtype=config.dtype,
                replicated=drafter.replicated,
                field="drafter.path",
            )
    length = config.options.fixed_draft_length
    made = make_drafter(drafter.name, target, path, num_speculative_tokens=length, **options)
    if tree is None or tree.kind != "auto":
        return ConfigDrafter(made, {})
    prompts = config.tuning_prompts(target)
    lengths = [
        len(encode_prompt(target, prompt, f"prompts[{number}]"))
        for number, prompt in enumerate(prompts)
    ]
    made, fastest_trees = with_fastest_trees(
        target,
        made,
        tree,
        path=drafter.path,
        batch_size=min(config.options.batch_size, len(prompts)),
        # The length of the longest row when half of its answer is decoded.
        context=max(lengths) + config.sampling.max_new_tokens // 2,
        tell=tell,
    )
    greedy = config.sampling.temperature == 0
    trees = {name: fastest if greedy else fastest.tree for name, fastest in fastest_trees.items()}
    for name, chosen in trees.items():
        tell(f"{name}: tree.kind=auto: {chosen}")
    return ConfigDrafter(made, trees)
