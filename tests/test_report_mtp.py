"""The bigram reference, and the numbers that compare a model and its MTP modules with it."""

import dataclasses
import itertools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import tiny_config
from heads import mtp_head
from script_modules import script_module

from specjax.loading.checkpoints import save_checkpoint
from specjax.loading.load import random_model
from specjax.models.heads.mtp import Mtp, MtpModules
from specjax.models.heads.shared_parameters import share
from train.data.examples import Example, target_metadata
from train.data.sources import open_sources
from train.data.writing import write_responses
from train.pretraining import bigram
from train.pretraining.bigram import Bigram

V = 61
with script_module("training.report_mtp") as report_mtp:
    pass


def texts(count, length=40, seed=0, vocab=V):
    """Sequences of a Markov chain that prefers a few followers."""
    rng = np.random.default_rng(seed)
    table = rng.dirichlet(np.full(vocab, 0.05), vocab)
    found = []
    for _ in range(count):
        tokens = [int(rng.integers(vocab))]
        while len(tokens) < length:
            tokens.append(int(rng.choice(vocab, p=table[tokens[-1]])))
        found.append(np.array(tokens, np.int32))
    return found


def straightforward(data, vocab):
    """Interpolated Kneser-Ney, [V, V], as its formula is written down."""
    counts = np.zeros((vocab, vocab))
    for tokens in data:
        for one, other in itertools.pairwise(tokens):
            counts[one, other] += 1

    def discount(values):
        once, twice = (values == 1).sum(), (values == 2).sum()
        return once / (once + 2 * twice)

    kinds = (counts > 0).sum(0)
    small = discount(kinds)
    lower = np.maximum(kinds - small, 0) / kinds.sum()
    lower = lower + small * (kinds > 0).sum() / kinds.sum() / vocab
    large = discount(counts)
    wanted = np.tile(lower, (vocab, 1))
    for one in np.flatnonzero(counts.sum(1)):
        row = counts[one]
        wanted[one] = np.maximum(row - large, 0) + large * (row > 0).sum() * lower
        wanted[one] /= row.sum()
    return wanted


def test_a_bigram_is_the_formula():
    data = texts(12)
    counted = Bigram.of(iter(data), V)
    before, after = (np.asarray(grid.ravel()) for grid in np.mgrid[:V, :V])
    probs = np.exp(counted.log_probs(before, after)).reshape(V, V)
    np.testing.assert_allclose(probs.sum(1), 1, rtol=1e-12)
    np.testing.assert_allclose(probs, straightforward(data, V), rtol=1e-10)
    chosen = probs[np.arange(V), counted.likeliest()]
    np.testing.assert_allclose(chosen, probs.max(1), rtol=1e-12)
    # Where a token was never followed, and where there is nothing to count.
    unseen = set(range(V)) - {int(token) for one in data for token in one[:-1]}
    assert unseen
    empty = Bigram.of([], V)
    np.testing.assert_allclose(empty.log_probs(before, after), -np.log(V))


def test_counts_do_not_depend_on_how_they_are_gathered(monkeypatch):
    data = texts(6)
    whole = Bigram.of(data, V)
    monkeypatch.setattr(bigram, "_GATHERED", 90)
    parts = Bigram.of(data[3:] + data[:3], V)
    np.testing.assert_array_equal(whole.pairs, parts.pairs)
    np.testing.assert_array_equal(whole.counts, parts.counts)
    assert whole.counts.sum() == sum(len(one) - 1 for one in data)


def test_repeated_8_grams():
    assert report_mtp.repeated(range(40)) == 0
    assert report_mtp.repeated([1, 2, 3]) == 0
    assert report_mtp.repeated([7] * 17) == pytest.approx(0.9)
    assert report_mtp.repeated([*range(8), 99, *range(8)]) == pytest.approx(0.1)


@pytest.fixture(scope="module")
def model():
    """A random model with two modules of its own."""
    bare = random_model(tiny_config(max_positions=200), 0, dtype="float32")
    head = mtp_head(bare, 2)
    return dataclasses.replace(bare, mtp=MtpModules(head.config, head.params))


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    """The model with its modules and without, and texts, two of them held out."""
    folder = tmp_path_factory.mktemp("report")
    save_checkpoint(model, folder / "model")
    save_checkpoint(dataclasses.replace(model, mtp=None), folder / "bare")
    examples = [
        Example(tokens, np.ones(len(tokens), bool), id=number)
        for number, tokens in enumerate(texts(60, 30))
    ]
    write_responses(folder / "data", examples, target_metadata(model))
    return folder


def straightforward_choices(model):
    """Log-probabilities of the model [T, V] of tokens [T], and the likeliest of each module [T]."""
    head, params = Mtp(model.mtp.config, jnp.dtype("float32")), model.mtp.params
    params = {**params, "shared": share(model.params, None, head=True)}

    @jax.jit
    def choices(tokens):
        size, ids = len(tokens), tokens[None]
        where, causal = jnp.arange(size)[None], jnp.tril(jnp.ones((1, size, size), bool))
        whole = model.architecture.extend(
            model.params, ids, where, None, None, 0, causal, features=("final_norm",)
        )
        hidden, chosen = whole.features["final_norm"], []
        for index in range(model.mtp.config.num_modules):
            own, pairs = head.module(params, index), jnp.roll(ids, -1 - index, axis=1)
            cache, window = head.make_cache(1, size), head.make_window(1, size)
            output, _ = head.extend(own, pairs, hidden, where, cache, window, 0, causal)
            chosen.append(head.logits(own, output)[0].argmax(-1))
            hidden = head.next_hidden(own, output)
        return jax.nn.log_softmax(whole.logits[0]), chosen

    return choices


def test_numbers_are_those_of_a_plain_computation(model, folder):
    data = open_sources([folder / "data"])
    numbers = report_mtp.held_out_numbers(model, data, 64, 10**6, 2)
    counted = Bigram.of((data[index].tokens for index in range(60) if index % 50), V)
    follower = counted.likeliest()
    found = {name: [] for name in ("loss", "cost", "bigram", 0, 1, "both")}
    choices = straightforward_choices(model)
    for tokens in (data[0].tokens, data[50].tokens):
        logp, drafts = jax.tree.map(np.asarray, choices(tokens))
        choice = logp.argmax(-1)
        for at in range(2, len(tokens)):
            found["loss"].append(-logp[at - 1, tokens[at]])
            found["cost"] += (-counted.log_probs(tokens[at - 1 : at], tokens[at : at + 1])).tolist()
            found["bigram"].append(follower[tokens[at - 1]] == choice[at - 1])
            # Module k at row t predicts x_{t+k+2}, which the model itself predicts at t+k+1.
            for depth in range(2):
                if at + depth < len(tokens):
                    found[depth].append(drafts[depth][at - 2] == choice[at + depth - 1])
            if at + 1 < len(tokens):
                found["both"].append(found[0][-1] and found[1][-1])
    mean = {name: pytest.approx(np.mean(values), rel=1e-5) for name, values in found.items()}
    assert numbers["held_out_tokens"] == 56
    assert numbers["lm_loss"] == mean["loss"]
    assert numbers["bigram_loss"] == mean["cost"]
    assert numbers["bigram_agrees_with_model"] == mean["bigram"]
    assert numbers["mtp_0_agrees_with_model"] == mean[0]
    assert numbers["mtp_1_agrees_with_model"] == mean[1]
    assert numbers["mtp_0_agrees_with_model"] != numbers["mtp_1_agrees_with_model"]
    assert numbers["tau_sim"] == pytest.approx(1 + np.mean(found[0]) + np.mean(found["both"]))


def report(folder, model, *more):
    flags = [f"--model={folder / model}", f"--data={folder / 'data'}", "--row_tokens=64"]
    return report_mtp.main([*flags, *more])


def test_a_report(folder, tmp_path, capsys):
    short = ["--prompt_tokens=6", "--new_tokens=24", "--num_speculative_tokens=3"]
    assert report(folder, "model", *short, f"--out={tmp_path / 'out.json'}") == 0
    shown = capsys.readouterr().out
    numbers = json.loads((tmp_path / "out.json").read_text())
    assert numbers["all/continuations"] == 2
    assert 1 <= numbers["all/tau"] <= 4
    assert "all/acceptance_2" in numbers
    assert f"{numbers['lm_loss']:.4f}" in shown
    assert report(folder, "bare") == 0
    shown = capsys.readouterr().out
    assert f"{numbers['bigram_loss']:.4f}" in shown
    assert "mtp" not in shown
    assert "tau" not in shown


def test_acceptance_of_what_repeats_little():
    class Result:
        token_ids = ([1] * 20, list(range(20)))
        drafted = np.array([[1, 1, 1], [1, 1, -1]])
        accepted = np.array([[1, 1, 1], [1, 0, -1]])

    found = report_mtp.acceptance(Result, 0.2)
    assert found["all/tau"] == pytest.approx(9 / 5)
    assert found["little_repeated/continuations"] == 1
    assert found["little_repeated/tau"] == pytest.approx(1.5)
    assert found["little_repeated/acceptance_0"] == pytest.approx(0.5)
    assert found["little_repeated/repeated_8_grams"] == 0


@pytest.mark.parametrize(
    ("name", "flags", "said"),
    [
        ("bare", ["--depths=1"], "depths=1: .* has no MTP modules"),
        ("model", ["--depths=1"], "depths=1: the model has 2 modules"),
        ("model", ["--new_tokens=190"], "new_tokens=190: with prompt_tokens=64 they exceed"),
        ("model", [], "prompt_tokens=64: no held-out text is longer"),
        ("nosuch", [], "model='nosuch"),
    ],
)
def test_refused(folder, capsys, name, flags, said):
    arguments = [f"--model={folder / name}" if name != "nosuch" else "--model=nosuch", *flags]
    assert report_mtp.main([*arguments, f"--data={folder / 'data'}", "--row_tokens=64"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(said, error)
