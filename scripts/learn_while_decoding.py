"""Decode answers of a new domain with a head that learns from them, and with drafters that do not.

    python scripts/learn_while_decoding.py [--answers=2000] [--drafters=learned,eagle3,corpus]

The target answers so many questions for SQL queries, made from templates, of which the bundled
heads have seen none. `learned` is the bundled EAGLE-3 head, trained between steps
(`train.while_decoding`); other names are of drafters that stay as they are, or that copy from
earlier answers. Prints tokens per pass of the target for each part of the answers, by the order in
which they end, and for `learned` how much it has trained. Exit codes: 0; 1 if answers have other
tokens than with the first drafter, when decoding greedily; 2 for bad input; 130 after Ctrl-C or
SIGTERM.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import specjax
from specjax.apps.command_line import command
from specjax.apps.command_line.flags import Listed, run_flags
from specjax.drafters import make_drafter
from specjax.engine.outputs import Output
from specjax.errors import InputError
from specjax.fields import Number, PathOrName, Text, Whole
from specjax.loading.hub import DEFAULT_MODEL
from specjax.methods.find_head import shipped_head
from train.methods.eagle import EagleLoss, eagle_method
from train.run.optimizer import Optimization
from train.while_decoding import Learner, LearnerOptions

LEARNED = "learned"
_KIND = "eagle3"
_TABLES = "orders customers books invoices patients flights students hotels recipes songs"
_COLUMNS = "name price date city rating age title country total status"
_ASKED = (
    "Write an SQL query that lists the {0} and the {1} of all {table} where the {2} is {how} "
    "{number}, sorted by {3}.",
    "Write an SQL query that counts the {table} by {0} and {1}, if the {2} is {how} {number}.",
    "Write an SQL query for the {number} {table} with the largest {0}, with their {1} and {2}.",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv`, by default the process's arguments; return its exit code."""
    program = "python scripts/learn_while_decoding.py"
    return run_flags(run, Flags, argv, program=program, documentation=__doc__)


@dataclass(frozen=True, kw_only=True)
class Flags:
    """The flags of this script."""

    target: Annotated[str, PathOrName()] = DEFAULT_MODEL
    """The model."""
    drafters: Annotated[tuple[str, ...] | str, Listed(Text())] = f"{LEARNED},{_KIND},corpus"
    """The drafters that are compared."""
    answers: Annotated[int, Whole(1)] = 2000
    """The number of answers."""
    parts: Annotated[int, Whole(1)] = 10
    """The number of parts of the answers for which tokens per pass are printed."""
    max_new_tokens: Annotated[int, Whole(1)] = 48
    """The maximum number of tokens of an answer."""
    temperature: Annotated[float, Number(0.0)] = 0.0
    """The temperature."""
    batch_size: Annotated[int, Whole(1)] = 8
    """The number of rows that decode together."""
    share: Annotated[float, Number(0.0, 1.0)] = 0.5
    """The most of the time that may be spent on training."""
    passes: Annotated[float, Number(above=True)] = 2.0
    """The most times that an answer is trained on, on average."""
    learning_rate: Annotated[float, Number(above=True)] = 1e-3
    """The learning rate."""


def questions(count: int) -> list[str]:
    """Return `count` different questions."""
    rng, found = random.Random(0), dict[str, None]()
    while len(found) < count:
        text = rng.choice(_ASKED).format(
            *rng.sample(_COLUMNS.split(), 4),
            table=rng.choice(_TABLES.split()),
            how=rng.choice(("above", "below", "exactly")),
            number=rng.randint(2, 99),
        )
        found[text] = None
    return list(found)


@dataclass
class Decoded:
    """The outputs of a drafter in the order in which they ended, the seconds, and the learner."""

    outputs: list[Output] = field(default_factory=list)
    seconds: float = 0.0
    learner: Learner | None = None

    def per_pass(self, parts: int) -> list[float]:
        """Return the tokens per pass of so many parts of the outputs."""
        bounds = [len(self.outputs) * number // parts for number in range(parts + 1)]
        return [
            metrics_of(self.outputs[begin:end])
            for begin, end in itertools.pairwise(bounds)
            if end > begin
        ]


def metrics_of(outputs: Sequence[Output]) -> float:
    """Return the mean number of tokens per pass of the target."""
    rounds = sum(len(output.rounds.emitted) for output in outputs)
    return sum(len(output.token_ids) for output in outputs) / rounds


def run(flags: Flags) -> int:
    """Decode and print the table; return the exit code."""
    model = specjax.load_model(flags.target)
    asked = questions(flags.answers)
    parts = min(flags.parts, flags.answers)
    last = [flags.answers * number // parts for number in range(1, parts + 1)]
    print(f"| drafter | {' | '.join(f'to {number}' for number in last)} | tokens/s |")
    print(f"|---{'|---' * parts}|---|", flush=True)
    first, wrong = None, 0
    for name in flags.drafters:
        decoded = decode(model, name, asked, flags)
        tokens = {output.id: output.token_ids for output in decoded.outputs}
        first = first or tokens
        wrong += 0 if flags.temperature else sum(first[id] != tokens[id] for id in tokens)
        speed = sum(map(len, tokens.values())) / decoded.seconds
        each = " | ".join(f"{value:.2f}" for value in decoded.per_pass(parts))
        print(f"| {name} | {each} | {speed:.0f} |", flush=True)
        if (learner := decoded.learner) is not None:
            print(
                f"{learner.steps} steps, {learner.train_s:.0f} of {decoded.seconds:.0f} s, loss "
                f"{learner.losses[0]:.3f} -> {sum(learner.losses[-20:]) / 20:.3f}",
                flush=True,
            )
    if wrong:
        print(f"{wrong} answers have other tokens than with {flags.drafters[0]}")
    return int(wrong > 0)


def decode(model: specjax.Model, name: str, asked: Sequence[str], flags: Flags) -> Decoded:
    """Return the answers to questions with the drafter called `name`."""
    drafter = make_drafter(_KIND if name == LEARNED else name, model)
    engine = specjax.Engine(model, drafter=drafter, batch_size=flags.batch_size, max_length=256)
    decoded, deltas = Decoded(), engine
    if name == LEARNED:
        if (head := shipped_head(_KIND, model)) is None:
            raise InputError(f"target={flags.target!r}: no {_KIND} head comes with specjax for it")
        method = eagle_method(model, head.config, head.draft_ids, EagleLoss(steps=3))
        decoded.learner = deltas = Learner(
            engine,
            head,
            method,
            LearnerOptions(
                share=flags.share,
                passes=flags.passes,
                row_labels=flags.max_new_tokens,
                row_tokens=128,
            ),
            Optimization(learning_rate=flags.learning_rate, schedule="constant", warmup=20),
        )
    for number, text in enumerate(asked):
        chat = [{"role": "user", "content": text}]
        engine.add(
            chat, id=number, max_new_tokens=flags.max_new_tokens, temperature=flags.temperature
        )
    engine.compile()
    begin = time.perf_counter()
    decoded.outputs = [delta.output for delta in deltas if delta.output is not None]
    decoded.seconds = time.perf_counter() - begin
    if decoded.learner is not None:
        decoded.seconds -= decoded.learner.compile_s
    return decoded


if __name__ == "__main__":
    command.use_compilation_cache()
    raise SystemExit(main())
