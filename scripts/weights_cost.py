"""Measure how much quantized weights change a model's predictions.

    python scripts/weights_cost.py [--target=MODEL] [--weights=int8,int4,file] [--text=FILE]

Runs the model with each of `--weights` and with `weights=float` over the same tokens, and prints a
table: the bytes of the weights; KL(float || weights) in nats per token; how often the likeliest
token is that of float; the perplexity. FILE is a text, which is split into pieces of `--context`
tokens that are scored separately, or conversations as JSON lines (.jsonl) with the keys that
`train.import_responses` reads, whose answers are scored. Without it the float model answers the
built-in prompts greedily: its perplexity on its own answers is low, and only comparable within the
table. Exit codes: 0; 2 for bad input; 130 after Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from specjax.apps.command_line import command
from specjax.apps.command_line.flags import Listed, run_flags
from specjax.apps.run.built_in_prompts import BUILT_IN
from specjax.core.parameter_sizes import count_bytes
from specjax.engine.requests import encode_prompt
from specjax.errors import InputError
from specjax.fields import Choice, InputFile, PathOrName, Whole, optional
from specjax.loading.hub import DEFAULT_MODEL
from specjax.loading.load import load_model
from specjax.loading.model import Model
from specjax.loading.texts.documents import Documents
from specjax.models.decoder import Decoder
from train.data.json_lines import read_rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv`, by default the process's arguments; return its exit code."""
    return run_flags(
        run, Flags, argv, program="python scripts/weights_cost.py", documentation=__doc__
    )


@dataclass(frozen=True, kw_only=True)
class Flags:
    """The flags of this script."""

    target: Annotated[str, PathOrName()] = DEFAULT_MODEL
    """The model."""
    weights: Annotated[tuple[str, ...] | str, Listed(Choice(("int8", "int4", "file")))] = (
        "int8,int4"
    )
    """The forms of weights to compare with float ones."""
    text: Annotated[Path | None, optional(InputFile())] = None
    """A text, or conversations (.jsonl)."""
    context: Annotated[int, Whole(2)] = 512
    """The maximum number of tokens that are run together."""
    limit: Annotated[int, Whole(1)] = 32
    """The number of pieces or conversations."""
    max_new_tokens: Annotated[int, Whole(1)] = 128
    """The maximum number of tokens of an answer to a built-in prompt."""


class Piece(NamedTuple):
    """The ids of T tokens that are run together, and a mask of those that are scored."""

    tokens: np.ndarray
    is_scored: np.ndarray


@dataclass(frozen=True)
class Cost:
    """The effect of a model's weights per scored token, compared with float weights."""

    num_bytes: int
    kl: float
    """KL(float || weights), in nats."""
    agreement: float
    """The share of tokens at which the likeliest next token is the same."""
    perplexity: float


def run(flags: Flags) -> int:
    """Measure, and print the table; return the exit code."""
    reference = load_model(flags.target, weights="float", field="target")
    pieces = pieces_of(reference, flags)
    count = sum(int(piece.is_scored[1:].sum()) for piece in pieces)
    if not count:
        raise InputError(
            f"text={str(flags.text)!r}: none of its tokens is scored; give a longer text, or a "
            "larger --context"
        )
    # Loaded before anything is compiled: a file may not have them.
    others = {name: load_model(flags.target, weights=name) for name in flags.weights}
    print(f"{reference.name}: {len(pieces)} pieces, {count} tokens scored")
    print("| weights | MB | KL, nats per token | same greedy token | perplexity |")
    print("|---|---|---|---|---|")
    for name, model in {"float": reference, **others}.items():
        cost = compare(reference, model, pieces)
        print(
            f"| `{name}`, {model.weights} | {cost.num_bytes / 1e6:.1f} | {cost.kl:.1e} "
            f"| {100 * cost.agreement:.1f} % | {cost.perplexity:.3f} |",
            flush=True,
        )
    return 0


def pieces_of(model: Model, flags: Flags) -> list[Piece]:
    """Return the pieces to score; raise InputError for a file in another format."""
    if flags.text is None:
        return _answers(model, flags)
    pieces = []
    for ids, scored in _read(model, flags.text):
        for start in range(0, len(ids), flags.context):
            if len(pieces) == flags.limit:
                return pieces
            end = start + flags.context
            pieces.append(Piece(ids[start:end], scored[start:end]))
    return pieces


def _answers(model: Model, flags: Flags) -> list[Piece]:
    """Return the built-in prompts with the model's greedy answers."""
    chats = [question.first_turn for question in BUILT_IN][: flags.limit]
    prompts = [encode_prompt(model, chat) for chat in chats]
    result = specjax.generate(
        model, prompts, drafter="none", temperature=0.0, max_new_tokens=flags.max_new_tokens
    )
    return [
        Piece(
            np.array([*prompt, *answer], np.int32)[: flags.context],
            (np.arange(len(prompt) + len(answer)) >= len(prompt))[: flags.context],
        )
        for prompt, answer in zip(prompts, result.token_ids, strict=True)
    ]


def _read(model: Model, path: Any) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the token ids of each document in a file, and a mask of those that are scored."""
    if path.suffix == ".jsonl":
        for example in read_rows(path):
            ids = encode_prompt(model, example.tokens.tolist(), f"{path}: id={example.id}")
            yield np.array(ids, np.int32), example.loss_mask
        return
    for text, _ in Documents((path,)):
        ids = encode_prompt(model, text, f"text={str(path)!r}")
        yield np.array(ids, np.int32), np.ones(len(ids), np.bool_)


def compare(reference: Model, model: Model, pieces: Sequence[Piece]) -> Cost:
    """Return the cost of a model's weights compared with the reference's, over all pieces."""
    # One width, so that each model is compiled once.
    width = max(len(piece.tokens) for piece in pieces)
    sums = np.zeros(4)
    for piece in pieces:
        padding = width - len(piece.tokens)
        tokens = np.pad(piece.tokens, (0, padding))
        is_scored = np.pad(piece.is_scored, (0, padding))
        expected, found = (
            _log_probabilities(one.architecture, one.params, tokens[None])
            for one in (reference, model)
        )
        sums += np.asarray(_sums(expected, found, tokens, is_scored), np.float64)
    count, kl, agreement, loss = sums
    perplexity = float(np.exp(loss / count))
    # Rounding can make a sum of zeros negative.
    return Cost(count_bytes(model.params), max(0.0, kl / count), agreement / count, perplexity)


@functools.partial(jax.jit, static_argnums=0)
def _log_probabilities(decoder: Decoder, params: Any, tokens: jax.Array | np.ndarray) -> jax.Array:
    """Return the log-probabilities [T, V] of the next token after each of `tokens` [1, T]."""
    num_tokens = tokens.shape[1]
    positions = jnp.arange(num_tokens)[None]
    causal = jnp.tril(jnp.ones((1, num_tokens, num_tokens), bool))
    result = decoder.extend(params, tokens, positions, None, None, 0, causal)
    return jax.nn.log_softmax(result.logits[0].astype(jnp.float32))


@jax.jit
def _sums(
    expected: jax.Array,
    found: jax.Array,
    tokens: jax.Array | np.ndarray,
    is_scored: jax.Array | np.ndarray,
) -> jax.Array:
    """Return the number of scored tokens and, over them, KL, equal choices, `found`'s loss.

    `expected` and `found` are `_log_probabilities` of the T tokens.
    """
    expected, found, labels = expected[:-1], found[:-1], tokens[1:]
    kl = jnp.sum(jnp.exp(expected) * (expected - found), axis=-1)
    same = expected.argmax(axis=-1) == found.argmax(axis=-1)
    loss = -jnp.take_along_axis(found, labels[:, None], axis=-1)[:, 0]
    figures = jnp.stack([jnp.ones_like(kl), kl, same.astype(kl.dtype), loss])
    return jnp.sum(jnp.where(is_scored[1:], figures, 0.0), axis=1)


if __name__ == "__main__":
    command.use_compilation_cache()
    raise SystemExit(main())
