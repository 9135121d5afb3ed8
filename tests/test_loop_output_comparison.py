"""Speculative output is the plain output, token for token: greedy, and `coupled` at any warp."""

import numpy as np
import pytest
from conftest import slow
from decoding import PROMPTS, coupled, decode, drafters, greedy, replay

NEW = 32


@pytest.fixture(scope="module")
def plain_mixed(tiny):
    """Plain decoding, one prompt at a time, with the noise that `coupled` uses."""
    return coupled(tiny, None, NEW, batch_size=1)


@pytest.fixture(scope="module")
def every(tiny, unrelated, similar):
    return drafters(tiny, unrelated, similar)


def assert_counts(got):
    """Round by round: no more accepted than drafted, and all that was emitted is in the output."""
    participated = got.emitted > 0
    assert (got.accepted[participated] <= got.drafted[participated]).all()
    assert (got.emitted[participated] <= got.accepted[participated] + 1).all()
    assert (got.drafted[participated] < got.width[participated]).all()
    assert np.maximum(got.emitted, 0).sum(axis=1).tolist() == list(map(len, got.token_ids))


@pytest.mark.parametrize(
    ("name", "length"),
    [
        ("similar", 0),
        ("ngram", 8),
        *slow(("similar", 1), ("similar", 8), ("early_exit", 0), ("early_exit", 8), ("ngram", 1)),
    ],
)
def test_draft_lengths(name, length, tiny, every, plain_mixed):
    got = coupled(tiny, every[name], NEW, num_speculative_tokens=length, every_width=True)
    assert got.token_ids == plain_mixed.token_ids
    assert_counts(got)
    assert got.drafted.max() == length


@pytest.mark.parametrize("acceptance", [0.0, *slow(0.6, 1.0)])
def test_simulated(acceptance, tiny, plain_mixed):
    drafter = replay(tiny, plain_mixed, acceptance)
    got = coupled(tiny, drafter, NEW, num_speculative_tokens=3)
    assert got.token_ids == plain_mixed.token_ids
    assert_counts(got)
    participated = got.emitted > 0
    if acceptance == 0.0:
        assert (got.accepted[participated] == 0).all()
    elif acceptance == 1.0:
        assert (got.accepted == got.drafted).all()
        assert got.emitted[:, 0].tolist() == [4] * len(PROMPTS)
    else:
        tested = np.minimum(got.accepted + 1, got.drafted)[participated].sum()
        assert 0.5 < got.accepted[participated].sum() / tested < 0.7


EDGES = [245, 255, 256, 257, 500, 508]


@pytest.mark.parametrize("name", ["early_exit", *slow("similar")])
def test_across_the_blocks_of_the_cache(name, tiny, every):
    """Prompts around 256 and 512 tokens; the last ones end exactly at the capacity of 512."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(61, size=length).tolist() for length in EDGES]
    requests = [greedy(max_new_tokens=min(20, 512 - length)) for length in EDGES]
    plain = decode(tiny, prompts, sampling=requests, batch_size=1)
    got = decode(tiny, prompts, drafter=every[name], sampling=requests, num_speculative_tokens=3)
    assert got.token_ids == plain.token_ids
    assert [len(tokens) for tokens in got.token_ids] == [20, 20, 20, 20, 12, 4]
