"""A drafter of every method, for one tiny target, in every topology that the method takes."""

import contextlib
import contextvars
import dataclasses
import functools

import conftest
import jax
import jax.numpy as jnp
import numpy as np
from conftest import tiny_config
from decoding import Shifting, random_distribution
from tiny_models import block_head, eagle_head, medusa_head, mtp_head, peagle_head

from specjax.core.drafter import LoadedDrafter
from specjax.drafters import (
    TreeOptions,
    drafter_options,
    head_drafter,
    make_drafter,
    merge_drafters,
    take_turns,
)
from specjax.loading.load import random_model
from specjax.loading.quantize import quantized_model
from specjax.methods.corpus.drafter import Corpus
from specjax.methods.corpus.sorted_text import sorted_text, with_separator
from specjax.methods.draft_model.drafter import DraftModel
from specjax.methods.draft_model.other_tokenizer import TokenMap, TranslatedModel
from specjax.methods.ngram import Ngram
from specjax.methods.quantized import Quantized
from specjax.methods.registry import METHODS
from specjax.models.config import Recurrence
from specjax.processors import Grammar

VOCAB = 8
LENGTH = 2
"""The longest path of a draft."""
CHOICES = ((0,), (1,), (0, 0), (1, 0))
"""Both siblings have a child: `block` looks at the second one's after it has refused the first."""
TREES = {
    "chain": None,
    "static": TreeOptions(kind="static", choices=CHOICES),
    "dynamic": TreeOptions(kind="dynamic", topk=2, depth=LENGTH, num_nodes=4),
}
TOPOLOGIES = (*TREES, "merged", "turns")
"""Of a drafter alone; beside a lookup in one tree; after a lookup, a static one if it can be."""
LOOKUP = Ngram(prompt_lookup_min=1, num_matches=1)
SOME = np.arange(7, dtype=np.int32)
FEW_KEYS = dict(sliding_window=3, sinks=1)
DFLASH2 = dict(conv_kernel_size=2, conv_group_size=8, selector_rank=3, selector_top_k=5)
FEW_RECORDED, RECORDED = 5_000, 50_000
"""The number of rows for which `simulated` has tokens, and where the whole suite runs."""


DELTA = Recurrence("delta", key_heads=1, value_heads=4, key_width=8, value_width=8)
MAMBA2 = Recurrence("mamba2", key_heads=1, value_heads=4, key_width=8, value_width=8)
LAYERS = {
    "attention": {},
    "delta": dict(recurrence=DELTA, mixers=("recurrent", "attention"), family="qwen3_5_text"),
    "mamba2": dict(recurrence=MAMBA2, mixers=("recurrent", "attention"), family="bamba"),
    "grammar": {},
}
"""The layers of a target: of attention alone, or with recurrent ones between them; or a target of
attention whose outputs follow a grammar."""
RECURRENT = ("delta", "mamba2")
NEXT = {
    # state: {token: the state after it}
    0: {0: 1, 1: 2, 2: 0, 3: 3, 4: 1, 5: 0, 6: 3},
    1: {0: 1, 1: 0, 2: 2, 5: 3},
    2: {3: 1},
    3: {1: 0, 2: 3, 6: 2, 7: 0},
}
"""A grammar in which what may follow depends on all tokens before: one alone in state 2."""
_layers = contextvars.ContextVar("layers", default="attention")


@contextlib.contextmanager
def target_with(layers):
    """Let `target` be one with other layers inside this context."""
    token = _layers.set(layers)
    yield
    _layers.reset(token)


def per_target(function):
    """Return a function that computes its result once for each target and arguments."""
    cached = functools.cache(lambda layers, *arguments: function(*arguments))
    return functools.wraps(function)(lambda *arguments: cached(_layers.get(), *arguments))


@per_target
def target():
    """Return the target of all cells with the current layers."""
    shape = dict(hidden_size=32, intermediate_size=32, num_heads=2, num_kv_heads=1, head_dim=16)
    layers = LAYERS[_layers.get()]
    config = tiny_config(vocab_size=VOCAB, max_positions=64, **shape, **layers)
    return random_model(config, 0, dtype="float32")


def constraint():
    """Return the processors of the current target, each with the arrays that it reads of a row."""
    if _layers.get() != "grammar":
        return ()
    after = np.full((len(NEXT), VOCAB), -1, np.int16)
    for state, tokens in NEXT.items():
        after[state, list(tokens)] = list(tokens.values())
    arrays = {
        "classes": np.arange(VOCAB, dtype=np.int32),
        "successors": after.reshape(-1),
        "width": np.int32(VOCAB),
        "least": np.zeros(len(NEXT), np.int32),
        "drafts": np.array([-1, -1, 3, 2], np.int32),
        "room": np.int32(1000),
    }
    return ((Grammar(*after.shape, after.size), jax.tree.map(lambda array: array[None], arrays)),)


@per_target
def similar():
    """Return the target with noise on its weights."""
    rng = np.random.default_rng(0)

    def noisy(leaf):
        return jnp.asarray(leaf * (1 + 0.5 * rng.standard_normal(leaf.shape, np.float32)))

    return dataclasses.replace(target(), params=jax.tree.map(noisy, target().params))


def named(name, **options):
    """Return a function that makes a drafter by its name, as users do."""
    return lambda **tree: make_drafter(name, target(), **options, **tree)


def of_head(head, **options):
    """Return a function that makes a drafter of random weights."""
    return lambda **tree: head_drafter(head(target(), **options), target(), **tree)


def eagle3(**options):
    return of_head(eagle_head, vocabulary=7, seed=1)(**options)


def draft_model(positions=64, **options):
    model = similar()
    config = dataclasses.replace(model.config, max_positions=positions)
    model = dataclasses.replace(model, config=config)
    return LoadedDrafter(DraftModel(model.architecture, **options), model.params)


def quantized(**tree):
    copy = quantized_model(similar(), "int4")
    return LoadedDrafter(Quantized(copy.architecture, weights="int4", **tree), copy.params)


def corpus(**tree):
    texts = np.random.default_rng(0).integers(VOCAB, size=(5, 30))
    parts = [with_separator(text.tolist(), np.uint16) for text in texts]
    options = dict(prompt_lookup_min=1, suffix_decoding_max_spec_factor=2.0)
    return LoadedDrafter(Corpus(**options, **tree), (sorted_text(parts, 192, np.uint16),))


def token_recycling(tree=None):
    return make_drafter("token_recycling", target(), tree=tree)


def simulated():
    rows = RECORDED if conftest.full else FEW_RECORDED
    texts = np.random.default_rng(0).integers(VOCAB, size=(rows, 32)).tolist()
    return make_drafter("simulated", target(), continuations=texts, acceptance=0.9)


MAKERS = {
    "ngram": named("ngram", prompt_lookup_min=1),
    "suffix": named("suffix"),
    "corpus": corpus,
    "draft_model": draft_model,
    "early_exit": named("early_exit", exit_layer=1),
    "layer_skip": named("layer_skip", skipped=(1,)),
    "quantized": quantized,
    "sparse_kv": named("sparse_kv", budget=3, sinks=1),
    "medusa": of_head(medusa_head, heads=2, original_lm_head=False, spread=3.0),
    "eagle": of_head(eagle_head, version=1, spread=0.5),
    "eagle3": eagle3,
    "peagle": of_head(peagle_head, num_layers=2, spread=0.5),
    "mtp": of_head(mtp_head, num_modules=2),
    "dflash": of_head(block_head, spread=0.5),
    "dspark": of_head(block_head, spread=0.5, markov_rank=2),
    "token_recycling": token_recycling,
    "lookahead": named("lookahead", window=2, levels=3, guesses=2, pool_size=64),
    "lookup": named("lookup"),
    "simulated": simulated,
    "forced": named("forced"),
}
"""How to make a drafter of each method: a new one needs its line here, and is proved by it."""


def translated(**options):
    """The model with two tokens in another order, and one that the target does not have."""
    model, ids = similar(), np.array([0, 2, 1, 3, 4, 5, 6], np.int32)
    tokens = TokenMap(np.arange(VOCAB - 1, dtype=np.int32), ids, np.append(ids, np.int32(3)))
    params = TranslatedModel.parameters(_reordered(model.params, [0, 2, 1, 3, 4, 5, 6, 7]), tokens)
    drafter = DraftModel(TranslatedModel(model.architecture, VOCAB), **options)
    return LoadedDrafter(drafter, params)


def _reordered(params, ids):
    """The parameters of a model whose token i is the token `ids[i]` of the given one."""
    params = dict(params) | {"embed": {"embedding": params["embed"]["embedding"][jnp.array(ids)]}}
    if "head" in params:
        params["head"] = {"kernel": params["head"]["kernel"][:, jnp.array(ids)]}
    return params


VARIANTS = {
    "translated": translated,
    "itself": lambda: LoadedDrafter(DraftModel(target().architecture), target().params),
    "shifting": lambda: LoadedDrafter(Shifting(VOCAB, step=VOCAB)),
    "random": lambda: random_distribution(VOCAB),
    "draft_model_few_keys": lambda: draft_model(**FEW_KEYS),
    "eagle3_few_keys": lambda: eagle3(**FEW_KEYS),
    "mtp_few_keys": lambda: of_head(mtp_head, num_modules=2)(**FEW_KEYS),
    "dflash_few_keys": lambda: of_head(block_head, spread=0.5)(**FEW_KEYS),
    "early_exit_p_min": named("early_exit", exit_layer=1, draft_p_min=0.2),
    "early_exit_all_layers": named("early_exit", exit_layer=3),
    "draft_model_greedy": lambda: draft_model(draft_sample_method="greedy"),
    "draft_model_short": lambda: draft_model(positions=14),
    "layer_skip_p_min": named("layer_skip", skipped=(1,), draft_p_min=0.3),
    "medusa_projected": of_head(medusa_head, heads=2, projection=True, ids=SOME),
    "eagle_reduced": of_head(eagle_head, version=1, fc_bias=True, vocabulary=7),
    "eagle3_flags": of_head(eagle_head, norm_before_residual=True, norm_output=True, fc_norm=True),
    "eagle3_borrowed": of_head(eagle_head, vocabulary=7, own_head=False, num_kv_heads=2),
    "mtp_reduced": of_head(
        mtp_head, num_modules=2, vocabulary=7, concat="hidden_first", zero_first_embedding=True
    ),
    "mtp_raw": of_head(mtp_head, num_modules=3, hidden="pre_norm", recursion="raw"),
    "dflash2": of_head(block_head, spread=0.5, **DFLASH2),
}
"""The target as its own draft model, two drafters as users write them, other forms: as chains."""


REFUSED = {
    ("suffix", "static"): "suffix counts its trees anew",
    ("corpus", "static"): "corpus counts its trees anew",
    ("token_recycling", "dynamic"): "token_recycling has static trees",
}
"""The trees that a method with trees refuses, and what it says."""


def takes(name, topology):
    """Return whether a method takes a topology, by its record."""
    if topology in ("merged", "turns"):
        return not METHODS[name].alone
    if topology == "chain":
        return True
    return "tree" in drafter_options(name) and (name, topology) not in REFUSED


@per_target
def drafter(name, topology):
    """Return the drafter of a method in a topology, as one that takes turns."""
    if topology in ("static", "dynamic"):
        return take_turns(MAKERS[name](tree=TREES[topology]))
    if topology == "turns":
        tree = {"tree": TREES["static"]} if takes(name, "static") else {}
        return take_turns(LOOKUP, MAKERS[name](**tree))
    made = (MAKERS | VARIANTS)[name]()
    return take_turns(merge_drafters(made, LOOKUP) if topology == "merged" else made)
