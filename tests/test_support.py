"""Drafters and rules for which docs/support.md has no other test to name."""

import jax
import numpy as np
import pytest
from conftest import row_count, slow, tiny_config
from decoding import PROMPTS, decode, mixed

from specjax.drafters import LoadedDrafter
from specjax.loading.load import random_model
from specjax.methods.early_exit import EarlyExit
from specjax.methods.ngram import Ngram
from specjax.methods.simulated import Simulated
from specjax.testing import Tabular, check_drafter

VOCAB, ROWS = 5, 8_000


def table():
    return Tabular(VOCAB), 1.2 * jax.random.normal(jax.random.key(0), (VOCAB, VOCAB))


def two_layers():
    config = tiny_config(
        vocab_size=VOCAB,
        num_layers=2,
        hidden_size=8,
        intermediate_size=8,
        num_heads=1,
        num_kv_heads=1,
        head_dim=4,
    )
    return random_model(config, 0, dtype="float32")


def replay():
    """Continuations that are unrelated to the target's own."""
    tokens = np.random.default_rng(0).integers(VOCAB, size=(row_count(ROWS), 4))
    drafter = Simulated(acceptance=1.0)
    return LoadedDrafter(drafter, drafter.replay(tokens.tolist(), VOCAB))


CELLS = {
    "ngram-block": (lambda: Ngram(prompt_lookup_min=1), table, "block"),
    "early_exit-block": (lambda: EarlyExit(2, exit_layer=1), two_layers, "block"),
    "simulated-rejection": (replay, table, "rejection"),
    "simulated-block": (replay, table, "block"),
}


@pytest.mark.parametrize(
    "cell", ["ngram-block", "simulated-block", *slow("early_exit-block", "simulated-rejection")]
)
def test_sampled_rows(cell):
    drafter, target, rule = CELLS[cell]
    check = check_drafter(drafter(), target(), row_count(ROWS), verify=rule)
    assert check.passed, check
    assert check.acceptance_length > 1.03


def test_plain_rows(tiny):
    """Together and one after the other."""
    options = {"verify": "coupled", "sampling": mixed(max_new_tokens=8)}
    together = decode(tiny, PROMPTS, **options)
    alone = decode(tiny, PROMPTS, batch_size=1, **options)
    assert together.token_ids == alone.token_ids
