"""MTP modules: what they compute, against a straightforward computation of its own."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from conftest import slow
from decoding import first_state, greedy, make_call
from test_decoder import one_pass
from tiny_models import mtp_config, mtp_drafter, mtp_head

from specjax.core.causal_mask import causal
from specjax.core.round import make_context, noise_keys, proposal_noise
from specjax.errors import InputError
from specjax.methods.heads.complete_parameters import complete_parameters
from specjax.models.mtp import Mtp
from specjax.trees import best_tree

CONVENTIONS = {
    "default": {},
    "hidden_first": {"concat": "hidden_first"},
    "raw": {"recursion": "raw"},
    "zero_first": {"zero_first_embedding": True},
    "pre_norm": {"hidden": "pre_norm"},
}
"""Each convention other than the default, one at a time."""


def rms(x, scale, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * scale


def turned(x, position, theta):
    """One head's vector, its pairs (i, i + C/2) rotated."""
    half = len(x) // 2
    angles = position / theta ** (np.arange(half) / half)
    first, second = x[:half], x[half:]
    return np.concatenate(
        [
            first * np.cos(angles) - second * np.sin(angles),
            second * np.cos(angles) + first * np.sin(angles),
        ]
    )


def block(layer, x, shape):
    """One decoder layer over a sequence [T, D], position by position."""
    scale = lambda name: layer[name]["scale"]  # noqa: E731
    kernel = lambda part, name: layer[part][name]["kernel"]  # noqa: E731
    h = rms(x, scale("attention_norm"), shape.rms_norm_eps)
    tokens, heads, groups, width = len(x), shape.num_heads, shape.num_kv_heads, shape.head_dim
    group = heads // groups
    qkv = (h @ kernel("attention", "qkv")).reshape(tokens, groups, group + 2, width)
    query = qkv[:, :, :-2].reshape(tokens, heads, width)
    key, value = qkv[:, :, -2], qkv[:, :, -1]
    mixed = np.zeros_like(query)
    for t in range(len(x)):
        for head in range(shape.num_heads):
            mine = turned(query[t, head], t, shape.rope_theta)
            keys = [turned(key[s, head // group], s, shape.rope_theta) for s in range(t + 1)]
            scores = np.array(keys) @ mine / np.sqrt(shape.head_dim)
            weights = np.exp(scores - scores.max())
            mixed[t, head] = weights @ value[: t + 1, head // group] / weights.sum()
    x = x + mixed.reshape(tokens, heads * width) @ kernel("attention", "output")
    h = rms(x, scale("mlp_norm"), shape.rms_norm_eps)
    hidden = shape.intermediate_size
    blocks = np.gcd(heads, hidden)
    both = (h @ kernel("mlp", "gate_up")).reshape(tokens, blocks, 2, hidden // blocks)
    gate, up = (both[:, :, part].reshape(tokens, hidden) for part in range(2))
    return x + (gate / (1 + np.exp(-gate)) * up) @ kernel("mlp", "down")


def run_module(config, params, index, tokens, hidden):
    """The outputs of a module at positions 0, 1, ..., for its tokens and hidden states there."""
    own, shared, eps = params["modules"][str(index)], params["shared"], config.decoder.rms_norm_eps
    if "embed" in shared:
        embedded = shared["embed"]["embedding"][tokens]
    else:
        embedded = shared["head"]["kernel"].T[tokens]
    if config.zero_first_embedding:
        embedded = embedded * (np.arange(len(tokens)) > 0)[:, None]
    e = rms(embedded, own["embedding_norm"]["scale"], eps)
    h = rms(hidden, own["hidden_norm"]["scale"], eps)
    pair = np.concatenate([e, h] if config.concat == "embedding_first" else [h, e], axis=1)
    return block(own["layer"], pair @ own["projection"]["kernel"], config.decoder)


def normed(config, params, index, output):
    scale = params["modules"][str(index)]["final_norm"]["scale"]
    return rms(output, scale, config.decoder.rms_norm_eps)


def handed_on(config, params, index, output):
    return normed(config, params, index, output) if config.recursion == "normed" else output


def reference(config, params, tokens, features):
    """The logits of each module at each position that it has.

    From x_0 .. x_{n-1}, drafts after them, and f_0 .. f_{n-2}. Module k reads x_{t+1+k} at position
    t, up to n-2, and the last one its own outputs at further positions.
    """
    hidden, every = features[config.hidden].astype(np.float64), []
    most = len(hidden)
    for index in range(config.num_modules):
        read = tokens[1 + index :]
        last = index == config.num_modules - 1
        count = len(read) if last else min(len(read), most)
        hidden = hidden[:count]
        output = run_module(config, params, index, read[: len(hidden)], hidden)
        while len(hidden) < count:
            latest = handed_on(config, params, index, output[-1:])
            hidden = np.concatenate([hidden, latest])
            output = run_module(config, params, index, read[: len(hidden)], hidden)
        every.append(
            normed(config, params, index, output) @ params["shared"]["draft_head"]["kernel"]
        )
        hidden = handed_on(config, params, index, output)
    return every


def wide(params):
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)


def given(target, seed=0, length=6):
    """Tokens and features, as plain arrays."""
    rng = np.random.default_rng(seed)
    width = target.config.hidden_size
    features = {
        name: 2 * rng.standard_normal((length - 1, width)).astype(np.float32)
        for name in ("final_norm", "pre_norm")
    }
    return rng.integers(0, target.config.vocab_size, length).astype(np.int32), features


@functools.partial(jax.jit, static_argnums=0)
def chained(mtp, params, tokens, features):
    """`Mtp` over all positions of each module at once."""
    hidden, every = mtp.fuse(params, {name: value[None] for name, value in features.items()}), []
    for index in range(mtp.config.num_modules):
        own, count = mtp.module(params, index), len(tokens) - 1 - index
        output, _ = mtp.extend(
            own,
            tokens[None, 1 + index :],
            hidden[:, :count],
            jnp.arange(count)[None],
            mtp.make_cache(1, 8),
            mtp.make_window(1, count),
            0,
            causal(jnp.arange(count), count),
        )
        every.append(mtp.logits(own, output)[0])
        hidden = mtp.next_hidden(own, output)
    return every


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_each_convention_is_what_it_says(convention, tiny):
    head = mtp_head(tiny, num_modules=3, **CONVENTIONS[convention])
    params = complete_parameters(head, tiny)
    tokens, features = given(tiny)
    got = chained(Mtp(head.config, tiny.dtype), params, tokens, features)
    wanted = reference(head.config, wide(params), tokens, features)
    for mine, theirs in zip(got, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-4, rtol=1e-3)
    usual = chained(Mtp(mtp_config(tiny, 3), tiny.dtype), params, tokens, features)
    differ = np.abs(np.asarray(got[1]) - np.asarray(usual[1])).max() > 1e-2
    assert differ == (convention != "default")


@pytest.mark.parametrize(
    ("modules", "convention"),
    [
        (3, "zero_first"),
        *slow((1, "raw"), (1, "zero_first"), (2, "hidden_first")),
        *slow((3, "default"), (3, "raw"), (3, "pre_norm")),
    ],
)
def test_drafts_are_those_of_a_plain_computation(modules, convention, tiny):
    """Beyond the number of modules too, and where modules have pairs before the first position."""
    loaded = mtp_drafter(tiny, num_modules=modules, vocabulary=40, **CONVENTIONS[convention])
    draft = proposed(tiny, loaded, num_speculative_tokens=modules + 3)
    assert np.asarray(draft.valid).all()
    for row, prompt in enumerate(SHORT):
        after = plain_logits(tiny, loaded, prompt)
        wanted: list[int] = []
        for _ in range(modules + 3):
            wanted.append(after(wanted, 1)[0])
        assert np.asarray(draft.tokens)[row].tolist() == wanted


@pytest.mark.parametrize(
    ("modules", "convention"), [(3, "default"), *slow((2, "zero_first"), (2, "raw"))]
)
def test_trees_are_those_of_a_plain_computation(modules, convention, tiny):
    """Each node is the candidate of its rank after the tokens on the way to it."""
    loaded = mtp_drafter(tiny, num_modules=modules, vocabulary=40, **CONVENTIONS[convention])
    rates = [[0.7, 0.2, 0.05]] * (modules + 2)
    tree = best_tree(rates, 8 + 4 * modules)
    assert tree.depth == modules + 2
    draft = proposed(tiny, loaded, tree=tree, num_speculative_tokens=tree.depth)
    assert np.asarray(draft.valid).all()
    for row, prompt in enumerate(SHORT):
        after = plain_logits(tiny, loaded, prompt)
        found: dict[tuple[int, ...], list[int]] = {(): []}
        for path, token in zip(tree.choices, np.asarray(draft.tokens)[row], strict=True):
            above = found[path[:-1]]
            assert token == after(above, path[-1] + 1)[-1]
            found[path] = [*above, int(token)]


SHORT = [[5, 9], [3, 4, 5], [9, 8, 7, 6], list(range(20, 29))]
"""Prompts after which later modules have pairs before position 0."""


def proposed(target, loaded, **options):
    """The greedy draft of a call's first round."""
    options = {"draft_sample_method": "greedy", **options}
    call = make_call(
        target,
        SHORT,
        drafter=loaded._replace(drafter=replace(loaded.drafter, **options)),
        sampling=greedy(max_new_tokens=16),
    )

    @jax.jit
    def propose(params, state):
        context = make_context(call.plan.loop, params[0], state)
        part, own = call.plan.loop.drafter.parts[0], state.drafter[0].drafter
        noise = proposal_noise(call.plan.loop, state, noise_keys(call.plan.loop, params[1], state))
        return part.propose(params[1][0], own, context, noise)[0]

    return propose(call.plan.params, first_state(call))


def plain_logits(target, loaded, prompt):
    """A function of drafted tokens and a count: the likeliest tokens after them, best first."""
    config, params = loaded.drafter.head.config, wide(loaded.params)
    ids = np.asarray(loaded.params["draft_ids"])
    known = len(prompt) - 1
    read = one_pass(target, np.array([[*prompt, *[0] * (12 - known)]]), features=(config.hidden,))
    features = {config.hidden: np.asarray(read.features[config.hidden])[0, :known]}

    def after(drafted, count):
        every = reference(config, params, np.array([*prompt, *drafted]), features)
        logits = every[min(len(drafted), config.num_modules - 1)][-1]
        return ids[np.argsort(-logits, kind="stable")[:count]].tolist()

    return after


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"num_modules": 0}, "num_modules=0: use a whole number from 1 to 64"),
        ({"concat": "both"}, "concat='both' is unknown: use embedding_first, hidden_first"),
        (
            {"hidden": "layer_input:1"},
            "hidden='layer_input:1' is unknown: use final_norm, pre_norm",
        ),
        ({"recursion": "no"}, "recursion='no' is unknown: use normed, raw"),
        ({"zero_first_embedding": 1}, "zero_first_embedding=1"),
        ({"vocabulary": 62}, "draft_vocab_size=62: must be in 1..61"),
    ],
)
def test_senseless_configs_are_refused(fields, says, tiny, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(InputError) as raised:
        mtp_config(tiny, **fields)
    assert says in str(raised.value)
