"""Decode answers of a new domain with a head that learns from them, and with drafters that do not.

    python scripts/learn_while_decoding.py [--drafters=learned:eagle3,eagle3,corpus]
    python scripts/learn_while_decoding.py --policy_updates=20 --answers=640 --temperature=1

The target answers questions for SQL queries, made from templates, of which the bundled heads have
seen none. `learned:eagle3` is the bundled head, trained between steps (`train.while_decoding`), as
are `learned:medusa`, `learned:dspark` and `learned:draft_model`; other names are of drafters that
stay as they are, or that copy from earlier answers. With
`--policy_updates` the target, in floating point, is changed by a policy gradient after each part of
the answers, which rewards capital letters. Prints tokens per pass of the target for each part, in
the order in which answers end, the rewards, and how much a head has trained. Exit codes:
0; 1 if greedy answers have other tokens than with the first drafter; 2 for bad input; 130 after
Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import specjax
from specjax.apps.command_line import command
from specjax.apps.command_line.flags import Listed, run_flags
from specjax.drafters import make_drafter
from specjax.engine.outputs import Output
from specjax.errors import InputError
from specjax.fields import Number, PathOrName, Text, Whole
from specjax.loading.hub import DEFAULT_MODEL
from specjax.methods.find_head import shipped_head
from specjax.methods.heads.head import Head
from specjax.models.form import Form
from train.methods.blocks.block import BlockLoss, block_method
from train.methods.distill import DistillLoss, distill_method
from train.methods.eagle import EagleLoss, eagle_method
from train.methods.medusa import MedusaLoss, medusa_method
from train.methods.method import Method
from train.run.optimizer import Optimization
from train.while_decoding import Learner, LearnerOptions, batch_of, policy_loss

LEARNED = "learned:"
"""What stands before the kind of a head that learns."""
_STEPS = EagleLoss(steps=3)
_METHODS: dict[str, Callable[[specjax.Model, Head], Method]] = {
    "eagle3": lambda model, head: eagle_method(model, head.config, head.draft_ids, _STEPS),
    "medusa": lambda model, head: medusa_method(model, head.config, head.draft_ids, MedusaLoss()),
    "dspark": lambda model, head: block_method(model, head.config, head.draft_ids, BlockLoss()),
    "draft_model": lambda model, head: distill_method(
        model, range(head.config.decoder.num_layers), head.draft_ids, DistillLoss()
    ),
}
_PROMPT_TOKENS = 96
"""The most tokens of a question in the default model's chat template, with room to spare."""
_MICRO_BATCH = 8
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
    drafters: Annotated[tuple[str, ...] | str, Listed(Text())] = "learned:eagle3,eagle3,corpus"
    """The drafters that are compared."""
    answers: Annotated[int, Whole(1)] = 2000
    """The number of answers."""
    parts: Annotated[int, Whole(1)] = 10
    """The number of parts of the answers, without policy updates."""
    policy_updates: Annotated[int, Whole()] = 0
    """The number of updates of the target, one after each part but the last."""
    policy_rate: Annotated[float, Number(above=True)] = 2e-5
    """The learning rate of the target."""
    max_new_tokens: Annotated[int, Whole(1, 128)] = 32
    """The maximum number of tokens of an answer."""
    temperature: Annotated[float, Number(0.0)] = 0.0
    """The temperature."""
    batch_size: Annotated[int, Whole(1)] = 8
    """The number of rows that decode together."""
    share: Annotated[float, Number(0.0, 1.0)] = 0.5
    """The most of the time that may be spent on training the head."""
    passes: Annotated[float, Number(above=True)] = 1.5
    """The most times that the head is trained on an answer, on average."""
    learning_rate: Annotated[float, Number(above=True)] = 1e-3
    """The learning rate of the head."""


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
    """The outputs of a drafter by part, in the order in which they ended.

    `seconds` are those of decoding and of training the head, without compiling.
    """

    parts: list[list[Output]] = field(default_factory=list)
    seconds: float = 0.0
    learner: Learner | None = None

    def tokens(self) -> dict[Any, list[int]]:
        """Return the tokens of each output by its id."""
        return {output.id: output.token_ids for part in self.parts for output in part}


def per_pass(outputs: Sequence[Output]) -> float:
    """Return the mean number of tokens per pass of the target."""
    rounds = sum(len(output.rounds.emitted) for output in outputs)
    return sum(len(output.token_ids) for output in outputs) / rounds


def rewards(outputs: Sequence[Output]) -> np.ndarray:
    """Return the share of capital letters among the letters of each output, float32."""
    texts = [[letter for letter in output.text if letter.isalpha()] for output in outputs]
    shares = [sum(map(str.isupper, text)) / max(len(text), 1) for text in texts]
    return np.array(shares, np.float32)


def run(flags: Flags) -> int:
    """Decode and print the table; return the exit code."""
    floats = {}
    if flags.policy_updates:
        floats = {"weights": "float", "form": Form.for_training(jax.default_backend())}
        if flags.temperature != 1:
            raise InputError(
                f"temperature={flags.temperature}: policy_updates need --temperature=1"
            )
    model = specjax.load_model(flags.target, **floats)
    asked = questions(flags.answers)
    count = min(flags.policy_updates + 1 if flags.policy_updates else flags.parts, flags.answers)
    parts = np.array_split(np.arange(flags.answers), count)
    print(f"| drafter | {' | '.join(f'to {part[-1] + 1}' for part in parts)} | tokens/s |")
    print(f"|---{'|---' * count}|---|", flush=True)
    first, wrong = None, 0
    for name in flags.drafters:
        decoded = decode(model, name, asked, parts, flags)
        tokens = decoded.tokens()
        first = first or tokens
        wrong += 0 if flags.temperature else sum(first[id] != tokens[id] for id in tokens)
        speed = sum(map(len, tokens.values())) / decoded.seconds
        each = " | ".join(f"{per_pass(part):.2f}" for part in decoded.parts)
        print(f"| {name} | {each} | {speed:.0f} |", flush=True)
        if flags.policy_updates:
            print("reward", *(f"{rewards(part).mean():.2f}" for part in decoded.parts), flush=True)
        if (learner := decoded.learner) is not None and learner.steps:
            last = learner.losses[-20:]
            print(
                f"{learner.steps} steps, {learner.train_s:.0f} of {decoded.seconds:.0f} s, loss "
                f"{learner.losses[0]:.3f} -> {sum(last) / len(last):.3f}",
                flush=True,
            )
    if wrong:
        print(f"{wrong} answers have other tokens than with {flags.drafters[0]}")
    return int(wrong > 0)


def decode(
    model: specjax.Model,
    name: str,
    asked: Sequence[str],
    parts: Sequence[np.ndarray],
    flags: Flags,
) -> Decoded:
    """Return the answers to questions, part by part, with the drafter called `name`."""
    copies = {"suffix_decoding_max_cached_requests": flags.answers} if name == "corpus" else {}
    kind = name.removeprefix(LEARNED)
    drafter = make_drafter(kind, model, **copies)
    engine = specjax.Engine(model, drafter=drafter, batch_size=flags.batch_size, max_length=256)
    decoded, deltas = Decoded(), engine
    rows = max(64, max(map(len, parts)) if flags.policy_updates else 0)
    if name != kind:
        decoded.learner = deltas = _learner(engine, model, kind, rows, flags)
    elif flags.policy_updates:
        tokens = _PROMPT_TOKENS + flags.max_new_tokens
        engine.record(("final_norm",), rows=rows, tokens=tokens)
    policy = _Policy(model, flags) if flags.policy_updates else None
    sampling = {"max_new_tokens": flags.max_new_tokens, "temperature": flags.temperature}
    for number, part in enumerate(parts):
        for index in part:
            engine.add([{"role": "user", "content": asked[index]}], sampling, id=int(index))
        engine.compile()
        begin, compiled_s = time.perf_counter(), _compile_s(decoded)
        outputs = [delta.output for delta in deltas if delta.output is not None]
        decoded.seconds += time.perf_counter() - begin - (_compile_s(decoded) - compiled_s)
        decoded.parts.append(outputs)
        if policy is not None and number + 1 < len(parts):
            policy.update(engine, outputs, rows)
    return decoded


def _compile_s(decoded: Decoded) -> float:
    return 0.0 if decoded.learner is None else decoded.learner.compile_s


def _learner(
    engine: specjax.Engine, model: specjax.Model, kind: str, rows: int, flags: Flags
) -> Learner:
    """Return the learner of the bundled head of a kind; raise InputError if there is none."""
    head = shipped_head(kind, model) if kind in _METHODS else None
    if head is None:
        raise InputError(
            f"drafters={LEARNED}{kind}: no such head comes with specjax for {flags.target}; use "
            f"one of {', '.join(_METHODS)}, with the default model"
        )
    options = LearnerOptions(
        share=flags.share,
        passes=flags.passes,
        rows=rows,
        row_labels=flags.max_new_tokens,
        row_tokens=_PROMPT_TOKENS + flags.max_new_tokens,
    )
    constant = Optimization(learning_rate=flags.learning_rate, schedule="constant", warmup=20)
    return Learner(engine, head, _METHODS[kind](model, head), options, constant)


class _Policy:
    """The target's parameters, and a policy gradient that changes them."""

    def __init__(self, model: specjax.Model, flags: Flags) -> None:
        self._optimizer = optax.adam(flags.policy_rate)
        self._params, self._state = model.params, self._optimizer.init(model.params)
        labels, decoder = flags.max_new_tokens, model.architecture

        @jax.jit
        def step(params: Any, state: Any, recorded: Any, rows: Any, advantages: Any) -> Any:
            batch = batch_of(recorded, rows, num_labels=labels)
            gradient = jax.grad(functools.partial(policy_loss, decoder))(params, batch, advantages)
            updates, state = self._optimizer.update(gradient, state)
            return optax.apply_updates(params, updates), state

        self._step = step

    def update(self, engine: specjax.Engine, outputs: Sequence[Output], rows: int) -> None:
        """Train the target on outputs, which are the latest recorded rows, and decode with it."""
        outputs = [output for output in outputs if output.failure is None]
        reward, count = rewards(outputs), len(outputs)
        # Rows that fill up the last micro-batch count for nothing.
        at, advantages = np.zeros((2, -(-count // _MICRO_BATCH) * _MICRO_BATCH), np.float32)
        advantages[:count] = (reward - reward.mean()) / max(reward.std(), 1e-6)
        at[:count] = (engine.num_recorded - count + np.arange(count)) % rows
        for some in np.arange(len(at)).reshape(-1, _MICRO_BATCH):
            chosen = jnp.asarray(at[some], jnp.int32), jnp.asarray(advantages[some])
            self._params, self._state = self._step(
                self._params, self._state, engine.recorded, *chosen
            )
        engine.update_params(self._params)


if __name__ == "__main__":
    command.use_compilation_cache()
    raise SystemExit(main())
