"""The notebook runs from top to bottom and shows what it says."""

from pathlib import Path

import nbformat
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_one_round_runs():
    notebook = nbformat.read(EXAMPLES / "one_round.ipynb", as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": EXAMPLES}}).execute()
    shown = [
        output.get("text", "") or output.data.get("text/html", "")
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
    ]
    assert any("#1a7f37" in text and "#0969da" in text for text in shown)
    assert shown[-1].startswith("accepted ")
