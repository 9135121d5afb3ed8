"""Evaluation of a drafter: held-out losses, and acceptance length in real decoding."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specjax.drafters import LoadedDrafter, head_drafter, make_drafter
from specjax.engine.generate import Generation, generate
from specjax.engine.options import FIXED
from specjax.loading.model import Model
from train.data.batches import Batch, build
from train.data.packing import Source
from train.methods.method import Method
from train.run.config import EvalConfig
from train.run.loop import Feed
from train.run.metrics import MetricsWriter, add, clock, scalars, shown, sums_of
from train.run.sharding import gathered
from train.run.step import Program

_TEXT_PROMPT = 64
"""The maximum length of a prompt taken from a text; the rest of the text is the reference answer.
"""


@dataclass(frozen=True)
class Evaluation:
    """A function that evaluates parameters, between steps and at the end of a run.

    It computes losses on the batches of `held_out`, if given, decodes `prompts` with the drafter,
    and passes the numbers to `writer`.
    """

    method: Method
    program: Program
    target: Model
    target_params: Any
    held_out: Feed | None
    prompts: Sequence[Sequence[int]]
    config: EvalConfig
    writer: MetricsWriter
    seconds: dict[str, float] = field(default_factory=dict, init=False)
    """The seconds of an earlier evaluation, without compiling: "losses" of all losses, and
    "decoding" of all prompts at one temperature.
    """

    def __call__(self, params: Any, step: int, last: bool) -> dict[str, float]:
        """Return held-out losses (`eval/...`) and results of decoding (`eval/tau`, ...) by name.

        `last` says that this is the evaluation at the end of a run, which uses all temperatures.
        """
        numbers: dict[str, float] = {}
        if self.held_out is not None and self.config.batches:
            doing = f"losses of {self._num_batches(self.held_out)} batch(es)"
            with self.writer.working(self._announced(step, doing, self.seconds.get("losses"))):
                numbers |= self._losses(params, self.held_out)
        if self.prompts:
            temperatures = self.config.temperatures if last else self.config.temperatures[:1]
            seconds = self.seconds.get("decoding")
            expected = None if seconds is None else seconds * len(temperatures)
            doing = f"decoding {len(self.prompts)} prompt(s) at temperature "
            doing += ", ".join(f"{temperature:g}" for temperature in temperatures)
            with self.writer.working(self._announced(step, doing, expected)):
                numbers |= self._decode(params, temperatures)
        if numbers:
            self.writer.say(f"step {step}, held out: {_summary(numbers)}")
        return numbers

    def _announced(self, step: int, doing: str, seconds: float | None) -> str:
        known = seconds is not None
        expected = f"about {clock(seconds)}, compiling aside" if known else "compiles first"
        return f"step {step}, held out: {doing} ({expected})"

    def _num_batches(self, feed: Feed) -> int:
        return min(-(-len(feed.packing.rows(0)) // feed.shape.rows), self.config.batches)

    def batches(self, feed: Feed) -> Iterator[Batch]:
        """Yield the batches of held-out conversations on which losses are computed."""
        rows, count, placement = feed.packing.rows(0), feed.shape.rows, feed.placement
        for number in range(self._num_batches(feed)):
            taken = rows[number * count : (number + 1) * count]
            taken = taken + [[]] * (count - len(taken))
            yield placement.put(
                build(feed.source, [taken[row] for row in placement.rows], feed.shape)
            )

    def _losses(self, params: Any, feed: Feed) -> dict[str, float]:
        total, begin = None, time.perf_counter()
        for batch in self.batches(feed):
            loss, measures = self.program.evaluate(params, self.target_params, batch)
            total = add(total, sums_of(loss, measures))
            # The first one may have compiled.
            now = time.perf_counter()
            self.seconds["losses"], begin = (now - begin) * self._num_batches(feed), now
        return scalars(total, "eval") if total else {}

    def _decode(self, params: Any, temperatures: Sequence[float]) -> dict[str, float]:
        params = gathered(params, self.program.mesh)
        target = self.target if self.method.model is None else self.method.model(params)
        if self.method.head is None:
            drafter = make_drafter(target=target, **self.method.drafter_options)
        else:
            drafter = head_drafter(self.method.head(params, {}), target)
        numbers: dict[str, float] = {}
        for temperature in temperatures:
            suffix = tau_name(temperature).removeprefix("tau")
            result = decode_prompts(target, drafter, self.prompts, self.config, temperature)
            numbers |= {f"eval/{name}{suffix}": value for name, value in tau_of(result).items()}
            self.seconds["decoding"] = result.prefill_s + result.decode_s
        return numbers


def tau_name(temperature: float) -> str:
    """Return the name of the decoded tau at a temperature: "tau", "tau_t0.7", ..."""
    return "tau" if temperature == 0 else f"tau_t{temperature:g}"


def decode_prompts(
    target: Model,
    drafter: LoadedDrafter,
    prompts: Sequence[Sequence[int]],
    config: EvalConfig,
    temperature: float,
) -> Generation:
    """Decode prompts, lists of token ids, with the drafter at a temperature, as `config` says."""
    return generate(
        target,
        [list(prompt) for prompt in prompts],
        drafter=drafter,
        num_speculative_tokens=config.num_speculative_tokens or FIXED,
        sampling={"temperature": temperature, "max_new_tokens": config.new_tokens},
    )


def tau_of(result: Generation) -> dict[str, float]:
    """Return `tau` (`metrics.acceptance_length`) and `decoded_acc_pos_i` of decoded prompts.

    `decoded_acc_pos_i` is the fraction of rounds in which draft tokens 0..i were accepted.
    """
    summary = result.summary()
    shares = {
        f"decoded_acc_pos_{depth}": share for depth, share in enumerate(summary.acceptance_at_pos)
    }
    measured = {"tau": summary.acceptance_length, **shares}
    return {name: float(value) for name, value in measured.items() if value is not None}


def held_out_prompts(source: Source, chosen: np.ndarray, count: int, room: int) -> list[list[int]]:
    """Return up to `count` prompts, evenly spaced among the `chosen` conversations.

    A prompt ends where the target's first answer begins. In text, where every token is a label, it
    ends in the middle, after at most `_TEXT_PROMPT` tokens. Prompts longer than `room` tokens are
    omitted.
    """
    found: list[list[int]] = []
    spread = np.unique(np.linspace(0, len(chosen) - 1, min(2 * count, len(chosen))).astype(int))
    # Every second one first, so that those that fit come from everywhere.
    for index in (*spread[::2], *spread[1::2]) if len(chosen) else ():
        example = source[int(chosen[index])]
        answers = np.flatnonzero(example.loss_mask)
        end = int(answers[0]) if len(answers) else 0
        if len(answers) == len(example.tokens):
            end = min(len(answers) // 2, _TEXT_PROMPT, room)
        if 1 <= end <= room and len(found) < count:
            found.append([int(token) for token in example.tokens[:end]])
    return found


def _summary(numbers: dict[str, float]) -> str:
    parts = [shown(numbers, "eval")] if "eval/loss" in numbers else []
    parts += [
        f"{name.removeprefix('eval/')} {value:.3f}"
        for name, value in numbers.items()
        if name.startswith("eval/tau") and name != "eval/tau_sim"
    ]
    return "  ".join(parts)
