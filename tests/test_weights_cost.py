"""`scripts/weights_cost.py` on a tiny model: its figures are those that NumPy computes."""

import json
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from bad_input import refused_command
from commands import script_module
from conftest import tiny_config
from scipy.special import log_softmax

from specjax.loading.load import random_model, save_model
from specjax.loading.quantize import quantized_model
from specjax.models.form import Form


@pytest.fixture(scope="module")
def script():
    with script_module("weights_cost") as module:
        yield module


@pytest.fixture(scope="module")
def target(chatty):
    sizes = dict(hidden_size=64, intermediate_size=96, head_dim=16)
    config = tiny_config(vocab_size=chatty.tokenizer.vocab_size, **sizes)
    return random_model(config, 0, chatty.tokenizer, dtype="float32", form=Form())


def conversations(path, rows):
    keys = {"category": "qa", "source": "test", "licence": "", "temperature": 0.0}
    lines = [
        json.dumps({"id": n, **keys, "prompt_token_ids": prompt, "response_token_ids": answer})
        for n, (prompt, answer) in enumerate(rows)
    ]
    path.write_text("\n".join(lines))
    return path


def reading(path, context=512, limit=32):
    return SimpleNamespace(text=path, context=context, limit=limit)


def next_token_log_probabilities(model, ids):
    tokens = jnp.asarray([ids])
    causal = jnp.tril(jnp.ones((1, len(ids), len(ids)), bool))
    positions = jnp.arange(len(ids))[None]
    logits = model.architecture.extend(
        model.params, tokens, positions, None, None, 0, causal
    ).logits
    return log_softmax(np.asarray(logits[0], np.float64), axis=-1)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_figures_are_those_of_the_answers_tokens(weights, script, target, tmp_path):
    rows = [([5, 6, 7], [8, 9]), ([3], [4, 5, 6, 7, 3, 2])]
    pieces = script.pieces_of(target, reading(conversations(tmp_path / "a.jsonl", rows)))
    model = quantized_model(target, weights)
    kl, same, loss = [], [], []
    for prompt, answer in rows:
        ids = prompt + answer
        before = slice(len(prompt) - 1, len(ids) - 1)
        p, q = (next_token_log_probabilities(one, ids)[before] for one in (target, model))
        kl += list(np.sum(np.exp(p) * (p - q), axis=-1))
        same += list(p.argmax(axis=-1) == q.argmax(axis=-1))
        loss += list(-q[np.arange(len(answer)), answer])
    cost = script.compare(target, model, pieces)
    assert len(kl) == 8
    assert cost.kl == pytest.approx(np.mean(kl), rel=1e-3)
    assert cost.agreement == pytest.approx(np.mean(same))
    assert cost.perplexity == pytest.approx(np.exp(np.mean(loss)), rel=1e-5)
    assert cost.num_bytes < script.compare(target, target, pieces).num_bytes / 2


def test_fewer_bits_cost_more(script, target, tmp_path):
    pieces = script.pieces_of(
        target, reading(conversations(tmp_path / "a.jsonl", [([5], list(range(3, 60)))]))
    )
    none, few, fewest = (
        script.compare(target, model, pieces)
        for model in (target, *(quantized_model(target, name) for name in ("int8", "int4")))
    )
    assert (none.kl, none.agreement) == (0, 1)
    assert 0 < few.kl < fewest.kl / 10


def test_a_text_is_scored_in_pieces(script, target, tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("abc ab " * 40)
    ids = target.tokenizer.encode(path.read_text())
    pieces = script.pieces_of(target, reading(path, context=16))
    assert max(len(piece.tokens) for piece in pieces) == 16
    assert np.concatenate([piece.tokens for piece in pieces]).tolist() == ids
    assert all(piece.is_scored.all() for piece in pieces)
    assert len(script.pieces_of(target, reading(path, context=16, limit=2))) == 2


def test_the_command_compares_answers_to_the_built_in_prompts(script, target, tmp_path, capsys):
    save_model(target, tmp_path / "model")
    flags = [f"--target={tmp_path / 'model'}", "--weights=int8", "--limit=2", "--max_new_tokens=4"]
    assert script.main(flags) == 0
    heading, *_, float_line, int8_line = capsys.readouterr().out.splitlines()
    assert "2 pieces, 8 tokens scored" in heading
    assert "| `float`, float32 |" in float_line
    assert "| 0.0e+00 | 100.0 % |" in float_line
    assert "| `int8`, Q8_0 (" in int8_line
    one_token = conversations(tmp_path / "long.jsonl", [([5, 6, 7], [8])])
    for flags_given, message in (
        ([f"--text={one_token}", "--context=3"], "none of its tokens is scored; give a longer"),
        (["--weights=file"], "weights='file'"),
    ):
        assert message in refused_command(script.main, [flags[0], *flags_given], capsys)
