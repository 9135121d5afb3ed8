"""Packages import only those below them, and nothing imports in a circle."""

import ast
import configparser
import functools
import re
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# From the top down; modules at the root of specjax and train are named by themselves.
COMMANDS = sorted(file.stem for file in (ROOT / "train").glob("*.py") if file.stem != "__init__")
ORDER = [
    " ".join(["train", *(f"train.{name}" for name in COMMANDS)]),
    "train.while_decoding",
    "train.generation",
    "train.run",
    "train.methods train.pretraining",
    "train.experts",
    "train.data",
    "specjax.__main__ specjax.decode specjax.bench specjax.spec_bench specjax.report "
    "specjax.export specjax.corpus_index specjax.serve specjax.doctor specjax.tuning "
    "specjax.diagnosis",
    "specjax.apps.serve specjax.apps.spec_bench specjax.apps.export specjax.apps.corpus_index",
    "specjax.apps.doctor specjax.apps.report",
    "specjax.apps.playground",
    "specjax.apps.run",
    "specjax.apps.command_line",
    "specjax.apps.rows",
    "specjax.apps.tuning",
    "specjax.apps",
    "specjax.testing",
    "specjax.engine",
    "specjax.drafters",
    "specjax.methods",
    "specjax.loading",
    "specjax.models specjax.processors",
    "specjax.core",
    "specjax.distributed",
    "specjax.fields",
    "specjax.grammars",
    "specjax.files specjax.theory",
    "specjax.sampling specjax.controllers specjax.trees specjax.metrics specjax.signals "
    "specjax.errors",
]
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names.split()}


def sources():
    """The source of each module of specjax and train by its dotted name; a package by its own."""
    found = {}
    for root in ("specjax", "train"):
        for file in (ROOT / root).rglob("*.py"):
            parts = file.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = file.read_text(encoding="utf-8")
    # The package itself loads its names lazily.
    del found["specjax"]
    return found


def imports(source, known):
    """The modules, of those that are known, that a source imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in known else node.module for name in inside}
    return found & known


@functools.cache
def graph():
    """The modules that each module imports; found by the worker that runs these tests."""
    found = sources()
    return {name: imports(source, set(found)) for name, source in found.items()}


def closure(*names):
    """Modules and all that they import, directly or not, with their packages."""
    reached, found = set(), {*names}
    while found:
        reached |= found
        packages = {other.rpartition(".")[0] for other in found} & graph().keys()
        found = (packages | set().union(*(graph()[other] for other in found))) - reached
    return reached


def level(name):
    depth = 3 if name.startswith("specjax.apps") else 2
    return LEVEL[".".join(name.split(".")[:depth])]


def test_imports_go_down():
    upward = [
        f"{name} -> {other}"
        for name, others in graph().items()
        for other in others
        if level(name) > level(other)
    ]
    assert not upward


# A step is given its limits, and what chooses them knows nothing of a step.
TRACED = {
    f"specjax.core.{name}" for name in ("loop", "round", "initial_state", "state", "plan", "verify")
}


def test_a_round_and_what_chooses_its_limits_do_not_know_each_other():
    chosen_by = {name for name in graph() if name.startswith("specjax.controllers")}
    assert {"specjax.controllers", "specjax.controllers.auto"} <= chosen_by
    assert all(graph()[name] <= chosen_by for name in chosen_by)
    assert graph().keys() >= TRACED
    reached = closure(*TRACED)
    assert reached > TRACED
    assert not reached & chosen_by


def test_the_core_can_be_read_in_an_afternoon():
    """What the loop over rounds imports, and nothing of files, loading, models or options."""
    core = closure("specjax.core.loop")
    lines = [len(source.splitlines()) for name, source in sources().items() if name in core]
    assert len(core) <= 36
    assert sum(lines) <= 6850
    packages = {".".join(name.split(".")[:2]) for name in core}
    assert packages == {
        "specjax.core",
        "specjax.distributed",
        "specjax.errors",
        "specjax.sampling",
        "specjax.trees",
    }


# Commands, and public modules that are applications on the library.
ENTRIES = {
    *("decode", "bench", "spec_bench", "report", "export", "corpus_index", "serve", "doctor"),
    *("tuning", "diagnosis", "__main__"),
}


def test_the_library_imports_no_application():
    upward = [
        f"{name} -> {other}"
        for name, others in graph().items()
        for other in others
        if name.startswith("specjax.") and name.split(".")[1] not in {"apps", *ENTRIES}
        if other.startswith("specjax.") and other.split(".")[1] in {"apps", *ENTRIES}
    ]
    assert not upward


def test_no_circles():
    edges = {name: others - {name} for name, others in graph().items()}
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
        (("expanduser",), "specjax/files/path_checks.py", set()),
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


def test_the_check_finds_what_it_is_for():
    source = "from specjax import trees\ndef f():\n    from specjax.apps import rows\n"
    found = imports(source, {"specjax.apps.rows", "specjax.apps", "specjax.trees"})
    assert found == {"specjax.apps.rows", "specjax.trees"}
    assert level("specjax.fields") > level("specjax.apps.rows")


def package_of(module):
    """The package a module is in, or the module itself at the root of specjax."""
    return module.split(".")[0 if module.startswith("train") else 1]


def arrows(edges):
    """The edges of a graph without circles that do not follow from others, as mermaid lines."""
    reached = {}

    def reachable(name):
        if name not in reached:
            reached[name] = set(edges[name]).union(*map(reachable, edges[name]))
        return reached[name]

    return [
        f"    {name} --> {other}"
        for name in sorted(edges)
        for other in sorted(edges[name])
        if not any(other in reachable(between) for between in edges[name] - {other})
    ]


def test_the_diagram_shows_the_imports():
    """The one of docs/design.md, without commands, and without what any module may import."""
    edges = defaultdict(set)
    for name, others in graph().items():
        for other in {name, *others}:
            edges[package_of(name)].add(package_of(other))
    anywhere = {"errors", "signals", *ENTRIES}
    edges = {
        name: others - anywhere - {name} for name, others in edges.items() if name not in anywhere
    }
    page = (ROOT / "docs" / "design.md").read_text()
    drawn = page.partition("```mermaid\nflowchart TD\n")[2].partition("\n```")[0]
    assert drawn.splitlines() == arrows(edges)


def test_the_diagram_leaves_out_what_follows():
    assert arrows({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == ["    a --> b", "    b --> c"]


# Imported by another name than it is installed by.
INSTALLED_AS = {"absl": "absl-py", "orbax": "orbax-checkpoint"}
# What specjax imports where it is there, and the extra that brings it.
OPTIONAL = {
    "huggingface_hub": "hub",
    "matplotlib": "plots",
    **dict.fromkeys(("anyio", "starlette", "uvicorn"), "serve"),
    **dict.fromkeys(("array_record", "tensorflow_datasets"), "train"),
}


def requirements(lines):
    return {re.split("[<>=]", line)[0].replace("_", "-") for line in lines.strip().split("\n")}


@pytest.mark.parametrize("package", ["specjax", "train"])
def test_what_is_imported_is_required(package):
    """So that pip alone installs what decoding needs, and with the extra what training needs."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    required = requirements(config["options"]["install_requires"])
    extra = {name: requirements(lines) for name, lines in config["options.extras_require"].items()}
    used = {
        module.split(".")[0]
        for file in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        for module in imported_modules(node)
    }
    used -= {"specjax", "train", *sys.stdlib_module_names}
    wanted = {name: INSTALLED_AS.get(name, name).replace("_", "-") for name in used}
    assert {"jax", "flax"} <= used
    if package == "train":
        assert "optax" in used
        assert wanted.keys() & OPTIONAL.keys() <= {"array_record"}
        assert {*wanted.values()} <= required | extra["train"]
        return
    assert OPTIONAL.keys() <= used
    assert all(wanted[name] in extra[where] for name, where in OPTIONAL.items())
    assert {wanted[name] for name in used - OPTIONAL.keys()} <= required
    # What only training needs is not installed without it.
    assert not required & extra["train"]


def imported_modules(node):
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [node.module]
    return []


def test_no_folders_import_each_other():
    """But for a folder and one inside it."""
    folders = {name.rpartition(".")[0] for name in graph()}

    def folder(name):
        return name if name in folders else name.rpartition(".")[0]

    edges = {(folder(name), folder(other)) for name, others in graph().items() for other in others}
    both = sorted({tuple(sorted(pair)) for pair in edges if pair[::-1] in edges})
    assert [(a, b) for a, b in both if a != b and not b.startswith(f"{a}.")] == []
