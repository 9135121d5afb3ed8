"""`python -m specjax.report`: figures checked by hand, files, pictures, and what it refuses."""

import copy
import csv
import dataclasses
import json
import math
import sys
from pathlib import Path

import pytest
from reports import ROWS, as_lines, content, read_one, row

from specjax.apps.report import csv_jsonl, picture_files, plots, report
from specjax.apps.report.plots import Curve
from specjax.apps.report.runs import Entry, labels, without_length
from specjax.apps.rows import statistics
from specjax.apps.rows.records import DecodedRow, read_report, read_reports
from specjax.apps.rows.report_file import ReportFile
from specjax.apps.rows.statistics import OVERALL, batch_widths, figures, figures_by_task
from specjax.apps.run import decode, predicted_speedup
from specjax.errors import InputError
from specjax.fields import read_values
from specjax.loading.load import save_model

pytest.importorskip("matplotlib")


@pytest.fixture
def write(tmp_path):
    """Writes reports; returns their paths."""

    def files(**contents):
        paths = [tmp_path / f"{name}.jsonl" for name in contents]
        for path, one in zip(paths, contents.values(), strict=True):
            path.write_text(one if isinstance(one, str) else as_lines(one))
        return list(map(str, paths))

    return files


def table(text, heading):
    """The cells of the first Markdown table below a heading."""
    lines = text.split(heading, 1)[1].splitlines()
    rows = [line.strip("| ") for line in lines if line.startswith("|")]
    rows = [[cell.strip() for cell in one.split("|")] for one in rows]
    end = next((i for i, one in enumerate(rows[1:], 1) if one[0] == rows[0][0]), len(rows))
    return rows[:1] + rows[2:end]


def read_csv(path):
    return list(csv.DictReader(path.read_text().splitlines()))


def test_figures_by_hand(write):
    (path,) = write(a=content())
    figures = figures_by_task(read_report(path))
    assert list(figures) == [OVERALL, "mt_bench", "qa"]
    talk, qa, everything = figures["mt_bench"], figures["qa"], figures[OVERALL]
    # Writing and math are both MT-bench's: rounds 3, 1, 1 and 2.
    assert talk.counts.num_requests == 2
    assert talk.counts.acceptance_length == 7 / 4
    assert talk.counts.acceptance_length_per_request == pytest.approx((5 / 3 + 2) / 2)
    assert talk.counts.tau_drafted == 2
    assert talk.counts.acceptance_rate == 3 / 6
    assert talk.counts.acceptance_at_pos == pytest.approx((2 / 3, 1 / 3))
    assert talk.counts.cond_acceptance_at_pos == pytest.approx((2 / 3, 1 / 2))
    assert talk.tokens_per_second == pytest.approx(7 / 1.5)
    assert talk.plain_tokens_per_second == pytest.approx(7 / 2.5)
    assert talk.speedup == pytest.approx(2.5 / 1.5)
    assert talk.speedup_with_prefill == pytest.approx(3.25 / 2.25)
    assert talk.speedup_per_request == pytest.approx((2 + 1) / 2)
    assert qa.counts.acceptance_length == 5 / 2
    assert qa.counts.tokens_per_round == 2
    assert qa.speedup == pytest.approx(0.8)
    # Pooled, which is neither the mean of the tasks nor that of the requests.
    assert everything.counts.acceptance_length == 12 / 6
    assert everything.speedup == pytest.approx(3.3 / 2.5)
    assert everything.speedup_per_request == pytest.approx((2 + 1 + 0.8) / 3)
    assert (everything.identical_rows, everything.compared_rows) == (3, 3)
    # Without each batch in turn: 1.3 / 1.5, 2.8 / 2 and 2.5 / 1.5.
    logs = [math.log(one) for one in (1.3 / 1.5, 2.8 / 2, 2.5 / 1.5)]
    error = math.sqrt(2 / 3 * sum((one - sum(logs) / 3) ** 2 for one in logs))
    low, high = (3.3 / 2.5 * math.exp(sign * 4.302653 * error) for sign in (-1, 1))
    assert everything.speedup_interval == pytest.approx((low, high))
    assert qa.speedup_interval is None
    assert everything.few


def test_a_batch_counts_its_seconds_once_and_tells_tasks_apart_only_where_it_holds_one(write):
    first, second, third = copy.deepcopy(ROWS)
    fourth = row(3, "writing", [(2, 2, 3), (2, 2, 3)], 3.0, 4.0, batch=1)
    for one in (first, second):
        one |= {"batch": 0, "decode_s": 2.0, "plain_decode_s": 5.0}
    third |= {"batch": 1, "decode_s": 3.0, "plain_decode_s": 4.0}
    (path,) = write(a=content(rows=[first, second, third, fourth], batch_size=2))
    run = read_report(path)
    figures = figures_by_task(run)
    assert figures[OVERALL].tokens_per_second == pytest.approx((5 + 2 + 4 + 6) / 5)
    assert figures[OVERALL].speedup == pytest.approx(9 / 5)
    assert figures[OVERALL].speedup_per_request is None
    # The second batch holds both tasks: its seconds count for neither.
    assert figures["mt_bench"].speedup == pytest.approx(5 / 2)
    assert (figures["mt_bench"].timed_requests, figures["mt_bench"].counts.num_requests) == (2, 3)
    assert figures["qa"].speedup is None
    assert figures["qa"].counts.acceptance_length == 5 / 2
    # A round is as wide as the widest of its batch, and lasts while a row of it does.
    assert batch_widths(run.rows).tolist() == [3, 3, 1, 3, 3]
    assert report.main([path, f"--out={path}.d", "--nopictures"]) == 0
    text = (read_report(path).path.parent / "a.jsonl.d" / "report.md").read_text()
    head, line = table(text, "### Speed-up")
    assert head == ["Drafter", "MT (3)\u2020", "QA (1)\u2020", *FEW_OVERALL]
    assert line == ["ngram", "2.50x\u2021\\*", "n/a", "2.25", "1.80x"]
    assert "that hold only this task" in text


FEW_OVERALL = ["Tokens per pass\u2020", "Speed-up\u2020"]


def test_few_answers_are_neither_ranked_nor_bold(write, capsys):
    slow = content("early_exit", "4")
    for one in slow["rows"]:
        one["decode_s"] *= 2
    (path, other) = write(slow=slow, fast=content())
    assert report.main([path, other, f"--out={path}.d", "--nopictures"]) == 0
    shown = capsys.readouterr().out
    text = (read_report(path).path.parent / "slow.jsonl.d" / "report.md").read_text()
    head, first, second = table(text, "### Speed-up")
    assert head[-2:] == FEW_OVERALL
    assert (first[0], second[0]) == ("early_exit, 4 draft tokens", "ngram, 2 draft tokens")
    for printed in (shown, text):
        assert "**" not in printed
        assert "\u2020 from fewer than 5 answers: neither ranked nor in bold" in printed


def test_ranges_of_repeats_are_over_all_batches():
    """Of each repeat the geometric mean over batches; plain decoding where it varies most."""
    speeds = [((8.0, 4.0), (9.0, 3.0)), ((2.0, 4.0), (8.0, 6.0))]
    rows = [
        read_values(DecodedRow, row(number, "qa", [(2, 1, 2)], 1.0, 1.0, repeated_speeds=one))
        for number, one in enumerate(speeds)
    ]
    found = figures(rows)
    assert found.speedup_range == pytest.approx((1.0, 2.0))
    assert found.plain_range == (4.0, 6.0)
    assert found.repeats == 2
    once = dataclasses.replace(rows[1], repeated_speeds=())
    for others in ([once], [rows[0], once]):
        assert (figures(others).speedup_range, figures(others).plain_range) == (None, None)
        assert figures(others).repeats == 0


def test_a_speedup_that_its_tau_makes_impossible_is_marked_everywhere(write, monkeypatch):
    """In no table in bold, and ranked as what is possible; of rows in a batch the best one counts.

    Two rows of one batch, with 2 and 1 tokens per pass, are 100/60 times as fast by 110/65 tokens
    per pass if the first one has more tokens.
    """
    monkeypatch.setattr(statistics, "FEW", 1)
    fast, usual = content("medusa", "4"), content("eagle3", "4")
    for drafter, accepted, seconds in ((fast, 0, 0.3), (usual, 2, 0.4)):
        drafter["rows"] = [
            row(
                number,
                "qa",
                [(4, accepted, accepted + 1)] * 4,
                seconds,
                1.0,
                drafter=drafter["run"]["drafter"],
                prompt_hash=str(number),
            )
            for number in range(2)
        ]
    paths = write(fast=fast, usual=usual)
    assert report.main([*paths, f"--out={paths[0]}.d", "--formats=svg"]) == 0
    text = (read_report(paths[0]).path.parent / "fast.jsonl.d" / "report.md").read_text()
    _, first, second = table(text, "### Speed-up")
    # By its clock the second would be the fastest, 3.33x at one token per pass.
    assert first == ["eagle3", "**2.50x**", "**3.00**", "**2.50x**"]
    assert second == ["medusa", "3.33x\u2021", "1.00", "3.33x\u2021"]


def test_of_rows_that_share_a_batch_the_best_tokens_per_pass_are_possible():
    """Plain decoding takes 100 passes, as long as the first row, which drafts take 50 for."""
    rows = [
        read_values(DecodedRow, row(number, "qa", rounds, 50.0, 100.0, batch=0))
        for number, rounds in enumerate(([(1, 1, 2)] * 50, [(1, 0, 1)] * 10))
    ]
    found = figures(rows)
    assert found.counts.acceptance_length == pytest.approx(110 / 60)
    assert (found.speedup, found.possible_speedup, found.noisy) == (2.0, 2.0, False)
    noisy = figures([dataclasses.replace(each, decode_s=49.0) for each in rows])
    assert noisy.noisy
    assert noisy.credible_speedup == 2.0
    alone = figures([dataclasses.replace(each, batch=n) for n, each in enumerate(rows)])
    assert alone.possible_speedup == pytest.approx(110 / 60)


def test_files_in_spec_benchs_layout(write, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(statistics, "FEW", 1)
    slow = content("early_exit", "4")
    slow["run"]["config"]["drafter"]["exit_layer"] = 2
    for one in slow["rows"]:
        one["decode_s"] *= 2
    paths = write(fast=content(), slow=slow, none=content("none", None))
    out = tmp_path / "out"
    assert report.main([*paths, f"--out={out}"]) == 0
    shown = capsys.readouterr().out
    text = (out / "report.md").read_text()
    assert "## cpu, float32, batch size 1, temperature 0, up to 5 new tokens" in text
    head, *lines = table(text, "### Speed-up")
    assert head == ["Drafter", "MT (2)", "QA (1)", "Tokens per pass", "Speed-up"]
    # The fastest first; the best of a column is bold, all of them where several show the same.
    assert lines == [
        ["ngram, 2 draft tokens", "**1.67x**", "**0.80x**", "**2.00**", "**1.32x**"],
        ["none", "**1.67x**", "**0.80x**", "**2.00**", "**1.32x**"],
        ["early_exit, 4 draft tokens, exit layer 2", "0.83x", "0.40x", "**2.00**", "0.66x"],
    ]
    assert "| ngram, 2 draft tokens " in shown
    ngram = "ngram, 2 draft tokens"
    assert table(text, "Mean over requests")[1] == [ngram, "**1.83**", "**2.50**", "**2.06**"]
    assert table(text, "### All tasks together")[1][:6] == [
        *(ngram, "3", "4.4", "3.3", "1.32x", "0.25 to 7.10")
    ]
    assert table(text, "### Acceptance by position")[:3] == [
        ["Drafter", "acceptance", "1", "2"],
        [ngram, "cumulative", "0.80", "0.40"],
        [ngram, "conditional", "0.80", "0.50\u2020"],
    ]
    rows = read_csv(out / "report.csv")
    assert [(one["label"], one["subset"]) for one in rows[:3]] == [
        (ngram, "mt_bench"),
        (ngram, "qa"),
        (ngram, "overall"),
    ]
    assert float(rows[0]["acceptance_length"]) == 7 / 4
    assert float(rows[0]["acceptance_at_pos_1"]) == pytest.approx(2 / 3)
    assert float(rows[0]["acceptance_at_pos_2"]) == pytest.approx(1 / 3)
    assert 0 < float(rows[0]["speedup_low"]) < 1.67 < float(rows[0]["speedup_high"])
    assert rows[0]["predicted_speedup"] == rows[1]["speedup_low"] == ""
    lines = (out / "ngram_2_draft_tokens.jsonl").read_text().splitlines()
    first = json.loads(lines[0])
    assert [first[name] for name in ("question_id", "category", "model_id", "drafter")] == [
        *(0, "writing", "model", ngram)
    ]
    assert first["choices"] == [
        {
            "index": 0,
            "turns": ["answer 0"],
            "decoding_steps": [3],
            "new_tokens": [5],
            "wall_time": [1.5],
            "accept_lengths": [3, 1, 1],
        }
    ]
    for name in ("speedup.png", "tokens_per_pass.png", "acceptance_by_position.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
        assert f"]({name})" in text
    # No two of the runs differ in draft length alone.
    assert not (out / "speedup_by_length.png").exists()


def test_the_size_of_drafters_where_it_is_known(write, tmp_path):
    sized = content("eagle3", "4")
    sized["run"]["drafter_bytes"] = 12_340_000
    for name, one, cells in (("with", sized, {"n/a", "12.3"}), ("without", content(), None)):
        other = content("medusa", "4")
        paths = write(one=one, other=other)
        assert report.main([*paths, f"--out={tmp_path / name}", "--nopictures"]) == 0
        head, *lines = table((tmp_path / name / "report.md").read_text(), "### All tasks together")
        assert (head[-1] == "MB") == (cells is not None)
        assert cells in (None, {line[-1] for line in lines})


def test_pictures_of_other_kinds(write, tmp_path):
    out = tmp_path / "out"
    assert report.main([*write(a=content()), f"--out={out}", "--formats=svg,pdf"]) == 0
    for name in ("speedup", "tokens_per_pass", "acceptance_by_position"):
        assert "<svg" in (out / f"{name}.svg").read_text()
        assert (out / f"{name}.pdf").read_bytes().startswith(b"%PDF")
    assert "](speedup.svg)" in (out / "report.md").read_text()
    assert not list(out.glob("*.png"))


def test_a_run_that_drafted_nothing_is_named(write, tmp_path):
    idle = content(length="auto", rows=[row(0, "qa", [(0, 0, 1)] * 4, 1.0, 2.0)])
    out = tmp_path / "out"
    assert report.main([*write(a=idle), f"--out={out}", "--formats=svg"]) == 0
    said = "nothing was drafted: auto found that drafting does not pay here, or ngram found"
    assert said in (out / "report.md").read_text()


def test_turn_taking_of_a_question_are_one_line(write):
    later = row(0, "writing", [(2, 1, 2)], 0.5, 0.5, turn=1, batch=3, text="second")
    (path,) = write(a=content(rows=[dict(ROWS[0], turn=0), ROWS[1], later]))
    entry = Entry.of(read_report(path), "label")
    lines = [json.loads(line) for line in csv_jsonl.jsonl_text(entry).splitlines()]
    assert [line["question_id"] for line in lines] == [0, 1]
    choice = lines[0]["choices"][0]
    assert choice["turns"] == ["answer 0", "second"]
    assert choice["new_tokens"] == [5, 2]
    assert choice["accept_lengths"] == [3, 1, 1, 2]


@pytest.mark.parametrize("lossy", [False, True])
def test_every_file_says_whether_a_rule_is_lossy(lossy, write):
    report = content()
    report["run"]["lossy"] = lossy
    entry = Entry.of(read_report(*write(a=report)), "label")
    rows = csv.DictReader(csv_jsonl.csv_text([entry]).splitlines())
    assert {row["lossy"] for row in rows} == {str(lossy)}
    lines = [json.loads(line) for line in csv_jsonl.jsonl_text(entry).splitlines()]
    assert {line["lossy"] for line in lines} == {lossy}


def test_runs_under_other_conditions_are_not_compared(write, tmp_path):
    hot = content(sampling={"temperature": 0.8, "max_new_tokens": 5})
    slow = content()
    slow["rows"][0]["decode_s"] = 9.0
    paths = write(a=content(), hot=hot, slow=slow)
    out = tmp_path / "out"
    assert report.main([*paths, f"--out={out}"]) == 0
    text = (out / "report.md").read_text()
    cold, warm = text.split("\n## ")[1:]
    assert "temperature 0," in cold
    assert [line[0] for line in table(cold, "### Speed-up")[1:]] == ["ngram (a)", "ngram (slow)"]
    (line,) = table(warm, "### Speed-up")[1:]
    assert line == ["ngram", "1.67x", "0.80x", "2.00", "1.32x"]
    assert (out / "tokens_per_pass-1.png").exists()
    assert "tokens_per_pass-2.png" in warm


def test_labels_name_what_differs(write):
    runs = [
        read_report(path)
        for path in write(
            a=content(length=None),
            b=content(length="8", verify="coupled"),
            c=content("early_exit", "auto", drafter={"name": "early_exit", "exit_layer": 3}),
            d=content("none"),
            e=content("eagle3", "1", tree={"kind": "dynamic", "num_nodes": 32, "depth": 5}),
            f=content("eagle3", tree={"kind": "static", "choices": [[0], [1]], "topk": None}),
        )
    ]
    # The drafter's own K is that of its longest draft.
    assert labels(runs) == [
        "ngram, 2 draft tokens",
        "ngram, 8 draft tokens, coupled verification",
        "early_exit, auto, exit layer 3",
        "none",
        "eagle3, 1 draft token, dynamic tree, 32 nodes, depth 5",
        "eagle3, 2 draft tokens, static tree, choices [[0], [1]]",
    ]
    assert [without_length(label) for label in labels(runs)[1:3]] == [
        "ngram, coupled verification",
        "early_exit, exit layer 3",
    ]
    assert labels(runs[:1]) == ["ngram"]


def test_equal_runs_are_told_apart_by_their_paths(write, tmp_path):
    """Else one of them would be missing from the pictures."""
    (first,) = write(same=content())
    paths = [tmp_path / folder / "again" / "same.json" for folder in ("one", "two")]
    for path in paths:
        path.parent.mkdir(parents=True)
        path.write_text(Path(first).read_text())
    runs = [read_report(path) for path in paths]
    assert labels(runs) == ["ngram (one/again/same)", "ngram (two/again/same)"]
    (other,) = write(other=content())
    assert labels([read_report(other), runs[0]]) == ["ngram (other)", "ngram (same)"]


def test_a_report_keeps_every_text_and_id(tmp_path):
    """Also texts that are no Unicode, ids of 63 bits, and numbers that are not finite."""
    changed = content()
    words = "[[1.  0.]\n [0.  1.]]\u00a0\ud800 \u4f60"
    changed["rows"][0] |= {"text": words, "question_id": 2**62, "logprobs": [-0.5, -math.inf]}
    file = ReportFile(tmp_path / "r.jsonl")
    file.add([{"record": "run", **changed["run"]}])
    file.finish([{"record": "row", **changed["rows"][0]}])
    (row,) = read_report(tmp_path / "r.jsonl").rows
    assert (row.text, row.question_id, row.logprobs) == (words, 2**62, (-0.5, None))
    assert "\u4f60" in (tmp_path / "r.jsonl").read_text()


def test_the_prediction_adds_up_the_parts(write, tmp_path, monkeypatch):
    monkeypatch.setattr(statistics, "FEW", 1)
    longer = content(length="4")
    longer["rows"][0]["decode_s"] = 0.5
    paths = write(a=content(length="16"), b=longer, c=content())
    out = tmp_path / "out"
    parts = predicted_speedup.RoundCosts(0.05, {1: 0.1, 3: 0.2})
    monkeypatch.setattr(
        report,
        "predicted_speedups",
        lambda runs, say: [parts.speedup_of(run.rows) for run in runs],
    )
    drawn = {}
    monkeypatch.setattr(
        picture_files,
        "draw_curves",
        lambda path, panels, **rest: drawn.update({path.name: panels}),
    )
    assert report.main([*paths, f"--out={out}", "--predict"]) == 0
    # Five rounds of six were three wide, and six gave eleven tokens.
    expected = 11 / 6 * 0.1 / (0.05 + (5 * 0.2 + 0.1) / 6)
    rows = read_csv(out / "report.csv")
    total = [one for one in rows if one["subset"] == "overall"]
    # The fastest, and then in the order given.
    assert [one["num_speculative_tokens"] for one in total] == ["4", "16", "2"]
    for one in total:
        assert float(one["predicted_speedup"]) == pytest.approx(expected)
        measured = float(one["speedup"])
        assert float(one["efficiency"]) == pytest.approx(measured / expected)
    (curve,) = drawn["speedup_by_length.png"][""]
    assert curve.label == "ngram"
    assert (curve.x, curve.theory_x) == ([2, 4, 16], [2, 4, 16])
    assert curve.measured == pytest.approx([1.32, 3.3 / 2.0, 1.32])
    assert curve.theory == pytest.approx([expected] * 3)


def test_runs_of_a_real_model(tmp_path, chatty, capsys):
    save_model(chatty, tmp_path / "model")
    questions = [
        {"question_id": 1, "category": "qa", "turns": ["abc abc ab"]},
        {"question_id": 2, "category": "writing", "turns": ["one two one two"]},
    ]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(question) + "\n" for question in questions))
    paths = [str(tmp_path / f"r{length}.jsonl") for length in (1, 2)]
    for length, path in zip((1, 2), paths, strict=True):
        code = decode.main(
            [
                f"--config.target={tmp_path / 'model'}",
                f"--config.prompts={prompts}",
                f"--config.report={path}",
                f"--config.num_speculative_tokens={length}",
                "--config.drafter.prompt_lookup_min=1",
                "--config.sampling.max_new_tokens=12",
                "--config.compare=true",
            ]
        )
        assert code == 0
        # The summary is what the rows add up to.
        run, written = read_report(path), read_one(Path(path))
        everything = figures_by_task(run)[OVERALL].to_dict()
        assert {name: written["summary"][name] for name in everything} == everything
        assert run.exact
        assert run.draft_length == length
    out = tmp_path / "out"
    capsys.readouterr()
    assert report.main([*paths, f"--out={out}", "--predict"]) == 0, capsys.readouterr()
    assert "timing" in capsys.readouterr().out
    rows = read_csv(out / "report.csv")
    assert all(float(one["efficiency"]) > 0 for one in rows if one["subset"] == "overall")
    assert (out / "speedup_by_length.png").exists()


def test_several_drafters_in_one_file(write, tmp_path, capsys):
    both = content("ngram+eagle3", "auto")
    for one in both["rows"]:
        one["drafter_index"] = [-1] * len(one["emitted"])
    (path,) = write(several=as_lines(content(length="auto"), both))
    first, second = read_reports(path)
    assert (first.drafter, second.drafter) == ("ngram", "ngram+eagle3")
    assert first.auto
    assert first.rows[0].drafter_index == (0, 0, -1)
    assert second.rows[0].drafter_index == (-1, -1, -1)
    with pytest.raises(InputError, match="has runs of 2 drafters"):
        read_report(path)
    (other,) = write(other=content("none", "auto"))
    assert report.main([path, other, f"--out={tmp_path / 'out'}", "--nopictures"]) == 0
    text = (tmp_path / "out" / "report.md").read_text()
    names = ["ngram", "ngram+eagle3", "none"]
    assert [line[0] for line in table(text, "### Speed-up")[1:]] == names
    lines = table(text, "### What auto chose")[1:]
    assert lines == [[name, "83%", "1.67", "1: 1, 3: 5"] for name in names]
    rows = [one for one in read_csv(tmp_path / "out" / "report.csv") if one["subset"] == OVERALL]
    assert [one["label"] for one in rows] == names
    # 3.3 s and 1 s of prefill against 2.5 s and 1 s.
    assert float(rows[0]["speedup_with_prefill"]) == pytest.approx(4.3 / 3.5)
    assert (tmp_path / "out" / "ngram+eagle3.jsonl").exists()


def changed(*path, to):
    report_content = content()
    inner = report_content
    for name in path[:-1]:
        inner = inner[name]
    if to is None and len(path) > 1:
        del inner[path[-1]]
    else:
        inner[path[-1]] = None if to is ... else to
    return report_content


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("{}\n", "record=None, drafter='None': no such run"),
        ("{\n", "is not JSON"),
        ('{"rows": NaN}\n', "NaN is no number of JSON"),
        ("[" * 100_000 + "\n", "is not JSON"),
        ("[]\n", "put one JSON object in a line"),
        ('{"record": "bench", "floor_ms": 1.0}\n', "record='bench'"),
        ("", "holds no rows"),
        (as_lines(content()) * 2, "a second run of drafter='ngram': keep two runs in two files"),
        (content(rows=[]), "holds no rows"),
        (changed("run", to=None), "record='row', drafter='ngram': no such run"),
        (changed("rows", 1, "drafter", to="other"), "record='row', drafter='other': no such run"),
        (changed("rows", 1, "drafted", to=None), "drafted is missing"),
        (changed("rows", 1, "sesonds", to=1), "sesonds=1 is not supported"),
        (changed("rows", 1, "batch", to="2"), "batch='2'"),
        (changed("rows", 1, "batch", to=True), "batch=True"),
        (changed("rows", 1, "token_ids", to=[1]), "emitted does not add up"),
        (changed("rows", 1, "width", to=[3, 3]), "width must have one entry per round"),
        (changed("rows", 1, "drafted", to=[-1]), "drafted=[-1]: use whole numbers"),
        (changed("rows", 1, "accepted", to=[3]), "accepted exceeds drafted"),
        (changed("rows", 1, "plain_decode_s", to=None), "plain_decode_s is missing"),
        (changed("rows", 1, "plain_new_tokens", to=...), "give all or none"),
        (changed("rows", 1, "batch", to=10**400), "batch=1000"),
        (changed("rows", 1, "decode_s", to=1e300), "decode_s=1e+300: use a number"),
        (changed("rows", 1, "width", to=[10**30]), "width=[1000"),
        (changed("rows", 1, "token_ids", to=[None]), "token_ids=[None]: use token ids"),
        (changed("rows", 1, "turn", to="1"), "turn='1'"),
        (changed("rows", 1, "near_ties", to=[{"index": 1}]), "margin is missing"),
        (changed("run", "versions", to=True), "versions=True: use an object"),
        (changed("run", "lossy", to="false"), "lossy='false'"),
        (changed("run", "temperature", to=None), "temperature is missing"),
        (
            changed("run", "config", "x", to=json.loads('{"a":' * 30 + "1" + "}" * 30)),
            "more than 20 levels",
        ),
        (changed("rows", 1, "drafter_index", to=[-2]), "drafter_index[0]=-2"),
        (changed("summary", "refused", to=5), "refused=5"),
        (content(target="other"), "is of model"),
        (content(prompts="others"), "answer other prompts; report each set separately"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(wrong, says, write, tmp_path, capsys):
    good, bad = write(good=content(), bad=wrong)
    assert report.main([bad, good, f"--out={tmp_path / 'out'}"]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("error: ")
    assert shown.err.count("\n") == 1
    assert says in shown.err
    assert "bad.jsonl" in shown.err
    assert not (tmp_path / "out").exists()


def stopped(**changes):
    part = content(**changes)
    part["summary"]["interrupted"] = True
    return part


def test_of_a_run_that_was_stopped_the_common_prompts_are_reported(write, tmp_path, capsys):
    """As if the others had been stopped at the same prompt; what is left out is counted."""
    paths = write(whole=content(), part=stopped(name="suffix", rows=ROWS[:2]))
    assert report.main([*paths, f"--out={tmp_path / 'out'}"]) == 0
    left = "Only prompts that all runs answered are compared: left out are ngram (1 answer)."
    named = "Interrupted: suffix (2 answers)."
    text = (tmp_path / "out" / "report.md").read_text()
    assert named in text
    assert left in text
    assert left in capsys.readouterr().out

    paths = write(whole=stopped(rows=ROWS[:2]), part=stopped(name="suffix", rows=ROWS[:2]))
    assert report.main([*paths, f"--out={tmp_path / 'same'}"]) == 0
    same = (tmp_path / "same" / "report.md").read_text()
    assert table(same, "Tokens per pass") == table(text, "Tokens per pass")


def test_other_conditions_do_not_take_prompts_from_a_table(write, tmp_path):
    """A run at another temperature, stopped after a prompt, says nothing of the first table."""
    warm = dict(sampling={"temperature": 1.0})
    paths = write(
        a=content(), b=content(name="suffix"), c=content(**warm), d=stopped(rows=ROWS[:1], **warm)
    )
    assert report.main([*paths, f"--out={tmp_path / 'out'}"]) == 0
    cold, _, warm = (tmp_path / "out" / "report.md").read_text().partition("temperature 1,")
    assert "left out" not in cold
    assert "Only prompts that all runs answered are compared: left out are ngram" in warm


def test_a_batch_is_left_out_as_a_whole(write, tmp_path):
    """Its seconds are those of all of its rows."""
    together = [{**ROWS[0], "batch": 0}, {**ROWS[1], "batch": 0}, ROWS[2]]
    part = stopped(name="suffix", rows=[ROWS[0]])
    part["rows"].append({**content()["rows"][2], "drafter": "suffix"})
    paths = write(whole=content(rows=together), part=part)
    assert report.main([*paths, f"--out={tmp_path / 'out'}"]) == 0
    text = (tmp_path / "out" / "report.md").read_text()
    assert "Only prompts that all runs answered are compared: left out are " in text
    assert "ngram (2 answers)" in text
    assert "suffix (1 answer)." in text


def test_stopped_runs_without_a_common_prompt_are_refused(write, tmp_path, capsys):
    paths = write(whole=content(), part=stopped(rows=ROWS[:1], prompts="others"))
    assert report.main([*paths, f"--out={tmp_path / 'out'}"]) == 2
    assert "no answered prompt in common" in capsys.readouterr().err
    assert report.main([paths[1], f"--out={tmp_path / 'out'}"]) == 0
    assert "Interrupted: ngram" in (tmp_path / "out" / "report.md").read_text()


def test_texts_of_a_report_are_no_commands_to_a_terminal(write, tmp_path, capsys):
    evil = "\x1b[2J\x07"
    bad = content(name=f"{evil}drafter", rows=[{**ROWS[0], "category": f"{evil}category"}])
    bad["run"]["device"] = f"{evil}cpu"
    bad["run"]["versions"] = {f"{evil}jax": "1"}
    bad["summary"]["refused"] = f"{evil}refused"
    (path,) = write(a=bad)
    out = tmp_path / "out"
    assert report.main([path, f"--out={out}", "--nopictures"]) == 0
    for text in (capsys.readouterr().out, (out / "report.md").read_text()):
        assert all(line.isprintable() for line in text.splitlines())
        plain = text.lower().replace("\\\\", "\\")  # Markdown escapes the backslash once more
        for word in ("cpu", "drafter", "category", "refused"):
            assert rf"\x1b[2j\x07{word}" in plain


def test_bad_arguments(write, tmp_path, capsys, monkeypatch):
    (path,) = write(a=content())
    (tmp_path / "file").write_text("")
    other = content()
    other["run"]["device"] = "TPU v7"
    (elsewhere,) = write(elsewhere=other)
    out = f"--out={tmp_path / 'out'}"
    for argv, says in (
        ([path], "out is missing"),
        ([out], "no reports"),
        ([path, out, "--nosuch"], "nosuch"),
        ([path, out, "--formats=png,gif"], "formats='gif' is unknown: use png, svg, pdf"),
        ([str(tmp_path / "missing.jsonl"), out], "no such file"),
        ([path, f"--out={tmp_path / 'file'}"], "is a file: name a folder"),
        ([path, f"--out={tmp_path / 'file' / 'x'}"], "a part of it is a file"),
        ([elsewhere, out, "--predict"], "ran on TPU v7, this machine has cpu"),
        ([path, out, "--predict"], "cannot be used here"),
    ):
        assert report.main(argv) == 2, argv
        assert says in capsys.readouterr().err
    assert report.main(["--help"]) == 0
    assert "--out=DIR" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    # Tables need no matplotlib.
    assert report.main([path, f"--out={tmp_path / 'new'}"]) == 0
    assert "no pictures: matplotlib is missing; pip install" in capsys.readouterr().err
    assert "![" not in (tmp_path / "new" / "report.md").read_text()
    assert not list((tmp_path / "new").glob("*.png"))
    with pytest.raises(InputError, match="matplotlib is not installed"):
        plots.draw_intervals(tmp_path / "a.png", [], title="t", x_label="x")


def test_speedups_are_drawn_with_intervals_and_counts(write, tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(
        picture_files, "draw_intervals", lambda path, rows, **rest: drawn.update({path.name: rows})
    )
    slow = content("eagle3")
    for one in slow["rows"]:
        one["decode_s"] *= 2
    many = content(rows=[row(n, "qa", [(2, 1, 2)], 1.0, 1.0 + n / 10, batch=n) for n in range(5)])
    for name, contents in (("two", [slow, content()]), ("many", [many])):
        paths = write(**{f"{name}{index}": one for index, one in enumerate(contents)})
        assert report.main([*paths, f"--out={tmp_path / name}"]) == 0
        rows = drawn.pop("speedup.png")
        if name == "two":
            assert [one.label for one in rows] == ["eagle3", "ngram"]
            assert [one.value for one in rows] == pytest.approx([0.66, 1.32])
            assert {one.note for one in rows} == {"3 answers, 11 tokens"}
            assert all(one.doubtful and one.ends[0] < one.value < one.ends[1] for one in rows)
        else:
            assert not rows[0].doubtful


def test_labels_are_drawn_as_they_are(tmp_path, monkeypatch):
    """Formulas, control characters, what the font lacks, and very long ones."""
    figures, save = [], plots._save
    monkeypatch.setattr(plots, "_save", lambda *args: (figures.append(args[0]), save(*args)))
    names = ["$x^$ \x1b[2J", "_hidden", "\u4f60", "long " * 200, "\ud800"]
    rows = [plots.Interval(name, 1.0, (0.5, 2.0), note="$") for name in names]
    plots.draw_intervals(tmp_path / "a.svg", rows, title="$" * 400, x_label="x", level=1.0)
    curves = [Curve(name, [1], [1.0]) for name in names]
    plots.draw_curves(tmp_path / "b.png", {"$": curves}, title="t", x_label="x", y_label="y")
    ticks = [text.get_text() for text in figures[0].axes[0].get_yticklabels()]
    legend = [text.get_text() for text in figures[1].legends[0].get_texts()]
    assert ticks == [f"{name}\n\\$" for name in legend]
    assert legend[:2] == ["\\$x^\\$ \\x1b[2J", " _hidden"]
    assert len(legend) == len(names)
    assert max(map(len, legend)) <= 60


def test_pictures_show_all_that_they_are_given(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(plots, "_save", lambda figure, path: figures.append(figure))
    low, high = Curve("a", [1, 2], [0.1, 0.2]), Curve("b", [1, 2], [3.0, 4.0])
    labels = {"title": "t", "x_label": "x", "y_label": "y"}
    plots.draw_curves(tmp_path / "a.png", {"left": [low], "right": [high]}, **labels)
    (figure,) = figures
    # The panels share an axis: limits set too early would be too low for the second.
    for axes in figure.axes:
        bottom, top = axes.get_ylim()
        assert bottom == 0
        assert top >= 4.0
    bars = {str(index): [1.0, None, 2.0] for index in range(9)}
    families = ["one"] * 3 + ["two"] * 6
    plots.draw_bars(
        tmp_path / "b.png", ["p", "q", "r"], bars, title="t", y_label="y", families=families
    )
    (axes,) = figures[1].axes
    assert len(axes.patches) == 18
    colours = [axes.containers[index][0].get_facecolor() for index in range(9)]
    assert len(set(colours)) == 9
    assert [text.get_text() for text in axes.texts] == ["1.00", "2.00"] * 9


def test_only_an_earlier_report_is_replaced(tmp_path, capsys):
    run, out = tmp_path / "a.json", tmp_path / "out"
    run.write_text(as_lines(content()))
    arguments = [str(run), f"--out={out}", "--nopictures"]
    for _ in range(2):
        assert report.main(arguments) == 0
    capsys.readouterr()
    (out / "report.md").unlink()  # what is gone is no loss
    assert report.main(arguments) == 0
    (out / "notes.md").write_text("mine")
    assert report.main(arguments) == 2
    assert "holds 'notes.md', which specjax has no record" in capsys.readouterr().err
    assert (out / "notes.md").read_text() == "mine"


def test_pictures_draw_any_text(tmp_path, capsys):
    rows = content()["rows"]
    for one, category in zip(rows, ("$x_{$ and $", "a\ud800b", "plain"), strict=True):
        one["category"] = category
    run = tmp_path / "a.json"
    run.write_text(as_lines(content(rows=rows)))
    assert report.main([str(run), f"--out={tmp_path / 'out'}"]) == 0
    assert (tmp_path / "out" / "tokens_per_pass.png").exists()
    # Markdown shows one of the two backslashes.
    assert "a\\\\ud800b" in (tmp_path / "out" / "report.md").read_text().lower()
