"""A toy method on a tiny random target, for the tests of the training loop.

`python tests/toy_training.py --config=tests/toy_training.py --config.field=value ...` trains it.
The toy is a linear drafter of two depths in the shape of Medusa heads, so that it can be exported.
"""

import functools
import os
import sys
import time
from dataclasses import dataclass
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from specjax.apps.command_line import config_file
from specjax.fields import Text
from specjax.loading.load import random_model
from specjax.methods.heads.head import Head, TargetMetadata
from specjax.methods.medusa.head import MedusaConfig
from specjax.models.config import DecoderConfig
from train.data.batches import Batch
from train.data.examples import Example, target_metadata
from train.data.write_responses import write_responses
from train.methods.method import Method, measure
from train.methods.packed_rows import at_rows, fill_features
from train.run import run, setup
from train.run.config import TrainingConfig, read_training_config

DEPTHS = 2
TOKENS, LABELS = 32, 28
SHAPE = dict(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    max_positions=200,
)


def toy_target(mesh=None):
    """Return a random target without a tokenizer."""
    return random_model(DecoderConfig(**SHAPE), 0, dtype="float32", mesh=mesh)


def conversations(count=60, seed=0, features=()):
    """Return conversations with a pattern that can be learned, with ids 0, 1, ..."""
    rng = np.random.default_rng(seed)
    found = []
    for number in range(count):
        length = int(rng.integers(8, 25))
        start, prompt = int(rng.integers(4)), int(rng.integers(2, 6))
        tokens = ((start + 3 * np.arange(length)) % SHAPE["vocab_size"]).astype(np.int32)
        mask, width = np.arange(length) >= prompt, SHAPE["hidden_size"]
        values = {name: rng.normal(size=(length, width)).astype(np.float16) for name in features}
        found.append(Example(tokens=tokens, loss_mask=mask, features=values, id=number))
    return found


class Listed(list):
    """Conversations in memory with the interface of a dataset on disk."""

    feature_names = ()
    quick, read = 10**9, 0

    def __getitem__(self, index):
        # Reading is slow after the first `quick` of them, for tests that interrupt the run.
        self.read += 1
        time.sleep(0.25 * (self.read > self.quick))
        return super().__getitem__(index)

    @property
    def lengths(self):
        """The number of tokens of each conversation."""
        return np.array([len(one.tokens) for one in self], np.int32)

    @property
    def num_labels(self):
        """The number of labels of each conversation."""
        return np.array([one.loss_mask.sum() for one in self], np.int32)

    @property
    def validation(self):
        """A mask of the held-out conversations."""
        return np.array([one.id % 50 == 0 for one in self])

    @property
    def parts(self):
        """The datasets of which it consists."""
        return (self,)

    directory = "memory"

    @property
    def target(self):
        """The metadata of the target that supposedly wrote the conversations."""
        return target_metadata(toy_target())


def write_data(directory, **options):
    """Write the conversations as a dataset."""
    names = options.get("features", ())
    write_responses(directory, conversations(**options), target_metadata(toy_target()), names)


def toy_method(target, config=None, *, poison=None):
    """Return a method whose drafter predicts labels from the feature two positions before.

    There is no noise. With `poison` the loss is NaN at every label with that token.
    """
    width, vocab = target.config.hidden_size, target.config.vocab_size
    head_config = MedusaConfig(
        hidden_size=width,
        vocab_size=vocab,
        num_heads=DEPTHS,
        num_layers=1,
        draft_vocab_size=vocab,
        original_lm_head=False,
    )

    def init(key):
        return {
            "blocks": {
                "kernel": 0.1 * jax.random.normal(key, (DEPTHS, 1, width, width)),
                "bias": jnp.zeros((DEPTHS, 1, width)),
            },
            "head": {"kernel": jnp.zeros((DEPTHS, width, vocab))},
        }

    def loss(params, target_params, batch, key):
        features = at_rows(batch.features["final_norm"], batch.labels - 2)
        x = features[None] + jnp.tanh(
            jnp.einsum("bad,kde->kbae", features, params["blocks"]["kernel"][:, 0])
            + params["blocks"]["bias"][:, :, None, :]
        )
        logits = jnp.einsum("kbad,kdv->kbav", x, params["head"]["kernel"])
        total, right = 0.0, []
        for depth in range(DEPTHS):
            position = jnp.minimum(batch.labels + depth, batch.tokens.shape[1] - 1)
            there = (batch.labels >= 0) & (position == batch.labels + depth)
            there &= at_rows(batch.segments, position) == at_rows(batch.segments, batch.labels)
            wanted = at_rows(batch.tokens, position)
            logp = jax.nn.log_softmax(logits[depth])
            here = -jnp.take_along_axis(logp, wanted[..., None], axis=-1)[..., 0]
            if poison is not None:
                here = jnp.where(wanted == poison, jnp.nan, here)
            total = total + jnp.where(there, here, 0.0).sum()
            right.append(logits[depth].argmax(-1) == wanted)
        return total, measure({"ce": total}, jnp.stack(right), batch.labels)

    def head(params, training):
        return Head("medusa", head_config, params, None, TargetMetadata.of(target), training)

    return Method("toy", ("final_norm",), init, loss, head)


def get_config():
    """Return the config of a run that takes a second or two."""
    config = config_file.config_of(TrainingConfig)
    config.steps = 12
    config.batch_size = 4
    config.row_tokens, config.row_labels = TOKENS, LABELS
    config.warmup = 2
    config.learning_rate = 1e-2
    config.log_every = 4
    config.checkpoint_every = 5
    config.eval.every = 0
    config.eval.batches = 1
    config.eval.prompts = 0
    return config


@dataclass(frozen=True, kw_only=True)
class ToyConfig(TrainingConfig):
    """The checked config of this file's command."""

    DEFAULT = __file__


@dataclass(frozen=True, kw_only=True)
class AnyData(ToyConfig):
    """Names of data that are looked up elsewhere: `--config.data=memory` is no dataset on disk."""

    data: Annotated[str, Text()]


def read(config):
    """The checked value of a config."""
    return read_training_config(TrainingConfig, config.to_dict())


def toy_run(folder, console=None, target=toy_target, **changes):
    """Train the toy in `folder`/w on data on disk; `changes` are fields of its config, dotted."""
    if not (folder / "data").exists():
        write_data(folder / "data")
    config = get_config()
    config.data, config.workdir = str(folder / "data"), str(folder / "w")
    config.update_from_flattened_dict(changes)
    make = lambda target, data, config: toy_method(target)  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            setup, "load_model", lambda name, *, field, form, weights, mesh=None: target(mesh)
        )
        return run.run(read(config), make, console or Console(quiet=True))


def two_rows(vocab_size, seed=0):
    """Two rows: two conversations and padding, and one that fills its row."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, vocab_size, (2, 24)).astype(np.int32)
    segments = np.array([[1] * 10 + [2] * 11 + [0] * 3, [1] * 24], np.int32)
    positions = np.array([[*range(10), *range(11), 0, 0, 0], [*range(24)]], np.int32)
    labels = np.full((2, 20), -1, np.int32)
    labels[0, :12] = [*range(4, 10), *range(14, 20)]
    labels[1, :18] = [*range(2, 12), *range(16, 24)]
    return Batch(*map(jnp.asarray, (tokens, positions, segments, labels)), {})


def with_features(target, batch, names=("final_norm",)):
    """The batch with features of the target."""
    return _with_features(target.architecture, target.params, batch, tuple(names))


@functools.partial(jax.jit, static_argnums=(0, 3))
def _with_features(decoder, params, batch, names):
    return fill_features(decoder, params, batch, names)


def config_of(**changes):
    """The checked value of the toy's config, with some fields changed, and a workdir."""
    config = get_config()
    config.workdir = "build/toy"
    config.update_from_flattened_dict(changes)
    return read(config)


if __name__ == "__main__":
    setup.load_model = lambda name, *, field, form, weights, mesh=None: toy_target(mesh)

    toys = Listed(conversations())
    toys.quick = int(os.environ.get("TOY_QUICK", Listed.quick))
    on_disk = setup.open_sources
    setup.open_sources = lambda paths: toys if paths == ["memory"] else on_disk(paths)

    def make(target, data, config):
        """The method of this file's config."""
        return toy_method(target)

    raise SystemExit(run.main(make, AnyData, sys.argv[1:]))
