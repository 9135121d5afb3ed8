"""The page of a run, in a headless browser: its rounds, its distributions, its sliders."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
from browser import CHROMIUM, browser

from specjax import sampling, theory
from specjax.apps.playground import page
from specjax.apps.playground.draft_tests import DraftTest
from specjax.apps.playground.replay_round import RecordedRow, RoundTrace
from specjax.apps.playground.theory_tables import CONTEXT, LLAMA_8B
from specjax.apps.report import report
from specjax.errors import InputError

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")


TEXT = " <b>&</script><script>alert(1)</script>"
"""Of every token: nothing in it becomes part of the page."""


def round_trace(number, accepted):
    """A round of a chain of three tokens, of which so many were accepted."""
    likeliest = ((4, 0.5, 0.7), (5, 0.3, 0.1), (9, 0.2, 0.2))
    tests = tuple(
        DraftTest(slot, 3 + slot, 0.5, 0.7, likeliest, slot <= accepted, u, 0.714)
        for slot, u in zip(range(1, min(accepted + 1, 3) + 1), (0.125, 0.25, 0.375), strict=False)
    )
    tokens = (*range(4, 4 + accepted), 9)
    source = "target" if accepted == 3 else "residual"
    return RoundTrace(
        number=number,
        position=2 + number,
        root=2,
        tokens=(4, 5, 6),
        parents=(0, 1, 2),
        valid=(True, True, True),
        drafted_by=(0, 1, 0),
        path=tuple(range(1, accepted + 1)),
        tests=tests,
        next_token=9,
        next_source=source,
        next_likeliest=tuple((token, p, None) for token, p, _ in likeliest),
        emitted=tokens,
        recorded=tokens,
        problems=(),
    )


@pytest.fixture(scope="module")
def answer():
    """An answer of four rounds, as a page has it, and its record."""
    traces = [round_trace(number, accepted) for number, accepted in enumerate((1, 3, 0, 2))]
    emitted = tuple(len(trace.emitted) for trace in traces)
    tokens = sum((trace.emitted for trace in traces), ())
    accepted = tuple(len(trace.path) for trace in traces)
    recorded = RecordedRow(tokens, (3,) * 4, accepted, emitted, (0,) * 4)
    return page.answer_of(
        "first", [["suffix", "corpus"]], (1, 2), recorded, traces, dict.fromkeys(range(10), TEXT)
    ), recorded


def run_of(answer):
    run = {"target": "toy", "drafter": "suffix|corpus"}
    run |= {"rule": "rejection", "temperature": 0.9, "device": "cpu", "tau": 1.8, "speedup": 1.2}
    return {**run, "k": 3, "alpha": 0.5, "answers": [answer], "num_answers": 1}


@pytest.fixture(scope="module")
def file(answer, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(page.page({"runs": [run_of(answer[0])]}), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def opened(file, tmp_path_factory):
    with browser(tmp_path_factory.mktemp("profile")) as view:
        view.open(file.as_uri())
        yield view


def test_the_page_is_one_file_that_loads_nothing(file):
    text = file.read_text(encoding="utf-8")
    assert not re.findall(r"(?:src|href)=\"(?!#|data:)|@import|url\(", text)
    assert text.count("<script") == text.count("</script>") == 2


@needs_browser
def test_rounds_are_stepped_through(opened, answer):
    found, recorded = answer
    rounds = len(recorded.emitted)
    assert len(found["rounds"]) == rounds > 3
    shown = opened.run("document.querySelectorAll('#tokens .token').length")
    assert shown == len(recorded.token_ids)
    # A colour for each drafter, also for those that draft together.
    found_classes = "[...document.querySelectorAll('#tokens .token')].map((x) => x.className)"
    classes = [name.removesuffix(" here") for name in opened.run(found_classes)]
    drafted = ["token d0", "token d1", "token d0"]
    assert classes == [name for count in recorded.accepted for name in (*drafted[:count], "token")]
    assert [name in opened.text("#legend") for name in ("suffix", "corpus")] == [True, True]
    for number in (1, rounds, 2):
        opened.slide("#slider", number)
        assert opened.text("#number") == f"{number} of {rounds}"
        trace = found["rounds"][number - 1]
        assert opened.run("document.querySelectorAll('.steps > li').length") == len(trace["tests"])
        for test in trace["tests"]:
            assert f"{test['uniform']:.3f}" in opened.text("#trace")
        assert "gives the tokens that the run emitted" in opened.text("#trace")
    opened.click("#next")
    assert opened.text("#number").startswith("3 of")
    opened.key("#tokens", "ArrowLeft")
    assert opened.text("#number").startswith("2 of")
    opened.run("document.querySelector('[data-round=\"0\"]').click()")
    assert opened.text("#number").startswith("1 of")
    assert not opened.errors


@needs_browser
def test_the_distributions_are_those_of_sampling(opened):
    def values(name):
        return np.array([float(x) for x in opened.run(f"exact.dataset.{name}").split(",")])

    before = values("p")
    opened.key("#bars .p", "PageUp")
    p, q = values("p"), values("q")
    assert p[0] == pytest.approx(before[0] + 0.1)
    assert p.sum() == pytest.approx(1)
    logp, logq = jnp.log(p), jnp.log(q)
    acceptance = float(sampling.overlap(logp, logq))
    assert float(opened.run("exact.dataset.acceptance")) == pytest.approx(acceptance, abs=1e-6)
    np.testing.assert_allclose(
        values("residual"), jnp.exp(sampling.residual(logp, logq)), atol=1e-6
    )
    np.testing.assert_allclose(values("wrong"), np.minimum(p, q) + (1 - acceptance) * p, atol=1e-6)
    assert "The sum equals p." in opened.text("#distance")
    opened.click("#simulate")
    opened.until("+exact.dataset.drawn >= 20000")
    opened.click("#simulate")
    simulated = [float(x) for x in opened.text("#counts tr:last-child").split("\t")[1:]]
    np.testing.assert_allclose(simulated, p, atol=0.03)
    opened.click("[name=after][value=p]")
    assert "is wrong by" in opened.text("#distance")
    assert not opened.errors


@needs_browser
def test_the_sliders_show_what_theory_computes(opened):
    grid = page._tables()
    alpha, k, cost = 15, 5, 4
    for name, value in (("alpha", alpha), ("k", k), ("cost", cost)):
        opened.slide(f"#{name}", value)
    arguments = grid["alpha"][alpha], np.array(grid["k"]), grid["cost"][cost]
    gains = theory.speedup(*arguments)
    assert float(opened.run("buys.dataset.speedup")) == pytest.approx(gains[k], abs=0.006)
    assert int(opened.run("buys.dataset.best")) == theory.optimal_k(*arguments[::2], max_k=12)
    tokens = theory.expected_tokens(grid["alpha"][alpha], k)
    assert float(opened.run("buys.dataset.tokens")) == pytest.approx(tokens, abs=6e-4)
    opened.run("$('chip').selectedIndex = 2; $('chip').dispatchEvent(new Event('change'))")
    opened.slide("#batch", 3)
    batch = grid["batch"][3]
    found = theory.roofline(
        LLAMA_8B, "h100-sxm", batch, CONTEXT, k, grid["alpha"][alpha], draft_cost=grid["cost"][cost]
    )
    assert float(opened.run("buys.dataset.speedup")) == pytest.approx(found.speedup, abs=0.006)
    assert not opened.errors


@needs_browser
def test_no_number_is_minus_zero(opened):
    assert opened.run("[-1e-17, -0.0004, -0.0006, 0.25].map((x) => fixed(x)).join(' ')") == (
        "0.000 0.000 -0.001 0.250"
    )


@needs_browser
def test_the_first_round_that_is_shown_has_a_draft(answer, tmp_path, tmp_path_factory):
    """Whatever else there is: with a refusal after accepted tokens, if there is one."""
    found, _ = answer
    mixed, accepted, refused, _ = found["rounds"]
    none = {**mixed, "valid": [False] * 3, "path": [], "tests": []}
    with browser(tmp_path_factory.mktemp("profile")) as view:
        for number, (rounds, first) in enumerate(
            [([none, refused], 2), ([none, refused, accepted], 3), ([none, accepted, mixed], 3)]
        ):
            rounds = [{**trace, "number": index} for index, trace in enumerate(rounds)]
            accepted_counts = [len(trace["path"]) for trace in rounds]
            emitted = [1 + count for count in accepted_counts]
            shown = {**found, "rounds": rounds, "emitted": emitted, "accepted": accepted_counts}
            path = tmp_path / f"page{number}.html"
            path.write_text(page.page({"runs": [run_of(shown)]}), encoding="utf-8")
            view.open(path.as_uri())
            assert view.text("#number") == f"{first} of {len(rounds)}"
            assert not view.errors


def test_the_chat_starts_at_a_low_temperature():
    text = page.page({"runs": []})
    assert re.search(r'id="temperature" [^>]*value="0.2"', text)


@needs_browser
def test_a_narrow_screen_and_a_round_that_differs(answer, tmp_path, tmp_path_factory):
    found, _ = answer
    rounds = [{**found["rounds"][0], "problems": ["emitted tokens: other ones"]}]
    path = tmp_path / "page.html"
    path.write_text(page.page({"runs": [run_of({**found, "rounds": rounds})]}), encoding="utf-8")
    with browser(tmp_path_factory.mktemp("profile")) as view:
        view.open(path.as_uri(), width=360, height=740)
        assert view.run("document.documentElement.scrollWidth") <= 360
        assert "differs from the recorded run: emitted tokens" in view.text("#trace [role=alert]")
        assert not view.errors


def test_a_file_of_someone_else_is_kept(tmp_path, capsys):
    path = tmp_path / "notes.html"
    path.write_text("<p>mine</p>", encoding="utf-8")
    with pytest.raises(InputError, match="is no page of specjax"):
        page.check_page(path)
    page.check_page(tmp_path / "new.html")
    assert report.main([str(tmp_path / "none.jsonl"), f"--html={path}"]) == 2
    assert path.read_text(encoding="utf-8") == "<p>mine</p>"
    assert report.main([str(tmp_path / "none.jsonl")]) == 2
    assert "out is missing: pass --out=DIR, or --html=FILE" in capsys.readouterr().err
