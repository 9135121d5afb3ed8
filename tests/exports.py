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
from specjax.models.heads.eagle import Eagle
from specjax.models.heads.medusa import Medusa, MedusaConfig, parameter_table
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
    """Float32 logits [n, Vd] of a Medusa or EAGLE head on random tokens and features."""
    params, rng = complete_parameters(head, target), np.random.default_rng(seed)

    def feature(width):
        return jnp.asarray(rng.standard_normal((1, _TOKENS, width), np.float32))

    if isinstance(head.config, MedusaConfig):
        medusa = Medusa(head.config, target.dtype)
        return np.asarray(_medusa_logits(medusa, params, feature(head.config.hidden_size)))[0]
    features = {tap: feature(head.config.target_hidden_size) for tap in head.config.taps}
    tokens = rng.integers(0, head.config.decoder.vocab_size, (1, _TOKENS + 1))
    eagle = Eagle(head.config, target.dtype)
    return np.asarray(_eagle_logits(eagle, params, features, jnp.asarray(tokens, jnp.int32)))[0]


@functools.partial(jax.jit, static_argnums=0)
def _medusa_logits(medusa, params, feature):
    states = medusa.states(params, feature)
    every = [medusa.logits(params, states[index], index) for index in range(len(states))]
    return jnp.concatenate(every, axis=1)


@functools.partial(jax.jit, static_argnums=0)
def _eagle_logits(eagle, params, features, tokens):
    """Of a few pairs, and of one step further on the head's own output."""
    positions = jnp.arange(_TOKENS + 1)
    seen, cache = causal(positions, _TOKENS + 1), eagle.make_cache(1, _TOKENS)
    window, hidden = eagle.make_window(1, _TOKENS + 1), eagle.fuse(params, features)
    first, last = slice(None, -1), slice(-1, None)
    outputs = []
    for part in (first, last):
        output, window = eagle.extend(
            params,
            tokens[:, part],
            hidden,
            positions[None, part],
            cache,
            window,
            0 if part is first else _TOKENS,
            seen[:, part],
        )
        hidden = eagle.next_hidden(params, output)[:, last]
        outputs.append(eagle.logits(params, output))
    return jnp.concatenate(outputs, axis=1)
