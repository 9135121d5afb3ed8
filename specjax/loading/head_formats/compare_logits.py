"""Compares the draft logits of two heads on fixed inputs, bit for bit."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.errors import InputError
from specjax.loading.heads.complete_parameters import complete_parameters
from specjax.loading.heads.head import Head
from specjax.loading.model import Model
from specjax.models.decoder import Decoder
from specjax.models.heads.draft_decoder import DraftModelConfig, ReducedDecoder
from specjax.models.heads.eagle import Eagle
from specjax.models.heads.medusa import Medusa, MedusaConfig
from specjax.models.heads.mtp import Mtp, MtpConfig
from specjax.models.heads.pair_head import PairHead
from specjax.models.masks import causal

_TOKENS = 6


def draft_logits(head: Head, target: Model, seed: int = 0) -> np.ndarray:
    """Float32 logits [n, Vd] of a head on random tokens and features.

    Each module of a head of pairs runs over a few of them, and the last one then one step further
    on its own output.
    """
    params = complete_parameters(head, target)
    rng = np.random.default_rng(seed)

    precision = target.activation_dtype, target.multiply

    def feature(width: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal((1, _TOKENS, width), np.float32), precision[0])

    if isinstance(head.config, MedusaConfig):
        medusa = Medusa(head.config, *precision)
        every = _medusa_logits(medusa, params, feature(head.config.hidden_size))
    elif isinstance(head.config, DraftModelConfig):
        model = ReducedDecoder(
            Decoder(head.config.decoder, target.activation_dtype, multiply=target.multiply)
        )
        tokens = rng.integers(0, head.config.decoder.vocab_size, (1, _TOKENS))
        every = _model_logits(model, params, jnp.asarray(tokens, jnp.int32))
    else:
        functions = Mtp if isinstance(head.config, MtpConfig) else Eagle
        pairs = functions(head.config, *precision)
        features = {tap: feature(head.config.target_hidden_size) for tap in head.config.taps}
        count = _TOKENS + head.config.num_modules
        tokens = rng.integers(0, head.config.decoder.vocab_size, (1, count))
        every = _pair_logits(pairs, params, features, jnp.asarray(tokens, jnp.int32))
    return np.asarray(every)[0]


@functools.partial(jax.jit, static_argnums=0)
def _medusa_logits(medusa: Medusa, params: Any, feature: jax.Array) -> jax.Array:
    states = medusa.states(params, feature)
    every = [medusa.logits(params, states[index], index) for index in range(len(states))]
    return jnp.concatenate(every, axis=1)


@functools.partial(jax.jit, static_argnums=0)
def _model_logits(model: ReducedDecoder, params: Any, tokens: jax.Array) -> jax.Array:
    positions = jnp.arange(_TOKENS)
    seen = causal(positions, _TOKENS)
    return model.extend(params, tokens, positions[None], None, None, 0, seen).logits


@functools.partial(jax.jit, static_argnums=0)
def _pair_logits(
    head: PairHead, params: Any, features: dict[str, jax.Array], tokens: jax.Array
) -> jax.Array:
    positions = jnp.arange(_TOKENS + 1)
    seen = causal(positions, _TOKENS + 1)
    cache, hidden, every = head.make_cache(1, _TOKENS), head.fuse(params, features), []
    for index in range(head.config.num_modules):
        own, window = head.module(params, index), head.make_window(1, _TOKENS + 1)
        read = tokens[:, index : index + _TOKENS]
        output, window = head.extend(
            own, read, hidden, positions[None, :-1], cache, window, 0, seen[:, :-1]
        )
        every.append(head.logits(own, output))
        hidden = head.next_hidden(own, output)
    further, _ = head.extend(
        own,
        tokens[:, -1:],
        hidden[:, -1:],
        positions[None, -1:],
        cache,
        window,
        _TOKENS,
        seen[:, -1:],
    )
    return jnp.concatenate([*every, head.logits(own, further)], axis=1)


def check_same(head: Head, again: Head, target: Model, where: str) -> None:
    """Raise InputError unless two heads give the same logits, bit for bit, for the same tokens."""
    if not np.array_equal(_ids(head), _ids(again)):
        raise InputError(f"{where}: read again, it drafts other tokens; report this")
    wanted, got = draft_logits(head, target), draft_logits(again, target)
    if not np.array_equal(wanted, got):
        difference = float(np.abs(wanted - got).max())
        raise InputError(
            f"{where}: read again, its logits differ by up to {difference:.3g}; report this"
        )


def _ids(head: Head) -> np.ndarray:
    return np.arange(head.target.vocab_size) if head.draft_ids is None else head.draft_ids
