"""Measure a model with MTP modules.

    python scripts/training/report_mtp.py --model=W/export --data=DIR --out=FILE.json

On the held-out part of the data: the model's loss (nats per token); how often the draft of each
depth is the token that the model itself finds likeliest there, the true tokens before it given, and
the tokens per target pass that drafts which are all so would give (`tau_sim`); the loss of a bigram
of the same training part, and how often its likeliest token is the model's. Then
the first tokens of held-out texts are continued greedily with the modules as drafter, and the
acceptance is shown beside the share of 8-grams that a continuation has repeated: of all
continuations, and of those that repeat less than --most_repeated. A model without modules gets the
losses alone. Exit codes: 0; 2 for bad input; 130 after Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import metrics
from specjax.cli import command
from specjax.cli.flags import Parser
from specjax.decoding.generate import Generation, generate
from specjax.drafters import make_drafter
from specjax.errors import InputError
from specjax.fields import Number, OutputFile, PathOrName, Whole, optional
from specjax.loading.load import load_model
from specjax.loading.model import Model
from specjax.models.heads.mtp import Mtp
from train.data.batches import Batch, build
from train.data.examples import target_metadata
from train.data.packing import Packing, Shape
from train.data.sources import DataFolders, Sources, open_sources, split_names
from train.methods.blockwise_loss import Teacher
from train.methods.method import measure, measure_undrafted
from train.methods.mtp_loss import MtpLoss, modules_loss
from train.methods.packed_rows import ahead, features_of, label_ahead
from train.methods.target_loss import target_loss
from train.pretraining.bigram import Bigram
from train.run.metrics import add, scalars, sums_of

_GRAM = 8
_BATCH = 8


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""

    def act(arguments: list[str]) -> int:
        _report(**parser().read(arguments))
        return 0

    return command.run(act, argv, parser().format_help())


def parser() -> Parser:
    """The flags."""
    flags = Parser("python scripts/training/report_mtp.py", __doc__)
    add = flags.add_field
    add("model", PathOrName(), "a model, such as W/export of train.mtp")
    add("data", DataFolders(), "datasets with a held-out part, with commas")
    add("out", optional(OutputFile()), "the numbers as JSON too", default=None)
    add("row_tokens", Whole(4, 1 << 20), "tokens read at once", default=512)
    add("tokens", Whole(1), "held-out tokens that losses are measured on, about", default=200_000)
    add("depths", optional(Whole(1, 64)), "drafts; else the number of modules", default=None)
    add("prompts", Whole(0, 1 << 20), "texts that are continued", default=64)
    add("prompt_tokens", Whole(2), "tokens of them that are given", default=64)
    add("new_tokens", Whole(_GRAM), "tokens of a continuation", default=96)
    add("num_speculative_tokens", optional(Whole(1, 64)), "else the depths", default=None)
    most = "repeated 8-grams of a continuation that has little repetition"
    add("most_repeated", Number(0.0, 1.0), most, default=0.2)
    return flags


def _report(
    model: str,
    data: str,
    out: Path | None,
    row_tokens: int,
    tokens: int,
    depths: int | None,
    prompts: int,
    prompt_tokens: int,
    new_tokens: int,
    num_speculative_tokens: int | None,
    most_repeated: float,
) -> None:
    loaded = load_model(model, field="model")
    if prompt_tokens + new_tokens > loaded.config.max_positions:
        raise InputError(
            f"new_tokens={new_tokens}: with prompt_tokens={prompt_tokens} they exceed the model's "
            f"{loaded.config.max_positions} positions; lower one of them"
        )
    sources = open_sources(split_names(data), target_metadata(loaded))
    if loaded.mtp is None and depths is not None:
        raise InputError(f"depths={depths}: {model} has no MTP modules; leave it out")
    steps = depths or (0 if loaded.mtp is None else loaded.mtp.config.num_modules)
    if loaded.mtp is not None and steps < loaded.mtp.config.num_modules:
        raise InputError(
            f"depths={depths}: the model has {loaded.mtp.config.num_modules} modules; use as many, "
            "or more"
        )
    numbers = held_out_numbers(loaded, sources, row_tokens, tokens, steps)
    if steps and prompts:
        result = continuations(
            loaded, sources, prompts, prompt_tokens, new_tokens, num_speculative_tokens or steps
        )
        numbers |= acceptance(result, most_repeated)
    for name, value in numbers.items():
        print(f"{name:36} {value:.4f}" if isinstance(value, float) else f"{name:36} {value}")
    if out is not None:
        content = {"model": Path(model).name, "most_repeated": most_repeated, **numbers}
        out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def held_out_numbers(
    model: Model, data: Sources, row_tokens: int, tokens: int, steps: int
) -> dict[str, float | int]:
    """Losses and agreements over about so many held-out tokens; `steps` drafts are compared.

    Every number is over the same labels: tokens with at least two before them in their text. Raises
    InputError where nothing is held out.
    """
    shape = Shape(_BATCH, row_tokens, row_tokens)
    held_out = np.flatnonzero(data.validation)
    if not len(held_out):
        raise InputError("data: nothing is held out; use a dataset with more conversations")
    rows = Packing(data, held_out, shape, 0).rows(0)
    bigram = Bigram.of(
        (data[int(index)].tokens for index in np.flatnonzero(~data.validation)),
        model.config.vocab_size,
    )
    follower = bigram.likeliest()
    labels, bigram_loss, sums = 0, 0.0, None
    right = {"model": 0, "bigram": 0, "bigram_model": 0}
    for first in range(0, len(rows), _BATCH):
        taken = rows[first : first + _BATCH]
        batch = build(data, taken + [[]] * (_BATCH - len(taken)), shape)
        nats, choices, measures = jax.device_get(_compare(_Compared.of(model, steps), model, batch))
        sums = add(sums, sums_of(nats, measures))
        where = batch.labels >= 0
        at = batch.labels[where]
        row = np.nonzero(where)[0]
        before, token = batch.tokens[row, at - 1], batch.tokens[row, at]
        chosen = choices[where]
        bigram_loss -= float(bigram.log_probs(before, token).sum())
        right["model"] += int((chosen == token).sum())
        right["bigram"] += int((follower[before] == token).sum())
        right["bigram_model"] += int((follower[before] == chosen).sum())
        labels += len(at)
        if labels >= tokens:
            break
    found = scalars(sums, "model")
    numbers: dict[str, float | int] = {
        "held_out_tokens": labels,
        "lm_loss": found["model/loss"],
        "bigram_loss": bigram_loss / labels,
        "lm_accuracy": right["model"] / labels,
        "bigram_accuracy": right["bigram"] / labels,
        "bigram_agrees_with_model": right["bigram_model"] / labels,
    }
    for depth in range(steps):
        numbers[f"mtp_{depth}_agrees_with_model"] = found[f"model/acc_pos_{depth}"]
    return numbers | ({"tau_sim": found["model/tau_sim"]} if steps else {})


@dataclasses.dataclass(frozen=True)
class _Compared:
    """The static part of a comparison; equal values compile once."""

    decoder: Any
    head: Mtp | None
    steps: int

    @classmethod
    def of(cls, model: Model, steps: int) -> _Compared:
        decoder = dataclasses.replace(model.architecture, dtype=jnp.dtype(jnp.float32))
        return cls(decoder, Mtp(model.mtp.config, decoder.dtype) if steps else None, steps)


def _compare(plan: _Compared, model: Model, batch: Batch) -> Any:
    modules = {} if plan.head is None else model.mtp.params
    return _compared(plan, model.params, modules, batch)


@functools.partial(jax.jit, static_argnums=0)
def _compared(plan: _Compared, params: Any, modules: Any, batch: Batch) -> Any:
    """Loss, the model's choice at each label [B, A], and measures of drafts that are such."""
    names = ("final_norm",) if plan.head is None else ("final_norm", *plan.head.config.taps)
    now = features_of(plan.decoder, params, batch, tuple(dict.fromkeys(names)))
    nats, own = target_loss(params["head"]["kernel"], now["final_norm"], None, batch)
    choices, labels = own.choices[0], batch.labels
    if plan.head is None:
        return nats, choices, measure_undrafted({}, labels)
    _, scores, _ = modules_loss(
        plan.head,
        modules,
        params,
        None,
        batch,
        now,
        Teacher.of(batch, None, None),
        MtpLoss(steps=plan.steps),
        False,
    )
    depths = range(plan.steps)
    there = jnp.stack([label_ahead(labels, depth) for depth in depths])
    same = scores.choices == jnp.stack([ahead(choices, depth) for depth in depths])
    return nats, choices, measure({}, same, there)


def continuations(
    model: Model, data: Sources, count: int, prompt_tokens: int, new_tokens: int, drafts: int
) -> Generation:
    """Greedy continuations of the beginnings of held-out texts, with the model's own modules.

    Raises InputError where no held-out text is longer than a prompt.
    """
    long = np.flatnonzero(data.validation & (data.lengths > prompt_tokens))
    if not len(long):
        raise InputError(
            f"prompt_tokens={prompt_tokens}: no held-out text is longer; use fewer tokens"
        )
    spread = np.unique(np.linspace(0, len(long) - 1, min(count, len(long))).astype(int))
    prompts = [data[int(long[index])].tokens[:prompt_tokens].tolist() for index in spread]
    return generate(
        model,
        prompts,
        drafter=make_drafter("mtp", model),
        num_speculative_tokens=drafts,
        batch_size=_BATCH,
        sampling={"temperature": 0.0, "max_new_tokens": new_tokens},
    )


def acceptance(result: Generation, most_repeated: float) -> dict[str, float | int]:
    """Acceptance and repetition, of all continuations and of those that repeat little."""
    shares = np.array([repeated(tokens) for tokens in result.token_ids])
    numbers: dict[str, float | int] = {}
    for name, chosen in (("all", shares <= 1), ("little_repeated", shares < most_repeated)):
        numbers[f"{name}/continuations"] = int(chosen.sum())
        if not chosen.any():
            continue
        drafted, accepted = result.drafted[chosen], result.accepted[chosen]
        numbers[f"{name}/repeated_{_GRAM}_grams"] = float(shares[chosen].mean())
        numbers[f"{name}/tau"] = float(metrics.acceptance_length(accepted) or 0.0)
        by_position = metrics.acceptance_at_pos(drafted, accepted)
        for position, share in enumerate(by_position):
            if share is not None:
                numbers[f"{name}/acceptance_{position}"] = float(share)
    return numbers


def repeated(tokens: Sequence[int]) -> float:
    """The share of a text's 8-grams that have occurred in it before; 0 for a shorter text."""
    grams = [tuple(tokens[first : first + _GRAM]) for first in range(len(tokens) - _GRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


if __name__ == "__main__":
    command.use_compilation_cache()
    raise SystemExit(main())
