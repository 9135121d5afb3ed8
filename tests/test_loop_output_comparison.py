"""Speculative output is the plain output, token for token: greedy, and `coupled` at any warp."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import slow
from decoding import PROMPTS, Deciding, coupled, decode, drafters, greedy, mixed, replay

from specjax import sampling

NEW = 32
GREEDY_ROWS = [row for row, request in enumerate(mixed()) if request.temperature == 0]


@pytest.fixture(scope="module")
def plain_greedy(tiny):
    """Plain decoding, one prompt at a time."""
    return decode(tiny, PROMPTS, sampling=greedy(max_new_tokens=NEW), batch_size=1)


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


DRAFTERS = [
    "similar",
    "random_distribution",
    # Lookups are in `test_draft_lengths`, and early exits across blocks of the cache, below; turns
    # that end in trees have tests of their own (test_tree_drafters).
    *slow("early_exit", "turns", "turns_trees", "merged"),
    *slow("ngram", "unrelated", "itself", "similar_greedy", "early_exit_p_min"),
    *slow("shifting", "ngram_tree"),
]


@pytest.mark.parametrize(
    "name",
    # Mixed rows, below, are greedy in part, with each drafter.
    slow("ngram", "similar", "itself", "early_exit", "turns", "shifting"),
)
def test_greedy_rows(name, tiny, every, plain_greedy):
    requests = greedy(max_new_tokens=NEW)
    got = decode(tiny, PROMPTS, drafter=every[name], sampling=requests, num_speculative_tokens=3)
    assert got.token_ids == plain_greedy.token_ids
    assert_counts(got)
    if name == "itself":
        assert (got.accepted == got.drafted).all()


@pytest.mark.parametrize("name", DRAFTERS)
def test_coupled_rows(name, tiny, every, plain_mixed):
    got = coupled(tiny, every[name], NEW, num_speculative_tokens=3)
    assert got.token_ids == plain_mixed.token_ids
    assert_counts(got)
    if name == "itself":
        assert (got.accepted == got.drafted).all()


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


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("ngram", "block"),
        *slow(*itertools.product(("similar_greedy", "similar"), ("rejection", "block"))),
        *slow(("early_exit", "rejection"), ("random_distribution", "block")),
    ],
)
def test_greedy_rows_beside_sampled_ones(name, rule, tiny, every, plain_mixed):
    options = dict(sampling=mixed(max_new_tokens=NEW), num_speculative_tokens=3)
    got = decode(tiny, PROMPTS, drafter=every[name], verify=rule, **options)
    for row in GREEDY_ROWS:
        assert got.token_ids[row] == plain_mixed.token_ids[row]
    assert_counts(got)


@pytest.mark.slow  # as of the page that is run in test_docs
def test_a_rule_of_ones_own(tiny, every, plain_mixed):
    def cautious(tokens, num_valid, target, draft, uniforms):
        """As `rejection`, of at most one token."""
        return sampling.rejection(tokens, jnp.minimum(num_valid, 1), target, draft, uniforms)

    options = dict(sampling=mixed(max_new_tokens=NEW), num_speculative_tokens=3)
    got = decode(tiny, PROMPTS, drafter=every["ngram"], verify=Deciding(cautious), **options)
    for row in GREEDY_ROWS:
        assert got.token_ids[row] == plain_mixed.token_ids[row]
    assert got.accepted.max() == 1


@pytest.mark.parametrize("acceptance", [0.6, *slow(0.0, 1.0)])
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


@pytest.mark.slow  # rows that come and go give what they give alone (test_engine)
@pytest.mark.parametrize(
    ("rule", "sizes"),
    [
        ("rejection", (3, 8)),
        *slow(("rejection", (1, 8)), ("block", (3, 8)), ("coupled", (3, 8))),
    ],
)
def test_a_row_does_not_change_with_the_batch(rule, sizes, tiny, every, plain_mixed):
    """In threes with a spare row at the end, and all together; greedy ones as plain and alone."""
    options = dict(
        drafter=every["early_exit"],
        verify=rule,
        sampling=mixed(max_new_tokens=NEW),
        num_speculative_tokens=3,
    )
    first, *others = (decode(tiny, PROMPTS, batch_size=size, **options) for size in sizes)
    for row in GREEDY_ROWS:
        assert first.token_ids[row] == plain_mixed.token_ids[row]
    for other in others:
        assert first.token_ids == other.token_ids
        # The rounds are each row's own, too; only the width may follow the neighbours.
        for field in ("drafted", "accepted", "emitted"):
            assert (getattr(first, field) == getattr(other, field)).all()


LADDER = ((1, 2, 4), (3, 5, 2), (6, 7, 1), (8, 8, 0))


@pytest.mark.slow  # as on a ladder of lookups (test_limits)
def test_lengths_that_follow_the_batch(tiny, every, plain_mixed):
    # Rows end one after the other, so that all steps of the ladder are used.
    requests = [
        dataclasses.replace(request, max_new_tokens=NEW - 4 * row)
        for row, request in enumerate(mixed())
    ]
    got = decode(
        tiny,
        PROMPTS,
        drafter=every["early_exit"],
        verify="coupled",
        sampling=requests,
        num_speculative_tokens_per_batch_size=LADDER,
    )
    for row, tokens in enumerate(got.token_ids):
        assert tokens == plain_mixed.token_ids[row][: NEW - 4 * row]
    assert_counts(got)
    drafted = set(got.drafted[got.emitted > 0].tolist())
    assert len(drafted) >= 3, drafted


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


@pytest.mark.slow  # as the end of room of Medusa's heads (test_medusa)
def test_up_to_the_last_position(tiny, every):
    rng = np.random.default_rng(1)
    prompts = [rng.integers(61, size=length).tolist() for length in (570, 590, 598, 599)]
    requests = greedy(max_new_tokens=50)
    plain = decode(tiny, prompts, sampling=requests)
    assert [len(tokens) for tokens in plain.token_ids] == [30, 10, 2, 1]
    assert plain.finish_reasons == ["length"] * 4
    drafter = every["similar"]
    got = decode(tiny, prompts, drafter=drafter, sampling=requests, num_speculative_tokens=8)
    assert got.token_ids == plain.token_ids
    assert got.finish_reasons == plain.finish_reasons
