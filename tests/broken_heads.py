"""Heads with one planted fault each, made from sound heads, for tests of the doctor.

`python tests/broken_heads.py [NAME ...]` examines those of the default model, and its sound heads.
"""

import dataclasses
import functools
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from specjax.apps.doctor import changes
from specjax.apps.doctor.diagnose import diagnose
from specjax.drafters import make_drafter
from specjax.loading.load import load_model
from specjax.methods.block.head import BlockHead
from specjax.methods.draft_model.head import ReducedDecoder
from specjax.methods.eagle.head import Eagle
from specjax.methods.medusa.head import Medusa
from specjax.models.config import SlidingWindow


@dataclasses.dataclass(frozen=True)
class LateEagle(Eagle):
    """An EAGLE head that pairs each token with the feature one position too early."""

    def fuse(self, params, features):
        """Return the hidden states, shifted by one position."""
        early = {name: jnp.roll(value, 1, axis=1) for name, value in features.items()}
        return super().fuse(params, early)


@dataclasses.dataclass(frozen=True)
class LateBlock(BlockHead):
    """A block drafter that reads features one position too early."""

    def fuse(self, params, features):
        """Return the vectors of each position, shifted by one position."""
        early = {name: jnp.roll(value, 1, axis=1) for name, value in features.items()}
        return super().fuse(params, early)


@dataclasses.dataclass(frozen=True)
class LateMedusa(Medusa):
    """Medusa heads that read the feature one position too early, in a pass over whole rows."""

    def states(self, params, features):
        """Return the states, shifted by one position."""
        return super().states(params, jnp.roll(features, 1, axis=1))


def with_config(loaded, **fields):
    """Return the drafter with some fields of its head's config changed."""
    head = loaded.drafter.head
    head = dataclasses.replace(head, config=dataclasses.replace(head.config, **fields))
    return loaded._replace(drafter=dataclasses.replace(loaded.drafter, head=head))


def shifted(loaded):
    """Return the drafter with a head that reads features one position too early."""
    head = loaded.drafter.head
    kind = LateEagle
    for sound, late in ((Medusa, LateMedusa), (BlockHead, LateBlock)):
        kind = late if isinstance(head, sound) else kind
    head = kind(**{one.name: getattr(head, one.name) for one in dataclasses.fields(head)})
    return loaded._replace(drafter=dataclasses.replace(loaded.drafter, head=head))


def other_layers(loaded, by):
    """Return the drafter with its taps moved by `by` layers.

    With 1 it counts outputs of layers where inputs are meant; -1 is the reverse.
    """
    layers = [int(tap.partition(":")[2]) + by for tap in loaded.drafter.features]
    return with_config(loaded, taps=tuple(f"layer_input:{layer}" for layer in layers))


def next_tokens(loaded):
    """Return the drafter with a vocabulary map in which each id is one too high."""
    return loaded._replace(params={**loaded.params, "draft_ids": loaded.params["draft_ids"] + 1})


def narrow(loaded, size):
    """Return the draft model with a sliding window with which it was not trained."""
    model = loaded.drafter.model
    is_reduced = isinstance(model, ReducedDecoder)
    decoder = model.decoder if is_reduced else model
    config = dataclasses.replace(decoder.config, sliding_window=SlidingWindow(size))
    decoder = dataclasses.replace(decoder, config=config)
    model = ReducedDecoder(decoder) if is_reduced else decoder
    return loaded._replace(drafter=dataclasses.replace(loaded.drafter, model=model))


def of_another_target(loaded, seed=0):
    """Return the head with permuted features, as a target with the same shapes would have them."""
    kernel = loaded.params["fc"]["kernel"]
    size = loaded.drafter.head.config.target_hidden_size
    order = np.random.default_rng(seed).permutation(size)
    rows = np.concatenate([order + size * tap for tap in range(kernel.shape[0] // size)])
    return loaded._replace(params={**loaded.params, "fc": {"kernel": kernel[rows]}})


def in_four_bits(loaded):
    """Return the head with kernels of four bits and one scale each instead of one per group."""

    def rounded(leaf):
        scale = jnp.abs(leaf).max() / 7
        return jnp.round(leaf / scale) * scale if leaf.ndim > 1 else leaf

    shared = {"shared", "draft_ids"}
    own = {name: part for name, part in loaded.params.items() if name not in shared}
    return loaded._replace(params={**loaded.params, **jax.tree.map(rounded, own)})


@functools.cache
def _default():
    return load_model("smollm2-135m-instruct")


def _shipped(kind, **options):
    return make_drafter(kind, _default(), num_speculative_tokens=3, **options)


def _float(kind):
    model = load_model("smollm2-135m-instruct", weights="float", dtype="float32")
    return model, make_drafter(kind, model, num_speculative_tokens=3, weights="float")


CASES = {
    changes.POSITIONS: lambda: shifted(_shipped("eagle3", weights="float")),
    changes.TAPS: lambda: other_layers(_shipped("eagle3"), 1),
    changes.NORM: lambda: with_config(_shipped("eagle3"), norm_before_residual=True),
    changes.VOCABULARY: lambda: next_tokens(_shipped("eagle3")),
    changes.TEMPLATE: lambda: _shipped("eagle3"),
    changes.DTYPE: lambda: in_four_bits(_shipped("eagle3", weights="float")),
    changes.WINDOW: lambda: narrow(_shipped("draft_model"), 8),
    changes.TARGET: lambda: of_another_target(_shipped("eagle3", weights="float")),
    "eagle3": lambda: _shipped("eagle3"),
    "medusa": lambda: _shipped("medusa"),
    "draft_model": lambda: _shipped("draft_model"),
}


def examine(name):
    """Return the diagnosis of a case on the default model."""
    from specjax.apps.run.built_in_prompts import BUILT_IN

    chats, raw = [one.first_turn for one in BUILT_IN], [one.turns[0] for one in BUILT_IN]
    given, other = (raw, {"chat=true": chats}), (chats, {"chat=false": raw})
    prompts, others = given if name == changes.TEMPLATE else other
    # A fault of another kind is in the drafter whatever its dtype.
    kind = "eagle3" if name == changes.DTYPE else name
    exact = functools.partial(_float, kind) if kind in ("eagle3", "medusa", "draft_model") else None
    return diagnose(
        _default(),
        CASES[name](),
        prompts,
        other_prompts=others,
        in_float32=exact,
        tell=lambda line: print("   ", line, flush=True),
    )


if __name__ == "__main__":
    for name in sys.argv[1:] or CASES:
        begin = time.time()
        result = examine(name)
        found = "; ".join(f"{one.fault}: {one.evidence}" for one in result.findings)
        print(f"| {name} | {found or 'nothing found'} | {time.time() - begin:.0f} s", flush=True)
        print(result, flush=True)
        jax.clear_caches()
