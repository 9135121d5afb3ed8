"""Calls of every function that specjax exports, with values that its arguments do not take."""

import inspect

import numpy as np

import specjax
from specjax import testing
from specjax.decoding.options import DecodeOptions
from specjax.decoding.session import plan_session
from specjax.drafters import DRAFTERS, drafter_options
from specjax.loading import checkpoints
from specjax.loading.load import random_model
from specjax.models.config import DecoderConfig

TARGET = random_model(DecoderConfig(61, 24, 40, 3, 4, 2, 6, 600), 0, dtype="float32")


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
}
SIGNATURES = {"stream": specjax.stream, "Engine.add": specjax.Engine(TARGET).add}
OBJECTS = {
    "model",
    "mesh",
    "form",
    "progress",
    "controller",
    "limits",
    "request",
    "distributions",
    "valid",
}
"""Arguments that only code can give: everything of another class is wrong."""
VALUES = {"Delta", "Output", "Drafter", "LoadedDrafter", "Generation", "Model", "InputError"}
"""Exported for what they hold, not to be called."""
GOOD = {("SamplingParams", "seed", None)}
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


def accepted_or_raised():
    """The calls that did not end in an InputError that names the argument, in words."""
    problems = []
    for name, (function, good) in CALLS.items():
        for argument in parameters(name, function):
            for value in [*BAD["any"], *BAD.get(argument, [])]:
                if any((name, argument) == one[:2] and value is one[2] for one in GOOD):
                    continue

                def call(argument=argument, value=value, function=function, good=good):
                    return function(**{**good, argument: value})

                if (found := problem(call, CALLED.get((name, argument), argument))) is not None:
                    problems.append(f"{name}({argument}={value!r:.40}): {found}"[:300])
    for name in DRAFTERS:
        for option in drafter_options(name):
            for value in BAD["any"]:

                def call(name=name, option=option, value=value):
                    return specjax.make_drafter(name, TARGET, **{option: value})

                if (found := problem(call, option)) is not None:
                    problems.append(f"make_drafter({name}, {option}={value!r:.40}): {found}")
    return problems


def numbers_refused():
    """Why NumPy's numbers are refused, which are numbers; None where they are not."""
    three = np.int64(3)
    try:
        session = plan_session(
            TARGET,
            [np.array([1, 2]), (np.uint8(1),)],
            drafter=specjax.make_drafter("ngram", TARGET, prompt_lookup_max=three),
            options=DecodeOptions(num_speculative_tokens=three, batch_size=three, seed=three),
            requests={"top_k": three, "temperature": np.float32(0.5), "max_new_tokens": three},
        )
    except Exception as error:
        return str(error)
    return None if (session.seed, session.requests[0].top_k) == (3, 3) else "they got lost"


def uncovered():
    """Exported names that are not called here, and arguments without values that they refuse."""
    modules = {name for name in specjax.__all__ if inspect.ismodule(getattr(specjax, name))}
    names = set(specjax.__all__) - set(CALLS) - VALUES - modules
    arguments = {one for name, (function, _) in CALLS.items() for one in parameters(name, function)}
    return sorted(names | (arguments - set(BAD) - OBJECTS))
