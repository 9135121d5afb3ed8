"""Long inputs: up to 128,000 positions at small width, and prompts that reach the last position."""

import logging

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import slow, tiny_config
from decoding import greedy

from specjax import generate
from specjax.core.cache import KVCache
from specjax.loading.load import random_model
from specjax.models.config import RopeScaling


@pytest.mark.parametrize("chunks", [32, *slow(125, 500)])
def test_a_long_prompt(chunks):
    """With one layer, keys depend on no other token and can be computed apart from the prefill."""
    chunk, new = 256, 8
    count = chunks * chunk
    scaling = RopeScaling("yarn", factor=16.0, original_max_positions=8192, attention_factor=1.1)
    shape = dict(num_layers=1, hidden_size=8, num_heads=1, num_kv_heads=1, head_dim=8)
    config = tiny_config(max_positions=1 << 17, rope_scaling=scaling, **shape)
    model = random_model(config, 0, dtype="float32")
    prompt = np.random.default_rng(0).integers(model.config.vocab_size, size=count)
    prompt[-600:-300] = prompt[-300:]
    request = greedy(max_new_tokens=new, ignore_eos=True)
    result = generate(model, prompt, drafter="ngram", sampling=request)
    assert result.drafted.max() > 0

    decoder = model.architecture

    def extend(tokens, positions, cache, visible):
        window = decoder.make_window(*tokens.shape)
        return decoder.extend(model.params, tokens, positions, cache, window, 0, visible)

    rows, positions = (x.reshape(chunks, chunk) for x in (jnp.asarray(prompt), jnp.arange(count)))
    itself = jnp.eye(chunk, dtype=bool)[None]
    alone = extend(rows, positions, decoder.make_cache(chunks, chunk), itself).window
    keys, values = (
        jnp.moveaxis(part, 1, 2).reshape(1, 1, 1, count, -1) for part in (alone.k, alone.v)
    )
    tokens = jnp.array([[prompt[-1], *result.token_ids[0][:-1]]])
    expected = extend(
        tokens,
        count - 1 + jnp.arange(new)[None],
        KVCache(keys, values, jnp.array([count - 1])),
        jnp.tril(jnp.ones((1, new, new), bool)),
    ).logits.argmax(axis=-1)
    assert expected[0].tolist() == result.token_ids[0]


def test_a_prompt_that_reaches_the_last_position_is_said(tiny, caplog):
    positions = tiny.config.max_positions
    request = greedy(max_new_tokens=8, ignore_eos=True)
    prompts = [[1] * 4, [2] * (positions - 3), [3] * (positions - 3)]
    with caplog.at_level(logging.WARNING, logger="specjax"):
        outputs = generate(tiny, prompts, sampling=request).token_ids
        generate(tiny, prompts[1], sampling=request, max_length=positions)
    assert list(map(len, outputs)) == [8, 3, 3]
    (line,) = (record.getMessage() for record in caplog.records)
    assert line == (
        f"prompts[1] has {positions - 3} tokens, and max_new_tokens=8 would exceed the {positions} "
        f"positions for which {tiny.name} is configured; its output ends after 3 tokens "
        "(2 such prompts)"
    )
