"""Near-ties are told from other tokens: what rounding explains is excused, and nothing else."""

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest
from conftest import FAST, compiled_with, tiny_config
from decoding import Call, decode

from specjax import sampling
from specjax.apps.rows import compare_outputs
from specjax.apps.rows.compare_outputs import Difference, NearTie, compare_row, least_change
from specjax.engine.generate import generate
from specjax.engine.plan import plan_requests
from specjax.engine.requests import SamplingParams
from specjax.loading.load import random_model
from specjax.methods.make import make_drafter
from specjax.models.cpu import library

SCORES = np.log([0.1, 0.2, 0.3, 0.4])
FLAT = np.zeros(4)
VOCAB, NEW = 200, 24
WARPS = {
    "greedy": {},
    "temperature": dict(temperature=1.0),
    "top_p": dict(temperature=1.0, top_p=0.9),
    "top_k": dict(temperature=1.0, top_k=20),
    "min_p": dict(temperature=0.7, min_p=0.1),
}


def odds(share):
    return np.log(share / (1 - share))


@pytest.mark.parametrize(
    ("token", "noise", "filters", "change"),
    [
        (3, FLAT, {}, 0.0),
        (2, FLAT, {}, np.log(4 / 3)),
        (0, FLAT, {}, np.log(4)),
        (0, [2.0, 0, 0, 0], {}, 0.0),
        # Of four tokens the two likeliest are kept: the third is close to it, and has to win.
        (1, [0, 2.0, 0, 0], dict(top_k=2), np.log(3 / 2)),
        (1, FLAT, dict(top_k=2), np.log(2)),
        (3, [0, 2.0, 0, 0], dict(top_k=2), 0.0),
        # The noise prefers the second, which is surely kept but for a change of log(3 / 2).
        (3, [0, 0, 2.0, 0], dict(top_k=2), np.log(3 / 2)),
        (1, [0, 2.0, 0, 0], dict(min_p=0.6), np.log(0.6 / 0.5)),
        (3, [0, 2.0, 0, 0], dict(min_p=0.4), np.log(0.5 / 0.4)),
        (0, [0, 2.0, 0, 0], dict(min_p=0.6), np.log(0.6 / 0.25)),
        # The third begins at 0.7 of the mass, whose odds have to change.
        (1, [0, 2.0, 0, 0], dict(top_p=0.68), odds(0.7) - odds(0.68)),
        (3, [0, 2.0, 0, 0], dict(top_p=0.72), odds(0.72) - odds(0.7)),
        # But in float32 sums round as well.
        (1, [0, 2.0, 0, 0], dict(top_p=0.7 - 5e-5), 5e-5),
        (3, [0, 2.0, 0, 0], dict(top_p=0.7 + 5e-5), 5e-5),
        # After top-k it has 0.3 / 0.7 of what is left.
        (2, [0, 0, 2.0, 0], dict(top_k=2, top_p=0.55), odds(4 / 7) - odds(0.55)),
    ],
)
def test_the_least_change_with_which_a_token_is_drawn(token, noise, filters, change):
    request = SamplingParams(temperature=1.0, **filters)
    found = least_change(SCORES, np.asarray(noise), request, token)
    assert found == pytest.approx(change, abs=1e-6)


def test_no_change_makes_up_for_what_is_no_number():
    for scores in ([0, -np.inf], [0, np.nan], [np.inf, 0], [-np.inf, -np.inf]):
        assert least_change(np.array(scores), np.zeros(2), SamplingParams(), 1) == math.inf
    assert least_change(np.array([0, -1e9]), np.zeros(2), SamplingParams(), 1) > 9e8
    assert not NearTie(0, math.nan, 1.0).excused
    assert not NearTie(0, math.inf, math.inf).excused


@pytest.mark.parametrize("warp", WARPS)
def test_no_change_is_needed_for_the_token_that_is_drawn_alone(warp):
    rng, filters = np.random.default_rng(0), {"temperature": 1.0, **WARPS[warp]}
    logits, noise = 2 * rng.standard_normal((4, 60), np.float32), rng.gumbel(size=(4, 60))
    drawn = np.argmax(sampling.warp(logits, **filters) + noise, axis=1)
    for row, gumbel, best in zip(logits.astype(np.float64), noise, drawn, strict=True):
        scores, request = row / filters["temperature"], SamplingParams(**filters)
        changes = [least_change(scores, gumbel, request, token) for token in range(60)]
        assert np.flatnonzero(np.array(changes) < 1e-6).tolist() == [best]


@dataclasses.dataclass(frozen=True)
class Runs:
    """Rows of each of `WARPS` in turn: of plain decoding, with drafts, and with another seed."""

    call: Call
    plain: list[list[int]]
    drafted: list[list[int]]
    reseeded: list[list[int]]

    def compared(self, rows):
        pairs = zip(rows, self.plain, strict=True)
        found = [
            compare_row(self.call.plan, self.call.requests[row], *pair)
            for row, pair in enumerate(pairs)
        ]
        return [one for one in found if one is not None]


@pytest.fixture(scope="module")
def rounding():
    """Runs in bfloat16 of a model whose passes of one token and of several give other logits.

    The attention in C++, which rounds alike in both, is off.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "available", lambda: False)
        # They run for longer than it takes to compile them.
        with compiled_with(**FAST):
            runs = _runs()
        yield runs


def _runs():
    shape = dict(num_layers=24, hidden_size=128, head_dim=16, vocab_size=VOCAB)
    model = random_model(tiny_config(**shape), 0, dtype="bfloat16")
    # Larger weights make more of what the first layers round.
    params = jax.tree.map(lambda leaf: leaf * 1.5 if leaf.ndim > 1 else leaf, model.params)
    model = dataclasses.replace(model, params=params)
    prompts = np.random.default_rng(1).integers(0, VOCAB, (30, 5)).tolist()
    common = dict(max_new_tokens=NEW, ignore_eos=True)
    requests = [common | WARPS[name] for _ in range(6) for name in WARPS]
    run = functools.partial(decode, model, prompts, sampling=requests, verify="coupled")
    plain = run().token_ids
    drafter = make_drafter("simulated", model, continuations=plain, acceptance=0.7)
    return Runs(
        Call(*plan_requests(model, prompts, sampling=requests)),
        plain,
        run(drafter=drafter, num_speculative_tokens=7).token_ids,
        run(seed=1).token_ids,
    )


def test_what_rounding_decides_is_excused(rounding):
    """Rows of drafts that leave plain decoding's at a near-tie, and then have another prefix."""
    found = rounding.compared(rounding.drafted)
    assert found
    assert all(one.excused for one in found)
    # The same rows with a wrong last token, which nothing excuses.
    wrong = [[*ids[:-1], (ids[-1] + 7) % VOCAB] for ids in rounding.drafted]
    for one in rounding.compared(wrong):
        assert (one.excused, one.near_ties[-1].index) == (False, NEW - 1)


def test_independent_samples_differ(rounding):
    """Greedy rows do not depend on the seed, and few rows of others are the same by chance."""
    found = rounding.compared(rounding.reseeded)
    assert len(found) >= 22
    assert sum(one.excused for one in found) <= 0.02 * len(found)


def test_arbitrary_tokens_differ(rounding):
    """One token of an otherwise equal row, also where it is the last."""
    rng, found = np.random.default_rng(2), []
    for index in (0, NEW - 1):
        for row, ids in enumerate(rounding.plain[::2]):
            wrong = (ids[index] + int(rng.integers(1, VOCAB))) % VOCAB
            ours = [*ids[:index], wrong, *ids[index + 1 :]]
            found.append(
                compare_row(rounding.call.plan, rounding.call.requests[2 * row], ours, ids)
            )
    assert len(found) == 30
    assert sum(one.excused for one in found) <= 0.02 * len(found)


def test_float32_excuses_what_is_closer_than_a_ten_thousandth(chatty, monkeypatch):
    request = dict(max_new_tokens=4, ignore_eos=True)
    plan, (asked,) = plan_requests(chatty, [[5, 6, 7]], sampling=request)
    plain = generate(chatty, [[5, 6, 7]], sampling=request).token_ids[0]
    ours = [*plain[:2], (plain[2] + 1) % 90, plain[3]]
    assert compare_row(plan, asked, plain, plain) is None
    found = compare_row(plan, asked, ours, plain)
    assert (found.first, found.excused) == (2, False)
    assert found.near_ties[0].margin > found.near_ties[0].resolution == 1e-4
    # Rows of the same tokens do not end at different places.
    short = compare_row(plan, asked, plain[:2], plain)
    assert (short.first, short.excused) == (2, False)
    for gap, excused in ((5e-5, True), (5e-3, False)):

        def near(*arguments, gap=gap):
            for index in range(4):
                passes = np.zeros((2, 90))
                passes[:, plain[index]] = 9.0
                passes[0, ours[index]] = 9.0 - gap * (ours[index] != plain[index])
                passes[1, ours[index]] = 9.0
                yield index, passes

        monkeypatch.setattr(compare_outputs, "_logits_of_passes", near)
        found = compare_row(plan, asked, ours, plain)
        assert found.excused == excused
        assert [one.index for one in found.near_ties] == [2]


def test_all_near_ties_of_a_row_have_to_be_excused():
    near, far = NearTie(3, 1e-5), NearTie(9, 0.5)
    assert Difference((near,)).excused
    assert not Difference((near, far)).excused
    assert Difference((near, far)).first == 3
