"""The weights that plain decoding reads per second, beside what memory gives."""

import dataclasses
import itertools

import jax
import pytest
import reports
from conftest import tiny_config

from specjax.apps.report import report
from specjax.apps.rows.records import DecodedRow, RunHeader
from specjax.apps.rows.statistics import figures
from specjax.apps.rows.weight_reads import weight_bandwidth, weight_reads_line
from specjax.apps.tuning import weight_bandwidth as measuring
from specjax.apps.tuning.weight_bandwidth import memory_bandwidth, pass_bytes
from specjax.core.parameter_sizes import count_bytes
from specjax.fields import read_values
from specjax.loading.load import random_model
from specjax.loading.model import Model
from specjax.models.config import DecoderConfig, Experts
from specjax.theory import ExpertShape, ModelShape, weight_bytes

EXPERTS = Experts(num_experts=8, per_token=2, intermediate_size=16, shared_size=12, num_dense=1)
CONFIGS = {
    "untied": tiny_config(),
    "tied": tiny_config(tie_word_embeddings=True),
    "experts": tiny_config(experts=EXPERTS),
    "tied with experts": tiny_config(experts=EXPERTS, tie_word_embeddings=True),
}


def shape_of(config: DecoderConfig) -> ModelShape:
    """A config's shape for `theory`, which has no biases."""
    names = [field.name for field in dataclasses.fields(ModelShape)]
    sizes = {name: getattr(config, name) for name in names if hasattr(config, name)}
    if config.experts is not None:
        fields = [field.name for field in dataclasses.fields(ExpertShape)]
        kept = {name: getattr(config.experts, name) for name in fields if name != "use"}
        sizes["experts"] = ExpertShape(**kept)
    return ModelShape(**sizes)


def model_of(name: str, **options) -> Model:
    return random_model(CONFIGS[name], 0, dtype="float32", **options)


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_bytes_of_a_pass_are_those_of_theory(name, tokens):
    expected = weight_bytes(shape_of(CONFIGS[name]), tokens=tokens, itemsize=4)
    assert pass_bytes(model_of(name), tokens) == round(expected)


def test_a_tied_embedding_is_read_as_the_output_layer_and_an_untied_one_is_not():
    embedding = 4 * 61 * 24
    tied, untied = model_of("tied"), model_of("untied")
    assert pass_bytes(tied) == count_bytes(tied.params)
    assert pass_bytes(untied) == count_bytes(untied.params) - embedding


def test_only_the_experts_in_use_are_read():
    model = model_of("experts")
    expert = 4 * 3 * 24 * EXPERTS.intermediate_size
    unused = 2 * (EXPERTS.num_experts - EXPERTS.per_token) * expert  # two of three layers
    assert pass_bytes(model) == count_bytes(model.params) - 4 * 61 * 24 - unused
    assert pass_bytes(model, 1) < pass_bytes(model, 2) < pass_bytes(model, 1000)
    assert pass_bytes(model, 1000) == count_bytes(model.params) - 4 * 61 * 24


def test_layers_apart_and_bfloat16():
    """The form of layers changes nothing; half the bytes are half, up to what stays float32."""
    whole = model_of("experts")
    apart = model_of("experts", form=dataclasses.replace(whole.form, layers="unrolled"))
    assert pass_bytes(apart) == pass_bytes(whole)
    half = jax.tree.map(lambda leaf: leaf.astype("bfloat16"), whole.params)
    assert 2 * pass_bytes(dataclasses.replace(whole, params=half)) == pass_bytes(whole)


def test_memory_is_measured_once_and_by_its_fastest_read(monkeypatch):
    clock = iter(itertools.accumulate(itertools.cycle([1.0, 0.25, 1.0, 0.125, 1.0, 0.5])))
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(measuring, "_NUM_BYTES", 1 << 20)
    monkeypatch.setattr(measuring, "_SECONDS", 0.8)
    memory_bandwidth.cache_clear()
    try:
        assert memory_bandwidth() == memory_bandwidth() == (1 << 20) / 0.125
        assert next(clock) == 3.875 + 1.0  # three reads, and none by the second call
    finally:
        memory_bandwidth.cache_clear()


def header(**changes) -> RunHeader:
    return RunHeader.read({**reports.content()["run"], **changes})


def read(*records) -> list[DecodedRow]:
    return [read_values(DecodedRow, record) for record in records]


def test_the_line_is_of_plain_decoding_s_passes_and_seconds():
    """Two rows share the four passes and two seconds of a group; the other group has one row."""
    rounds = [(2, 1, 2)]
    shared = {"batch": 0, "plain_passes": 4}
    rows = read(
        reports.row(0, "qa", rounds, 0.5, 2.0, **shared),
        reports.row(1, "qa", rounds, 0.5, 2.0, **shared),
        reports.row(2, "qa", rounds, 0.1, 1.0, batch=1, plain_passes=2),
    )
    run, of_rows = header(pass_bytes=1_500_000_000), figures(rows)
    assert of_rows.plain_passes_per_second == pytest.approx(6 / 3)
    assert weight_bandwidth(run, of_rows) == pytest.approx(3e9)
    assert weight_reads_line(run, of_rows, 4e9) == (
        "plain decoding reads 3 GB/s of weights (1,500 MB per pass): 75% of the 4 GB/s that this "
        "machine's memory gives"
    )
    alone = "plain decoding reads 3 GB/s of weights (1,500 MB per pass)"
    assert weight_reads_line(run, of_rows, None) == alone


def test_plain_decoding_with_nothing_to_compare_counts_its_own_passes():
    plain = {"plain_new_tokens": None, "plain_prefill_s": None, "plain_decode_s": None}
    record = reports.row(0, "qa", [(0, 0, 1)] * 3, 0.5, None, drafter="none", **plain)
    (row,) = read({**record, "plain_passes": None})
    assert figures([row]).plain_passes_per_second == pytest.approx(6.0)
    drafted = dataclasses.replace(row, drafter="ngram")
    assert figures([drafted]).plain_passes_per_second is None


def test_a_report_has_the_line_where_it_is_known(tmp_path):
    known, older = reports.content(), reports.content("medusa")
    known["run"]["pass_bytes"] = 10_000_000
    known["summary"]["memory_bandwidth"] = 1e9
    for row in older["rows"]:
        del row["plain_passes"]
    for name, contents, count in (("known", (known, older), 1), ("older", (older,), 0)):
        path = tmp_path / f"{name}.jsonl"
        path.write_text(reports.as_lines(*contents))
        assert report.main([str(path), f"--out={tmp_path / name}", "--nopictures"]) == 0
        text = (tmp_path / name / "report.md").read_text()
        assert text.count("Plain decoding reads ") == count
    # 11 tokens in 3.3 seconds, one pass each.
    line = "Plain decoding reads 0.0333 GB/s of weights (10 MB per pass): 3% of the 1 GB/s that"
    assert line in (tmp_path / "known" / "report.md").read_text()
