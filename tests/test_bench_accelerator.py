"""The accelerator benchmark at its debug size: it resumes, and its numbers are consistent."""

import json
import math
import os
import subprocess
import sys
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from commands import SCRIPTS, script_module
from conftest import slow, xla_flags

sys.path.append(str(SCRIPTS))

from accelerator.sizes import SIZES, model_shape
from accelerator.synthetic import random_cache, random_model
from specjax import generate
from specjax.models.form import Form

DEBUG = SIZES["debug"]


@pytest.fixture(scope="module")
def bench():
    with script_module("bench_accelerator") as module:
        yield module


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
    assert row["cell"] == {"batch": 1, "context": 24}
    assert row["status"] == "measured"
    passes = {int(width): seconds for width, seconds in row["passes"].items()}
    assert list(passes) == [1, DEBUG.num_speculative_tokens + 1, 8]
    overhead = (row["round_s"] - passes[1]) / row["round_s"]
    assert row["loop_overhead"] == pytest.approx(overhead)
    shape = model_shape(DEBUG.model)
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
        ("--batches=3", "batches=3: use some of 1, 2"),
        *slow(("--contexts=many", "contexts=many: use some of 24")),
    ],
)
def test_a_bad_flag_is_one_line(call, flag, said):
    done = call(flag)
    assert done.returncode == 2
    assert done.stderr == f"error: {said}\n"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RuntimeError("RESOURCE_EXHAUSTED: trying to allocate 9 bytes."), "out of memory"),
        (ValueError("no such kernel"), "failed"),
    ],
    ids=["out of memory", "failed"],
)
def test_a_row_without_figures_says_why(error, status, bench, tmp_path, monkeypatch):
    def fail(*_):
        raise error

    monkeypatch.setattr(bench.decoding, "measure", fail)
    monkeypatch.setattr(bench, "random_model", lambda *_: None)
    monkeypatch.setattr(bench, "_SIZE", SimpleNamespace(value="debug"))
    rows = bench.Rows(tmp_path / "rows.jsonl", {})
    assert bench.measure(DEBUG, rows, 1e9, math.inf) == []
    again = bench.Rows(rows.path, {})
    assert [row["status"] for row in again.by_cell.values()] == [status] * 2
    assert all(str(error) in row["reason"] for row in again.by_cell.values())
    # One that failed is tried again, the others are not.
    bench.measure(DEBUG, again, 1e9, math.inf)
    assert len(rows.path.read_text().splitlines()) == (4 if status == "failed" else 2)


def test_a_call_stops_when_its_time_is_over(bench, tmp_path):
    rows = bench.Rows(tmp_path / "rows.jsonl", {})
    left = bench.measure(DEBUG, rows, 1e9, deadline=0.0)
    assert [cell.batch for cell in left] == [1, 2]
    assert not rows.path.exists()


def test_rows_of_other_settings_do_not_count(bench, tmp_path):
    path, cell = tmp_path / "rows.jsonl", bench.Cell(1, 24)
    bench.Rows(path, {"device": "a"}).add(cell, "measured", round_s=1.0)
    assert cell in bench.Rows(path, {"device": "a"}).by_cell
    assert cell not in bench.Rows(path, {"device": "b"}).by_cell


def test_the_full_size_is_llamas():
    assert model_shape(SIZES["8b"].model).num_params() == 8_030_261_248
    assert SIZES["8b"].widths_of(64) == [1, 2, 4, 5, 8, 16]


@pytest.fixture(scope="module")
def synthetic():
    """The same model in bfloat16, its layers stacked and unrolled."""
    return [
        random_model("tiny", DEBUG.model, "bfloat16", Form(layers))
        for layers in ("stacked", "unrolled")
    ]


@pytest.mark.parametrize("layout", [0, *slow(1)])
def test_the_synthetic_model_counts_in_bfloat16_too(layout, synthetic):
    """So that passes of different widths never disagree about the next token."""
    result = generate(synthetic[layout], [[5], [90]], sampling={"max_new_tokens": 12})
    assert result.token_ids == [[(start + i) % 96 for i in range(1, 13)] for start in (5, 90)]


def test_both_layouts_hold_the_same_weights(synthetic):
    stacked, apart = (model.params["layers"] for model in synthetic)
    for layer in range(DEBUG.model.num_layers):
        for part in ("qkv", "output"):
            kernel = apart[str(layer)]["attention"][part]["kernel"]
            np.testing.assert_array_equal(stacked["attention"][part]["kernel"][layer], kernel)
            spread = 1 / np.sqrt(DEBUG.model.hidden_size)
            assert np.asarray(kernel, np.float32).std() == pytest.approx(spread, rel=0.1)
    assert stacked["mlp_norm"]["scale"].shape == (2, 64)


def test_a_random_cache_holds_what_it_says():
    cache = random_cache(DEBUG.model, jnp.float32, 2, 64, 7)
    assert cache.k.shape == (2, 2, 2, 64, 16)
    assert cache.length.tolist() == [7, 7]
    assert np.std(cache.v) == pytest.approx(1, rel=0.1)
    assert not np.array_equal(cache.k[0], cache.k[1])
