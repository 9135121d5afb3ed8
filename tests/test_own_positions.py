"""Drafters with fewer positions than their target: rows draft up to these, and no further."""

import dataclasses
import functools

import numpy as np
import pytest
from bad_input import refused
from conftest import slow, tiny_config
from decoding import changed, decode, draft_model, greedy
from test_own_cache import with_window
from tiny_models import block_head, eagle_head, medusa_head

from specjax import make_drafter
from specjax.drafters import LoadedDrafter, head_drafter, merge_drafters, take_turns
from specjax.loading.load import random_model
from specjax.methods.draft_model.drafter import DraftModel
from specjax.methods.ngram import Ngram
from specjax.models.config import Attention, Embedding, Mlp, Norm, SlidingWindow
from specjax.testing import Tabular

POSITIONS, NEW, LENGTH = 24, 40, 3
PROMPTS = [[5], list(range(12)), list(range(20)), list(range(30))]


@pytest.fixture(scope="module")
def learned():
    """A target with learned positions, as GPT-2 has them."""
    shape = dict(num_kv_heads=4, tie_word_embeddings=True, attention_bias=True, mlp_bias=True)
    config = tiny_config(
        family="gpt2",
        norm=Norm("layer"),
        attention=Attention(rotary_width=0),
        mlp=Mlp("gelu_tanh", gated=False),
        embedding=Embedding(positions=True),
        **shape,
    )
    return random_model(config, 4, dtype="float32")


def shortened(model):
    """Return a model with its first positions only."""
    params = dict(model.params)
    if model.config.embedding.positions:
        params["positions"] = {"embedding": params["positions"]["embedding"][:POSITIONS]}
    config = dataclasses.replace(model.config, max_positions=POSITIONS)
    return dataclasses.replace(model, config=config, params=params)


def short_head(head):
    decoder = dataclasses.replace(head.config.decoder, max_positions=POSITIONS)
    return dataclasses.replace(head, config=dataclasses.replace(head.config, decoder=decoder))


def drafted_at(result):
    """Return pairs of the committed length before a round and the number of drafted tokens."""
    pairs = []
    for row, prompt in enumerate(PROMPTS):
        emitted = [int(count) for count in result.emitted[row] if count >= 0]
        before = len(prompt) + np.concatenate([[0], np.cumsum(emitted)[:-1]]).astype(int)
        drafted = [int(count) for count in result.drafted[row] if count >= 0]
        pairs += zip(before.tolist(), drafted, strict=True)
    return pairs


def decoded(target, drafter):
    request = greedy(max_new_tokens=NEW, ignore_eos=True)
    options = dict(num_speculative_tokens=LENGTH, batch_size=4)
    return decode(target, PROMPTS, drafter=drafter, sampling=request, **options)


def until_the_end(pairs):
    """Return whether rows draft in full up to the drafter's last position, and not beyond."""
    return all(
        drafted == min(LENGTH, max(POSITIONS - length, 0)) or length == 1
        for length, drafted in pairs
    )


@pytest.fixture(scope="module")
def plain():
    return functools.cache(lambda target: decoded(target, None).token_ids)


@pytest.mark.parametrize("name", ["learned", *slow("rotary", "eagle3", "dflash")])
def test_rows_draft_up_to_the_drafters_own_last_position(name, tiny, learned, plain):
    target = learned if name == "learned" else tiny
    drafter = {
        "learned": lambda: draft_model(shortened(learned)),
        "rotary": lambda: draft_model(shortened(tiny)),
        "eagle3": lambda: head_drafter(short_head(eagle_head(tiny)), tiny, sliding_window=None),
        "dflash": lambda: head_drafter(short_head(block_head(tiny)), tiny),
    }[name]()
    result = decoded(target, drafter)
    assert result.token_ids == plain(target)
    lengths_and_counts = drafted_at(result)
    assert until_the_end(lengths_and_counts)
    assert {POSITIONS - 1, POSITIONS} & {length for length, _ in lengths_and_counts}
    assert any(drafted == LENGTH for _, drafted in lengths_and_counts)
    if name in ("learned", "rotary"):
        # It is the target itself: all that it drafts is accepted.
        np.testing.assert_array_equal(result.drafted, result.accepted)


def test_a_drafter_without_end_is_found(learned):
    """A broken variant: embeddings after the last one are read as if they were it."""
    endless = changed(draft_model(shortened(learned)))
    result = decoded(learned, endless)
    assert not until_the_end(drafted_at(result))
    assert (result.drafted != result.accepted).any()


@pytest.mark.parametrize("join", slow(take_turns, merge_drafters))
def test_drafters_beside_it_continue(join, learned, plain):
    short = draft_model(shortened(learned), num_speculative_tokens=LENGTH)
    joined = join(short, LoadedDrafter(Ngram(prompt_lookup_min=1)))
    assert joined.drafter.parts[0].max_positions == POSITIONS
    result = decoded(learned, joined)
    assert result.token_ids == plain(learned)
    beyond = [drafted for length, drafted in drafted_at(result) if length >= POSITIONS]
    assert 0 < sum(beyond) <= LENGTH * len(beyond)


def test_a_window_of_the_own_positions_draws_from_the_latest_tokens(tiny, learned, similar):
    """Rotary layers see distances. Learned positions end, and models with windows take no other."""

    def positions(model, **options):
        return DraftModel(model.architecture, **options).max_positions

    short = shortened(tiny)
    assert positions(short) == POSITIONS
    assert positions(short, sliding_window=POSITIONS) is None
    assert positions(short, sliding_window=POSITIONS + 1) == POSITIONS
    assert positions(shortened(learned), sliding_window=POSITIONS) == POSITIONS
    assert positions(with_window(short, SlidingWindow(8))) == POSITIONS
    assert DraftModel(Tabular(8)).max_positions == Tabular(8).max_positions
    head = short_head(eagle_head(tiny))
    windows = [
        head_drafter(one, tiny).drafter.sliding_window
        for one in (
            head,
            dataclasses.replace(head, training={"config": {"row_tokens": 9}}),
            dataclasses.replace(head, training={"config": {"row_tokens": 99}}),
        )
    ]
    assert windows == [POSITIONS, 9, POSITIONS]


def lines(records):
    return [record.getMessage() for record in records]


def test_fewer_positions_are_said_when_a_drafter_is_loaded(tiny, learned, caplog):
    begin = f"drafts in the first {POSITIONS} positions, and"
    make_drafter("draft_model", learned, shortened(learned))
    make_drafter("draft_model", tiny, shortened(tiny))
    head_drafter(short_head(block_head(tiny)), tiny)
    named = f"{tiny.name} has 600: longer rows continue without drafts"
    window = f"; drafter.sliding_window={POSITIONS} drafts on, from the latest tokens"
    assert lines(caplog.records) == [
        f"draft_model {begin} {learned.name} has 600: longer rows continue without drafts",
        f"draft_model {begin} {named}{window}",
        f"dflash {begin} {named}{window}",
    ]
    caplog.clear()
    make_drafter("draft_model", tiny, tiny)
    make_drafter("draft_model", tiny, shortened(tiny), sliding_window=POSITIONS)
    head_drafter(short_head(eagle_head(tiny)), tiny)
    assert not caplog.records


def test_chains_are_no_longer_than_what_a_head_drafts(tiny):
    for head, name, most in ((block_head(tiny), "dflash", 3), (medusa_head(tiny), "medusa", 3)):
        refused(
            lambda head=head, most=most: head_drafter(head, tiny, num_speculative_tokens=most + 1),
            f"num_speculative_tokens=4: {name} drafts at most {most} tokens in a row; lower it",
        )
