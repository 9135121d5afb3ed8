"""The records of methods: their names stand in one place each, and what they say is so."""

import ast
import importlib
import re
from pathlib import Path

import pytest

from specjax.core.drafter import Drafter
from specjax.drafters import DRAFTERS, TRAINED
from specjax.methods.heads.head_drafter import HeadDrafter
from specjax.methods.registry import HEADS, METHODS

ROOT = Path(__file__).parents[1]
DEFAULTS = {
    "specjax/apps/run/decode_config.py": {"ngram"},
    "specjax/apps/run/bench_config.py": {"ngram", "draft_model", "eagle3"},
}
"""Names that are defaults of commands."""
OTHER_THINGS = {
    "specjax/files/atomic_writes.py": {"suffix"},  # of a file
    "specjax/files/folder_checksums.py": {"corpus"},  # a kind of folder
    "specjax/loading/formats/gguf_fields.py": {"none"},
    "specjax/loading/formats/families/qwen3_next.py": {"mtp"},  # how tensors' names begin
    "specjax/loading/model.py": {"mtp"},  # modules of a target, and below among its parameters
    "specjax/loading/quantize.py": {"mtp"},
    "specjax/loading/texts/documents.py": {"none"},
    "specjax/methods/published_layouts.py": {"none"},
    "specjax/methods/options.py": {"none", "eagle3"},  # nothing, and an example in a message
    "specjax/models/mtp.py": {"mtp"},  # the kind of head that these modules are
    "specjax/apps/serve/requests.py": {"none", "suffix"},  # OpenAI's
    "specjax/apps/serve/server.py": {"none"},
    "specjax/testing/controller_simulation.py": {"ngram", "eagle3", "token_recycling"},
}
"""Words that mean something else, or the simulated acceptance of such a drafter."""
LAYOUTS = {
    "specjax/apps/export.py": {"medusa"},
    "specjax/methods/heads/checkpoint.py": {"eagle"},
}
"""Names of published layouts that are those of the methods."""


def home(method):
    """The file or folder of a method."""
    *folders, file = method.drafter.__module__.split(".")
    path = Path(*folders)
    return (
        path if (ROOT / path / "method.py").exists() and len(folders) > 2 else path / f"{file}.py"
    )


def named_in(source):
    """The names of methods in a source's strings, alone or joined, docstrings aside."""
    tree = ast.parse(source)
    documents = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    texts = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if id(node) not in documents
    ]
    names = [text for text in texts if re.fullmatch(r"[\w+|,]+", text)]
    return {part for text in names for part in re.split(r"[+|,]", text) if part in METHODS}


def test_a_name_stands_in_the_methods_own_folder():
    homes = {name: home(method) for name, method in METHODS.items()}
    strangers = {}
    for file in sorted((ROOT / "specjax").rglob("*.py")):
        path = file.relative_to(ROOT)
        own = {name for name, place in homes.items() if path.is_relative_to(place)}
        for allowed in (DEFAULTS, OTHER_THINGS, LAYOUTS):
            own |= allowed.get(path.as_posix(), set())
        if found := named_in(file.read_text(encoding="utf-8")) - own:
            strangers[path.as_posix()] = found
    assert strangers == {}


def test_the_count_finds_what_it_is_for():
    assert named_in('"""ngram"""\nX = ("eagle3", f"ngram+{1}", "an eagle")') == {"eagle3", "ngram"}
    assert all((ROOT / home(method)).exists() for method in METHODS.values())
    assert home(METHODS["eagle3"]) == Path("specjax/methods/eagle")
    assert home(METHODS["ngram"]) == Path("specjax/methods/ngram.py")


def test_the_public_names_are_those_of_the_records():
    assert {name: method.drafter for name, method in METHODS.items()} == DRAFTERS
    assert set(TRAINED) == set(HEADS)
    assert all(issubclass(kind, Drafter) for kind in DRAFTERS.values())


@pytest.mark.parametrize("name", METHODS)
def test_a_record_agrees_with_itself(name):
    method = METHODS[name]
    assert method.name == name
    trained = method.head is not None
    assert trained == method.needs.weights == issubclass(method.drafter, HeadDrafter)
    assert not (trained and method.of_target)
    assert trained or not (method.own_head or method.of_model)
    assert method.usual_length


@pytest.mark.parametrize(
    "training",
    [one for method in METHODS.values() for one in method.training],
    ids=lambda t: t.name,
)
def test_a_training_command_exists(training):
    assert (ROOT / training.config).is_file()
    assert callable(importlib.import_module(training.module).main)
