"""Small heads with random weights, for the tests."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from specjax.drafters import head_drafter
from specjax.loading.heads.head import Head, TargetMetadata
from specjax.models.heads.eagle import EagleConfig, default_taps
from specjax.models.heads.medusa import Medusa, MedusaConfig, parameter_table
from specjax.models.heads.mtp import MtpConfig, MtpModules
from specjax.models.parameters import Parameter
from train.methods.medusa import first_params

SOME = np.sort(np.random.default_rng(0).choice(61, 40, replace=False)).astype(np.int32)
"""A part of the tiny target's vocabulary."""


def eagle_config(target, version=3, vocabulary=None, **flags):
    taps = ("final_norm",) if version == 1 else default_taps(target.config.num_layers)
    return EagleConfig(
        decoder=dataclasses.replace(target.config, num_layers=1),
        version=version,
        target_hidden_size=target.config.hidden_size,
        draft_vocab_size=vocabulary or target.config.vocab_size,
        taps=taps,
        **flags,
    )


def noisy(table, seed, spread):
    """Parameters of noise: norms and biases that are not neutral, logits that are."""
    entries, tree = jax.tree.flatten(table, is_leaf=lambda node: isinstance(node, Parameter))
    rng = np.random.default_rng(seed)
    leaves = []
    for entry in entries:
        noise = rng.standard_normal(entry.shape, np.float32)
        size = 0.1 if len(entry.shape) == 1 else spread * entry.shape[0] ** -0.5
        neutral = np.float32(len(entry.shape) == 1 and entry.kind == "ones")
        leaves.append(jnp.asarray(neutral + noise * np.float32(size)))
    return jax.tree.unflatten(tree, leaves)


def some_ids(target, count, seed):
    rng = np.random.default_rng(seed)
    return np.sort(rng.choice(target.config.vocab_size, count, replace=False)).astype(np.int32)


def eagle_head(target, version=3, vocabulary=None, seed=0, spread=1.0, **flags):
    config = eagle_config(target, version, vocabulary, **flags)
    params = noisy(config.parameter_table(), seed, spread)
    ids = None if vocabulary is None else some_ids(target, vocabulary, seed)
    kind = "eagle3" if version == 3 else "eagle"
    return Head(kind, config, params, ids, TargetMetadata.of(target))


def mtp_config(target, num_modules=1, vocabulary=None, decoder=None, **conventions):
    return MtpConfig(
        decoder=decoder or dataclasses.replace(target.config, num_layers=1),
        draft_vocab_size=vocabulary or target.config.vocab_size,
        num_modules=num_modules,
        **conventions,
    )


def mtp_head(target, num_modules=1, vocabulary=None, seed=0, spread=1.0, **conventions):
    config = mtp_config(target, num_modules, vocabulary, **conventions)
    params = noisy(config.parameter_table(), seed, spread)
    ids = None if vocabulary is None else some_ids(target, vocabulary, seed)
    return Head("mtp", config, params, ids, TargetMetadata.of(target))


def with_modules(target, num_modules=1, **options):
    """The target with MTP modules of its own."""
    head = mtp_head(target, num_modules, **options)
    return dataclasses.replace(target, mtp=MtpModules(head.config, head.params))


def mtp_drafter(target, **options):
    return head_drafter(mtp_head(target, **options), target)


def eagle_drafter(target, **options):
    return head_drafter(eagle_head(target, **options), target)


def medusa_config(target, heads=3, num_layers=1, original_lm_head=True, projection=False, ids=None):
    vocab = target.config.vocab_size
    size = vocab if ids is None else len(ids)
    width = target.config.hidden_size
    return MedusaConfig(width, vocab, heads, num_layers, size, original_lm_head, projection)


def medusa_head(target, ids=None, spread=1.0, seed=0, **options):
    """Random heads; own ones are the target's, with noise."""
    config = medusa_config(target, ids=ids, **options)
    rng = np.random.default_rng(seed)

    def noise(entry):
        size = spread * (0.1 if len(entry.shape) == 3 else entry.shape[-2] ** -0.5)
        return jnp.asarray(size * rng.standard_normal(entry.shape, np.float32))

    table = parameter_table(config)
    if config.projection or not config.original_lm_head:
        start = first_params(Medusa(config, jnp.dtype("float32")), target, ids, jax.random.key(0))
    table.pop("head", None)
    params = jax.tree.map(noise, table, is_leaf=lambda node: isinstance(node, Parameter))
    if config.projection:
        params["projection"] = jax.tree.map(jnp.add, params["projection"], start["projection"])
    if not config.original_lm_head:
        params["head"] = start["head"]
    return Head("medusa", config, params, ids, TargetMetadata.of(target))
