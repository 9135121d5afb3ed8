"""Packages import only those below them, nothing imports in a circle, and no folder is crowded."""

import ast
import configparser
import re
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from script_modules import script_module

ROOT = Path(__file__).parent.parent
# From the top down; modules at the root of specjax and train are named by themselves.
COMMANDS = sorted(file.stem for file in (ROOT / "train").glob("*.py") if file.stem != "__init__")
ORDER = [
    " ".join(["train", *(f"train.{name}" for name in COMMANDS)]),
    "train.generation",
    "train.run",
    "train.methods train.pretraining",
    "train.experts",
    "train.data",
    "specjax.decode specjax.bench specjax.report specjax.export",
    "specjax.cli",
    "specjax.reporting",
    "specjax.testing",
    "specjax.tuning",
    "specjax.decoding",
    "specjax.drafters",
    "specjax.loading",
    "specjax.models",
    "specjax.distributed",
    "specjax.fields",
    "specjax.files specjax.theory",
    "specjax.sampling specjax.controllers specjax.cache specjax.trees specjax.metrics "
    "specjax.signals specjax.errors specjax.log",
]
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names.split()}
MOST_MODULES = 14

with script_module("documents.draw_packages") as packages:
    GRAPH = packages.module_graph()


def level(name):
    return LEVEL[".".join(name.split(".")[:2])]


def test_imports_go_down():
    upward = [
        f"{name} -> {other}"
        for name, others in GRAPH.items()
        for other in others
        if level(name) > level(other)
    ]
    assert not upward


# A step is given its limits, and what chooses them knows nothing of a step.
TRACED = {
    f"specjax.decoding.{name}" for name in ("loop", "round", "start", "state", "plan", "verify")
}


def test_a_round_and_what_chooses_its_limits_do_not_know_each_other():
    chosen_by = {name for name in GRAPH if name.startswith("specjax.controllers")}
    assert {"specjax.controllers", "specjax.controllers.auto"} <= chosen_by
    assert all(GRAPH[name] <= chosen_by for name in chosen_by)
    assert GRAPH.keys() >= TRACED
    reached = set(TRACED)
    while new := set().union(*(GRAPH[name] for name in reached)) - reached:
        reached |= new
    assert reached > TRACED
    assert not reached & chosen_by


def test_no_circles():
    edges = {name: others - {name} for name, others in GRAPH.items()}
    while leaves := [name for name, others in edges.items() if not others & edges.keys()]:
        for name in leaves:
            del edges[name]
    assert not edges


# What reads JSON that this program wrote itself, or is a program of its own.
OWN_JSON = {
    "specjax/distributed/processes.py",
    "specjax/distributed/folder_lock.py",
    "specjax/loading/tokenizers/template_renderer.py",
}


@pytest.mark.parametrize(
    ("words", "home", "exceptions"),
    [
        (("json.loads(", "json.load("), "specjax/files/json_files.py", OWN_JSON),
        (("expanduser",), "specjax/files/paths.py", set()),
    ],
)
def test_one_reader_of_json_and_one_of_paths(words, home, exceptions):
    """Whatever may be wrong with a text from outside is an error of its one reader."""
    users = {
        file.relative_to(ROOT).as_posix()
        for root in ("specjax", "train")
        for file in (ROOT / root).rglob("*.py")
        if any(word in file.read_text() for word in words)
    }
    assert home in users
    assert users - exceptions == {home}


def test_no_folder_is_crowded():
    count = defaultdict(int)
    for root in ("specjax", "train", "scripts"):
        for file in (ROOT / root).rglob("*.py"):
            count[str(file.parent.relative_to(ROOT))] += file.name != "__init__.py"
    assert {folder: number for folder, number in count.items() if number > MOST_MODULES} == {}


def test_the_check_finds_what_it_is_for():
    source = "from specjax import trees\ndef f():\n    from specjax.cli import console\n"
    found = set(packages.imports(source, {"specjax.cli.console", "specjax.cli", "specjax.trees"}))
    assert found == {"specjax.cli.console", "specjax.trees"}
    assert level("specjax.fields") > level("specjax.cli.console")


def test_the_picture_shows_the_imports():
    drawn = packages.PICTURE.read_text()
    assert drawn == packages.svg(), "run python scripts/documents/draw_packages.py"


def test_the_picture_leaves_out_what_follows():
    edges = {"a": {"b", "c"}, "b": {"c"}, "c": set()}
    assert packages.reduced(edges) == {"a": {"b"}, "b": {"c"}, "c": set()}
    assert packages.levels(packages.reduced(edges)) == [["a"], ["b"], ["c"]]


# Imported by another name than it is installed by; and extras, or what an installed one brings.
INSTALLED_AS = {"absl": "absl-py", "orbax": "orbax-checkpoint"}
NOT_REQUIRED = {"huggingface_hub", "matplotlib", "array_record"}


def test_what_is_imported_is_required():
    """So that pip alone installs what decoding and training need."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    lines = config["options"]["install_requires"].split("\n")
    required = {re.split("[<>=]", line)[0] for line in lines}
    used = {
        module.split(".")[0]
        for root in ("specjax", "train")
        for file in (ROOT / root).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        for module in imported_modules(node)
    }
    ours = {"specjax", "train", *sys.stdlib_module_names}
    wanted = {INSTALLED_AS.get(name, name) for name in used - ours - NOT_REQUIRED}
    assert {"jax", "optax"} <= wanted
    assert {name.replace("_", "-") for name in wanted - required} <= required


def imported_modules(node):
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [node.module]
    return []


def test_no_folders_import_each_other():
    """But for a folder and one inside it."""
    folders = {name.rpartition(".")[0] for name in GRAPH}

    def folder(name):
        return name if name in folders else name.rpartition(".")[0]

    edges = {(folder(name), folder(other)) for name, others in GRAPH.items() for other in others}
    both = sorted({tuple(sorted(pair)) for pair in edges if pair[::-1] in edges})
    assert [(a, b) for a, b in both if a != b and not b.startswith(f"{a}.")] == []
