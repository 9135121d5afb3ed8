"""The benchmark runs end to end and reports what its table shows."""

import dataclasses
import io
import json
import math

import numpy as np
import pytest
import reports
from decoding import make_call
from rich.console import Console

from specjax.apps.rows.records import DecodedRow
from specjax.apps.rows.speedups import Speedup, median_repeat, speed_ratio
from specjax.apps.run import bench, bench_run
from specjax.apps.run.predicted_speedup import measure_round_costs
from specjax.apps.run.runner import turn_order
from specjax.apps.tuning import measure_costs
from specjax.engine.generate import Generation
from specjax.fields import read_values
from specjax.loading.load import save_model
from specjax.methods.ngram import Ngram


def short(target):
    """A drafter of one's own, of few draft lengths."""
    return Ngram(num_speculative_tokens=2)


again = short
"""Another name for it."""


@pytest.mark.usefixtures("one_width")
def test_the_debug_size_reports_every_part(tmp_path, chatty, capsys):
    save_model(chatty, tmp_path / "model")
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"question_id": 1, "category": "qa", "turns": ["ab"]}\n')
    code = bench.main(
        [
            "--config=configs/bench_smollm2.py:debug",
            f"--config.target={tmp_path / 'model'}",
            f"--config.prompts={questions}",
            f"--config.report={tmp_path / 'report.jsonl'}",
            "--config.batch_sizes=(1,)",
            "--config.drafters=('test_bench:short', 'test_bench:again')",
        ]
    )
    assert code == 0, capsys.readouterr()
    lines = (tmp_path / "report.jsonl").read_text().splitlines()
    kinds = {}
    for record in map(json.loads, lines):
        kinds.setdefault(record.pop("record"), []).append(record)
    assert list(kinds) == ["bench", "pass", "speedup", "summary"]
    sizes = {(row["capacity"], row["width"]) for row in kinds["pass"]}
    assert sizes == {(256, 1), (256, 2), (512, 1), (512, 2)}
    found = [(one["num_speculative_tokens"], one["drafter"]) for one in kinds["speedup"]]
    drafters = ("plain, again", "test_bench:short", "test_bench:again")
    assert found == [(length, name) for length in ("auto", 1) for name in drafters]
    for one in kinds["speedup"]:
        assert (one["batch"], one["identical"]) == (2, True)
        mean, low, high = one["speedup"]
        assert 0 < low <= mean <= high
        if one["drafter"] == "plain, again":
            assert (one["acceptance_length"], one["mean_draft"]) == (1.0, 0.0)
        if one["num_speculative_tokens"] == 1 and one["drafter"] != "plain, again":
            assert one["efficiency"] == pytest.approx(mean / one["predicted"])
        else:
            assert one["predicted"] is None
    # Decoded once, for all drafters.
    assert len({one["plain_tokens_per_second"] for one in kinds["speedup"]}) == 2
    assert "Speed-up over plain decoding" in capsys.readouterr().out


@pytest.mark.parametrize("terminal", [False, True])
def test_no_cell_of_a_table_is_cut(terminal):
    ratio = speed_ratio([batch(*(2 * log for log in EVEN))])
    name = "ngram+a_module_of_my_own:drafter[fast]"
    numbers = ("auto", 16, 0.75, 2.5, 4.0, 0.5, 1234.5, 617.2)
    one = Speedup(name, *numbers, ratio, ratio, identical=True, predicted=1.9)
    console = Console(file=io.StringIO(), width=120, force_terminal=terminal, color_system=None)
    columns = {**bench_run._SPEEDUP_COLUMNS, **bench_run._AUTO_COLUMNS}
    bench_run._print_table(console, "Speed-up", columns, [one])
    printed = console.file.getvalue()
    assert "…" not in printed
    if not terminal:
        assert all(cell in printed for cell in (name, str(ratio), "50%", *columns))


def test_a_speedup_above_its_tokens_per_pass_says_so():
    ratio = speed_ratio([batch(1.0, 1.0)])
    numbers = (4, 1, 0.0, 1.13, 4.0, 1.0, 1234.5, 617.2)
    one = Speedup("eagle3", *numbers, ratio, ratio, identical=True, possible_speedup=1.13)
    said = f"{ratio} (the clock is noisy: at most 1.13x is possible)"
    assert bench_run._SPEEDUP_COLUMNS["speed-up"](one) == said
    for possible in (None, 2.72):  # of plain decoding beside itself nothing is said
        one = dataclasses.replace(one, possible_speedup=possible)
        assert bench_run._SPEEDUP_COLUMNS["speed-up"](one) == str(ratio)


def rows_of(*results, batch=0, question=0, **times):
    """Rows of a batch, each with the tokens that its passes accepted; times are of the batch."""
    return [
        read_values(
            DecodedRow,
            reports.row(
                *(question + number, "qa", [(3, count, count + 1) for count in accepted], 2.0, 2.0),
                **{"batch": batch, "longest_path": 3, **times},
            ),
        )
        for number, accepted in enumerate(results)
    ]


def test_the_possible_speedup_is_that_of_the_mean_of_ratios():
    """Tokens per pass over all results may be fewer than the mean of what each result allows."""
    rows = rows_of((3, 3)) + rows_of((0, 0, 0, 0), (1, 1), batch=1, question=1)
    one = Speedup.of(rows, "fixed", 2, 0.0)
    assert one.possible_speedup == pytest.approx((4 * 2) ** 0.5)


def test_a_speedup_is_of_rows_by_batch_and_repeat():
    """Two batches of other questions in two repeats; with prefill 3 s against 1 + 2 e^0.1."""
    slow = 2.0 * math.exp(0.1)
    rows = [
        row
        for number, plain_s in enumerate((2.0, slow, 2.0, slow))
        for row in rows_of(
            *((1, 1), (0, 2)),
            batch=number,
            question=2 * (number % 2),
            prefill_s=1.0,
            plain_prefill_s=1.0,
            plain_decode_s=plain_s,
        )
    ]
    one = Speedup.of(rows, "fixed", 2, 0.0)
    # Each batch is as fast in both repeats.
    np.testing.assert_allclose(one.speedup, [math.exp(0.05)] * 3)
    whole = ((1 + slow) / 3) ** 0.5
    np.testing.assert_allclose(one.speedup_with_prefill, [whole] * 3)
    assert (one.acceptance_length, one.mean_draft, one.share_drafted) == (2.0, 3.0, 1.0)
    assert one.tokens_per_second == pytest.approx(4 * 8 / 8.0)
    assert (one.identical, one.possible_speedup) == (True, pytest.approx(2.0))
    different = dataclasses.replace(rows[0], identical=False)
    assert Speedup.of([different, *rows[1:]], "fixed", 2, 0.0).identical is False
    plain = [dataclasses.replace(row, longest_path=0) for row in rows]
    assert Speedup.of(plain, "fixed", 2, 0.0).possible_speedup is None


def test_a_pass_is_as_wide_as_the_widest_of_its_rows():
    """Of three rows the second begins a round late, and the third ends after one round."""
    width = np.array([[1, 4, 4], [4, 1, -1], [1, -1, -1]])
    none = np.zeros((3, 3), int)
    counts = [width, *[none] * 4, np.array([0, 1, 0])]
    result = Generation([[1]] * 3, [""] * 3, ["length"] * 3, [None] * 3, *counts, [], 1.0, 1.0)
    widths, rows = result.passes()
    assert widths.tolist() == [1, 4, 4]
    assert rows.tolist() == [2, 2, 2]
    result = dataclasses.replace(result, first_round=np.array([0, 0, 0]))
    widths, rows = result.passes()
    assert widths.tolist() == [4, 4, 4]
    assert rows.tolist() == [3, 2, 1]


def test_the_parts_of_a_prediction_are_of_full_batches(tiny, monkeypatch):
    call = make_call(tiny, [[1, 2]] * 3, drafter=Ngram(num_speculative_tokens=2))
    asked = []

    def widths_seconds(target, params, widths, *, batch, committed, capacity):
        asked.append((batch, committed))
        return {width: batch + width for width in widths}

    monkeypatch.setattr(measure_costs, "widths_seconds", widths_seconds)
    monkeypatch.setattr(measure_costs, "propose_seconds", lambda *call: 0.5)
    parts = measure_round_costs(*call, 8)
    assert asked == [(4, 6)]
    # Passes of 7, 7 and 5 s with drafts of half a second, for two tokens per round.
    (row,) = rows_of((1, 1, 1), width=[3, 3, 1])
    assert parts.speedup_of([row]) == pytest.approx(2 * 5 / (0.5 + (7 + 7 + 5) / 3))


def batch(*logs):
    """Speed-ups with these logarithms, one of each repeat."""
    return [math.exp(log) for log in logs]


EVEN = (-0.02, -0.01, 0.0, 0.01, 0.02)
"""Their mean has a standard error of 0.00707."""


@pytest.mark.parametrize(
    ("batches", "mean", "errors"),
    [
        # Student's t at 97.5 %, of 4 degrees of freedom: the repeats less one.
        ([EVEN], 0.0, 2.776445 * 0.00707107),
        # Of two batches that vary alike 8, of two of which one does not vary 4.
        ([EVEN, [1.0 + log for log in EVEN]], 0.5, 2.306004 * 0.00707107 / 2**0.5),
        ([EVEN, [0.1] * 5], 0.05, 2.776445 * 0.00707107 / 2),
        ([[0.1] * 5], 0.1, 0.0),
        # Of a single repeat nothing is known.
        ([EVEN, [0.1]], 0.05, math.inf),
    ],
)
def test_intervals_are_of_few_repeats(batches, mean, errors):
    ratio = speed_ratio([batch(*logs) for logs in batches])
    wanted = [math.exp(mean), math.exp(mean - errors), math.exp(mean + errors)]
    np.testing.assert_allclose(ratio, wanted, rtol=1e-5)


def test_an_interval_of_more_than_three_per_cent_is_unresolved():
    narrow = speed_ratio([batch(*EVEN)])
    wide = speed_ratio([batch(*(2 * log for log in EVEN))])
    assert narrow.resolved
    assert not wide.resolved
    assert str(narrow) == "1.000 [0.981..1.020]"
    assert str(wide) == "1.000 [0.961..1.040] unresolved"


@pytest.mark.parametrize("ways", [2, 5])
def test_every_other_repeat_goes_backwards_and_each_way_begins(ways):
    orders = [turn_order(ways, repeat) for repeat in range(2 * ways)]
    assert orders[0] == list(range(ways))
    for there, back in zip(orders[::2], orders[1::2], strict=True):
        assert back == there[::-1]
    assert {order[0] for order in orders[::2]} == set(range(ways))


def test_the_median_of_repeats_is_one_of_them():
    assert median_repeat([(6.0, 2.0), (1.0, 1.0), (2.0, 1.0)]) == 2
    assert median_repeat([(3.0, 1.0), (2.0, 2.0)]) == 1  # the lower one of two


def test_a_slow_while_is_slow_for_every_width(tiny, monkeypatch):
    """Passes are timed in turn: of a clock that slows down, each width sees the same."""
    now, step = 0.0, 0.0

    def slowing():
        nonlocal now, step
        step += 0.01
        now += step
        return now

    monkeypatch.setattr(measure_costs.time, "perf_counter", slowing)
    sizes = dict(batch=1, committed=4, capacity=128)
    seconds = measure_costs.widths_seconds(tiny.architecture, tiny.params, (1, 2, 3), **sizes)
    assert list(seconds) == [1, 2, 3]
    # One width after the other: the last would seem to take four times as long as the first.
    assert max(seconds.values()) < 1.5 * min(seconds.values())
