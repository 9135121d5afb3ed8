"""The documentation site: built with warnings as errors, and each public name on its page."""

import ast
import functools
import importlib
import inspect
import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest
from commands import script_module

from specjax import sampling, trees

pytest.importorskip("material", reason="the site is built with mkdocs-material: extra docs")

ROOT = Path(__file__).parents[1]
MODULES = [
    "specjax",
    *(f"specjax.{name}" for name in ("drafters", "sampling", "trees", "testing")),
    *(f"specjax.{name}" for name in ("metrics", "theory", "controllers", "processors")),
    *(f"specjax.{name}" for name in ("tuning", "diagnosis")),
]
MADE = re.compile("__(init|post_init)__")
TAG = re.compile(r"<[^>]+>")
LOADED = re.compile(r"<(?:script|img|link|iframe)\b[^>]*(?:src|href)=\"?(?:https?:)?//[^>]*")
ERRORS = re.compile(r"\b(InputError|ValueError|TypeError|OSError|KeyError|RuntimeError)\b")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    build = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", f"--site-dir={folder}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert build.returncode == 0, build.stderr[-2000:]
    return folder


def public_names(module):
    module = importlib.import_module(module)
    return [name for name in module.__all__ if not inspect.ismodule(getattr(module, name))]


def text_of(html):
    return unescape(TAG.sub("", html))


def sections(site, module):
    """The HTML of each name of a module's page."""
    page = (site / "docs" / "api" / module / "index.html").read_text()
    page = page.partition("<article")[2].partition("</article>")[0]
    parts = re.split(rf'<h2 id="{re.escape(module)}\.(\w+)">', page)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@functools.cache
def definitions(file):
    """The functions and classes of a file by name."""
    body = ast.parse(Path(file).read_text()).body
    return {node.name: node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def raised(node, file):
    """The errors that a function raises, and those of the functions of its file that it calls."""
    found, waiting, seen = set(), [node], set()
    while waiting:
        for part in ast.walk(waiting.pop()):
            if isinstance(part, ast.Raise):
                found |= set(ERRORS.findall(ast.unparse(part)))
            elif isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute):
                found |= {"InputError"} if part.func.attr == "check" else set()
            elif isinstance(part, ast.Call) and isinstance(part.func, ast.Name):
                found |= {"InputError"} if part.func.id == "check_instance" else set()
                called = definitions(file).get(part.func.id)
                if isinstance(called, ast.FunctionDef) and called not in seen:
                    seen.add(called)
                    waiting.append(called)
    return found


def written(value):
    """The file of a public function or class, and its definition there; None for a constant."""
    if not (inspect.isfunction(value) or inspect.isclass(value)):
        return None
    file = inspect.getsourcefile(inspect.unwrap(value))
    node = definitions(file).get(value.__name__)
    return node and (file, node)


def raised_by(value):
    """The errors of a public function, or of the making and the public methods of a class."""
    if not (found := written(value)):
        return set()
    file, node = found
    if isinstance(node, ast.FunctionDef):
        return raised(node, file)
    methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
    public = [each for each in methods if MADE.match(each.name) or each.name[0] != "_"]
    return set().union(*(raised(each, file) for each in public))


@pytest.mark.parametrize("module", MODULES)
def test_each_public_name_has_its_signature_and_source_on_a_page(site, module):
    found = sections(site, module)
    assert sorted(found) == sorted(public_names(module))
    for name, html in found.items():
        text, value = text_of(html), getattr(importlib.import_module(module), name)
        definition = name
        if of_code := written(value):
            kind = "def" if isinstance(of_code[1], ast.FunctionDef) else "class"
            definition = f"{kind} {value.__name__}"
        assert definition in text, name
        if definition.startswith("def"):
            shown = text.replace(" ", "").replace("\n", "")
            for argument in inspect.signature(value).parameters.values():
                types = argument.annotation if isinstance(argument.annotation, str) else ""
                assert f"{argument.name}:{types}".replace(" ", "").replace("'", '"') in shown, name
        (link,) = re.findall(r'Source: <a href="([^"]*)"', html)
        file, _, line = link.partition("/#__codelineno-0-")
        page = (site / "docs" / "api" / module / file / "index.html").read_text()
        code = text_of(page.rpartition("<pre>")[2])
        assert definition in code.splitlines()[int(line) - 1], name


@pytest.mark.parametrize("module", MODULES)
def test_names_that_raise_say_so(site, module):
    values, unsaid = importlib.import_module(module), {}
    of_all = ERRORS.findall("".join(re.findall(r"Bad input raises [^ ]+", values.__doc__)))
    for name, html in sections(site, module).items():
        said = {*of_all, *ERRORS.findall(text_of(html))}
        if missing := raised_by(getattr(values, name)) - said:
            unsaid[name] = missing
    assert unsaid == {}


def test_the_errors_that_code_raises_are_found():
    assert raised_by(sampling.warp) == {"ValueError"}
    assert raised_by(trees.sequoia_tree) == {"InputError"}
    assert raised_by(trees.Topology) == {"ValueError"}
    assert raised_by(sampling.argmax) == set()


def test_pages_load_nothing_from_elsewhere_and_show_their_pictures(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 50
    for page in pages:
        html = page.read_text()
        assert LOADED.findall(html) == [], page
        for picture in re.findall(r'<img[^>]*src="([^"]*)"', html):
            assert picture.startswith("data:") or (page.parent / picture).is_file(), picture


def test_the_search_knows_the_pages(site):
    index = (site / "search" / "search_index.json").read_text()
    for words in ("specjax.sampling.verify_chain", "docs/tutorial/", "notebooks/trees.ipynb/"):
        assert words in index
    assert "metrics.py/" not in index


def test_the_modules_of_the_reference_are_these():
    with script_module("write_api_reference") as script:
        assert list(script.MODULES) == MODULES
