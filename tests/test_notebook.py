"""The notebooks run from top to bottom and show what they say."""

import ast
import contextlib
import io
from pathlib import Path

import nbformat
import pytest
from conftest import slow
from nbclient import NotebookClient
from tiny_models import eagle_head

import specjax
from specjax.drafters import head_drafter

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


def execute_here(notebook):
    """The same in this process, where a test's own models can take the place of large ones."""
    names, outputs = {}, []
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        *lines, last = ast.parse(cell.source).body
        shows = isinstance(last, ast.Expr)
        body = lines if shows else [*lines, last]
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(ast.Module(body, []), "cell", "exec"), names)
            if shows:
                shown = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
                if shown is not None:
                    print(getattr(shown, "data", shown))
        outputs.append(out.getvalue())
    return [text for text in outputs if text]


@pytest.mark.slow
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


@pytest.mark.parametrize("own_model", [True, *slow(False)], ids=["tiny", "default"])
def test_a_tree_round_runs(own_model, chatty, monkeypatch):
    """With a tiny model in this process, or as it is, in a kernel."""
    notebook = read("trees.ipynb")
    if own_model:

        def make_drafter(name, model, **options):
            return head_drafter(eagle_head(model), model, **options)

        monkeypatch.setattr(specjax, "load_model", lambda name: chatty)
        monkeypatch.setattr(specjax, "make_drafter", make_drafter)
    outputs = execute_here(notebook) if own_model else execute(notebook)
    assert "river" in outputs[0]
    proposed, fate = (text for text in outputs if text.startswith("<svg"))
    assert "#cf222e" not in proposed
    assert "#cf222e" in fate
    assert outputs[-1].startswith("accepted nodes: ")
