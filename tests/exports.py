"""Heads to export, and exports changed as another tool might have."""

import functools
import json

import heads
import jax
import jax.numpy as jnp
import numpy as np
from heads import noisy
from safetensors.numpy import load_file, save_file

from specjax.files.folder_marker import MARKER
from specjax.loading.head_formats import write_foreign
from specjax.loading.heads.complete_parameters import complete_parameters
from specjax.loading.heads.head import Head, TargetMetadata
from specjax.models.decoder import Decoder
from specjax.models.heads.draft_decoder import DraftModelConfig, ReducedDecoder
from specjax.models.heads.eagle import Eagle
from specjax.models.heads.medusa import Medusa, MedusaConfig, parameter_table
from specjax.models.heads.mtp import Mtp, MtpConfig
from specjax.models.masks import causal

VOCABULARY = 40
_TOKENS = 6
eagle_head = functools.cache(heads.eagle_head)


@functools.cache
def medusa_head(target, vocabulary=None, original=False, layers=1, seed=0):
    size = target.config.vocab_size
    width = target.config.hidden_size
    config = MedusaConfig(width, size, 3, layers, vocabulary or size, original)
    ids = None
    if vocabulary is not None:
        rng = np.random.default_rng(seed)
        ids = np.sort(rng.choice(size, vocabulary, replace=False)).astype(np.int32)
    params = noisy(parameter_table(config), seed, 0.3)
    return Head("medusa", config, params, ids, TargetMetadata.of(target))


def written(tmp_path, head, form, target, **options):
    path = tmp_path / "head"
    write_foreign(head, path, form, target, **options)
    return path


def edit(path, config=None, tensors=None, drop=()):
    """Change an export as another tool, or an accident, might have."""
    values = json.loads((path / "config.json").read_text()) | (config or {})
    (path / "config.json").write_text(json.dumps(values))
    (file,) = path.glob("*.safetensors")
    # Saving drops the notes of specjax, and it is no longer what specjax wrote.
    (path / MARKER).unlink(missing_ok=True)
    stored = {name: value for name, value in load_file(file).items() if name not in drop}
    stored |= {name: np.ascontiguousarray(value) for name, value in (tensors or {}).items()}
    save_file(stored, file)


def draft_logits(head, target, seed=0):
    """Float32 logits [n, Vd] of a head on random tokens and features.

    Each module of a head of pairs runs over a few of them, and the last one then one step further
    on its own output.
    """
    params = complete_parameters(head, target)
    rng = np.random.default_rng(seed)

    precision = target.activation_dtype, target.multiply

    def feature(width):
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
def _medusa_logits(medusa, params, feature):
    states = medusa.states(params, feature)
    every = [medusa.logits(params, states[index], index) for index in range(len(states))]
    return jnp.concatenate(every, axis=1)


@functools.partial(jax.jit, static_argnums=0)
def _model_logits(model, params, tokens):
    positions = jnp.arange(_TOKENS)
    seen = causal(positions, _TOKENS)
    return model.extend(params, tokens, positions[None], None, None, 0, seen).logits


@functools.partial(jax.jit, static_argnums=0)
def _pair_logits(head, params, features, tokens):
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
