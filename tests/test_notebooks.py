"""The notebooks run from top to bottom and show what is stored in them."""

import ast
import contextlib
import io
import re
from pathlib import Path

import nbformat
import pytest
from conftest import slow
from matplotlib import pyplot as plt
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
MOST_BYTES = 150_000
COMPUTED = ("batch_economics", "speedup_limits")
"""Notebooks of formulas, without draws or training: their numbers are compared, too."""
NUMBER = re.compile(r"[-+]?\d[\d.,]*(?:e[-+]?\d+)?")
NAMES = [
    "acceptance_rule",
    "batch_economics",
    "mtp",
    "speedup_limits",
    "trees",
    "what_makes_a_draft_good",
    # One in docs/extending.md as well, one that trains longer, one with a real model.
    *slow("extending", "learning_while_decoding", "one_round"),
]


def read(name):
    return nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)


def shown(cell):
    """What a cell is stored with: the text that it printed, and the text of what it displays."""
    texts = [
        output.text if output.output_type == "stream" else output.data["text/plain"]
        for output in cell.outputs
    ]
    return "\n".join(text.strip() for text in texts if not text.startswith("<Figure"))


def execute(cell, names):
    """What a cell shows when it is run in this process, where all modules are loaded."""
    *lines, last = ast.parse(cell.source).body
    displays = isinstance(last, ast.Expr) and not cell.source.rstrip().endswith(";")
    body = lines if displays else [*lines, last]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(ast.Module(body, []), "cell", "exec"), names)
        if displays:
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
            if value is not None:
                print(repr(value))
    return out.getvalue().strip()


def without_numbers(text):
    """A text's words: digits, and so how arrays are padded, may differ with the version of jax."""
    return re.sub(r"\s+(?=\])|(?<=\[)\s+", "", re.sub(r"\s+", " ", NUMBER.sub("0", text)))


def numbers(text):
    return [float(number.strip(".,").replace(",", "")) for number in NUMBER.findall(text)]


def code_cells(name):
    return [cell for cell in read(name).cells if cell.cell_type == "code"]


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_shows_what_is_stored(name, monkeypatch):
    plt.switch_backend("Agg")
    monkeypatch.chdir(NOTEBOOKS)
    names = {"__name__": "__main__"}
    try:
        for cell in code_cells(name):
            found = execute(cell, names)
            assert without_numbers(found) == without_numbers(shown(cell)), cell.source
            if name in COMPUTED:
                assert numbers(found) == pytest.approx(numbers(shown(cell)), rel=1e-3), cell.source
    finally:
        plt.close("all")


@pytest.mark.slow
def test_a_notebook_runs_in_a_kernel():
    resources = {"metadata": {"path": NOTEBOOKS}}
    NotebookClient(read("acceptance_rule"), timeout=300, resources=resources).execute()


def test_every_notebook_is_small_and_is_tested():
    tested = {name if isinstance(name, str) else name.values[0] for name in NAMES}
    assert tested == {path.stem for path in NOTEBOOKS.glob("*.ipynb")}
    for path in NOTEBOOKS.glob("*.ipynb"):
        assert path.stat().st_size <= MOST_BYTES, path


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_links_between_files_lead_somewhere(path):
    text = "\n".join(cell.source for cell in read(path.stem).cells)
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert link.startswith("https://") or (NOTEBOOKS / link).exists(), link
