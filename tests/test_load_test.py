"""`scripts/load_test.py` on a tiny model: requests come at random, and none is lost."""

import functools
import json
import re

import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver
from commands import script_module
from conftest import slow

from specjax.apps.report import engine_report as engine_report_module
from specjax.apps.report.engine_report import draw_engine, engine_report
from specjax.engine.outputs import Times
from specjax.engine.statistics import Statistics, Step
from specjax.loading.load import save_model


@pytest.fixture
def load_test(chatty, tmp_path):
    """The script's `main` on a tiny model and four prompts; flags are keyword arguments."""
    save_model(chatty, tmp_path / "model")
    questions = [
        {"question_id": n, "category": "qa", "turns": ["abc ab " * (1 + 5 * n)]} for n in range(4)
    ]
    lines = [json.dumps(question) + "\n" for question in questions]
    (tmp_path / "prompts.jsonl").write_text("".join(lines))
    paths = {name: str(tmp_path / file) for name, file in (("target", "model"), ("out", "out"))}
    paths["prompts"] = str(tmp_path / "prompts.jsonl")

    def run(script, **values):
        flags.FLAGS.mark_as_parsed()
        with flagsaver.flagsaver(
            drafter="ngram", slots=3, num_speculative_tokens="3", **paths, **values
        ):
            return script.main([])

    with script_module("load_test") as script:
        yield functools.partial(run, script)


@pytest.mark.parametrize("rule", ["rejection", *slow("coupled", "block")])
def test_every_answer_is_what_it_is_alone(rule, load_test, tmp_path, capsys):
    assert not load_test(
        requests=24, rate=200.0, new_tokens=["2", "60"], verify=rule, aborts=0.4, abort_after=0.05
    )
    said = capsys.readouterr().out
    assert "lost: 0; different from alone: 0" in said
    assert " abort" in said
    report = json.loads((tmp_path / "out" / "load.json").read_text())
    assert report["summary"]["requests"] == 24
    assert report["summary"]["first_token_s"]["p95"] >= report["summary"]["waiting_s"]["p95"] >= 0
    assert sum(step["tokens"] for step in report["steps"]) == report["summary"]["tokens"]
    assert len(list((tmp_path / "out").glob("load_*.png"))) == 3


def test_a_shared_prefix_in_too_small_a_pool(load_test, tmp_path, capsys):
    assert not load_test(
        requests=8,
        rate=0.0,
        new_tokens=["150", "150"],
        ignore_eos=True,
        system=70,
        kv_page_size=64,
        num_kv_pages=7,
        aborts=0.0,
        pairs=1,
    )
    said = capsys.readouterr().out
    assert "lost: 0; different from alone: 0" in said
    without, shares = re.findall(r"with(?:out)? sharing: (\d+) prompt tokens read, (\d+)", said)
    assert int(shares[1]) > int(without[1]) == 0
    assert int(shares[0]) < int(without[0])
    assert "times sooner with sharing (median of 1" in said
    report = json.loads((tmp_path / "out" / "load.json").read_text())
    assert report["summary"]["put_back"] > 0


def test_an_engines_report_and_pictures(tmp_path):
    statistics = Statistics(num_slots=2)
    for second in range(1, 200):
        statistics.add_step(Step(float(second), 1.0, 4, 6, 8, second % 3))
    statistics.add_request(Times(1.0, 2.0, 3.0))
    report = engine_report(statistics)
    assert report["summary"]["occupancy"] == 6 / 8
    assert report["summary"]["total_s"] == {"p50": 3.0, "p95": 3.0, "p99": 3.0}
    assert report["summary"]["between_tokens_s"]["p50"] is None
    assert len(report["steps"]) == 199
    draw_engine(tmp_path / "e.png", statistics, "two slots")
    assert {one.name for one in tmp_path.iterdir()} == {
        "e_tokens.png",
        "e_slots.png",
        "e_waiting.png",
    }


def test_time_without_steps_is_seen_in_the_pictures(tmp_path, monkeypatch):
    statistics, drawn = Statistics(num_slots=2), {}
    for second in (*range(28, 60), *range(150, 200)):
        statistics.add_step(Step(float(second), 1.0, 4, 6, 8, 3))

    def keep(path, panels, **options):
        ((curve,),) = panels.values()
        drawn[path.name] = curve

    monkeypatch.setattr(engine_report_module, "draw_curves", keep)
    draw_engine(tmp_path / "e.png", statistics, "two slots")
    for name, busy, idle in (("tokens", 8.0, 0.0), ("slots", 1.5, 0.0), ("waiting", 3, np.nan)):
        curve = drawn[f"e_{name}.png"]
        assert list(curve.x) == sorted(curve.x)
        found = dict(zip(curve.x, curve.measured, strict=True))
        for x, value in found.items():
            if x < 25 or 65 < x < 145:
                np.testing.assert_equal(value, idle)
            elif 30 < x < 55 or 155 < x < 195:
                assert value == pytest.approx(busy)
    tokens = drawn["e_tokens.png"]
    assert np.sum(tokens.measured) * (tokens.x[1] - tokens.x[0]) == pytest.approx(82 * 8)
    # Of an engine that has run for longer than its steps are kept.
    statistics.rounds += 1000
    draw_engine(tmp_path / "e.png", statistics, "two slots")
    assert min(drawn["e_tokens.png"].x) > 27
