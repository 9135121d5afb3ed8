"""The decoder against transformers: goldens written by scripts/data/make_goldens.py."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import slow

from specjax.core.cache import commit
from specjax.loading.load import load_model

GOLDENS = Path(__file__).parent / "goldens"
TINY = ("grouped_tied", "biased_untied", "llama3", "linear", "yarn", "longrope")


@pytest.fixture(scope="module")
def smollm2():
    return load_model("smollm2-135m-instruct", dtype="float32")


def prefill(model, tokens, features=()):
    """One forward over whole rows: logits, features and the cache that holds them."""
    decoder = model.architecture
    batch, length = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length)[None, :], tokens.shape)
    visible = jnp.tril(jnp.ones((1, length, length), bool))
    cache, window = decoder.make_cache(batch, 256), decoder.make_window(batch, length)
    out = decoder.extend(
        model.params, tokens, positions, cache, window, 0, visible, features=features
    )
    slots = positions.astype(jnp.int32)
    return out, commit(cache, out.window, slots, jnp.full(batch, length, jnp.int32))


@pytest.mark.parametrize("name", TINY)
def test_logits_and_features_equal_those_of_transformers(name):
    model = load_model(GOLDENS / name, dtype="float32")
    golden = np.load(GOLDENS / name / "golden.npz")
    out, _ = prefill(model, jnp.asarray(golden["tokens"]), ("layer_input:1",))
    expected = golden["logits"][..., : model.config.vocab_size]
    np.testing.assert_allclose(out.logits, expected, atol=2e-5, rtol=1e-5)
    np.testing.assert_allclose(
        out.features["layer_input:1"], golden["layer_input_1"], atol=1e-5, rtol=1e-5
    )


ROWS = json.loads((GOLDENS / "smollm2_greedy.json").read_text())["rows"]


@pytest.mark.parametrize("row", [ROWS[0], *slow(*ROWS[1:])])
def test_greedy_tokens_of_the_default_model_equal_those_of_transformers(smollm2, row):
    """Teacher-forced: each golden token is the argmax after the ones before it."""
    sequence = [*row["ids"], *row["tokens"]]
    out, _ = prefill(smollm2, jnp.asarray([sequence]))
    predicted = np.argmax(out.logits[0, len(row["ids"]) - 1 : -1], axis=-1)
    assert predicted.tolist() == row["tokens"]
