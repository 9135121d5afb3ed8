"""Tiny models with random weights, and heads of every kind for them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from conftest import tiny_config

from specjax.core.cache import commit
from specjax.core.causal_mask import causal
from specjax.drafters import head_drafter
from specjax.files import folder_checksums
from specjax.loading.load import random_model
from specjax.loading.storage import orbax_checkpoint
from specjax.methods.block.head import BlockConfig, BlockHead
from specjax.methods.eagle.head import Eagle, EagleConfig, default_taps
from specjax.methods.heads.complete_parameters import complete_parameters
from specjax.methods.heads.head import Head, TargetMetadata
from specjax.methods.medusa.head import Medusa, MedusaConfig
from specjax.methods.peagle.head import PEagle, PEagleConfig
from specjax.models.config import Attention
from specjax.models.mtp import MtpConfig, MtpModules
from specjax.models.parameters import Parameter
from specjax.testing import Tabular
from train.methods.medusa import first_params

VOCABULARY = 40
"""Tokens of a reduced draft vocabulary."""
SOME = np.sort(np.random.default_rng(0).choice(61, VOCABULARY, replace=False)).astype(np.int32)
"""Such a part of the tiny target's vocabulary."""


def save_with_orbax(directory, params, metadata):
    """Save a drafter as versions before safetensors did."""
    orbax_checkpoint.save(directory, params, metadata, overwrite=False)
    folder_checksums.seal(directory, "drafter")


@functools.cache
def small_model(vocab_size, num_layers=2, seed=0):
    """Return a random model with so few tokens that its outputs can be enumerated."""
    shape = dict(hidden_size=8, intermediate_size=8, num_heads=1, num_kv_heads=1, head_dim=4)
    config = tiny_config(vocab_size=vocab_size, num_layers=num_layers, max_positions=64, **shape)
    return random_model(config, seed, dtype="float32")


@functools.cache
def bigrams(vocab):
    """Return a target that is a table of bigrams."""
    return Tabular(vocab), 1.2 * jax.random.normal(jax.random.key(0), (vocab, vocab))


def eagle_config(target, version=3, vocabulary=None, num_kv_heads=None, **flags):
    taps = ("final_norm",) if version == 1 else default_taps(target.config.num_layers)
    return EagleConfig(
        decoder=dataclasses.replace(
            target.config.llama_layers(1),
            num_kv_heads=num_kv_heads or target.config.num_kv_heads,
        ),
        version=version,
        target_hidden_size=target.config.hidden_size,
        draft_vocab_size=vocabulary or target.config.vocab_size,
        taps=taps,
        **flags,
    )


def noisy(table, seed, spread):
    """Return random parameters in which norms, biases and logits have a noticeable effect."""
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


def peagle_config(target, vocabulary=None, num_layers=1, **flags):
    like = eagle_config(target, vocabulary=vocabulary, **flags)
    fields = {field.name: getattr(like, field.name) for field in dataclasses.fields(like)}
    fields["decoder"] = dataclasses.replace(like.decoder, num_layers=num_layers)
    return PEagleConfig(**fields, mask_token_id=target.config.vocab_size - 1)


def peagle_head(target, vocabulary=None, num_layers=1, seed=0, spread=1.0, **flags):
    config = peagle_config(target, vocabulary, num_layers, **flags)
    params = noisy(config.parameter_table(), seed, spread)
    ids = None if vocabulary is None else some_ids(target, vocabulary, seed)
    return Head("peagle", config, params, ids, TargetMetadata.of(target))


def mtp_config(target, num_modules=1, vocabulary=None, decoder=None, **conventions):
    return MtpConfig(
        decoder=decoder or target.config.one_layer(),
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
    """Return the target with MTP modules of its own."""
    head = mtp_head(target, num_modules, **options)
    return dataclasses.replace(target, mtp=MtpModules(head.config, head.params))


def mtp_drafter(target, **options):
    return head_drafter(mtp_head(target, **options), target)


def eagle_drafter(target, **options):
    return head_drafter(eagle_head(target, **options), target)


def peagle_drafter(target, **options):
    return head_drafter(peagle_head(target, **options), target)


def block_config(target, vocabulary=None, num_layers=2, **options):
    decoder = target.config.llama_layers(num_layers)
    decoder = dataclasses.replace(decoder, attention=Attention(qk_norm=True))
    usual = dict(
        taps=tuple(f"layer_input:{i}" for i in range(1, target.config.num_layers)),
        block_size=4,
        mask_token_id=target.config.vocab_size - 1,
    )
    return BlockConfig(
        decoder=decoder,
        target_hidden_size=target.config.hidden_size,
        draft_vocab_size=vocabulary or target.config.vocab_size,
        **{**usual, **options},
    )


def block_head(target, vocabulary=None, seed=0, spread=1.0, **options):
    config = block_config(target, vocabulary, **options)
    params = noisy(config.parameter_table(), seed, spread)
    ids = None if vocabulary is None else some_ids(target, vocabulary, seed)
    return Head(config.kind, config, params, ids, TargetMetadata.of(target))


def block_drafter(target, **options):
    return head_drafter(block_head(target, **options), target)


def medusa_config(target, heads=3, num_layers=1, original_lm_head=True, projection=False, ids=None):
    vocab = target.config.vocab_size
    size = vocab if ids is None else len(ids)
    width = target.config.hidden_size
    return MedusaConfig(
        hidden_size=width,
        vocab_size=vocab,
        num_heads=heads,
        num_layers=num_layers,
        draft_vocab_size=size,
        original_lm_head=original_lm_head,
        projection=projection,
    )


def medusa_head(target, ids=None, spread=1.0, seed=0, **options):
    """Return random Medusa heads; if they have their own output layers, these are noisy copies."""
    config = medusa_config(target, ids=ids, **options)
    rng = np.random.default_rng(seed)

    def noise(entry):
        size = spread * (0.1 if len(entry.shape) == 3 else entry.shape[-2] ** -0.5)
        return jnp.asarray(size * rng.standard_normal(entry.shape, np.float32))

    table = config.parameter_table()
    if config.projection or not config.original_lm_head:
        start = first_params(Medusa(config, jnp.dtype("float32")), target, ids, jax.random.key(0))
    table.pop("head", None)
    params = jax.tree.map(noise, table, is_leaf=lambda node: isinstance(node, Parameter))
    if config.projection:
        params["projection"] = jax.tree.map(jnp.add, params["projection"], start["projection"])
    if not config.original_lm_head:
        params["head"] = start["head"]
    return Head("medusa", config, params, ids, TargetMetadata.of(target))


@functools.cache
def noisy_medusa_head(target, vocabulary=None, original=False, layers=1, seed=0):
    ids = None if vocabulary is None else some_ids(target, vocabulary, seed)
    config = medusa_config(target, 3, layers, original, ids=ids)
    params = noisy(config.parameter_table(), seed, 0.3)
    return Head("medusa", config, params, ids, TargetMetadata.of(target))


_PAIRS = 6


def draft_logits(head, target, seed=0):
    """Return float32 logits [n, Vd] of a Medusa or EAGLE head on random tokens and features."""
    params, rng = complete_parameters(head, target), np.random.default_rng(seed)

    def feature(width):
        return jnp.asarray(rng.standard_normal((1, _PAIRS, width), np.float32))

    if isinstance(head.config, MedusaConfig):
        medusa = Medusa(head.config, target.dtype)
        return np.asarray(_medusa_logits(medusa, params, feature(head.config.hidden_size)))[0]
    features = {tap: feature(head.config.target_hidden_size) for tap in head.config.taps}
    if isinstance(head.config, BlockConfig):
        return np.asarray(_block_logits(BlockHead(head.config, target.dtype), params, features))[0]
    tokens = rng.integers(0, head.config.decoder.vocab_size, (1, _PAIRS + 1))
    functions = PEagle if isinstance(head.config, PEagleConfig) else Eagle
    eagle = functions(head.config, target.dtype)
    return np.asarray(_eagle_logits(eagle, params, features, jnp.asarray(tokens, jnp.int32)))[0]


@functools.partial(jax.jit, static_argnums=0)
def _medusa_logits(medusa, params, feature):
    states = medusa.states(params, feature)
    every = [medusa.logits(params, states[index], index) for index in range(len(states))]
    return jnp.concatenate(every, axis=1)


@functools.partial(jax.jit, static_argnums=0)
def _block_logits(block, params, features):
    """Return the logits of a block after a few features, and its estimates of acceptance."""
    window = block.context(params, block.fuse(params, features), jnp.arange(_PAIRS)[None])
    slots, count = jnp.arange(_PAIRS)[None], jnp.array([_PAIRS])
    cache = commit(block.make_cache(1, _PAIRS), window, slots, count)
    tokens = jnp.arange(block.config.block_size)[None]
    inside = jnp.where(tokens > 0, block.config.mask_token_id, 0)
    states = block.extend(params, inside, _PAIRS + tokens, cache)
    logits = block.logits(params, states)
    embedded = block.embed_previous(params, tokens)
    if block.config.markov_rank:
        logits += block.bias(params, embedded)
    if block.config.selector_rank:
        every = jnp.arange(logits.shape[2])[None, None]
        logits += block.edges(params, states, tokens, every)
    if block.config.confidence:
        logits += block.confidence_logit(params, states, embedded)[:, :, None]
    return logits


@functools.partial(jax.jit, static_argnums=0)
def _eagle_logits(eagle, params, features, tokens):
    """Return the logits for a few pairs, and for one further step on the head's own output."""
    positions = jnp.arange(_PAIRS + 1)
    seen, cache = causal(positions, _PAIRS + 1), eagle.make_cache(1, _PAIRS)
    window, hidden = eagle.make_window(1, _PAIRS + 1), eagle.fuse(params, features)
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
            0 if part is first else _PAIRS,
            seen[:, part],
        )
        hidden = eagle.next_hidden(params, output)[:, last]
        outputs.append(eagle.logits(params, output))
    return jnp.concatenate(outputs, axis=1)
