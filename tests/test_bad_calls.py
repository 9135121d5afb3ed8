"""What public calls refuse: one line that names the argument, the value and the remedy.

Every argument of every function with values that it does not take; what does not go together;
drafters, rules and controllers of one's own that are none.
"""

import dataclasses
import inspect
import re

import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
import tokenizers
from bad_input import refused
from conftest import tiny_config
from decoding import Deciding, changed

import specjax
from specjax import sampling, testing
from specjax.controllers import Auto, Limits
from specjax.drafters import (
    DRAFTERS,
    Drafter,
    LoadedDrafter,
    TokenRecycling,
    Turns,
    drafter_options,
    merge_drafters,
)
from specjax.engine import programs
from specjax.engine.engine import Engine
from specjax.engine.options import DecodeOptions
from specjax.engine.plan import plan_requests
from specjax.errors import InputError, shown
from specjax.loading import checkpoints
from specjax.loading.load import random_model
from specjax.loading.tokenizers.tokenizer import Tokenizer
from specjax.methods.ngram import Ngram
from specjax.models.config import DecoderConfig
from specjax.sampling import Decision
from specjax.testing import Tabular, check_drafter
from specjax.trees import DynamicTopology, chain

TARGET = random_model(DecoderConfig(61, 24, 40, 3, 4, 2, 6, 600), 0, dtype="float32")


@pytest.fixture(autouse=True)
def unchecked(monkeypatch, tmp_path):
    """As for users: without a type checker in front of specjax's own messages."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    monkeypatch.chdir(tmp_path)
    yield
    assert list(tmp_path.iterdir()) == []


class Nothing:
    """Values that no argument accepts."""


BAD = {
    "any": [Nothing(), b"bytes", 2.5j],
    "rows": [0, "a", None],
    "target": [None, 3, "smollm2", (1, 2, 3)],
    "params": [None, [], {}, {"a": 1}, {"a.b": np.ones(2)}],
    "metadata": [None, [], {"a": float("nan")}, {"a": object()}],
    "field": [None, "", 5],
    "replicated": [2, "yes"],
    "weights": ["nosuch", 3, None],
    "activations": ["12", 12, None],
    "kv_cache_dtype": ["float8", 3, None],
    "rule": ["nosuch", 3, None],
    "topology": ["tree", 3, None],
    "vocab": [1, 6, "a"],
    "length": [0, 4, "a"],
    "prompt": [[], [-1], "ab", [2**31], np.array(3)],
    "prompts": [
        np.array(3),
        [np.array(3)],
        [np.array([[1, 2]])],
        [[np.array([1, 2])]],
        [[True]],
        None,
        [None],
        [[None]],
        [[-1]],
        [[10**6]],
        [[2.5]],
        [],
        5,
        [{}],
        [["a"]],
        [b"x"],
    ],
    "sampling": [3, "greedy", [3], [], {"top": 1}, {"temperature": "hot"}, {"stop": 5}],
    "drafter": [3, "nosuch", "", "os:getcwd", "sys:exit", "os:nosuch", "nosuch:f", "ngram+ngram"],
    "verify": ["nosuch", 3, None],
    "seed": ["a", -1, 2**32, 1.5, None, True],
    "batch_size": ["a", 0, 2**63, 1.5, True, None],
    "max_length": ["a", 0, 1, 2**63, 10**6],
    "num_speculative_tokens": ["a", -1, 10**6, 1.5, True],
    "num_speculative_tokens_per_batch_size": [
        5,
        [(1, 4, 10**6)],
        [(1, 4, 2), (3, 9, 1)],
        np.array(3),
        [(1, 2)],
        [(1, "a", 2)],
        [(4, 2, 1)],
    ],
    "rounds_per_step": [0, "a", None, 2**63],
    "refill_rows": [0, "a", 1.5],
    "max_prefill_tokens": [0, "a", 1.5],
    "kv_page_size": [0, "a", 32, 200, 128.5],
    "num_kv_pages": [0, "a", 1.5, 3],
    "num_kept_states": [0, "a", 1.5, 3],
    "enable_prefix_caching": ["a", 2, None, True],
    "num_tokens": [0, 1, "a", None, 2.5],
    "id": [2.5, True, b"x"],
    "n": [0, "a", None, 1.5],
    "name": [None, 3, "", "nosuch", "ngram+", "os:getcwd"],
    "name_or_path": ["", "a" * 300, "~nosuchuser/x", "a\0b", "nosuch", 5, None, "/dev/null"],
    "path": ["", "a" * 300, "~nosuchuser/x", "a\0b"],
    "directory": ["", "a" * 300, "~nosuchuser/x", "a\0b", "/dev/null", "/dev/full/x", 5, None],
    "dtype": [3, "float8", None],
    "overwrite": [3, None],
    "config": [
        3,
        None,
        "{",
        '{"method": 5}',
        "[]",
        '{"num_speculative_tokens": ' + "9" * 5000 + "}",
    ],
    "temperature": ["hot", -1, 1e300, float("nan"), 1e-40, True],
    "top_k": ["a", -1, 2**31, 1.5],
    "top_p": ["a", 0, 1.5, float("nan")],
    "min_p": ["a", -0.1, 1.5, float("nan")],
    "max_new_tokens": ["a", 0, 2**64, 10**5000, 1.5],
    "stop": [5, [5], [""], [None]],
    "stop_token_ids": [np.array(3), 5, "ab", [2**31], [-1], ["a"]],
    "logprobs": [2, "yes"],
    "ignore_eos": [2, "yes"],
    "presence_penalty": ["a", 2.5, float("nan"), True],
    "frequency_penalty": ["a", -2.5, None],
    "repetition_penalty": ["a", 0, -1.0, float("inf")],
    "logit_bias": [5, "a", {"a": 1}, {1: 101}, {-1: 1}, [1, 2], [(1, 2), (1, 3)]],
    "banned_token_ids": [np.array(3), 5, [-1]],
    "allowed_token_ids": ["ab", 5, [2.5], []],
    "forced_token_ids": ["ab", 5, [None]],
    "min_tokens": ["a", -1, 1.5],
    "no_repeat_ngram_size": ["a", -1, 1.5, 2**31],
    "regex": [5, "", "(a", "a**"],
    "json_schema": [5, "", "{", [], {"type": {1}}, {"type": "nosuch"}, {"not": {}}],
    "choice": [5, "a", [], [""], [5]],
    "grammar_after": [5, None, "x"],
    "logprobs_mode": [5, "raw", None],
    "committed": [5, "ab", [-1], [9]],
    "requested": [3, np.zeros(2), [1.0]],
}
CALLS = {
    "generate": (specjax.generate, {"target": TARGET, "prompts": [[1, 2]]}),
    "stream": (
        lambda *args, **kwargs: list(specjax.stream(*args, **kwargs)),
        {"target": TARGET, "prompts": [[1, 2]]},
    ),
    "compile": (specjax.compile, {"target": TARGET}),
    "Engine": (specjax.Engine, {"target": TARGET}),
    "Engine.add": (
        lambda *args, **kwargs: specjax.Engine(TARGET).add(*args, **kwargs),
        {"prompt": [1, 2]},
    ),
    "load_model": (specjax.load_model, {"name_or_path": "smollm2-135m-instruct"}),
    "make_drafter": (specjax.make_drafter, {"name": "draft_model", "target": TARGET}),
    "save_model": (specjax.save_model, {"model": TARGET, "directory": "new"}),
    "save_checkpoint": (specjax.save_checkpoint, {"model": TARGET, "directory": "new"}),
    "from_vllm_speculative_config": (
        specjax.from_vllm_speculative_config,
        {"config": {"method": "ngram", "num_speculative_tokens": 2}, "target": TARGET},
    ),
    "SamplingParams": (specjax.SamplingParams, {}),
    "DecodeOptions": (specjax.DecodeOptions, {}),
    "checkpoints.save_checkpoint": (
        checkpoints.save_checkpoint,
        {"model": TARGET, "directory": "new"},
    ),
    "checkpoints.save_drafter": (
        checkpoints.save_drafter,
        {"directory": "new", "params": {"a": np.ones(3)}, "metadata": {}},
    ),
    "checkpoints.load_drafter": (checkpoints.load_drafter, {"directory": "new"}),
    "testing.check_drafter": (
        testing.check_drafter,
        {
            "drafter": specjax.make_drafter("ngram", TARGET),
            "target": (testing.Tabular(4), np.zeros((4, 4))),
            "rows": 8,
        },
    ),
    "testing.check_rule": (testing.check_rule, {"rule": "rejection"}),
    "testing.check_processor": (
        testing.check_processor,
        {"processor": specjax.processors.NoRepeatNgrams(), "requested": np.full(1, 2, np.int32)},
    ),
}
SIGNATURES = {"stream": specjax.stream, "Engine.add": specjax.Engine(TARGET).add}
OBJECTS = {
    "model",
    "mesh",
    "form",
    "progress",
    "controller",
    "processor",
    "processors",
    "limits",
    "request",
    "distributions",
    "valid",
}
"""Arguments that only code can give: everything of another class is wrong."""
VALUES = {"Delta", "Output", "Drafter", "LoadedDrafter", "Generation", "Model", "InputError"}
"""Exported for what they hold, not to be called."""
GOOD = {
    *((name, "seed", None) for name in ("SamplingParams", "Engine.add")),
    *(("DecodeOptions", "max_length", value) for value in (2**63, 10**6)),
}
"""Values that one function accepts, although others do not."""
CALLED = {("make_drafter", "name"): "drafter"}
"""Arguments that errors call by the name of the command line's field."""


def parameters(name, function):
    """The names of a function's arguments."""
    signature = inspect.signature(SIGNATURES.get(name, function))
    return [
        parameter.name
        for parameter in signature.parameters.values()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]


def problem(call, argument):
    """What is wrong with how a call ends; None for an InputError that names the argument."""
    try:
        result = call()
    except specjax.InputError as error:
        said = str(error)
        if "\n" in said:
            return f"several lines: {said!r:.200}"
        if len(said) > 1500:
            return f"{len(said)} characters"
        return None if argument in said else f"does not name it: {said:.200}"
    except BaseException as error:
        return f"{type(error).__name__}: {error!s:.200}"
    return f"accepted: {result!r:.80}"


def calls():
    """Each function, argument, the name that errors have for it, and a value to be refused."""
    for name, (function, good) in CALLS.items():
        for argument in parameters(name, function):
            for value in [*BAD["any"], *BAD.get(argument, [])]:
                if any((name, argument) == one[:2] and value is one[2] for one in GOOD):
                    continue
                given = {**good, argument: value}
                field = CALLED.get((name, argument), argument)
                yield f"{name}({argument}={shown(value):.40})", function, given, field
    for name in DRAFTERS:
        for option in drafter_options(name):
            for value in BAD["any"]:
                given = {"name": name, "target": TARGET, option: value}
                yield f"{name}({option}={shown(value):.40})", specjax.make_drafter, given, option


def test_every_argument_of_every_function():
    problems = []
    for call, function, given, field in calls():
        if (found := problem(lambda: function(**given), field)) is not None:  # noqa: B023
            problems.append(f"{call}: {found}"[:300])
    assert problems == []


def test_every_function_and_argument_is_called():
    modules = {name for name in specjax.__all__ if inspect.ismodule(getattr(specjax, name))}
    assert set(specjax.__all__) - VALUES - modules <= set(CALLS)
    arguments = {one for name, (function, _) in CALLS.items() for one in parameters(name, function)}
    assert arguments <= set(BAD) | OBJECTS


def test_numpys_numbers_are_numbers():
    three = np.int64(3)
    plan, requests = plan_requests(
        TARGET,
        [np.array([1, 2]), (np.uint8(1),)],
        drafter=specjax.make_drafter("ngram", TARGET, prompt_lookup_max=three),
        options=DecodeOptions(num_speculative_tokens=three, batch_size=three, seed=three),
        sampling={"top_k": three, "temperature": np.float32(0.5), "max_new_tokens": three},
    )
    assert (plan.options.seed, requests[0].sampling.top_k) == (3, 3)


GENERATE = {
    "no_prompts": (dict(prompts=[]), "prompts is empty: give at least one"),
    "empty_prompt": (dict(prompts=[[1], []]), r"prompts\[1\] is empty"),
    "text_without_a_tokenizer": (dict(prompts=["hi"]), r"prompts\[0\].*no tokenizer; give token"),
    "not_a_prompt": (dict(prompts=[[1.5]]), r"prompts\[0\]=\[1.5\]: use text, token ids, or mess"),
    "unknown_token": (dict(prompts=[[61]]), r"prompts\[0\]: token id 61 is outside"),
    "negative_token": (dict(prompts=[[-1]]), r"prompts\[0\]: token id -1 is outside"),
    "too_long": (dict(prompts=[[1] * 600]), r"prompts\[0\] has 600 tokens.*shorten it"),
    "beyond_max_length": (
        dict(prompts=[[1] * 9], max_length=9),
        r"prompts\[0\] has 9 tokens.*max_length=9.*shorten it or raise max_length",
    ),
    "max_length": (dict(max_length=601), "max_length=601 exceeds .*lower it"),
    "batch_size": (dict(batch_size=0), "batch_size=0: use a whole number of at least 1"),
    "length": (dict(num_speculative_tokens=-1), "num_speculative_tokens=-1: use a whole number"),
    "length_type": (dict(num_speculative_tokens=1.5), "num_speculative_tokens=1.5: use a whole"),
    "length_word": (dict(num_speculative_tokens="max"), "num_speculative_tokens='max': use a whol"),
    "ladder": (
        dict(num_speculative_tokens_per_batch_size=[(4, 2, 1)]),
        r"per_batch_size\[0\]=\(4, 2, 1\): must be .*1 <= low <= high",
    ),
    "a_class": (dict(controller=Auto), r"controller=.*use a value of .*such as Auto\(\)"),
    "longer_than_the_most": (
        dict(num_speculative_tokens=2, num_speculative_tokens_per_batch_size=[(1, 2, 3)]),
        "per_batch_size=.*a step drafts more than num_speculative_tokens=2; raise that",
    ),
    "rule": (dict(verify="typicl"), "verify='typicl' is unknown: use rejection, block, coupled"),
    "drafter": (dict(drafter="ngramm"), "drafter='ngramm' is unknown: did you mean ngram"),
    "own_drafter": (dict(drafter="nowhere.to:find"), "drafter='nowhere.to:find': .*importable"),
    "own_function": (dict(drafter="os:getcwdd"), "drafter='os:getcwdd': .*importable"),
    "own_exit": (dict(drafter="sys:exit"), r"drafter='sys:exit' calls sys.exit\(.{1,60}\); call"),
    "missing_path": (dict(drafter="draft_model"), "drafter.path is missing"),
    "missing_option": (dict(drafter="simulated"), "drafter.continuations is missing"),
    "field": (dict(sampling={"temprature": 1.0}), "sampling.temprature=1.0 .*did you mean temper"),
    "unsupported": (
        dict(sampling={"prompt_logprobs": 1}),
        "sampling.prompt_logprobs=1 is not supported",
    ),
    "temperature": (dict(sampling={"temperature": -1.0}), "sampling.temperature=-1.0: use 0"),
    "nan": (dict(sampling={"temperature": float("nan")}), "sampling.temperature=nan: use 0"),
    "top_k": (dict(sampling={"top_k": -1}), "sampling.top_k=-1: use 0 for off"),
    "top_p": (dict(sampling={"top_p": 0.0}), "sampling.top_p=0.0: use 1 for off"),
    "top_p_above": (dict(sampling={"top_p": 1.1}), "sampling.top_p=1.1: use 1 for off"),
    "min_p": (dict(sampling={"min_p": 2}), "sampling.min_p=2: use 0 for off"),
    "max_new_tokens": (dict(sampling={"max_new_tokens": 0}), "sampling.max_new_tokens=0: use a wh"),
    "stop": (dict(sampling={"stop": [""]}), "sampling.stop=.*use strings that are not empty"),
    "stop_ids": (
        dict(sampling={"stop_token_ids": [-2]}),
        "sampling.stop_token_ids=.*use token ids",
    ),
    "seed": (dict(sampling={"seed": 0.5}), "sampling.seed=0.5: use a whole number"),
    "count": (dict(sampling=[{}, {}]), "sampling has 2 entries for 1 prompts"),
    "stop_without_a_tokenizer": (dict(sampling={"stop": ["x"]}), "sampling.stop: .*stop_token_ids"),
}


@pytest.mark.parametrize("name", GENERATE)
def test_generate_names_field_value_and_remedy(name, tiny):
    arguments, said = GENERATE[name]
    refused(lambda: specjax.generate(tiny, **{"prompts": [[1, 2]], **arguments}), said)


@pytest.mark.parametrize(
    ("call", "arguments", "message"),
    [
        (specjax.generate, {"temprature": 1.0}, "argument 'temprature'; did you mean temperature"),
        (specjax.stream, {"progress": print}, "unexpected argument 'progress'"),
        (lambda target, _, **given: Engine(target, **given), {"temperature": 1.0}, "'temperature'"),
        (
            lambda target, prompts, **given: Engine(target).add(*prompts, **given),
            {"temprature": 1.0},
            "unexpected argument 'temprature'; did you mean temperature",
        ),
    ],
)
def test_unknown_arguments_are_refused(call, arguments, message, tiny):
    with pytest.raises(TypeError, match=message):
        call(tiny, [[1, 2]], **arguments)


DRAFTER_OPTIONS = [
    # a drafter, its options, what is said
    ("ngram", {"prompt_lookup_min": 0}, "prompt_lookup_min=0: use a whole number from 1 to 64"),
    ("ngram", {"prompt_lookup_max": 1}, "prompt_lookup_max=1: must be at least"),
    ("ngram", {"match": "best"}, "match='best' is unknown: use latest, earliest"),
    ("ngram", {"size": 3}, "drafter.size=3: ngram does not take it; it takes prompt_lookup"),
    ("none", {"size": 3}, "drafter.size=3: none does not take it; it takes no options"),
    ("ngram", {"path": "x"}, "drafter.path='x': ngram does not take it"),
    ("ngram", {"num_speculative_tokens": -2}, "num_speculative_tokens=-2: use a whole"),
    ("early_exit", {"exit_layer": 4}, "exit_layer=4: .* 3 layers; use 1 to 3"),
    ("early_exit", {"exit_layer": 0}, "exit_layer=0: use a whole number of at least 1"),
    (
        "early_exit",
        {"exit_layer": "best"},
        "exit_layer='best': use a whole number of at least 1, or a",
    ),
    ("layer_skip", {"skip_layers": 3}, "skip_layers=3: the target has 3 layers; use 1 to 2"),
    ("layer_skip", {"skip_layers": 0}, "skip_layers=0: use a whole number of at least 1"),
    (
        "layer_skip",
        {"skipped": (3,)},
        r"skipped=\(3,\): the target has 3 layers; use",
    ),
    ("layer_skip", {"skipped": (0, 1, 2)}, "leaves no layer; skip fewer"),
    ("layer_skip", {"skipped": (1,), "skip_layers": 1}, "leave one of them out"),
    ("early_exit", {"draft_p_min": 1.0}, r"draft_p_min=1.0: use a number in \[0, 1\)"),
    ("early_exit", {"draft_sample_method": "beam"}, "method='beam' is unknown: use prob"),
    ("sparse_kv", {"budget": 0}, "budget=0: use a whole number from 1 to 1048576"),
    ("sparse_kv", {"budget": 4}, "budget=4: must exceed drafter.sinks=4"),
    ("sparse_kv", {"budget": 32, "keep": "scores"}, "budget=32: must exceed the latest 32 tokens"),
    ("sparse_kv", {"keep": "best"}, "keep='best' is unknown: use recent, scores"),
    ("sparse_kv", {"ratio": 1.0}, "ratio=1.0: use a number from 0 to 0.9"),
    ("eagle3", {"sliding_window": 0}, "sliding_window=0: use a whole number from 1 to 1048576"),
    (
        "eagle3",
        {"sinks": 4},
        "sinks=4: sinks are kept in addition .* set drafter.sliding_window too",
    ),
    ("ngram", {"sliding_window": 4}, "drafter.sliding_window=4: ngram does not take it"),
    ("sparse_kv", {"refresh": 0}, "refresh=0: use a whole number from 1 to 1048576"),
    ("simulated", {"continuations": []}, r"continuations=\[\]: pass the token ids"),
    (
        "simulated",
        {"continuations": [[1]], "acceptance": 2},
        "acceptance=2: use a number from 0 to 1",
    ),
    ("ngram+", {}, r"drafter='ngram\+': join different drafters"),
    ("ngram+ngram", {}, "join different drafters"),
    ("ngram+none", {}, "none cannot be joined by name: it drafts nothing"),
    ("ngram+simulated", {}, "simulated cannot be joined by name"),
    ("ngram+earlyexit", {}, "'earlyexit' is unknown: did you mean early_exit"),
    ("ngram+early_exit", {"noise": 1}, "drafter.noise=1: none of ngram, early_exit takes"),
    ("ngram+early_exit", {"path": "x"}, "drafter.path='x': of ngram, early_exit none could"),
    ("medusa+eagle3", {"path": "x"}, "of medusa, eagle3 medusa, eagle3 could take it"),
    ("ngram|", {}, r"drafter='ngram\|': join different drafters, as ngram\|eagle3"),
    ("ngram|ngram", {}, "join different drafters"),
    ("ngram|none", {}, "none cannot be joined by name: it drafts nothing"),
    ("test_drafters:make_own", {"size": 3}, "size=3: test_drafters:make_own does not take it; it"),
    ("test_drafters:make_own+ngram", {"size": 3}, "size=3: none of test_drafters:make_own, ngram"),
    ("test_drafters:Own", {}, r"'test_drafters:Own' fails \(TypeError: .*missing.*'path'"),
    ("ngram|early_exit+medusa", {}, r"join all of them by \+ or all by \|; for both use"),
    ("ngram|early_exit", {"noise": 1}, "drafter.noise=1: none of ngram, early_exit takes"),
    ("ngram", {"num_matches": 0}, "drafter.num_matches=0: use a whole number from 1 to 64"),
]
TREES = [
    (dict(topk=3), "tree.topk=3: a chain has no such option; use tree.kind=static or"),
    (dict(kind="tree"), "tree.kind='tree' is unknown: use chain, static, dynamic"),
    (dict(kind="static", nodes=3), "tree.nodes=3 is not supported: did you mean num_nodes?"),
    (dict(kind="dynamic", topk=0), "tree.topk=0: use a whole number from 1 to 64"),
    (dict(kind="static", choices=[[0], [0]]), "tree.choices: [0] is there twice"),
    (dict(kind="static", choices=[[1]]), "tree.choices: [1] needs [0], which is missing"),
    (dict(kind="static", choices=[[0, 0]]), "[0, 0] needs [0], which is missing"),
    (dict(kind="static", choices=[[0], []]), "use paths of ranks, as ((0,), (1,), (0, 0))"),
    (dict(kind="static", choices=[[0]], depth=1), "tree.depth=1: tree.choices says it already"),
    (
        dict(kind="dynamic", choices=[[0]]),
        "tree.kind=dynamic chooses the tree; use tree.kind=static",
    ),
    (dict(kind="static", topk=2, depth=2, num_nodes=7), "there are at most 6; lower it, or r"),
    (dict(kind="dynamic", topk=2, depth=2, num_nodes=7), "there are at most 6; lower it, or"),
    (5, "tree=5: use TreeOptions, or a dict of them"),
]


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        *DRAFTER_OPTIONS,
        *(("early_exit", {"tree": tree}, re.escape(said)) for tree, said in TREES),
    ],
)
def test_drafters_and_trees_that_cannot_be(name, options, said, tiny):
    refused(lambda: specjax.make_drafter(name, tiny, **options), said)


def test_draft_models_with_another_tokenizer(tiny):
    def letters(first):
        vocabulary = {letter: index for index, letter in enumerate(first)}
        backend = tokenizers.models.WordLevel(vocabulary, unk_token="a")
        return Tokenizer(tokenizers.Tokenizer(backend))

    make, one, other = specjax.make_drafter, letters("abcd"), letters("acbd")
    smaller = random_model(tiny_config(vocab_size=50), 0, dtype="float32")
    said = "have 61 and 50 tokens, and no tokenizers by which these could be compared"
    refused(lambda: make("draft_model", tiny, smaller), said)
    target, draft = (dataclasses.replace(tiny, tokenizer=own) for own in (one, other))
    said = "the texts of .* tokens depend on one another"
    refused(lambda: make("draft_model", target, draft), said)


def returns(*parts):
    """A rule that returns zeros of these shapes and types, whatever was drafted."""
    return Deciding(
        lambda tokens, *rest: Decision(*(jnp.zeros(shape, kind) for shape, kind in parts))
    )


def fails_at_three(tokens, *rest):
    assert 1 // (3 - tokens.shape[1]) >= 0
    return sampling.rejection(tokens, *rest)


@dataclasses.dataclass
class Unhashable(sampling.UniformRule):
    """A rule that could change: programs could not be kept by it."""

    def decide(self, *arguments):
        return sampling.rejection(*arguments)


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (sampling.rejection, "a rule is a value; subclass specjax.sampling.UniformRule"),
        (Deciding(lambda *arguments: 1), "decide returns 1; decide returns Decision"),
        (Deciding(print), "decide returns None; decide returns Decision"),
        (Deciding(lambda *arguments: "text"), "decide returns 'text'; decide returns Decision"),
        (returns(((1,), float), ((1, 61), float)), "decide returns Decision"),
        (returns(((1,), int), ((1, 60), float)), "decide returns Decision"),
        (returns(((1,), int), ((1, 61), int)), "decide returns Decision"),
        (Deciding(lambda tokens: tokens), "fails for drafts of 0 tokens .TypeError"),
        (Deciding(fails_at_three), "fails for drafts of 3 tokens .ZeroDiv"),
        (
            Deciding(lambda tokens, *rest: bool(tokens.sum())),
            "fails for drafts of 0 tokens .TracerBool",
        ),
        (sampling.Rule(), "fails for drafts of 0 tokens .NotImplementedError"),
        (Unhashable(), "fails for drafts of 0 tokens .TypeError: unhashable"),
    ],
)
def test_a_rule_of_ones_own_that_is_none(rule, said, tiny, monkeypatch):
    """It is refused before anything is compiled, with its own error as the cause."""
    monkeypatch.setattr(programs, "_compile", None)
    drafter = specjax.make_drafter("ngram", tiny)
    options = {"drafter": drafter, "num_speculative_tokens": 3}
    with pytest.raises(InputError, match=f"^verify=.*: {said}") as caught:
        specjax.generate(tiny, [[1, 2]], verify=rule, **options)
    assert "\n" not in str(caught.value)
    assert (caught.value.__cause__ is not None) == ("fails" in said)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WithATable(Ngram):
    table: object = dataclasses.field(kw_only=False)


class Forgetful(Drafter):
    """Without `propose`."""


class WithoutNoise(Ngram):
    """With a `propose` of too few arguments."""

    def propose(self, params, state, context):
        raise AssertionError


class KeepsOutputs(Ngram):
    """Copies outputs, which may have been drawn with the noise that verifies the copies."""

    def with_outputs(self, params, outputs):
        return params


class Undeclared(Ngram):
    """With distributions, though it does not say that it draws."""

    def propose(self, params, state, context, noise):
        draft, state = super().propose(params, state, context, noise)
        return draft.replace(logq=jnp.zeros((*draft.tokens.shape, 61))), state


def proposing(change):
    """A lookup whose draft and state are changed by a function, before they are returned."""
    return changed(Ngram(), propose=lambda real, *rest: change(*real(*rest)))


def with_tokens(draft, dtype):
    return draft.replace(tokens=draft.tokens.astype(dtype))


@pytest.mark.parametrize(
    ("drafter", "said"),
    [
        (lambda: WithATable(jnp.ones(3)), "unhashable.*params of LoadedDrafter"),
        (lambda: Forgetful(), "no Forgetful.propose; subclass"),
        (
            lambda: WithoutNoise(),
            r"WithoutNoise.propose: too many positional arguments; .* context, noise\)",
        ),
        (lambda: KeepsOutputs(), "KeepsOutputs.with_outputs keeps outputs .*text_digests"),
        (lambda: merge_drafters(Ngram(), KeepsOutputs()), "KeepsOutputs.with_outputs keeps out"),
        (lambda: changed(Ngram(), propose=lambda real, *rest: 1 / 0), "ZeroDivisionError"),
        (lambda: proposing(lambda draft, state: draft), r"returned Draft; return \(Draft, state\)"),
        (lambda: proposing(lambda draft, state: (state, draft)), r"returned \(tuple, Draft\)"),
        (
            lambda: proposing(lambda draft, state: (draft, jnp.ones(2))),
            r"propose returned the state .*float32\[2\]\) where init made \(\)",
        ),
        (
            lambda: proposing(lambda draft, state: (with_tokens(draft, "float32"), state)),
            r"returned tokens of float32\[1, 8\]; use int32\[B, N\], by jnp.argmax",
        ),
        (
            lambda: proposing(lambda draft, state: (draft.replace(valid=draft.tokens), state)),
            r"returned valid of int32\[1, 8\]; use bool",
        ),
        (lambda: Undeclared(), "returned logq.*but its `sampled` is False; override"),
        (
            lambda: changed(TokenRecycling(61), observe=lambda real, *rest: None),
            "observe returned the state None where init made .*return one of the same arrays",
        ),
        (lambda: LoadedDrafter(Turns((Ngram(), Ngram())), ()), "has 2 drafters and 0 params"),
    ],
)
def test_a_drafter_of_ones_own_that_is_none(drafter, said, tiny):
    def call():
        specjax.generate(tiny, [[1, 2]], drafter=drafter(), sampling={"max_new_tokens": 4})

    refused(call, f"^drafter.*{said}")


class WithAnInit(Ngram):
    def __init__(self, step):
        super().__init__()
        self.step = step


class WithAField(Drafter):
    step: int = 1


class OfIt(WithAField):
    """Inherits the fault."""


def test_a_drafter_without_dataclass_is_refused():
    """Fields that `@dataclass` does not see would be ignored where drafters are compared."""
    for make, said in (
        (lambda: WithAnInit(2), "^WithAnInit: __init__ without @dataclass, .* before the class"),
        (lambda: WithAField(), "^WithAField: step without @dataclass"),
        (lambda: OfIt(), "^WithAField: step without @dataclass"),
    ):
        refused(make, said)


def test_the_old_form_of_a_drafter_and_of_a_rule(tiny):
    """Closures are refused with the form of today."""
    with pytest.raises(InputError, match=r"^Drafter\('mine', .*subclass specjax.Drafter as a froz"):
        specjax.Drafter("mine", None, None, None, num_speculative_tokens=3)
    old = type("Drafter", (), {"init": None, "propose": None, "observe": None})()
    with pytest.raises(InputError, match=r"^drafter=.*subclass specjax.Drafter as a frozen datacl"):
        specjax.generate(tiny, [[1]], drafter=old)
    with pytest.raises(InputError, match=r"^verify=.*subclass specjax.sampling.UniformRule"):
        specjax.generate(tiny, [[1]], verify=lambda *arguments: None)


def test_checks_name_what_a_drafter_does_wrong(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    small = Tabular(8), jnp.zeros((8, 8))

    def too_many(real, params, state, context, noise):
        draft, state = real(params, state, context, noise)
        return draft.replace(valid=jnp.ones_like(draft.valid)), state

    def with_a_hole(real, params, state, context, noise):
        draft, state = real(params, state, context, noise)
        step = jnp.arange(draft.valid.shape[1])[None, :]
        hole = (step > 0) & (step < context.limit[:, None])
        return draft.replace(valid=hole), state

    def too_large(real, params, state, context, noise):
        draft, state = real(params, state, context, noise)
        tokens = jnp.pad(draft.tokens, ((0, 0), (0, 3)))
        return chain(tokens, draft.valid.sum(axis=1)), state

    def branches(real, params, state, context, noise):
        if context.length[0] > 3:
            return real(params, state, context, noise)

    def transposed(real, params, state, context, noise):
        draft, state = real(params, state, context, noise)
        return chain(draft.tokens.T, context.limit), state

    def child_first(real, params, state, context, noise):
        draft, state = real(params, state, context, noise)
        parents = jnp.zeros_like(draft.tokens).at[:, 0].set(2)
        valid = jnp.broadcast_to(context.limit[:, None] > 1, draft.valid.shape)
        return draft.replace(valid=valid, topology=DynamicTopology(parents, 2)), state

    class Rowless(Ngram):
        def init(self, params, batch, capacity):
            return jnp.zeros(())

    for drafter, said in (
        (changed(Ngram(), propose=too_many), "proposes more than its limit"),
        (changed(Ngram(), propose=with_a_hole), "not closed under ancestors"),
        (Rowless(), "rows as its first axis"),
        (changed(Ngram(), propose=too_large), r"tokens are \[B, 5\], and its num_nodes is 2 with"),
        (changed(Ngram(), propose=branches), r"at test_bad_calls.py:\d+, in branches .*jnp.where"),
        (changed(Ngram(), propose=transposed), r"num_valid has shape \(\d+,\) for tokens \(2, "),
        (
            changed(Ngram(), propose=child_first),
            r"returned topology.row_parents\[2, 0\] = 2; use 0 to 0",
        ),
    ):
        with pytest.raises(InputError, match=said):
            check_drafter(drafter, small, rows=100)
    with pytest.raises(InputError, match=r"rows=100 are too few: use at least 10240, in which"):
        check_drafter(Ngram(), small, rows=100)


@pytest.mark.parametrize(
    ("tokens", "count", "said"),
    [
        (jnp.ones((2, 3)), jnp.ones(2, int), r"tokens are float32: pass whole numbers"),
        (jnp.ones(3, int), jnp.ones(3, int), r"tokens have the shape \[3\]: pass \[B, K\]"),
        (jnp.ones((2, 3), int), 3, r"num_valid has shape \(\) for tokens \(2, 3\): tokens are"),
    ],
)
def test_a_chain_is_an_array_of_tokens_and_a_count_per_row(tokens, count, said, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(InputError, match=f"^chain: {said}"):
        chain(tokens, count)


def test_a_draft_of_another_size_than_its_drafter_says_is_refused(tiny):
    """Else nodes that the pass has no slots for would be dropped unseen."""

    def resized(length):
        def propose(real, params, state, context, noise):
            tokens = jnp.ones((len(context.length), length), jnp.int32)
            return chain(tokens, context.limit), state

        return changed(Ngram(num_speculative_tokens=2), propose=propose)

    for length in (1, 4):
        says = rf"^drafter 'changed': its tokens are \[B, {length}\], and its num_nodes is 2 with"
        with pytest.raises(InputError, match=says):
            specjax.generate(tiny, [[1, 2]], drafter=resized(length))


@dataclasses.dataclass(frozen=True)
class Chooses:
    """A controller that returns what it is told to."""

    choice: object

    def init(self, sizes):
        return 0

    def choose(self, state, unfinished, most_rounds):
        return self.choice

    def update(self, state, record):
        return state


@pytest.mark.parametrize(
    "choice",
    [
        None,
        (Limits((1,), (0.0,)), 0, 0),
        (Limits((1,), (0.0,)), 10**12, 0),
        (Limits((1,), (0.0,)), 2.5, 0),
        (Limits((1, 1), (0.0, 0.0)), 4, 0),
        (Limits((-1,), (0.0,)), 4, 0),
        (Limits((1,), ("a",)), 4, 0),
    ],
)
def test_a_choice_that_is_none(choice, tiny):
    with pytest.raises(InputError, match=r"^controller=.*choose returned .*; return \(Limits, rou"):
        specjax.generate(tiny, [1, 2], drafter="ngram", controller=Chooses(choice))


@pytest.mark.parametrize(
    ("positions", "max_length", "said"),
    [
        (64, None, "the 64 positions of random-0: shorten it$"),
        (64, 64, "the 64 positions of random-0: shorten it$"),
        (64, 48, "max_length=48: shorten it or raise max_length$"),
        (4096, None, "max_length=2048 .the default of engines.: shorten it or raise max_length$"),
    ],
)
def test_a_prompt_without_room_names_what_is_set(positions, max_length, said):
    model = random_model(tiny_config(max_positions=positions, num_layers=1), 0, dtype="float32")
    engine = specjax.Engine(model, batch_size=1, max_length=max_length)
    room = min(positions, max_length or 2048)
    said = rf"^prompt of request 0 has {room} tokens, which leaves no room for a new one in {said}"
    refused(lambda: engine.add([1] * room), said)


def test_a_checked_drafter_without_a_state_is_told_so():
    target = random_model(tiny_config(vocab_size=8, num_layers=1), 0, dtype="float32")
    drafter = proposing(lambda draft, state: draft)
    with pytest.raises(InputError, match=r"propose returned Draft; return \(Draft, state\)"):
        check_drafter(drafter, target, rows=100)
