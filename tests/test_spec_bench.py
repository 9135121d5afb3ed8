"""`python -m specjax.spec_bench`: what is measured, kept, resumed, refused and reported."""

import json
import os
import re
import signal
import time
from typing import Annotated

import numpy as np
import pytest
import reports
from bad_input import refused, refused_command
from commands import start
from rich.console import Console

import specjax
from specjax import theory
from specjax.apps.command_line.command import DIFFERENT
from specjax.apps.command_line.config_file import config_of, overridden
from specjax.apps.command_line.console import Screen
from specjax.apps.report import html_page, tables
from specjax.apps.report.best_length import best_lengths
from specjax.apps.report.runs import Entry, labels
from specjax.apps.rows.records import read_report
from specjax.apps.rows.statistics import OVERALL
from specjax.apps.spec_bench import command
from specjax.apps.spec_bench.answers_file import finished_rows
from specjax.apps.spec_bench.config import SpecBenchConfig, read_spec_bench_config
from specjax.apps.spec_bench.run import Measuring
from specjax.engine import programs
from specjax.fields import Whole
from specjax.loading.load import load_model, save_model
from specjax.loading.texts.questions import Question, stratified
from specjax.methods.ngram import Ngram

QUESTIONS = [
    {"question_id": 7, "category": "writing", "turns": ["abc abc ab", "and then"]},
    {"question_id": "x", "category": "qa", "turns": ["the quick brown fox"]},
    {"question_id": 9, "category": "qa", "turns": ["one two one two one"]},
]
NGRAM = "ngram drafter.prompt_lookup_min=1"
EXIT = "early_exit drafter.exit_layer=2"


def own(target, *, start: Annotated[int, Whole(1, 9)] = 1):
    """A drafter of one's own, with an option."""
    return Ngram(prompt_lookup_min=start)


@pytest.fixture(scope="module")
def folder(chatty, tmp_path_factory):
    """A model's folder, beside a file of questions."""
    path = tmp_path_factory.mktemp("spec_bench")
    save_model(chatty, path / "model")
    write(path / "questions.jsonl", QUESTIONS)
    return path


def write(path, questions):
    path.write_text("".join(json.dumps(question) + "\n" for question in questions))
    return path


def arguments(folder, out, **fields):
    fields = {
        "target": folder / "model",
        "prompts": folder / "questions.jsonl",
        "drafters": f"{NGRAM},{EXIT}",
        "max_new_tokens": 12,
        "out": out,
        "formats": "svg",
        **fields,
    }
    return [f"--config.{name}={value}" for name, value in fields.items()]


def answers(out):
    """What a run's cells emitted and counted, without times."""
    names = ("question_id", "turn", "text", "token_ids", "drafted", "accepted", "emitted", "width")
    return {
        path.name: [[row[name] for name in names] for row in reports.read_one(path)["rows"]]
        for path in sorted((out / "answers").iterdir())
    }


GRID = {"temperatures": (0.0, 0.7, 1.0), "num_speculative_tokens": (1, 3)}


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory):
    """A run over a grid, the folder of its results, and the programs that it compiled."""
    pytest.importorskip("matplotlib")
    programs._compile.cache_clear()
    out = tmp_path_factory.mktemp("whole") / "out"
    assert command.main(arguments(folder, out, **GRID)) == 0
    return out, programs._compile.cache_info().misses


def test_lengths_and_temperatures_are_operands(whole):
    """Plain decoding and two drafters, each greedy and sampled, of three temperatures and two K."""
    out, compiled = whole
    assert len(answers(out)) == 3 * (1 + 2 * 2)
    assert compiled == 3 * 2


def test_rows_are_those_of_decoding_alone(whole, folder):
    """Greedy, of a program for longer drafts: tokens, and what each round drafted and accepted."""
    out, _ = whole
    model = load_model(str(folder / "model"))
    for length in (1, 3):
        (path,) = (out / "answers").glob(f"early_exit*-{length}-t0-*")
        rows = reports.read_one(path)["rows"]
        assert [(row["question_id"], row["turn"]) for row in rows] == [
            *((7, 0), (7, 1), ("x", 0), (9, 0))
        ]
        assert all(row["identical"] and row["longest_path"] == length for row in rows)
        for row in rows:
            (question,) = (one for one in QUESTIONS if one["question_id"] == row["question_id"])
            messages = [{"role": "user", "content": question["turns"][0]}]
            if row["turn"]:
                messages.append({"role": "assistant", "content": rows[0]["text"]})
                messages.append({"role": "user", "content": question["turns"][1]})
            alone = specjax.generate(
                model,
                [messages],
                drafter=specjax.make_drafter("early_exit", model, exit_layer=2),
                num_speculative_tokens=length,
                max_new_tokens=12,
            )
            assert row["token_ids"] == alone.token_ids[0]
            for name in ("drafted", "accepted"):
                counts = getattr(alone, name)[0]
                assert row[name] == counts[counts >= 0].tolist()


def test_a_drafter_s_history_is_plain_decoding_s(whole):
    """Of sampled rows, too, so that all drafters answer the same prompts."""
    out, _ = whole
    found = answers(out)
    # `rejection` draws other tokens than plain decoding, whose first answer both are asked about.
    first = {name: rows[0][3] for name, rows in found.items() if "-t1-" in name}
    assert len({tuple(tokens) for tokens in first.values()}) > 1
    hashes = {
        row["prompt_hash"]
        for path in (out / "answers").iterdir()
        for row in reports.read_one(path)["rows"]
        if row["question_id"] == 7
    }
    assert len(hashes) == 1


def test_the_report_has_tables_by_task_and_the_answers_in_spec_bench_s_schema(whole):
    report = whole[0] / "report"
    text = (report / "report.md").read_text()
    for temperature in ("0", "0.7", "1"):
        assert f"temperature {temperature}, up to 12 new tokens" in text
    assert text.count("### The best draft length") == 3
    assert len(re.findall(r"Plain decoding reads .* GB/s of weights .*: \d+% of the ", text)) == 3
    assert "| Drafter | MT (2)† | QA (2)† | Tokens per pass† | Speed-up† |" in re.sub(
        " +", " ", text
    )
    line = json.loads(next(report.glob("early_exit_3_*_t0.7.jsonl")).read_text().splitlines()[0])
    assert (line["question_id"], line["category"], line["temperature"]) == (7, "writing", 0.7)
    (choice,) = line["choices"]
    assert {
        len(choice[name]) for name in ("turns", "decoding_steps", "new_tokens", "wall_time")
    } == {2}
    assert sum(choice["accept_lengths"]) == sum(choice["new_tokens"])
    assert len(choice["accept_lengths"]) == sum(choice["decoding_steps"])
    page = (report / "report.html").read_text()
    assert page.count("<img ") == text.count("![")
    assert set(re.findall(r'src="([^:]*:)', page)) == {"data:"}
    assert "http" not in re.sub(r'src="[^"]*"', "", page)


def test_killed_and_resumed_it_is_the_same_run(whole, folder, tmp_path, capsys):
    expected = answers(whole[0])
    out = tmp_path / "out"
    process = start(arguments(folder, out, **GRID), program=("-m", "specjax.spec_bench"))
    try:
        while process.poll() is None and len(list(out.glob("answers/*-t0.7-*"))) < 2:
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    # The file that was begun last may be empty, or end within a line.
    rows = sum(path.read_text().count('"record": "row"') for path in out.glob("answers/*"))
    assert 0 < rows < sum(map(len, expected.values()))
    # Half of a line, and of a conversation whose second turn is missing.
    (path,) = out.glob("answers/none-*-t0-*")
    first = path.read_text().splitlines(keepends=True)[1]
    for torn in ("", first.replace('"question_id": 7', '"question_id": 7', 1), '{"record": "ro'):
        complete = path.read_bytes()
        path.write_bytes(complete + torn.encode())
        turns = {7: 2, "x": 1, 9: 1}
        said = []
        kept = finished_rows(path, turns, said.append)
        assert len(kept) == complete.count(b'"record": "row"')
        assert bool(said) == bool(torn)
        assert path.read_bytes() == complete
    assert command.main(arguments(folder, out, **GRID)) == 0
    assert "of them finished" in capsys.readouterr().out
    assert answers(out) == expected
    before = {path: path.read_bytes() for path in (out / "answers").iterdir()}
    # Nothing is left to do.
    assert command.main(arguments(folder, out, **GRID)) == 0
    assert before == {path: path.read_bytes() for path in (out / "answers").iterdir()}
    for path in before:
        assert read_report(path).end.interrupted is False


def test_lengths_that_are_no_numbers_have_engines_of_their_own(folder, tmp_path):
    """An engine keeps the limit of the cell that used it last."""
    argv = arguments(folder, tmp_path, num_speculative_tokens=("fixed", 1, 8))
    written = overridden(config_of(SpecBenchConfig), argv, SpecBenchConfig).to_dict()
    screen = Screen(Console(quiet=True))
    measuring = Measuring(read_spec_bench_config(written), tmp_path, None, screen)
    ways = [way for way in measuring._ways if way.cell.entry == NGRAM]
    fixed, *numbers = (way.program for way in ways)
    assert fixed.plan.loop == numbers[0].plan.loop
    assert fixed is not numbers[0]
    assert numbers[0] is numbers[1]


def test_a_file_that_begins_with_half_a_unit_begins_anew(whole, tmp_path):
    (path,) = (whole[0] / "answers").glob("none-*-t0-*")
    lines = path.read_text().splitlines(keepends=True)
    for text in (lines[0], lines[0][:40], "".join(lines[:2]), "".join(lines[:2]) + lines[2][:50]):
        torn = tmp_path / "torn.jsonl"
        torn.write_text(text)
        said = []
        assert finished_rows(torn, {7: 2, "x": 1, 9: 1}, said.append) == []
        assert len(said) == 1
        assert torn.read_bytes() == b""


def test_a_damaged_file_is_named(whole, tmp_path):
    (path,) = (whole[0] / "answers").glob("none-*-t0-*")
    damaged = tmp_path / "damaged.jsonl"
    damaged.write_text(path.read_text().replace('"accepted"', '"axepted"', 1))
    refused(lambda: finished_rows(damaged, {7: 2, "x": 1, 9: 1}, print), "line 2 is no record")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"max_new_tokens": 13}, "max_new_tokens=13: the run in out="),
        ({"temperatures": (0.0, 1.0)}, r"temperatures=[0.0, 1.0]: the run in out="),
        ({"num_speculative_tokens": (1,)}, "num_speculative_tokens=[1]: the run in out="),
        ({"drafters": NGRAM}, f"drafters={NGRAM!r}: the run in out="),
        ({"questions": 2}, "questions=2: the run in out="),
        ({"seed": 1}, "seed=1: the run in out="),
        ({"verify": "block"}, "verify='block': the run in out="),
        ({"dtype": "bfloat16"}, "dtype='bfloat16': the run in out="),
    ],
)
def test_other_settings_are_refused(changes, said, whole, folder, capsys, monkeypatch):
    monkeypatch.setattr("specjax.apps.run.decode_config.load_model", None)
    before = {path: path.read_bytes() for path in whole[0].rglob("*") if path.is_file()}
    argv = arguments(folder, whole[0], **{**GRID, **changes})
    error = refused_command(command.main, argv, capsys)
    assert said in error
    assert error.endswith("give that, or another out\n")
    assert before == {path: path.read_bytes() for path in whole[0].rglob("*") if path.is_file()}


def test_other_questions_and_devices_are_refused(whole, folder, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("specjax.apps.run.decode_config.load_model", None)
    others = write(tmp_path / "others.jsonl", QUESTIONS[:2])
    argv = arguments(folder, whole[0], **GRID, prompts=others)
    assert "prompts='2 questions, " in refused_command(command.main, argv, capsys)
    monkeypatch.setattr(command, "device_name", lambda mesh: "another")
    argv = arguments(folder, whole[0], **GRID)
    assert "device='another': the run in" in refused_command(command.main, argv, capsys)
    # A file of another name with the same questions is the same run.
    monkeypatch.undo()
    same = write(tmp_path / "same.jsonl", QUESTIONS)
    assert command.main(arguments(folder, whole[0], **GRID, prompts=same)) == 0


@pytest.mark.parametrize(
    ("changes", "questions", "said"),
    [
        ({"tasks": "qa,poetry"}, QUESTIONS, "tasks='poetry': no question is of that task; use mt_"),
        ({"tasks": "qa,qa"}, QUESTIONS, "tasks: 'qa' is given twice"),
        ({"questions": 1}, QUESTIONS, "questions=1: there are 2 tasks (mt_bench, qa)"),
        ({"drafters": "ngran"}, QUESTIONS, "drafters='ngran': drafter='ngran' is unknown: did you"),
        ({"drafters": "ngram,"}, QUESTIONS, "drafters='ngram,': name drafters"),
        ({"drafters": "ngram,ngram"}, QUESTIONS, "drafters: 'ngram' is given twice"),
        ({"drafters": "none"}, QUESTIONS, "drafters='none': plain decoding is measured anyway"),
        ({"drafters": "ngram seed=1"}, QUESTIONS, "'seed=1' is no option of a drafter"),
        ({"drafters": "ngram drafter.exit_layer=1"}, QUESTIONS, "exit_layer"),
        (
            {"drafters": "test_spec_bench:own drafter.start=10"},
            QUESTIONS,
            "drafter.start=10: use a who",
        ),
        ({"drafters": "ngram drafter.exit_laier=1"}, QUESTIONS, "drafter.exit_laier"),
        ({"temperatures": (1, 1.0)}, QUESTIONS, "temperatures: 1.0 is given twice"),
        ({"num_speculative_tokens": (4, 4)}, QUESTIONS, "num_speculative_tokens: 4 is given twice"),
        ({}, [{"prompt": "one"}], 'line 1: "turns" must be a list of texts'),
        ({}, [QUESTIONS[0], QUESTIONS[0]], "question_id=7 is taken, by"),
        ({}, [], "holds no questions"),
    ],
)
def test_bad_input_is_named_before_any_work(
    changes, questions, said, folder, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("specjax.apps.run.decode_config.load_model", None)
    prompts = write(tmp_path / "questions.jsonl", questions)
    argv = arguments(folder, tmp_path / "out", **{"prompts": prompts, **changes})
    assert said in refused_command(command.main, argv, capsys)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"max_new_tokens": 1000}, "question 7: "),
        ({"drafters": "draft_model"}, "drafter.path is missing"),
    ],
)
def test_what_the_model_refuses_is_named_before_decoding(
    changes, said, folder, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("specjax.apps.run.runner.decode_requests", None)
    error = refused_command(command.main, arguments(folder, tmp_path / "out", **changes), capsys)
    assert said in error
    assert not (tmp_path / "out" / "settings.json").exists()


def test_a_folder_of_something_else_is_refused(folder, tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("mine")
    error = refused_command(command.main, arguments(folder, tmp_path), capsys)
    assert "holds 'thesis.tex'" in error
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_tokens_that_differ_are_an_error(folder, tmp_path, monkeypatch, capsys):
    difference = {"index": 0, "margin": 0.5, "resolution": 1e-4}
    argv = arguments(folder, tmp_path / "out", drafters=NGRAM, tasks="qa")
    assert command.main(argv) == 0
    (path,) = (tmp_path / "out" / "answers").glob("ngram*")
    changed = reports.read_one(path)
    changed["rows"][0] |= {"identical": False, "near_ties": [difference]}
    path.write_text(reports.as_lines(changed))
    assert command.main(argv) == DIFFERENT


def test_stratified_questions_are_as_many_of_each_task():
    sizes = {"writing": 2, "math": 4, "qa": 20, "rag": 3}
    questions = [
        Question(f"{name} {number}", name, ("?",))
        for name, size in sizes.items()
        for number in range(size)
    ]
    for count, expected in ((3, (1, 1, 1)), (10, (3, 4, 3)), (14, (5, 6, 3)), (29, (6, 20, 3))):
        chosen = stratified(questions, count)
        tasks = [one.category for one in chosen]
        assert (
            tuple(
                sum(task in names for task in tasks)
                for names in (("writing", "math"), ("qa",), ("rag",))
            )
            == expected
        )
        assert [questions.index(one) for one in chosen] == sorted(map(questions.index, chosen))
    assert stratified(questions, 100) == questions
    refused(lambda: stratified(questions, 2), "questions=2: there are 3 tasks")


ALPHA, STEP, PASS = 0.7, 0.04, 1.2
LENGTHS = (1, 2, 5, 9)


def run_of(length, tmp_path, paths=None):
    """A run of K draft tokens accepted independently, each round as long as theory says."""
    rng = np.random.default_rng(length)
    rows = []
    for number in range(6):
        accepted = np.minimum(rng.geometric(1 - ALPHA, 2000) - 1, length)
        rounds = [(length, int(count), int(count) + 1) for count in accepted]
        tokens = sum(emitted for *_, emitted in rounds)
        seconds = len(rounds) * (PASS + STEP * length)
        changes = {"longest_path": paths or length, "question_id": number}
        rows.append(reports.row(number, "qa", rounds, seconds, float(tokens), **changes))
    path = tmp_path / f"{length}-{paths}.jsonl"
    path.write_text(reports.as_lines(reports.content("eagle3", str(length), rows)))
    return read_report(path)


def entries_of(runs):
    return [Entry.of(*pair) for pair in zip(runs, labels(runs), strict=True)]


def test_the_best_length_is_theory_s(tmp_path):
    entries = entries_of([run_of(length, tmp_path) for length in LENGTHS])
    ((_, found),) = best_lengths(entries).items()
    assert found.label == "eagle3"
    assert found.round_cost == pytest.approx(PASS)
    assert found.token_cost == pytest.approx(STEP)
    expected = [1.0, *theory.speedup(ALPHA, np.arange(1, 10), STEP, verify_cost=PASS)]
    assert found.expected == pytest.approx(expected, rel=0.02)
    assert found.expected_length == theory.optimal_k(ALPHA, STEP, max_k=9, verify_cost=PASS)
    speeds = {entry.run.draft_length: entry.figures[OVERALL].speedup for entry in entries}
    assert found.best.run.draft_length == max(speeds, key=speeds.get)
    for length, speed in speeds.items():
        assert found.expected[length] == pytest.approx(speed, rel=0.02)
    text = tables.markdown(entries, {})
    assert "| eagle3 " in text.partition("### The best draft length")[2].partition("\n\n")[2]


def test_of_trees_the_best_length_is_measured_only(tmp_path):
    """A limit of so many nodes says nothing of the length of a path."""
    entries = entries_of([run_of(length, tmp_path, paths=9) for length in LENGTHS])
    ((_, found),) = best_lengths(entries).items()
    assert (found.expected, found.expected_length) == ((), None)
    assert best_lengths(entries[:1]) == {}


def test_the_interval_of_tau_is_of_answers(tmp_path):
    run = run_of(2, tmp_path)
    figures = Entry.of(run, "eagle3").figures[OVERALL]
    low, high = figures.acceptance_length_interval
    assert low < figures.counts.acceptance_length < high
    # The accepted tokens of a round are 0, 1 or 2; of 12,000 independent rounds the mean is known.
    accepted = np.concatenate([row.accepted for row in run.rows])
    wide = 2 * 2.57 * accepted.std() / np.sqrt(accepted.size)
    assert 0.3 * wide < high - low < 3 * wide


def test_a_page_shows_what_the_markdown_says():
    markdown = (
        "# one \\<b\\>\n\nversions: a\\|b\n\n## cpu\n\n### Speed-up\n\n"
        "| Drafter | QA |\n| :--- | ---: |\n| a\\|b | **2.00x** |\n| \\<i\\> | 1.00x |\n"
        "\nNot \\* bold.\n\n![Speed](a.svg)\n\n![Paper](a.pdf)\n"
    )
    page = html_page.page(markdown, {"a.svg": b"<svg/>", "a.pdf": b"%PDF"})
    assert "<h1>one &lt;b&gt;</h1>" in page
    assert "<tr><th>Drafter</th><th>QA</th></tr>" in page
    assert "<tr><td>a|b</td><td><b>2.00x</b></td></tr>" in page
    assert "<tr><td>&lt;i&gt;</td><td>1.00x</td></tr>" in page
    assert "<p>Not * bold.</p>" in page
    assert '<img alt="Speed" src="data:image/svg+xml;base64,PHN2Zy8+">' in page
    assert "Paper" not in page
