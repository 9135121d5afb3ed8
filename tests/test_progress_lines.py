"""Long operations say what they do and how long it takes, in Python and in commands."""

import io
import time

import pytest
from decoding import make_call
from model_files import gguf_metadata, gguf_tensors, write_gguf
from rich.console import Console

from specjax.apps.command_line import console as console_module
from specjax.apps.command_line.console import Screen
from specjax.apps.run import bench_run
from specjax.drafters import make_drafter
from specjax.engine import device_rows, programs
from specjax.engine.device_rows import DeviceRows
from specjax.engine.engine import Engine
from specjax.engine.options import DecodeOptions
from specjax.engine.requests import SamplingParams
from specjax.files import log
from specjax.loading.load import load_model
from specjax.loading.texts.questions import Question
from specjax.methods.ngram import Ngram


@pytest.fixture
def lines():
    """What is logged about long operations, as a command sees it."""
    found = []
    with log.shown_by(found.append):
        yield found


def test_lines_are_shown_by_a_command_and_warnings_as_usual(caplog):
    found = []
    log.LOGGER.setLevel("WARNING")
    try:
        with log.shown_by(found.append):
            log.LOGGER.info("reading %d", 3)
            log.LOGGER.warning("beware")
        log.LOGGER.info("unheard")
        assert log.LOGGER.level == 30
    finally:
        log.LOGGER.setLevel("INFO")
    assert found == ["reading 3"]
    assert [record.getMessage() for record in caplog.records] == ["beware"]


def test_the_time_left_is_told_every_ten_seconds(lines, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    tell = log.share_logger("reading")
    for second in range(1, 41):
        now[0] = second
        tell(second / 40)
    assert lines == [
        "reading: 25 %, about 30 s left",
        "reading: 50 %, about 20 s left",
        "reading: 75 %, about 10 s left",
    ]


@pytest.mark.parametrize("terminal", [False, True])
def test_what_is_done_within_a_long_operation_is_shown(terminal, monkeypatch):
    monkeypatch.setattr(console_module, "QUIET_S", -1)
    output = Console(file=io.StringIO(), force_terminal=terminal, width=200, color_system=None)
    with Screen(output).working("loading a model") as note:
        log.LOGGER.info("reading: %d %%", 40)
        note("checking")
    text = output.file.getvalue()
    assert "loading a model ..." in text
    for line in ("reading: 40 %", "checking"):
        shown = line in text
        assert shown or terminal  # a terminal draws only the latest
        assert (f"loading a model: {line}\n" in text) != terminal


def test_lines_are_few_without_a_terminal(capsys):
    output = Console(file=io.StringIO(), force_terminal=False, width=200)
    with Screen(output).working("loading") as note:
        for _ in range(100):
            note("reading")
    assert output.file.getvalue() == "loading ...\n"


def test_programs_are_told_apart(tiny, monkeypatch):
    """Each has a line of its own, by what differs."""
    monkeypatch.setattr(programs, "_plans", {})
    cases = [
        dict(),
        dict(num_speculative_tokens=2),
        dict(verify="coupled"),
        dict(sampling={"temperature": 1.0}),
        dict(sampling={"temperature": 1.0, "logprobs": True}),
        dict(drafter=None),
        dict(drafter=Ngram(prompt_lookup_min=1, prompt_lookup_max=7)),
    ]
    described = []
    for case in cases:
        options = {"drafter": make_drafter("ngram", tiny), "num_speculative_tokens": 3, **case}
        described.append(programs._described(make_call(tiny, [[1]], **options).plan.loop, 1))
    assert len(set(described)) == len(cases)
    assert described[0].startswith("ngram with drafts of 3 tokens, verify=rejection, greedy, for 1")
    assert described[-1].endswith("tokens, prompt included, with other drafter than before")


def test_sizes_of_batch_are_counted(tiny, lines, monkeypatch):
    now, compiled = [0.0], []

    def compile_one(self, plan=None):
        now[0] += 20
        compiled.append((plan or self.plan).num_rows)

    for name in ("compile", "_compiled"):
        monkeypatch.setattr(DeviceRows, name, compile_one)
    monkeypatch.setattr(device_rows.time, "perf_counter", lambda: now[0])
    DeviceRows(Engine(tiny, batch_size=4, max_length=64).plan).compile_fewer()
    assert compiled == [4, 2, 1]
    assert lines == [
        "compiled for 1 of 3 numbers of rows, about 40 s left",
        "compiled for 2 of 3 numbers of rows, about 20 s left",
    ]


def test_loading_tells_its_share(tmp_path, lines, monkeypatch):
    monkeypatch.setattr(log, "QUIET_S", -1)
    path = write_gguf(tmp_path / "a.gguf", gguf_metadata(), gguf_tensors())
    load_model(path, dtype="float32")
    shares = [line for line in lines if line.startswith("reading the parameters: ")]
    assert len(shares) > 5
    assert all(line.endswith(" left") for line in shares)


def test_a_bench_tells_its_share(chatty, lines, monkeypatch):
    monkeypatch.setattr(log, "QUIET_S", -1)
    drafters = {"ngram": make_drafter("ngram", chatty)}
    options = DecodeOptions(num_speculative_tokens="auto", batch_size=1)
    sampling = SamplingParams(max_new_tokens=4, ignore_eos=True)
    bench_run.measure_speedups(chatty, [Question(1, "", ("abc",))], drafters, options, sampling, 2)
    shares = [line for line in lines if line.startswith("decoding: ")]
    assert [line.split(",")[0] for line in shares] == [
        f"decoding: {share} %" for share in (17, 33, 50, 67, 83)
    ]
