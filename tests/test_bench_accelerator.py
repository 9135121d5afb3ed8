"""The accelerator benchmark at its debug size: it resumes, and its numbers are consistent."""

import json
import math
import os
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import slow, xla_flags
from script_modules import SCRIPTS

sys.path.append(str(SCRIPTS))

from accelerator.sizes import SIZES, model_shape
from accelerator.synthetic import random_cache, random_model
from specjax import generate
from specjax.models.decoder import Form

DEBUG, FULL = SIZES["debug"], SIZES["full"]


@pytest.fixture(scope="module")
def bench():
    import bench_accelerator

    return bench_accelerator


@pytest.fixture(scope="module")
def call(tmp_path_factory):
    """Runs the script in a process; `call.out` is the file of its rows."""
    out = tmp_path_factory.mktemp("accelerator") / "rows.jsonl"

    def run(*arguments):
        command = [sys.executable, str(SCRIPTS / "bench_accelerator.py"), "--size=debug"]
        return subprocess.run(
            [*command, f"--out={out}", "--batches=1", *arguments],
            env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla_flags(devices=1)},
            text=True,
            capture_output=True,
            check=False,
        )

    run.out = out
    return run


@pytest.fixture(scope="module")
def first(call):
    done = call()
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_numbers_of_a_row_are_consistent(call, first):
    (row,) = map(json.loads, call.out.read_text().splitlines())
    assert row["cell"] == {"model": "tiny", "layers": 2, "batch": 1, "context": 24}
    assert row["status"] == "measured"
    passes = {int(width): seconds for width, seconds in row["passes"].items()}
    assert list(passes) == [1, DEBUG.num_speculative_tokens + 1, 8]
    overhead = (row["round_s"] - passes[1]) / row["round_s"]
    assert row["loop_overhead"] == pytest.approx(overhead)
    shape = model_shape(DEBUG.models["tiny"])
    committed = 24 + DEBUG.plain_rounds / 2
    assert row["bytes"] == 4 * (shape.num_read_params() + committed * shape.kv_elements())
    assert row["tokens_per_second"] == pytest.approx(1 / row["round_s"])
    low, high = row["speedups"]
    assert 1 <= low["tokens_per_round"] < high["tokens_per_round"]
    assert high["tokens_per_round"] <= DEBUG.num_speculative_tokens + 1
    for speedup in (low, high):
        tokens = speedup["tokens_per_round"]
        measured = tokens * speedup["plain_round_s"] / speedup["round_s"]
        predicted = tokens * passes[1] / (row["draft_s"] + passes[3])
        assert speedup["speedup"] == pytest.approx(measured)
        assert speedup["predicted"] == pytest.approx(predicted)
        assert speedup["measured_over_predicted"] == pytest.approx(measured / predicted)
        assert speedup["speedup_min"] <= speedup["speedup_max"]
        assert speedup["same_rows"] == speedup["rows"] == DEBUG.runs
    for title in ("A plain round", "Speed-up with the simulated drafter"):
        assert title in first


def test_a_second_call_measures_only_what_is_left(call, first):
    before = call.out.read_text()
    # What a call that was killed had begun to write.
    call.out.write_text(before + before[:40])
    again = call()
    assert again.returncode == 0, again.stderr
    assert "compiling" not in again.stdout
    assert "A plain round" in again.stdout
    assert call.out.read_text() == before


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--models=9b", "models=9b: use some of tiny"),
        *slow(("--batches=3", "batches=3: use some of 1, 2")),
    ],
)
def test_a_bad_flag_is_one_line(call, flag, said):
    done = call(flag)
    assert done.returncode == 2
    assert done.stderr == f"error: {said}\n"


def measured(bench, rows, **changes):
    options = {"memory_bytes": math.inf, "bandwidth": 1e9, "deadline": math.inf, **changes}
    return bench.measure_model("tiny", DEBUG, rows, **options)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (None, "does not fit"),
        (RuntimeError("RESOURCE_EXHAUSTED: trying to allocate 9 bytes."), "out of memory"),
        (ValueError("no such kernel"), "failed"),
    ],
    ids=["does not fit", "out of memory", "failed"],
)
def test_a_row_without_figures_says_why(error, status, bench, tmp_path, monkeypatch):
    def fail(*_):
        raise error

    monkeypatch.setattr(bench.decoding, "measure", fail)
    rows = bench.Rows(tmp_path / "rows.jsonl", {})
    left = measured(bench, rows, memory_bytes=1e5 if error is None else math.inf)
    assert left == []
    again = bench.Rows(tmp_path / "rows.jsonl", {}).by_cell.values()
    assert [row["status"] for row in again] == [status] * 2
    assert all(str(error or "") in row.get("reason", "") for row in again)
    # One that failed is tried again, the others are not.
    measured(bench, rows)
    tried = len((tmp_path / "rows.jsonl").read_text().splitlines())
    assert tried == (4 if status == "failed" else 2)


def test_a_call_stops_when_its_time_is_over(bench, tmp_path):
    rows = bench.Rows(tmp_path / "rows.jsonl", {})
    assert [cell.batch for cell in measured(bench, rows, deadline=0.0)] == [1, 2]
    assert not rows.path.exists()


def test_rows_of_other_settings_do_not_count(bench, tmp_path):
    path, cell = tmp_path / "rows.jsonl", bench.Cell("tiny", 2, 1, 24)
    bench.Rows(path, {"device": "a"}).add(cell, "measured", round_s=1.0)
    assert cell in bench.Rows(path, {"device": "a"}).by_cell
    assert cell not in bench.Rows(path, {"device": "b"}).by_cell


def test_the_full_size_fits_what_it_can():
    """On 80 GB: fewer layers of the large shape, and some cells of the small one do not fit."""
    limit = int(80e9)
    layers = FULL.fitting_layers(FULL.models["70b"], limit)
    assert 30 < layers < 80
    small = FULL.models["8b"]
    assert model_shape(small).num_params() == 8_030_261_248
    assert model_shape(FULL.models["70b"]).num_params() == 70_553_706_496
    left_out = {
        (batch, context)
        for batch in FULL.batches
        for context in FULL.contexts
        if FULL.needed_bytes(small, batch, context, 64) > limit
    }
    assert left_out == {(64, 16384)}


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
            kernel = apart[str(layer)]["attention"][part]["kernel"]
            np.testing.assert_array_equal(stacked["attention"][part]["kernel"][layer], kernel)
            spread = 1 / np.sqrt(DEBUG.models["tiny"].hidden_size)
            assert np.asarray(kernel, np.float32).std() == pytest.approx(spread, rel=0.1)
    assert stacked["mlp_norm"]["scale"].shape == (2, 64)


def test_a_random_cache_holds_what_it_says():
    cache = random_cache(DEBUG.models["tiny"], jnp.float32, 2, 64, 7)
    assert cache.k.shape == (2, 2, 2, 64, 16)
    assert cache.length.tolist() == [7, 7]
    assert np.std(cache.v) == pytest.approx(1, rel=0.1)
    assert not np.array_equal(cache.k[0], cache.k[1])
