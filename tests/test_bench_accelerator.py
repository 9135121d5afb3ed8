"""The accelerator benchmark runs at its debug size and resumes; its numbers are consistent."""

import gc
import importlib.util
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import slow, xla_flags

SCRIPTS = Path(__file__).parents[1] / "scripts"
sys.path.append(str(SCRIPTS))

from accelerator import bench, kernels, peers, report
from accelerator.rows import FAILED, MEASURED, NO_FIT, SKIPPED, Rows, read_rows
from accelerator.sizes import SIZES, model_shape
from accelerator.synthetic import random_cache, random_model
from specjax import generate
from specjax.errors import InputError
from specjax.models.decoder import Form
from specjax.reporting.plots import Curve, draw_curves
from specjax.tuning import costs

DEBUG, FULL = SIZES["debug"], SIZES["full"]
HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None


def options(out, **changes):
    fields = dict(
        out=out,
        size="debug",
        models=("tiny",),
        kinds=("plain", "width", "speedup", "form", "attention", "transformers"),
        deadline=float("inf"),
        memory_bytes=None,
        label="",
        form=None,
        batches=DEBUG.batches,
        contexts=DEBUG.contexts,
        retry_failed=False,
    )
    return bench.Options(**{**fields, **changes})


class Runs:
    """Calls of the script with the same rows."""

    def __init__(self, folder):
        self.out = folder / "rows.jsonl"
        self.pictures = folder / "pictures"
        self.environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": xla_flags(devices=1),
        }

    def __call__(self, *arguments):
        command = [sys.executable, str(SCRIPTS / "bench_accelerator.py")]
        command += ["--size=debug", f"--out={self.out}", "--peer_python=no-such-python"]
        command += ["--batches=1"]
        return subprocess.run(
            [*command, *arguments], env=self.environment, text=True, capture_output=True
        )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("accelerator"))


@pytest.fixture(scope="module")
def first(runs):
    """The first call, which measures every kind of cell."""
    pictures = [f"--pictures={runs.pictures}"] if HAS_MATPLOTLIB else []
    done = runs(*pictures)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture
def rows(runs, first):
    return read_rows(runs.out)


def of_kind(rows, kind):
    return [row for row in rows if row["kind"] == kind]


def test_every_cell_is_a_row(rows):
    groups = len(DEBUG.contexts)
    kernel_groups = len(DEBUG.kernel_batches) * len(DEBUG.contexts) * len(DEBUG.kernel_tokens)
    expected = {
        "device": 1,
        "plain": groups,
        "width": groups * len(DEBUG.widths),
        "speedup": groups * len(DEBUG.acceptances),
        "form": kernel_groups * 6,
        "attention": kernel_groups * 3,
        "transformers": groups,
    }
    assert {kind: len(of_kind(rows, kind)) for kind in expected} == expected
    assert len(rows) == sum(expected.values())
    for row in rows:
        peer = row["kind"] == "transformers"
        assert row["status"] == (SKIPPED if peer else MEASURED), row
        assert not peer or "no-such-python: No such file" in row["reason"]


def test_the_numbers_of_a_row_add_up(rows):
    (device,) = of_kind(rows, "device")
    assert device["copy_bandwidth"] > 0
    assert device["matmul_flops"] > 0
    shape = model_shape(DEBUG.models["tiny"])
    for row in of_kind(rows, "plain"):
        overhead = (row["round_s"] - row["extend_s"]) / row["round_s"]
        assert row["loop_overhead"] == pytest.approx(overhead)
        committed = row["context"] + DEBUG.plain_rounds / 2
        read = shape.num_read_params() + row["batch"] * committed * shape.kv_elements()
        assert row["bytes"] == 4 * read
        reached = row["bytes"] / row["round_s"] / device["copy_bandwidth"]
        assert row["bandwidth_utilisation"] == pytest.approx(reached)
        assert row["tokens_per_second"] == pytest.approx(row["batch"] / row["round_s"])
    once = {row["batch"]: row["seconds"] for row in of_kind(rows, "width") if row["width"] == 1}
    for row in of_kind(rows, "width"):
        assert row["relative"] == pytest.approx(row["seconds"] / once[row["batch"]])
    for row in of_kind(rows, "speedup"):
        tokens = row["tokens_per_round"]
        assert 1 <= tokens <= DEBUG.num_speculative_tokens + 1
        speedup = tokens * row["plain_round_s"] / row["round_s"]
        predicted = tokens * row["extend_s"] / (row["draft_s"] + row["verify_s"])
        assert row["speedup"] == pytest.approx(speedup)
        assert row["predicted"] == pytest.approx(predicted)
        assert row["measured_over_predicted"] == pytest.approx(speedup / predicted)
        assert row["speedup_min"] <= row["speedup_max"]
        assert row["identical_rows"] == row["rows"] == row["batch"] * DEBUG.runs
    accepted = {}
    for row in of_kind(rows, "speedup"):
        accepted.setdefault(row["acceptance"], []).append(row["tokens_per_round"])
    low, high = (np.mean(accepted[rate]) for rate in (0.6, 0.9))
    assert low < high


def test_progress_and_aims_are_printed(first):
    assert "[1/15] device: compiling and measuring" in first.stdout
    assert "min left" in first.stdout or "under a minute left" in first.stdout
    for aim in ("copy bandwidth", "loop overhead", "measured / predicted", "T(8) / T(1)"):
        assert aim in first.stdout
    assert "not measured" not in first.stdout


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="matplotlib is not installed")
def test_the_pictures_are_written(runs, first):
    for name in ("speedup_tiny.png", "width_tiny.png"):
        assert (runs.pictures / name).read_bytes().startswith(b"\x89PNG")
        assert f"wrote {runs.pictures / name}" in first.stdout


@pytest.mark.slow  # as of one that failed, below
def test_a_second_call_measures_only_what_is_left(runs, first):
    before = runs.out.read_bytes()
    again = runs()
    assert again.returncode == 0, again.stderr
    assert "0 of 15 cells to measure" in again.stdout
    assert runs.out.read_bytes() == before
    # A row that was truncated, as by a call that was killed, is measured again.
    lines = before.splitlines(keepends=True)
    index = max(i for i, line in enumerate(lines) if b'"kind": "form"' in line)
    truncated = [*lines[:index], *lines[index + 1 :], lines[index][:40]]
    runs.out.write_bytes(b"".join(truncated))
    again = runs()
    assert again.returncode == 0, again.stderr
    assert "1 of 15 cells to measure" in again.stdout
    assert len(read_rows(runs.out)) == len(lines)
    assert runs.out.read_bytes().startswith(b"".join(truncated))


@pytest.fixture
def known_device(monkeypatch):
    """What the device reaches is given, which takes seconds to measure.

    What earlier tests left is not searched for garbage after each cell.
    """
    for name in ("copy_bandwidth", "matmul_flops"):
        monkeypatch.setattr(costs, name, lambda *_: 1e9)
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("known_device")
def test_what_does_not_fit_says_so_and_is_not_tried(tmp_path, capsys):
    small = options(
        tmp_path / "rows.jsonl",
        kinds=("plain", "width", "transformers"),
        memory_bytes=int(0.0001 * 2**30),
    )
    result = bench.Bench(small).run()
    peers.compare(small, DEBUG, result, Rows(small.out, result.settings), "no-such-python")
    rows = read_rows(small.out)
    assert len(of_kind(rows, "plain")) == len(of_kind(rows, "transformers")) == len(DEBUG.batches)
    for row in rows:
        if row["kind"] != "device":
            assert row["status"] == NO_FIT
            assert row["needed_bytes"] > 0.0001 * 2**30
    said = capsys.readouterr().out
    assert "does not fit: needs 0.0 GiB of 0.0 GiB" in said
    assert "made" not in said


def test_a_call_stops_when_its_time_is_over(tmp_path):
    done = bench.Bench(options(tmp_path / "rows.jsonl", deadline=0.0)).run()
    assert len(done.left) == 20
    assert done.left[0] == "device"
    assert not (tmp_path / "rows.jsonl").exists()


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--models=9b", "models=9b: use some of tiny"),
        *slow(
            ("--batches=3", "batches=3: use some of 1, 2"),
            ("--minutes=0", "minutes=0.0: use a number above 0"),
        ),
    ],
)
def test_bad_flags_are_one_line(runs, flag, said):
    done = runs(flag)
    assert done.returncode == 2
    assert done.stderr == f"error: {said}\n"


@pytest.mark.usefixtures("known_device")
def test_a_failing_cell_does_not_end_the_run(tmp_path, monkeypatch, capsys):
    def broken(*_):
        raise ValueError("no such kernel")

    monkeypatch.setattr(kernels, "attention_pass", broken)
    only = options(tmp_path / "rows.jsonl", kinds=("attention",))
    bench.Bench(only).run()
    rows = of_kind(read_rows(only.out), "attention")
    assert [row["status"] for row in rows] == [FAILED] * 3
    assert rows[0]["reason"] == "ValueError: no such kernel"
    assert "ValueError: no such kernel" in capsys.readouterr().err
    # Known failures are left alone until asked for.
    assert "0 of 4 cells" in _printed(capsys, bench.Bench(only))
    retry = options(only.out, kinds=("attention",), retry_failed=True)
    assert "3 of 4 cells" in _printed(capsys, bench.Bench(retry))


def _printed(capsys, one):
    one.run()
    return capsys.readouterr().out


@pytest.mark.usefixtures("known_device")
def test_running_out_of_memory_is_a_row(tmp_path, monkeypatch):
    def full(*_):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.")

    monkeypatch.setattr(kernels, "attention_pass", full)
    only = options(tmp_path / "rows.jsonl", kinds=("attention",))
    bench.Bench(only).run()
    rows = of_kind(read_rows(only.out), "attention")
    assert {row["status"] for row in rows} == {"out of memory"}


def test_the_full_size_fits_what_it_can():
    """On 80 GB: fewer layers of the large shape, and some cells of the small one do not fit."""
    limit = int(80e9)
    layers = FULL.fitting_layers(FULL.models["70b"], limit)
    assert 30 < layers < 80
    small = FULL.models["8b"]
    assert model_shape(small).num_params() == 8_030_261_248
    assert model_shape(FULL.models["70b"]).num_params() == 70_553_706_496
    fits = {
        (batch, context)
        for batch in FULL.batches
        for context in FULL.contexts
        if FULL.needed_bytes(small, batch, context, 64) <= limit
    }
    assert fits == {
        (1, 1024),
        (4, 1024),
        (16, 1024),
        (64, 1024),
        (1, 16384),
        (4, 16384),
        (16, 16384),
    }


def test_the_cells_of_the_full_size(tmp_path):
    full = options(
        tmp_path / "rows.jsonl",
        size="full",
        models=("8b", "70b"),
        memory_bytes=int(131e9),
        batches=FULL.batches,
        contexts=FULL.contexts,
    )
    one = bench.Bench(full)
    cells = [cell for job in one.work.jobs() for cell in job.cells]
    keys = [json.dumps(cell, sort_keys=True) for cell in cells]
    assert len(set(keys)) == len(keys)
    widths = {cell["width"] for cell in cells if cell["kind"] == "width"}
    assert widths == {1, 2, 4, 8, 16, 32, 64}
    large = {cell["layers"] for cell in cells if cell.get("model") == "70b"}
    assert 60 < max(large) < 80
    # The cheapest cells of a model come first.
    plain = [(c["batch"], c["context"]) for c in cells if c["kind"] == "plain"][:8]
    assert plain[0] == (1, 1024)
    assert plain[-1] == (64, 16384)


@pytest.fixture(scope="module")
def synthetic():
    """The same model in bfloat16, its layers stacked and unrolled."""
    return [
        random_model("tiny", DEBUG.models["tiny"], "bfloat16", Form(layers))
        for layers in ("stacked", "unrolled")
    ]


@pytest.mark.parametrize("layout", [0, *slow(1)])
def test_the_synthetic_model_counts_in_bfloat16_too(layout, synthetic):
    """So that passes of different widths never disagree about the next token."""
    result = generate(synthetic[layout], [[5], [90]], sampling={"max_new_tokens": 12})
    assert result.token_ids == [[(start + i) % 96 for i in range(1, 13)] for start in (5, 90)]


def test_both_layouts_hold_the_same_weights(synthetic):
    stacked, apart = (model.params["layers"] for model in synthetic)
    for layer in range(DEBUG.models["tiny"].num_layers):
        for part in ("query", "output"):
            one = apart[str(layer)]["attention"][part]["kernel"]
            np.testing.assert_array_equal(stacked["attention"][part]["kernel"][layer], one)
            spread = 1 / np.sqrt(DEBUG.models["tiny"].hidden_size)
            assert np.asarray(one, np.float32).std() == pytest.approx(spread, rel=0.1)
    assert stacked["mlp_norm"]["scale"].shape == (2, 64)


def test_a_random_cache_holds_what_it_says():
    cache = random_cache(DEBUG.models["tiny"], jnp.float32, 2, 64, 7)
    assert cache.k.shape == (2, 2, 2, 64, 16)
    assert cache.length.tolist() == [7, 7]
    assert np.std(cache.v) == pytest.approx(1, rel=0.1)
    assert not np.array_equal(cache.k[0], cache.k[1])


@pytest.mark.parametrize("variant", ["whole", "kernel", "library_xla"])
def test_every_way_to_attend_gives_the_same(variant):
    cell = {"variant": variant, "layers": 2, "batch": 2, "context": 24, "tokens": 3}
    config = DEBUG.models["tiny"]
    outputs = [
        jax.jit(kernels.attention(name))(0, *kernels.arguments(DEBUG, config, cell, name))
        for name in ("blocks", variant)
    ]
    np.testing.assert_allclose(*outputs, atol=1e-5)
    query = kernels.arguments(DEBUG, config, cell, variant)[0]
    assert np.abs(np.asarray(outputs[0] - query)).max() > 0.1


def test_where_speculation_stops_paying():
    common = {"model": "m", "layers": 2, "context": 8}
    speedups = {1: 2.0, 4: 1.1, 16: 0.9}
    rows = [
        {**common, "acceptance": 0.6, "batch": batch, "speedup": speedup}
        for batch, speedup in speedups.items()
    ]
    assert report.paying(rows) == [("m, 2 layers", 8, 0.6, speedups)]


def test_rows_of_other_settings_do_not_count(tmp_path):
    path = tmp_path / "rows.jsonl"
    cell = {"kind": "plain", "batch": 1}
    Rows(path, {"label": "a"}).add(cell, MEASURED, round_s=1.0)
    assert Rows(path, {"label": "a"}).done(cell)
    assert not Rows(path, {"label": "b"}).done(cell)
    assert not Rows(path, {"label": "a"}).done({**cell, "batch": 2})


def test_why_a_cell_has_no_figures_is_said_once(tmp_path):
    path = tmp_path / "rows.jsonl"
    cell = {"kind": "transformers", "batch": 1}
    for reason in ("no torch", "no torch", "no GPU"):
        rows = Rows(path, {})
        assert not rows.done(cell)
        rows.add(cell, SKIPPED, reason=reason)
    assert [row["reason"] for row in read_rows(path)] == ["no torch", "no GPU"]


PEER = """#!{python}
import json, sys
asked = json.loads(sys.argv[2])
assert asked["device"] == "cpu" and asked["shape"]["num_hidden_layers"] == 2
print(json.dumps({{"torch": "0", "transformers": "0"}}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if request["batch"] > 1:
        print(json.dumps({{"error": "out of memory: full"}}), flush=True)
    else:
        print(json.dumps({{"round_s": [0.3, 0.1, 0.2]}}), flush=True)
"""


def test_the_peer_is_asked_for_every_cell(tmp_path):
    python = tmp_path / "python"
    python.write_text(PEER.format(python=sys.executable))
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    asked = options(tmp_path / "rows.jsonl")
    result = bench.Result({"label": ""}, "cpu", None, {"tiny": 2}, ())
    rows = Rows(asked.out, result.settings)
    assert peers.compare(asked, DEBUG, result, rows, str(python)) == []
    one, two = read_rows(asked.out)
    assert one["round_s"] == median([0.3, 0.1, 0.2])
    assert one["tokens_per_second"] == pytest.approx(1 / 0.2)
    assert (two["batch"], two["status"]) == (2, "out of memory")


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="torch is installed")
def test_a_peer_without_torch_is_skipped(tmp_path):
    asked = options(tmp_path / "rows.jsonl", batches=(1,))
    result = bench.Result({}, "cpu", None, {"tiny": 2}, ())
    peers.compare(asked, DEBUG, result, Rows(asked.out, {}), sys.executable)
    (row,) = read_rows(asked.out)
    assert row["status"] == SKIPPED
    assert "No module named 'torch'" in row["reason"]


def test_pictures_without_matplotlib_are_refused(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match=r"pip install 'specjax\[plots\]'"):
        draw_curves(tmp_path / "a.png", {}, title="", x_label="", y_label="")


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="matplotlib is not installed")
def test_a_picture_has_measured_and_expected_lines(tmp_path):
    curve = Curve("acceptance 0.8", [1, 4, 16], [2.5, 2.0, 0.9], [1, 16], [3.0, 1.5])
    path = tmp_path / "folder" / "a.png"
    panels = {"left": [curve], "right": [curve]}
    draw_curves(path, panels, title="t", x_label="x", y_label="y", log_y=True)
    assert path.read_bytes().startswith(b"\x89PNG")
