"""The target run over its own answers: its distributions and features at each position."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Float, Int

from specjax.core.causal_mask import causal
from specjax.core.language_model import LanguageModel
from specjax.engine.requests import SamplingParams
from specjax.loading.model import Model
from specjax.sampling import WarpFlags, warp

_STEP = 64
"""Lengths are rounded up to a multiple of this, so that prompts of other lengths share programs."""


@struct.dataclass
class Answers:
    """Rows of a prompt and the target's answer, with the target's distributions and features.

    The labels of row b are the tokens of its answer: label a is the token at position `first[b] +
    a`, and there are `count[b]` of them. `logp[b, a]` are the target's log-probabilities of that
    token, under the sampling parameters of the measurement, and `best` the likeliest tokens.
    `features[name][b, t]` is the feature at position t.
    """

    tokens: Int[Array, "B T"]
    first: Int[Array, "B"]
    count: Int[Array, "B"]
    logp: Float[Array, "B A V"]
    best: Int[Array, "B A"]
    features: dict[str, Float[Array, "B T D"]]

    @property
    def is_label(self) -> np.ndarray:
        """A mask [B, A] of the labels that exist and have at least two tokens before them."""
        steps = np.arange(self.logp.shape[1])[None, :]
        first, count = (np.asarray(array)[:, None] for array in (self.first, self.count))
        return (steps < count) & (first + steps >= 2)

    @property
    def chance(self) -> float:
        """The expected acceptance of a draft that ignores the text.

        It is the mean of sum_x min(p(x), m(x)), where m is the mean of the target's distributions
        p.
        """
        is_label = jnp.asarray(self.is_label)[..., None]
        p = jnp.exp(self.logp)
        mean = jnp.where(is_label, p, 0).sum(axis=(0, 1)) / jnp.maximum(is_label.sum(), 1)
        overlaps = np.asarray(jnp.minimum(p, mean[None, None]).sum(axis=-1))
        return float(overlaps[self.is_label].mean())


def read_answers(
    model: Model,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    features: tuple[str, ...],
    sampling: SamplingParams,
) -> Answers:
    """Return the target's distributions and features over prompts and their answers.

    Prompts and answers are token ids; `features` are the names of the features to return, and
    distributions are those under the parameters `sampling`.
    """
    num_labels = max(map(len, answers))
    longest = max(len(prompt) for prompt in prompts) + num_labels
    width = -(-longest // _STEP) * _STEP
    tokens = np.zeros((len(prompts), width), np.int32)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        tokens[row, : len(prompt) + len(answer)] = (*prompt, *answer)
    first = np.array([len(prompt) for prompt in prompts], np.int32)
    count = np.array([len(answer) for answer in answers], np.int32)
    logp, best, feature_arrays = _run(
        model.architecture,
        features,
        num_labels,
        model.params,
        jnp.asarray(tokens),
        jnp.asarray(first),
        *warp_arguments(sampling),
    )
    arrays = (jnp.asarray(array) for array in (tokens, first, count))
    return Answers(*arrays, logp, best, feature_arrays)


def warp_arguments(
    sampling: SamplingParams,
) -> tuple[tuple[float, int, float, float], WarpFlags]:
    """Return the parameters that `warp` reads, and its flags."""
    numbers = sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p
    return numbers, WarpFlags.of(*numbers)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 7))
def _run(
    model: LanguageModel,
    features: tuple[str, ...],
    num_labels: int,
    params: dict,
    tokens: Int[Array, "B T"],
    first: Int[Array, "B"],
    parameters: tuple,
    flags: WarpFlags,
) -> tuple[Float[Array, "B A V"], Int[Array, "B A"], dict[str, Float[Array, "B T D"]]]:
    """Return the `logp`, `best` and `features` of `Answers`.

    `parameters` and `flags` are the results of `warp_arguments`.
    Rows run one after another, since the logits of all positions of all rows need much memory.
    """
    width = tokens.shape[1]
    positions = jnp.arange(width)

    def one(row: tuple[Int[Array, "T"], Int[Array, ""]]) -> tuple:
        row_tokens, begin = row
        result = model.extend(
            params,
            row_tokens[None],
            positions[None],
            model.make_cache(1, _STEP),
            model.make_window(1, width),
            0,
            causal(positions, width),
            features=features,
        )
        # Column t has the distribution of the token at t + 1.
        columns = jnp.clip(begin - 1 + jnp.arange(num_labels), 0, width - 1)
        logits = result.logits[0, columns]
        kept = {name: value[0] for name, value in result.features.items()}
        best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return warp(logits, *parameters, flags=flags), best, kept

    return lax.map(one, (tokens, first))
