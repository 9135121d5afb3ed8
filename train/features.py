"""Store the target's features of conversations, so that training need not run the target again.

    python -m train.features --input=DIR --output=DIR --features=layer_input:2,layer_input:15

Conversations of similar length run together. The output is a folder of datasets, which trainers
open as if it were one. Finished parts are kept, so that the same command resumes. Exit codes: 0; 2
for bad input; 130 after Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from specjax.apps.command_line import command
from specjax.apps.command_line.console import Screen
from specjax.apps.command_line.flags import run_flags
from specjax.distributed import folder_lock
from specjax.errors import InputError
from specjax.fields import InputFolder, PathOrName, Text, Whole, optional
from specjax.files import folders
from specjax.files.path_checks import output_folder
from specjax.loading.hub import DEFAULT_MODEL
from specjax.loading.load import load_model
from specjax.methods.eagle.head import default_taps
from specjax.models.decoder import Decoder
from specjax.models.features import check_features
from specjax.models.form import Form
from train.data.examples import METADATA, Example, target_metadata
from train.data.responses import Responses, open_responses
from train.data.write_responses import write_responses
from train.run.precision import MULTIPLY, as_multiplied, multiply_dtype

_KIND = "features"
_STEP = 64
"""Lengths are rounded up to a multiple of this, a trade-off between compiled shapes and padding."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv`, by default the process's arguments; return its exit code."""
    return run_flags(
        lambda flags: store_features(**vars(flags)),
        Flags,
        argv,
        program="python -m train.features",
        documentation=__doc__,
        interrupted="interrupted; the same command continues",
    )


@dataclass(frozen=True, kw_only=True)
class Flags:
    """The flags of `train.features`."""

    input: Annotated[Path, InputFolder()]
    """A dataset of conversations."""
    output: Annotated[str, PathOrName()]
    """The folder of datasets with features."""
    target: Annotated[str, PathOrName()] = DEFAULT_MODEL
    """The model that wrote them."""
    features: Annotated[str | None, optional(Text())] = None
    """Names of features, with commas; by default final_norm and those of EAGLE-3."""
    products: Annotated[str, MULTIPLY] = "auto"
    """The dtype of products."""
    tokens: Annotated[int, Whole(1, 1 << 24)] = 4096
    """The tokens that are run at a time."""
    part: Annotated[int, Whole(1)] = 1024
    """The conversations per dataset."""
    limit: Annotated[int | None, optional(Whole(1))] = None
    """The number of conversations, from the first one; by default all."""


def store_features(
    input: str | Path,
    output: str | Path,
    target: str,
    features: str | None,
    products: str,
    tokens: int,
    part: int,
    limit: int | None,
) -> None:
    """Run the target over a dataset and write a folder of datasets that also have its features.

    `input` and `output` are directories, and `target` is a model's path or name. `features` are
    names of features, separated by commas, by default those that training reads. `products` is the
    dtype of products, `tokens` the number of tokens per batch, `part` the number of conversations
    per dataset, and `limit` their number in all, if given. Raises InputError.
    """
    folder, where = output_folder("output", output), f"output={str(output)!r}"
    folders.check_claimable(folder, _KIND, where)
    form = Form.for_training(jax.default_backend())
    model = load_model(target, form=form, weights="float", field="target")
    metadata = target_metadata(model)
    data = open_responses(input, metadata)
    names = ("final_norm", *default_taps(model.config.num_layers))
    if features is not None:
        names = tuple(name.strip() for name in features.split(","))
    check_features(names, model.config.num_layers)
    multiply = multiply_dtype(products, "products")
    decoder = Decoder(model.config, model.dtype, form=model.form, multiply=multiply)
    params = as_multiplied(model.params, multiply)
    generation = {"features_of": data.generation, "products": str(multiply or "float32")}

    chosen = np.arange(len(data) if limit is None else min(limit, len(data)))
    parts = [chosen[first : first + part] for first in range(0, len(chosen), part)]
    parts = [members[np.argsort(data.lengths[members], kind="stable")] for members in parts]
    with folder_lock.hold(folder, _KIND, where):
        surplus = sorted(folder.glob("part-*"))[len(parts) :]
        if surplus:
            raise InputError(
                f"{surplus[0]}: is there already, and {len(chosen)} conversations fill "
                f"{len(parts)} parts of {part}; delete {folder}, or write elsewhere"
            )
        screen = Screen(Console())
        progress = _Progress(screen, len(chosen), int(data.lengths[chosen].sum()))
        screen.say(
            f"features of {len(chosen)} conversations, {progress.tokens} tokens; compiling first"
        )
        for number, members in enumerate(parts):
            directory = folder / f"part-{number:05d}"
            if (directory / METADATA).exists():
                _check_part(directory, data, members, names, generation)
                progress.skip(data.lengths[members])
                continue
            examples = _examples(decoder, params, data, members, names, tokens, progress)
            write_responses(directory, examples, metadata, names, generation=generation)
        screen.rest()
        screen.say(f"{folder}: features of {len(chosen)} conversations")


@dataclass
class _Progress:
    """The conversations and tokens finished so far, of the total; speeds are those of this run."""

    screen: Screen
    rows: int
    tokens: int
    rows_done: int = 0
    tokens_before: int = 0
    tokens_now: int = 0
    begin: float = field(default_factory=time.monotonic)

    def skip(self, lengths: np.ndarray) -> None:
        """Count conversations that an earlier run has finished."""
        self.rows_done += len(lengths)
        self.tokens_before += int(lengths.sum())

    def add(self, length: int) -> None:
        """Count a conversation of `length` tokens that this run has finished."""
        self.rows_done += 1
        self.tokens_now += length
        speed = self.tokens_now / max(time.monotonic() - self.begin, 1e-9)
        share = (self.tokens_before + self.tokens_now) / self.tokens
        self.screen.progress("features", self.rows_done, self.rows, speed, share)


def _check_part(
    directory: Path,
    data: Responses,
    members: np.ndarray,
    names: tuple[str, ...],
    generation: dict[str, Any],
) -> None:
    there = open_responses(directory)
    remedy = f"delete {directory.parent}, or write elsewhere"
    same = there.feature_names == names and all(
        np.array_equal(getattr(there, field), getattr(data, field)[members])
        for field in ("ids", "lengths", "num_labels")
    )
    if not same or there.generation.get("features_of") != generation["features_of"]:
        raise InputError(f"{directory}: holds other conversations or features; {remedy}")
    products = there.generation.get("products")
    if products != generation["products"]:
        raise InputError(
            f"{directory}: products={products}, not {generation['products']}; pass "
            f"--products={products}, {remedy}"
        )


def _examples(
    decoder: Decoder,
    params: Any,
    data: Responses,
    members: np.ndarray,
    names: tuple[str, ...],
    tokens: int,
    progress: _Progress,
) -> Iterator[Example]:
    """Yield the conversations `members` with their features, run in batches of similar lengths.

    A batch has at most `tokens` tokens, and `names` are the features to compute.
    """
    widths = itertools.groupby(members, lambda index: _rounded(int(data.lengths[index])))
    for width, same_width in widths:
        indices, rows = list(same_width), max(1, tokens // width)
        for first in range(0, len(indices), rows):
            examples = [data[int(index)] for index in indices[first : first + rows]]
            batch = np.zeros((rows, width), np.int32)
            for row, example in enumerate(examples):
                batch[row, : len(example.tokens)] = example.tokens
            features = jax.device_get(_forward(decoder, names, params, batch))
            for row, example in enumerate(examples):
                size = len(example.tokens)
                progress.add(size)
                own = {name: np.ascontiguousarray(features[name][row, :size]) for name in names}
                yield replace(example, features=own)


def _rounded(length: int) -> int:
    return -(-length // _STEP) * _STEP


@functools.partial(jax.jit, static_argnums=(0, 1))
def _forward(decoder: Decoder, names: tuple[str, ...], params: Any, tokens: jax.Array) -> Any:
    rows, wide = tokens.shape
    result = decoder.extend(
        params,
        tokens,
        jnp.broadcast_to(jnp.arange(wide), (rows, wide)),
        None,
        None,
        0,
        jnp.tril(jnp.ones((1, wide, wide), bool)),
        features=names,
        logits=False,
    )
    return jax.tree.map(lambda value: value.astype(jnp.float16), result.features)


if __name__ == "__main__":
    command.use_compilation_cache()
    raise SystemExit(main())
