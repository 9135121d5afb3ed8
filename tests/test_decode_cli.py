"""`python -m specjax.decode` from argument line to exit code, in this process."""

import dataclasses
import io
import json
import re

import numpy as np
import pytest
import reports
from conftest import slow
from rich.console import Console
from tiny_models import with_modules

from specjax import metrics
from specjax.apps.command_line.command import DIFFERENT
from specjax.apps.command_line.console import Screen
from specjax.apps.report import report as write_reports
from specjax.apps.report.runs import labels
from specjax.apps.rows import compare_outputs, decode_table, statistics
from specjax.apps.rows.decode_report import DrafterRun
from specjax.apps.rows.records import DecodedRow, RunHeader, read_report
from specjax.apps.rows.statistics import Figures
from specjax.apps.run import decode, decode_run, runner
from specjax.engine import engine
from specjax.engine.generate import generate
from specjax.errors import InputError
from specjax.fields import read_values
from specjax.loading.load import load_model, save_model
from specjax.methods import find_head

pytestmark = pytest.mark.usefixtures("one_width")
ROW = {field.name for field in dataclasses.fields(DecodedRow)}
SUMMARY = {
    "drafter",
    "interrupted",
    "refused",
    "memory_bandwidth",
    "plain_weight_bandwidth",
    "num_rows",
    *(field.name for field in dataclasses.fields(metrics.Summary)),
    *(field.name for field in dataclasses.fields(Figures) if field.name != "counts"),
    "expected_acceptance",
    "load_s",
    "compile_s",
    "first_token_s",
    "step_limits",
    "engines",
}
DRAFTERS = {
    "none": [],
    "ngram": ["--config.drafter.prompt_lookup_min=1"],
    "early_exit": ["--config.drafter.exit_layer=2"],
    "draft_model": [],
    "simulated": ["--config.drafter.acceptance=0.7"],
}


@pytest.fixture(scope="module")
def folder(chatty, tmp_path_factory):
    """A model's folder, beside a file of prompts."""
    path = tmp_path_factory.mktemp("cli")
    save_model(chatty, path / "model")
    questions = [
        {"question_id": 7, "category": "qa", "turns": ["abc abc ab", "and then"]},
        {"question_id": "x", "category": "math", "turns": ["the quick brown fox"]},
        {"question_id": 9, "category": "qa", "turns": ["one two one two one"]},
    ]
    lines = [json.dumps(question) + "\n" for question in questions]
    (path / "prompts.jsonl").write_text("".join(lines))
    return path


@pytest.fixture
def run(folder, tmp_path):
    """The CLI on the tiny model; returns the exit code and each drafter's report, None for none.

    Of a single drafter it is not in a list.
    """

    def call(*argv):
        path = tmp_path / "report.jsonl"
        defaults = [
            f"--config.target={folder / 'model'}",
            f"--config.report={path}",
            "--config.dtype=float32",
            "--config.compare=false",
            "--config.num_speculative_tokens=3",
            "--config.sampling.max_new_tokens=12",
            "--config.sampling.ignore_eos=true",
        ]
        if not any(argument.startswith("--config.prompt") for argument in argv):
            defaults.append(f"--config.prompts={folder / 'prompts.jsonl'}")
        code = decode.main([*defaults, *argv])
        assert [one.name for one in tmp_path.iterdir() if one != path] == []
        found = reports.read(path) if path.exists() else [None]
        return code, found[0] if len(found) == 1 else found

    return call


def drafter(name, folder):
    path = [f"--config.drafter.path={folder / 'model'}"] if name == "draft_model" else []
    return [f"--config.drafter.name={name}", *path, *DRAFTERS[name]]


@pytest.mark.parametrize("name", ["draft_model", *slow("none", "ngram", "early_exit", "simulated")])
def test_greedy_equals_plain_decoding(name, run, folder, capsys):
    fixed = "--config.num_speculative_tokens=fixed"
    code, report = run(*drafter(name, folder), fixed, "--config.compare=true")
    assert code == 0
    rows, summary = report["rows"], report["summary"]
    assert set(summary) == SUMMARY
    assert [row["question_id"] for row in rows] == [7, "x", 9]
    for row in rows:
        assert set(row) == ROW
        assert len(row["token_ids"]) == sum(row["emitted"]) == 12
        assert row["identical"] is True
        assert row["near_ties"] == []
        assert row["finish_reason"] == "length"
    assert summary["identical_rows"] == summary["num_rows"] == 3
    assert summary["drafter"] == name
    assert min(summary[key] for key in ("speedup", "load_s", "compile_s", "first_token_s")) > 0
    assert report["run"]["config"]["drafter"]["name"] == name
    assert set(report["run"]["versions"]) == {"python", "jax", "jaxlib", "flax", "specjax"}
    if name == "draft_model":
        # Of four draft tokens of the target's own none is refused; 12 = 5 + 5 + 2.
        assert {tuple(row["emitted"]) for row in rows} == {(5, 5, 2)}
    shown = capsys.readouterr()
    assert shown.err == ""
    assert "same tokens as plain  yes, 3 of 3 rows\n" in shown.out
    assert re.search(
        r"^speed-up              \d+\.\d\dx( \(the clock is .*\))?: ", shown.out, re.MULTILINE
    )
    assert shown.out.count(", same tokens\n") == 3


@pytest.mark.parametrize("name", ["simulated", *slow("early_exit")])
def test_coupled_equals_plain_decoding_at_a_temperature(name, run, folder):
    code, report = run(
        *drafter(name, folder),
        "--config.compare=true",
        "--config.verify=coupled",
        "--config.sampling.temperature=0.8",
        "--config.batch_size=2",
    )
    assert code == 0
    assert report["summary"]["identical_rows"] == 3
    assert report["summary"]["expected_acceptance"] is None
    assert [row["batch"] for row in report["rows"]] == [0, 0, 0]


def test_a_lossy_rule_says_so_wherever_it_is_used(run, folder, capsys, tmp_path):
    typical = [*drafter("ngram", folder), "--config.verify=typical", "--config.compare=true"]
    typical += ["--config.num_speculative_tokens=1"]
    code, report = run(*typical, "--config.sampling.temperature=1.0")
    assert code == 0
    assert report["run"]["lossy"] is True
    assert report["summary"]["identical_rows"] is None
    shown = capsys.readouterr().out
    assert "LOSSY: typical acceptance" in shown
    assert "not expected: typical is lossy" in shown
    assert labels([read_report(tmp_path / "report.jsonl")]) == ["ngram (lossy)"]
    # Greedy rows keep their tokens.
    code, report = run(*typical, "--config.typical.epsilon=0.5", "--config.typical.delta=2")
    assert code == 0
    assert report["run"]["lossy"] is False
    assert report["summary"]["identical_rows"] == 3
    assert "LOSSY" not in capsys.readouterr().out


def test_comparing_means_nothing_under_a_random_rule(run, folder, capsys):
    code, report = run(
        *drafter("early_exit", folder),
        "--config.compare=true",
        "--config.sampling.temperature=0.8",
        "--config.num_speculative_tokens=1",
        "--verbose",
    )
    assert code == 0
    assert {row["identical"] for row in report["rows"]} == {None}
    assert report["summary"]["identical_rows"] is None
    assert report["summary"]["speedup"] > 0
    assert 0 < report["summary"]["expected_acceptance"] < 1
    assert "expected from p and q" in capsys.readouterr().out


def test_report_without_comparison(run):
    code, report = run()
    assert code == 0
    assert {row["identical"] for row in report["rows"]} == {None}
    assert report["summary"]["plain_tokens_per_second"] is None
    assert report["summary"]["speedup"] is None


def test_selection_logprobs_and_stop_strings(run):
    code, report = run("--config.per_task=1", "--config.limit=1", "--config.sampling.logprobs=true")
    assert code == 0
    (row,) = report["rows"]
    assert len(row["logprobs"]) == len(row["token_ids"])
    assert max(row["logprobs"]) <= 0
    stop = row["text"][3:5]
    code, report = run("--config.limit=1", f"--config.sampling.stop=({stop!r},)")
    assert code == 0
    assert stop not in report["rows"][0]["text"]
    assert len(report["rows"][0]["token_ids"]) < 12


def test_all_turns_see_the_answers(run, folder):
    code, report = run("--config.turns=all", "--config.compare=true")
    assert code == 0
    rows = report["rows"]
    assert [(row["question_id"], row["turn"]) for row in rows] == [(7, 0), (7, 1), ("x", 0), (9, 0)]
    assert report["summary"]["identical_rows"] == 4
    conversation = [
        {"role": "user", "content": "abc abc ab"},
        {"role": "assistant", "content": rows[0]["text"]},
        {"role": "user", "content": "and then"},
    ]
    model = load_model(folder / "model", dtype="float32")
    sampling = {"max_new_tokens": 12, "ignore_eos": True}
    again = generate(model, [conversation], sampling=sampling)
    assert rows[1]["token_ids"] == again.token_ids[0]
    # One program decodes all turns.
    assert len(report["summary"]["engines"]) == 1


def test_a_later_turn_that_outgrows_the_model_keeps_what_was_decoded(run, folder, tmp_path, capsys):
    path = folder / "long.jsonl"
    turns = [["one two one", "and then " * 20], ["abc abc ab", "and then"]]
    path.write_text(
        "".join(json.dumps({"question_id": i, "turns": t}) + "\n" for i, t in enumerate(turns))
    )
    code, report = run(f"--config.prompts={path}", "--config.turns=all", "--config.max_length=120")
    assert code == 2
    assert [(row["question_id"], row["turn"]) for row in report["rows"]] == [(0, 0), (1, 0), (1, 1)]
    error = capsys.readouterr().err
    assert "which leaves no room for a new one in max_length=120" in error
    # It ran to its end: what is missing is said, and is no interruption.
    assert report["summary"]["interrupted"] is False
    assert f"error: {report['summary']['refused']}\n" == error
    path = tmp_path / "report.jsonl"
    assert read_report(path).end.refused == report["summary"]["refused"]
    assert write_reports.main([str(path), f"--out={tmp_path / 'out'}", "--nopictures"]) == 0
    said = capsys.readouterr().out
    assert "Later turns refused: ngram (3 answers): question 0, turn 2 has" in said
    assert "Interrupted" not in said


def test_a_later_turn_that_cannot_have_room_is_refused_before_any_work(run, folder, capsys):
    path = folder / "longer.jsonl"
    path.write_text(json.dumps({"question_id": 0, "turns": ["one", "and then " * 40]}) + "\n")
    code, report = run(f"--config.prompts={path}", "--config.turns=all", "--config.max_length=120")
    assert (code, report) == (2, None)
    assert "question 0, turn 2 has " in capsys.readouterr().err


def test_only_a_turn_without_room_is_refused(run, monkeypatch, capsys):
    """Any other error ends the run where it is."""
    decode_groups = decode_run.Decoding.run

    def fails_later(self, **options):
        yield next(decode_groups(self, **options))
        raise InputError("the clock stands still")

    monkeypatch.setattr(decode_run.Decoding, "run", fails_later)
    code, report = run()
    assert code == 2
    assert capsys.readouterr().err == "error: the clock stands still\n"
    assert [row["question_id"] for row in report["rows"]] == [7]
    assert report["summary"] is None


SEVERAL = [
    "--config.drafter.name=ngram,ngram+early_exit",
    "--config.drafter.prompt_lookup_min=1",
    "--config.drafter.exit_layer=2",
]


def test_several_drafters_beside_one_plain_decoding(run, monkeypatch, tmp_path, capsys):
    """With `auto`: what it chose is in the table."""
    decoded, one_batch = [], runner.Way.decode

    def decode_one(self, *arguments):
        decoded.append(self.name)
        return one_batch(self, *arguments)

    monkeypatch.setattr(runner.Way, "decode", decode_one)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path.parent / "cache"))
    code, runs = run(*SEVERAL, "--config.num_speculative_tokens=auto")
    assert code == 0
    assert decoded == ["ngram", "plain", "ngram+early_exit"] * 3
    names = ["ngram", "ngram+early_exit"]
    assert [one["summary"]["drafter"] for one in runs] == names
    first, second = (one["rows"] for one in runs)
    assert [row["question_id"] for row in first] == [7, "x", 9]
    for ours, theirs in zip(first, second, strict=True):
        assert ours["plain_decode_s"] == theirs["plain_decode_s"] > 0
        assert ours["identical"] is theirs["identical"] is True
        assert set(ours) == set(theirs) == ROW
        assert set(ours["drafter_index"]) <= {-1, 0}
        assert set(theirs["drafter_index"]) <= {-1, 0, 1}
        for row in (ours, theirs):
            drafting = [one >= 0 for one in row["drafter_index"]]
            assert drafting == [count > 0 for count in row["drafted"]]
    for one, layer in zip(runs, (None, 2), strict=True):
        summary = one["summary"]
        assert set(summary) == SUMMARY
        config = one["run"]["config"]
        assert config["drafter"]["exit_layer"] == layer
        assert config["drafter"]["prompt_lookup_min"] == 1
        passes = {row["batch"]: row["plain_passes"] for row in one["rows"]}
        seconds = {row["batch"]: row["plain_decode_s"] for row in one["rows"]}
        read = one["run"]["pass_bytes"] * sum(passes.values()) / sum(seconds.values())
        assert summary["plain_weight_bandwidth"] == pytest.approx(read)
        assert summary["memory_bandwidth"] > 0
        assert 0 < summary["speedup_with_prefill"] < summary["speedup"] + 1
    shown = capsys.readouterr().out
    assert shown.count(", same tokens\n") == 6
    assert shown.count("    ngram: 12 tokens, ") == 3
    assert shown.count("    ngram+early_exit: ") == 3
    for line in ("yes, 3 of 3 rows", "with prefill", "tokens per pass"):
        assert line in shown
    assert "passes by" not in shown


class Clock:
    """A clock on which steps take any time; `seed` chooses which."""

    def __init__(self, seed):
        self.rng, self.now = np.random.default_rng(seed), 0.0

    def perf_counter(self):
        self.now += self.rng.lognormal(sigma=2)
        return self.now


@pytest.mark.parametrize("length", [None, "auto"])
def test_equal_greedy_runs_have_equal_counts_whatever_the_clock_says(
    length, folder, tmp_path, monkeypatch, capsys
):
    """Only `auto` reads the clock, and says in which share of the passes it drafted."""
    argv = [
        f"--config.target={folder / 'model'}",
        f"--config.prompts={folder / 'prompts.jsonl'}",
        f"--config.report={tmp_path / 'report.jsonl'}",
        "--config.drafter.prompt_lookup_min=1",
        "--config.sampling.max_new_tokens=60",
        "--config.sampling.ignore_eos=true",
        "--config.compare=false",
    ]
    argv += [f"--config.num_speculative_tokens={length}"] * (length is not None)
    drafted = []
    for seed in range(3):
        monkeypatch.setattr(engine, "time", Clock(seed))
        assert decode.main(argv) == 0
        found = reports.read_one(tmp_path / "report.jsonl")
        drafted.append([row["drafted"] for row in found["rows"]])
        share = np.mean(np.concatenate(drafted[-1]) > 0)
        said = f"; {share:.0%} of passes had a draft)" in capsys.readouterr().out
        assert said == (length == "auto")
    assert (drafted[0] == drafted[1] == drafted[2]) == (length is None)


def test_all_numbers_with_verbose(run, capsys):
    code, report = run("--config.drafter.prompt_lookup_min=1", "--verbose")
    assert code == 0
    shown = capsys.readouterr().out
    limits = {}
    for (longest,), _, rounds in report["summary"]["step_limits"]:
        limits[longest] = limits.get(longest, 0) + rounds
    assert list(limits) == [3]
    assert re.search(rf"passes by limit +│ +3:{limits[3]} │", shown)
    for line in ("cumulative acceptance, from", "conditional", "passes by width", "compiling, s"):
        assert line in shown
    assert "ends at " in shown


def test_a_run_too_short_to_tell_its_speedup_says_so(run, capsys):
    code, report = run("--config.compare=true", "--config.limit=1")
    assert code == 0
    assert report["summary"]["speedup"] > 0
    shown = capsys.readouterr().out
    assert "speed-up              too short to tell\n" in shown
    assert "12 new tokens are too few to tell a speed-up, at least 32 are needed" in shown
    assert "same tokens as plain  yes, 1 of 1 rows" in shown


LONG = ("--config.sampling.max_new_tokens=40", "--config.compare=true", "--config.limit=1")


@pytest.mark.parametrize(("argv", "times"), [([], 3), (["--config.repeats=2"], 2)])
def test_one_prompt_is_decoded_several_times_in_turn(argv, times, run, capsys, monkeypatch):
    compiled = []
    opened = runner.Program.open

    def opens(self, name, *arguments):
        if self.engine is None:
            compiled.append(name)
        opened(self, name, *arguments)

    monkeypatch.setattr(runner.Program, "open", opens)
    labels = set()
    monkeypatch.setattr(
        decode_run.Screen, "progress", lambda self, label, *numbers: labels.add(label)
    )
    code, report = run(*LONG, *argv)
    assert code == 0
    names = ("ngram", "plain")
    assert labels == {f"{name}, repeat {n + 1}" for name in names for n in range(times)}
    (row,) = report["rows"]
    speeds = row["repeated_speeds"]
    assert len(speeds) == times
    ratios = sorted(ours / plain for ours, plain in speeds)
    found = report["summary"]
    assert found["speedup"] == pytest.approx(ratios[(times - 1) // 2])
    assert found["speedup_range"] == pytest.approx([ratios[0], ratios[-1]])
    assert len(row["token_ids"]) == 40
    assert compiled == ["ngram", "plain"]
    shown = capsys.readouterr().out
    which = {2: "lower of 2", 3: "median of 3"}[times]
    wanted = rf"{found['speedup']:.2f}x \({which}: {ratios[0]:.2f} to {ratios[-1]:.2f}(; .*)?\): "
    assert re.search(wanted, shown)
    assert "\n    40 tokens, cut at the limit\n" in shown


def test_a_long_answer_is_not_repeated_and_neither_are_several_prompts(run, monkeypatch):
    _, report = run("--config.compare=true")
    assert [row["repeated_speeds"] for row in report["rows"]] == [[]] * 3
    monkeypatch.setattr(decode_run, "_SHORT_S", 0.0)
    _, report = run(*LONG)
    assert report["rows"][0]["repeated_speeds"] == []
    assert report["summary"]["speedup_range"] is None


def test_a_repeat_with_other_tokens_is_the_one_that_is_reported(run, monkeypatch, capsys):
    """However fast it was."""
    seen, compare = [], runner.compare_row

    def second_differs(plan, request, ours, plain):
        seen.append(ours)
        if len(seen) == 2:
            ours = [*ours[:-1], ours[-1] ^ 1]
        return compare(plan, request, ours, plain)

    monkeypatch.setattr(runner, "compare_row", second_differs)
    code, report = run(*LONG)
    assert code == DIFFERENT
    assert report["rows"][0]["identical"] is False
    assert "NO, 0 of 1 rows" in capsys.readouterr().out


def test_repeats_need_a_comparison(run, capsys):
    code, _ = run("--config.repeats=2", "--config.compare=false")
    assert code == 2
    assert "repeats=2: compare=false measures no speed-up" in capsys.readouterr().err


def answer(*args, **changes):
    """A row of a report."""
    return read_values(DecodedRow, reports.row(*args, **changes))


@pytest.mark.parametrize(
    ("seconds", "line"),
    [
        (0.5, None),
        (1.05, None),
        (2.0, "0.50x: a round costs 2.4 plain passes and emits 1.2 tokens;"),
    ],
)
def test_a_slower_drafter_says_why_from_what_was_measured(seconds, line):
    rounds = [(2, 0, 1)] * 40 + [(2, 1, 2)] * 10
    row = answer(0, "qa", rounds, seconds, 1.0)
    found = decode_table.slower(statistics.figures([row]))
    assert found is None if line is None else found.startswith(line)
    assert line is None or found.endswith("docs/faq.md#why-is-it-slower")


@pytest.mark.parametrize(
    ("length", "longest", "says"),
    [
        ("auto", 0, "auto found that drafting does not pay here; --config.num_spec"),
        ("auto", 3, "ngram found no draft in the repeat reported here"),
        ("fixed", 3, "ngram found no draft in the repeat reported here"),
        (0, 0, "num_speculative_tokens is 0"),
    ],
)
def test_a_run_that_drafted_nothing_has_no_speedup(length, longest, says):
    rounds = [(0, 0, 1)] * 40
    header = RunHeader.read(reports.content(length=length)["run"])
    limits = [((longest,), (0.0,), 40)]
    run = DrafterRun(header, rows=[answer(0, "qa", rounds, 1.0, 2.0)], step_limits=limits)
    lines = decode_table.result_lines(run, None)
    assert lines["speed-up"].startswith(f"nothing was drafted: {says}")
    assert lines["tokens per pass"] == "1.00 (0 of 0 draft tokens accepted)"
    cells = decode_table.result_table([run], None, verbose=False)
    assert cells["speed-up"]["ngram"] == "nothing was drafted"
    assert cells["draft tokens accepted"]["ngram"] == "0 of 0"


def test_a_speedup_above_what_is_possible_says_so():
    run = DrafterRun(
        RunHeader.read(reports.content()["run"]),
        rows=[answer(0, "qa", [(2, 0, 1)] * 40, 1.0, 2.0)],
    )
    line = decode_table.result_lines(run, None)["speed-up"]
    assert line.startswith("2.00x (the clock is noisy: at most 1.00x is possible): ")
    # Of several repeats, the largest one counts.
    repeats = {"repeated_speeds": ((1.5, 1.0), (2.5, 1.0)), "identical": True}
    run.rows = [answer(0, "qa", [(1, 1, 2)] * 40, 2.0, 3.0, **repeats)]
    line = decode_table.result_lines(run, None)["speed-up"]
    noise = "the clock is noisy: at most 2.00x is possible"
    assert line.startswith(f"1.50x (lower of 2: 1.50 to 2.50; {noise}): ")


@pytest.mark.parametrize(("last", "said"), [(1.15, False), (1.3, True)])
def test_plain_decoding_that_drifts_is_said(last, said):
    speeds = ((2.0, 1.0), (2.0, 1.1), (2.0, last))
    row = answer(0, "qa", [(2, 1, 2)], 1.0, 1.0, repeated_speeds=speeds)
    line = decode_table.drift(statistics.figures([row]))
    assert (line is not None) == said
    assert not said or "plain decoding ran at 1.0 to 1.3 tokens/s between repeats" in line


def test_the_folder_of_a_report_is_made(run, tmp_path):
    path = tmp_path.parent / f"{tmp_path.name}-made" / "here" / "r.jsonl"
    code, _ = run("--config.limit=1", f"--config.report={path}")
    assert code == 0
    assert reports.read_one(path)["summary"]["num_rows"] == 1


def test_an_interrupted_batch_of_several_is_kept_for_none(run, monkeypatch):
    def interrupted(plan, requests, **options):
        if requests[0].number == 1 and len(plan.loop.drafter.parts) > 1:
            raise KeyboardInterrupt
        return decode_requests(plan, requests, **options)

    decode_requests = runner.decode_requests
    monkeypatch.setattr(runner, "decode_requests", interrupted)
    code, runs = run(*SEVERAL, "--config.num_speculative_tokens=auto")
    assert code == 130
    for one in runs:
        assert [row["question_id"] for row in one["rows"]] == [7]
        assert one["summary"]["interrupted"] is True


def wrong(compare, margin):
    def compared(plan, request, ours, plain):
        assert compare(plan, request, ours, plain) is None
        near_tie = compare_outputs.NearTie(3, margin)
        return compare_outputs.Difference((near_tie,)) if request.number == 1 else None

    return compared


@pytest.mark.parametrize(("margin", "code"), [(0.5, 1), (1e-6, 0)])
def test_a_difference_fails_unless_it_is_a_near_tie(margin, code, run, monkeypatch, capsys):
    monkeypatch.setattr(runner, "compare_row", wrong(runner.compare_row, margin))
    found, report = run("--config.compare=true")
    assert found == code
    row = report["rows"][1]
    assert row["identical"] is False
    assert row["near_ties"] == [{"index": 3, "margin": margin, "resolution": 1e-4}]
    assert report["summary"]["identical_rows"] == 2
    shown = capsys.readouterr().out
    assert "question x: first difference at new token 3" in shown
    assert ("NOT EXACT" if code else "excused") in shown


def second_best(compare):
    """What is said of the first token's runner-up, instead of what was generated."""

    def compared(plan, request, ours, plain):
        return compare(plan, request, [(plain[0] + 1) % 90], plain)

    return compared


@pytest.mark.parametrize("share", [0.5, 2.0])
def test_in_half_precision_what_it_cannot_resolve_is_excused(
    share, run, tmp_path, monkeypatch, capsys
):
    """Margins of half, and of twice, the least that counts as rounding in bfloat16."""
    largest = []

    def near(plan, request, new_tokens):
        for index, found in passes(plan, request, new_tokens):
            largest.append(found[0].max())
            found[:, new_tokens[index]] = found.max(axis=1) - share * 0.75 * 2**-7 * largest[-1]
            yield index, found

    passes = compare_outputs._logits_of_passes
    monkeypatch.setattr(compare_outputs, "_logits_of_passes", near)
    monkeypatch.setattr(runner, "compare_row", second_best(runner.compare_row))
    less = "--config.num_speculative_tokens=1"
    code, report = run("--config.compare=true", "--config.dtype=bfloat16", less)
    assert code == (0 if share < 1 else 1)
    assert read_report(tmp_path / "report.jsonl").exact == (share < 1)
    for row, logit in zip(report["rows"], largest, strict=True):
        assert row["identical"] is False
        decisive = row["near_ties"][0 if share < 1 else -1]
        assert decisive["resolution"] == pytest.approx(0.75 * 2**-7 * logit)
        assert decisive["margin"] == pytest.approx(share * 0.75 * 2**-7 * logit, rel=0.01)
    assert ("excused" if share < 1 else "NOT EXACT") in capsys.readouterr().out


def test_interrupt_leaves_finished_rows(run, monkeypatch, capsys):
    outcome, seen = decode_run.Screen.row_result, []

    def interrupting(self, *arguments, **options):
        outcome(self, *arguments, **options)
        seen.append(arguments)

    def interrupted(plan, requests, **options):
        if requests[0].number == 2:
            raise KeyboardInterrupt
        return decode_requests(plan, requests, **options)

    decode_requests = runner.decode_requests
    monkeypatch.setattr(runner, "decode_requests", interrupted)
    monkeypatch.setattr(decode_run.Screen, "row_result", interrupting)
    code, report = run("--config.compare=true")
    assert code == 130
    assert [row["question_id"] for row in report["rows"]] == [7, "x"]
    assert report["summary"]["interrupted"] is True
    assert report["summary"]["identical_rows"] == 2
    assert len(seen) == 2
    assert "2 finished rows are in the report" in capsys.readouterr().out


def test_interrupt_before_the_first_row(run, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "open_engine", interrupted)
    code, report = run()
    assert (code, report) == (130, None)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--config.drafter.name=ngarm"], "did you mean ngram?"),
        (["--config.drafter.name=os:nothing"], "package.module:function"),
        (["--config.drafter.exit_layer=1"], "ngram does not take it"),
        (["--config.drafter.name=early_exit", "--config.drafter.exit_layer=9"], "exit_layer=9"),
        (["--config.drafter.name=draft_model"], "drafter.path is missing"),
        (["--config.drafter.path=x"], "drafter.path='x'"),
        (["--config.typical.delta=0.1"], "typical.delta=0.1: verify=rejection does not take it"),
        (["--config.drafter.name=ngram,none,ngram"], "ngram is given twice; name each once"),
        (["--config.drafter.name=ngram,"], "name drafters such as ngram,eagle3"),
        (["--config.drafter.name=none,ngarm"], "did you mean ngram?"),
        (
            ["--config.drafter.name=none,ngram", "--config.drafter.exit_layer=1"],
            "drafter.exit_layer=1: none of none, ngram takes it; leave it out",
        ),
        (
            ["--config.drafter.name=medusa,eagle3", "--config.drafter.path=x"],
            "of medusa, eagle3 medusa, eagle3 could take it",
        ),
        (
            ["--config.drafter.name=ngram,none", "--config.drafter.replicated=true"],
            "none of ngram, none is a draft_model",
        ),
        (["--config.sampling.prompt_logprobs=1"], "there is no such field"),
        (["--config.max_length=4"], "max_length=4"),
        (["--config.max_length=100000"], "max_length=100000 exceeds"),
        (["--config.prompt=" + "abc " * 600], "positions"),
        (["--config.prompts=missing.jsonl"], "prompts='missing.jsonl': no such file"),
        (["--config.prompt=a", "--config.prompts=README.md"], "leave one of the two out"),
        (["--config.target=missing"], "no such file"),
        (["--config.target=missing.gguf"], "missing.gguf"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(argv, says, run, capsys):
    """What does not fit together, or the model; each field alone is in test_bad_inputs.py."""
    code, report = run(*argv)
    shown = capsys.readouterr()
    assert code == 2
    assert report is None
    assert shown.err.startswith("error: ")
    assert shown.err.count("\n") == 1
    assert says in shown.err


def test_other_tokenizer_and_malformed_prompts(run, folder, tmp_path_factory, tiny, capsys):
    path = tmp_path_factory.mktemp("other")
    save_model(tiny, path / "model")
    code, _ = run("--config.drafter.name=draft_model", f"--config.drafter.path={path / 'model'}")
    assert code == 2
    assert "no tokenizers by which these could be compared" in capsys.readouterr().err
    (path / "bad.jsonl").write_text('{"question_id": 1, "turns": ["a"]}\n{"question_id": 2\n')
    code, _ = run(f"--config.prompts={path / 'bad.jsonl'}")
    assert code == 2
    assert "line 2" in capsys.readouterr().err


def test_what_else_to_try_is_said_by_what_the_target_has(tiny, chatty, monkeypatch):
    """Heads that fit by size and tokens, whatever a model is called; MTP modules; or none."""
    default, modules = "smollm2-135m-instruct", with_modules(tiny)
    assert decode.others_to_try(tiny, ["ngram"]).startswith(
        f"no head comes with specjax for {tiny.name}"
    )
    assert decode.others_to_try(dataclasses.replace(tiny, name=default), ["ngram"]).startswith("no")
    own = find_head._target_of(find_head.SHIPPED / default / "eagle3")
    monkeypatch.setattr(find_head.TargetMetadata, "of", lambda model: own)
    line = decode.others_to_try(chatty, ["none", "ngram"])
    heads = find_head.shipped_heads()[default]
    assert line.startswith(f"{', '.join(heads)} come with specjax for this target: compare by ")
    assert line.endswith(f"--config.drafter.name=ngram,{','.join(heads)}")
    assert decode.others_to_try(chatty, ["ngram", "suffix+eagle3"]) is None
    monkeypatch.setattr(find_head, "shipped_heads", dict)
    assert decode.others_to_try(modules, ["ngram"]) == (
        "the target has MTP modules: compare by --config.drafter.name=ngram,mtp"
    )


def test_list_names_everything(capsys):
    assert decode.main(["--list"]) == 0
    shown = capsys.readouterr().out
    for name in (
        "prompt_lookup_max = 3",
        "up to 8 draft tokens; needs nothing else",
        "a trained head (path; included for smollm2-135m-instruct)",
        "exit_layer",
        "draft_model",
        "coupled",
        "top_p",
        "ignore_eos",
    ):
        assert name in shown


@pytest.mark.parametrize("compare", [False, *slow(True)])
def test_default_model_and_prompts(compare, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "r.jsonl"
    code = decode.main(
        [
            "--config.limit=1",
            f"--config.compare={compare}",
            "--config.num_speculative_tokens=1",
            "--config.sampling.max_new_tokens=4",
            f"--config.report={path}",
        ]
    )
    assert code == 0
    found = reports.read_one(path)
    assert found["summary"]["num_rows"] == 1
    assert found["summary"]["identical_rows"] == (1 if compare else None)
    assert found["run"]["target"] == "smollm2-135m-instruct"


def test_terminal_shows_colour_and_no_control_characters():
    for terminal, marks in ((True, "\x1b[32mb"), (False, "\u27e6b")):
        file = io.StringIO()
        screen = Screen(Console(file=file, force_terminal=terminal, color_system="standard"))
        screen.text([("a\x1b[2J", False), ("b", True)])
        screen.rest()
        assert marks in file.getvalue()
        assert "\x1b[2J" not in file.getvalue()
