"""The notebooks run from top to bottom and show what they say."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parents[1] / "examples"


def read(name):
    return nbformat.read(EXAMPLES / name, as_version=4)


def shown(notebook):
    """What each cell of code that prints anything says, in order."""
    texts = [
        "".join(
            output.get("text")
            or output.data.get("image/svg+xml")
            or output.data.get("text/html")
            or output.data["text/plain"]
            for output in cell.outputs
        )
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]
    return [text for text in texts if text]


def execute(notebook):
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": EXAMPLES}}).execute()
    return shown(notebook)


@pytest.mark.slow  # as a round of a tree, below
def test_one_round_runs():
    outputs = execute(read("one_round.ipynb"))
    assert any("#1a7f37" in text and "#0969da" in text for text in outputs)
    assert outputs[-1].startswith("accepted ")


@pytest.mark.slow  # the page of that name, which is longer, has a test in test_docs
def test_extending_runs_and_shows_what_is_stored():
    notebook = read("extending.ipynb")
    stored = shown(notebook)
    found = execute(notebook)
    drafter, broken, rule, counterexample, together = found
    assert all("passed=True" in check for check in (drafter, rule, together))
    assert broken.count("exact False") == 2
    assert "and should with" in counterexample
    assert [text.split(",")[0] for text in stored] == [text.split(",")[0] for text in found]


def test_a_tree_round_runs():
    outputs = execute(read("trees.ipynb"))
    assert "river" in outputs[0]
    proposed, fate = (text for text in outputs if text.startswith("<svg"))
    assert "#cf222e" not in proposed
    assert "#cf222e" in fate
    assert outputs[-1].startswith("accepted nodes: ")
