"""Logits that are not numbers end a row with an error, never with a token; others are as alone."""

import dataclasses
import warnings

import jax.numpy as jnp
import numpy as np
import pytest
import reports
from conftest import slow
from decoding import PROMPTS, Shifting, coupled, decode, draft_model, mixed

import specjax
from specjax.apps.run import decode as command
from specjax.engine.outputs import Failure
from specjax.engine.requests import SamplingParams
from specjax.loading.load import save_model
from specjax.methods.ngram import Ngram

NEW = 12


def spoiled(model, token, value=np.nan):
    """The model with logits that are not numbers wherever it reads `token`."""
    table = model.params["embed"]["embedding"]
    params = {**model.params, "embed": {"embedding": table.at[token].set(value)}}
    return dataclasses.replace(model, params=params)


@pytest.fixture(scope="module")
def plain(tiny):
    """The tokens of the undamaged model."""
    return coupled(tiny, None, NEW).token_ids


@pytest.fixture(scope="module")
def token(plain):
    """A token that some rows say early, some late and some never, and no prompt has."""
    for token in range(61):
        when = [row.index(token) for row in plain if token in row]
        inside = any(token in prompt for prompt in PROMPTS[:2])
        if 1 < len(when) < 6 and max(when) > 3 and not inside:
            return token
    raise AssertionError


def expected(plain, token):
    """The tokens that are left, and the reasons: nothing comes after the token."""
    tokens, reasons = [], []
    for prompt, row in zip(PROMPTS, plain, strict=True):
        end = 0 if token in prompt else NEW
        if end and token in row[:-1]:
            end = row.index(token) + 1
        tokens.append(row[:end])
        reasons.append("length" if end == NEW else "error")
    return tokens, reasons


DRAFTERS = {
    "plain": lambda tiny: None,
    # Right about every token, and then about none.
    "whole": draft_model,
    "shifting": lambda tiny: Shifting(tiny.config.vocab_size, step=9),
}


@pytest.mark.parametrize(
    ("name", "rule", "value"),
    [
        ("plain", "coupled", np.inf),
        ("whole", "coupled", np.nan),
        *slow(("plain", "coupled", np.nan), ("shifting", "coupled", np.inf)),
        *slow(("whole", "coupled", -np.inf), ("shifting", "coupled", np.nan)),
    ],
)
def test_rows_end_where_plain_decoding_ends_them(name, rule, value, tiny, plain, token):
    length = 3 if name != "plain" else "fixed"
    options = dict(verify=rule, sampling=mixed(max_new_tokens=NEW), num_speculative_tokens=length)
    got = decode(spoiled(tiny, token, value), PROMPTS, drafter=DRAFTERS[name](tiny), **options)
    tokens, reasons = expected(plain, token)
    assert set(reasons) == {"length", "error"}
    assert any(0 < len(row) < NEW for row in tokens)
    assert got.token_ids == tokens
    assert got.finish_reasons == reasons
    assert np.maximum(got.emitted, 0).sum(axis=1).tolist() == list(map(len, tokens))


def test_other_rows_of_a_random_rule_are_not_affected(tiny, token):
    # It drafts what a row has read, so rows that have not read the token never draft it.
    options = dict(
        drafter=Ngram(prompt_lookup_min=1),
        verify="rejection",
        sampling=mixed(max_new_tokens=NEW, top_p=1.0, min_p=0.0),
        num_speculative_tokens=3,
    )
    whole = decode(tiny, PROMPTS, **options)
    got = decode(spoiled(tiny, token), PROMPTS, **options)
    assert set(got.finish_reasons) == {"length", "error"}
    drafted = False
    for row, reason in enumerate(got.finish_reasons):
        tokens = got.token_ids[row]
        if reason == "error":
            assert len(tokens) < NEW
            assert token in PROMPTS[row] or tokens[-1] == token
        elif token not in whole.token_ids[row]:
            assert tokens == whole.token_ids[row]
            rounds = [one[one >= 0].tolist() for one in (got.emitted[row], whole.emitted[row])]
            assert rounds[0] == rounds[1]
            drafted |= max(rounds[0]) > 1
    assert drafted


def test_a_broken_drafter_costs_drafts_only(tiny, similar, plain):
    """Of a draft's distribution that is none nothing is accepted."""
    params = similar.params["final_norm"]
    broken = dataclasses.replace(
        similar, params={**similar.params, "final_norm": {"scale": params["scale"] * jnp.nan}}
    )
    got = coupled(tiny, draft_model(broken), NEW, num_speculative_tokens=3)
    assert got.token_ids == plain


@pytest.fixture(scope="module")
def damaged(chatty, tmp_path_factory):
    """A model's folder, with a weight that is not a number."""
    path = tmp_path_factory.mktemp("damaged") / "model"
    head = chatty.params["head"]["kernel"]
    params = {**chatty.params, "head": {"kernel": head.at[0, 3].set(jnp.nan)}}
    save_model(dataclasses.replace(chatty, params=params), path)
    return path


def test_the_command_says_so_and_exits_with_2(damaged, tmp_path, capsys):
    report = tmp_path / "r.json"
    argv = [f"--config.target={damaged}", f"--config.report={report}", "--config.limit=2"]
    argv += ["--config.compare=true", "--config.dtype=float32", "--config.max_length=150"]
    argv += ["--config.num_speculative_tokens=2"]
    assert command.main(argv) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(
        f"error: target={damaged}: its logits are not numbers (NaN or infinite) after 0 new tokens "
        "of question "
    )
    assert "(and 1 other)" in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out.count("ENDED BY AN ERROR") == 2
    rows = reports.read_one(report)["rows"]
    assert [(row["finish_reason"], row["token_ids"]) for row in rows] == [("error", [])] * 2


def test_the_interface_warns_and_returns_what_is_there(tiny, token):
    prompts, sampling = [[5, token], [5, 6]], SamplingParams(max_new_tokens=2)
    model = spoiled(tiny, token)
    said = r"target=random-0: its logits are not numbers .* after 0 new tokens of prompts\[0\],"
    with pytest.warns(RuntimeWarning, match=said):
        got = specjax.generate(model, prompts, sampling=sampling)
    assert got.finish_reasons == ["error", "length"]
    assert got.token_ids[0] == []
    assert got.failed_rows == {0: Failure(new_tokens=0)}
    with pytest.warns(RuntimeWarning, match=said):
        deltas = list(specjax.stream(model, prompts, sampling=sampling))
    assert [d.finish_reason for d in deltas if d.id == 0] == ["error"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert specjax.generate(model, prompts[1:], sampling=sampling).failed_rows == {}
