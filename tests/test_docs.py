"""What the documentation claims: its code runs and prints what it says, what it names exists."""

import contextlib
import dataclasses
import importlib
import inspect
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import script_module
from conformance.methods import TOPOLOGIES, takes
from conftest import slow
from tiny_models import eagle_drafter

import specjax
from specjax.apps.rows import decode_table
from specjax.drafters import DRAFTERS
from specjax.loading.formats.families import registry

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# (\w+)\.py\n")
RATE = re.compile(r"per target pass: \d\.\d\d$", re.MULTILINE)
LINK = re.compile(r"\]\(([^)#:\s]*)(?:#([^)\s]+))?\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
SOURCE = re.compile(
    r"\b((?:specjax|train|tests|scripts|configs|constraints|notebooks)/[\w/.]*\w)[`\s:,)]"
)
MODULE = re.compile(r"python -m ((?:specjax|train)[.\w]*)")
CALLED = re.compile(r"\bspecjax\.(\w+)\(")
PUBLIC = set(specjax._MODULES) - {"checkpoints", "sharding"}
CITED = re.compile(r"`(tests/[\w/]+\.py::[\w:]+(?:\[\S+\])?)`")


def run_page(page, names, compared=""):
    """Run a page's blocks of Python in order; what one printed is compared with the next text.

    Texts in which `compared` is not found are left out.
    """
    printed = ""
    for kind, text in FENCE.findall((DOCS / page).read_text()):
        if kind == "text" and re.search(compared, text):
            assert printed == text
        elif kind == "python":
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(text, page, "exec"), names)
            printed = out.getvalue()


@pytest.mark.parametrize("page", ["sampling.md", "theory.md", "long_contexts.md"])
def test_pages_on_arrays_print_what_they_say(page):
    run_page(page, names := {})
    assert names


def test_the_api_reference_is_current():
    with script_module("write_api_reference") as script:
        written = script.PAGE.read_text()
        assert written == script.reference(), "run python scripts/write_api_reference.py"


@pytest.mark.parametrize("name", ["specjax", *(f"specjax.{name}" for name in sorted(PUBLIC))])
def test_help_begins_with_functions_that_exist(name):
    """After one sentence comes a block with a line for what people look for."""
    module = importlib.import_module(name)
    first, block, *_ = module.__doc__.split("\n\n")
    assert len(first) < 110
    called = re.findall(r"(?<![.\w])(?:specjax\.)?([a-zA-Z]\w+)\(", block) or ["there are none"]
    assert [each for each in called if each not in {*module.__all__, "print"}] == []
    # A star import gives these, and pydoc lists their functions.
    assert [each for each in module.__all__ if not hasattr(module, each)] == []


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (specjax.DecodeOptions, [specjax.DecodeOptions]),
        (specjax.SamplingParams, [specjax.SamplingParams]),
        (specjax.Engine.__init__, [specjax.DecodeOptions]),
        (specjax.Engine.add, [specjax.SamplingParams]),
        *(
            (each, [specjax.DecodeOptions, specjax.SamplingParams])
            for each in (specjax.generate, specjax.stream, specjax.compile)
        ),
    ],
)
def test_help_says_what_each_option_means(function, options):
    explained = re.findall(r"^  (\w+): \S", inspect.getdoc(function), re.MULTILINE)
    names = [field.name for each in options for field in dataclasses.fields(each)]
    assert explained == list(dict.fromkeys(names))


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_help_lists_no_types_of_arrays(name):
    """`help` would show everything about them that NumPy says."""
    module = importlib.import_module(f"specjax.{name}")
    values = [getattr(module, each) for each in module.__all__]
    assert [each for each in values if hasattr(each, "array_type")] == []


OWN_MODEL = pytest.mark.parametrize("own_model", [True, *slow(False)], ids=["tiny", "default"])


@pytest.mark.usefixtures("one_width")
@OWN_MODEL
def test_the_code_of_extending_runs_and_prints_what_the_page_says(
    own_model, chatty, tmp_path, monkeypatch
):
    """How many tokens a pass of the default model gives is known of that model alone."""
    load_model = specjax.load_model
    if own_model:
        models = {"smollm2-135m-instruct": chatty}
        monkeypatch.setattr(
            specjax, "load_model", lambda name: models.get(name) or load_model(name)
        )
    monkeypatch.syspath_prepend(tmp_path)
    # The page adds a family of its own.
    monkeypatch.setattr(registry, "FAMILIES", dict(registry.FAMILIES))
    names, ran, printed = {}, "", None
    for kind, text in FENCE.findall((DOCS / "extending.md").read_text()):
        if kind == "text":
            if own_model and "smollm2" in ran:
                printed, text = (RATE.sub("per target pass: ", each) for each in (printed, text))
            assert printed == text
        elif file := FILE.match(text):
            (tmp_path / f"{file[1]}.py").write_text(text)
            monkeypatch.delitem(sys.modules, file[1], raising=False)
        else:
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(text, "extending.md", "exec"), names)
            ran, printed = text, out.getvalue()


@pytest.mark.usefixtures("one_width")
@OWN_MODEL
def test_the_tutorial_runs_and_prints_what_it_says(own_model, chatty, monkeypatch):
    """What the default model answers is known of that model alone."""
    load_model = specjax.load_model
    if own_model:
        models = {"smollm2-135m-instruct": chatty}
        monkeypatch.setattr(
            specjax, "load_model", lambda name: models.get(name) or load_model(name)
        )
    run_page("tutorial.md", names := {}, "same tokens|exact|parameters" if own_model else "")
    assert names["status"] == 0


PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "SECURITY", "CONTRIBUTING")),
    ROOT / "scripts" / "README.md",
    *sorted(DOCS.glob("*.md")),
]
# They name commands of their day: scripts and modules may be gone.
RECORDS = sorted((DOCS / "experiments").glob("*.md"))


def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    headings = (re.sub(r"[^\w\- ]", "", text.lower()) for text in HEADING.findall(page.read_text()))
    return {heading.replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, *RECORDS], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    missing = []
    for path, anchor in LINK.findall(page.read_text()):
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            missing.append(f"{path}#{anchor}")
    assert missing == []


def test_the_page_that_a_slow_result_names_exists():
    page, _, anchor = decode_table.SLOWER_PAGE.partition("#")
    assert anchor in anchors(ROOT / page)


def module_file(module):
    """What `python -m` runs."""
    path = module.replace(".", "/")
    return f"{path}/__main__.py" if (ROOT / path).is_dir() else f"{path}.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page):
    """Files and folders of the source; what commands write (build/...) is not looked at."""
    text = page.read_text()
    named = set(SOURCE.findall(text)) | set(map(module_file, MODULE.findall(text)))
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_the_glossary_names_files():
    assert len(set(SOURCE.findall((DOCS / "glossary.md").read_text()))) > 25


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_of_the_api_exist(page):
    names = set(CALLED.findall(page.read_text()))
    assert [name for name in sorted(names) if not hasattr(specjax, name)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_python_on_a_page_imports_is_there(page):
    imports = re.compile(r"^(?:from (?:specjax|train)[.\w]* )?import .+$", re.MULTILINE)
    blocks = [text for kind, text in FENCE.findall(page.read_text()) if kind == "python"]
    for line in imports.findall("\n".join(blocks)):
        if " specjax" in line or " train" in line:
            exec(line, {})


@pytest.mark.usefixtures("one_width")
@OWN_MODEL
def test_the_python_of_the_engines_page_runs(own_model, chatty, monkeypatch):
    if own_model:
        monkeypatch.setattr(specjax, "load_model", lambda name: chatty)
    for kind, text in FENCE.findall((DOCS / "engine.md").read_text()):
        if kind == "python":
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(text, "engine.md", "exec"), names := {})
    assert sorted(names["answers"]) == sorted(f"Count to {number}." for number in range(1, 13))


@pytest.mark.usefixtures("one_width")
@OWN_MODEL
def test_the_python_of_the_readme_runs_and_prints_what_it_says(own_model, chatty, monkeypatch):
    if own_model:
        make_drafter = specjax.make_drafter

        def drafter(name, model):
            return eagle_drafter(model) if name == "eagle3" else make_drafter(name, model)

        monkeypatch.setattr(specjax, "load_model", lambda name: chatty)
        monkeypatch.setattr(specjax, "make_drafter", drafter)
    blocks = FENCE.findall((ROOT / "README.md").read_text())
    (program,) = (text for kind, text in blocks if kind == "python" and "load_model" in text)
    (shown,) = (text for kind, text in blocks if kind == "text")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(program, "README.md", "exec"), names := {})
    if own_model:
        texts, tau = names["result"].texts, names["summary"].acceptance_length
        shown = "\n\n".join(texts) + f"\n{tau:.2f} tokens per pass of the target\n"
        assert len(texts) == len(names["prompts"])
    assert out.getvalue() == shown


def test_every_script_is_in_the_table_of_scripts():
    scripts = {
        path.relative_to(ROOT / "scripts").as_posix()
        for path in (ROOT / "scripts").rglob("*.py")
        if "__main__" in path.read_text()
    }
    page = (ROOT / "scripts" / "README.md").read_text()
    assert set(re.findall(r"`([\w/]+\.py)`", page)) == scripts


def test_the_matrix_is_in_the_proofs():
    """A row for each method, a column for each topology."""
    section = (DOCS / "proofs.md").read_text().partition("\n## The matrix")[2]
    table = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:3] == "| `"]
    methods = {name.strip("`"): cells for name, *cells in table if len(cells) == len(TOPOLOGIES)}
    assert methods == {
        name: ["yes" if takes(name, topology) else "refused" for topology in TOPOLOGIES]
        for name in DRAFTERS
        if name != "none"
    }


def test_the_proofs_exist(request):
    cited = set(CITED.findall((DOCS / "proofs.md").read_text()))
    assert len(cited) > 40
    missing = [test for test in cited if not (ROOT / test.partition("::")[0]).is_file()]
    assert missing == []
    # Where the whole suite runs, pytest has collected them already.
    collected = {item.nodeid for item in request.session.items}
    collected |= {name.partition("[")[0] for name in collected}
    if not (unknown := sorted(cited - collected)):
        return
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-n0", "--slow", "--collect-only", "-q", *unknown],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, (run.stdout + run.stderr)[-2000:]
