"""What `auto` loses to plain decoding and to fixed lengths, with real drafts and a simulated clock.

    python scripts/costs/simulate_costs.py --prompts=FILE --drafter=ngram+eagle3 --batch_size=8

Where a machine's speed changes by a fifth from second to second, a few per cent cannot be measured.
Here a model decodes real prompts, so that what is accepted is real, but `auto` is told how long
each step took by a table of costs, in plain rounds, with noise; what it spent is counted without
noise. Every repeat decodes all prompts, group by group; the first one also measures the costs, by
rounds whose noise is no less. With `--compare_fixed` each fixed draft length is decoded as well,
and priced as if the dearest of joined drafters had drafted in every round.
"""

from __future__ import annotations

import itertools
import math
import sys
from dataclasses import dataclass

import numpy as np
from absl import app, flags, logging

from specjax.cli.built_in_prompts import questions_of
from specjax.decoding.engine.learned_costs import LearnedCosts
from specjax.decoding.generate import decode_session, open_engine
from specjax.decoding.options import DecodeOptions
from specjax.decoding.prompts import encode_prompt, spread
from specjax.decoding.sampling_params import SamplingParams
from specjax.decoding.setup import Session, plan_session
from specjax.decoding.state import State
from specjax.distributed.sharding import fetch
from specjax.draft_length.cost_measurement import Measurement
from specjax.drafters import make_drafter
from specjax.loading.load import load_model
from specjax.models.decoder import Form

_TARGET = flags.DEFINE_string("target", "smollm2-135m-instruct", "The target.")
_PROMPTS = flags.DEFINE_string("prompts", None, "A JSONL file of questions; else built-in ones.")
_LIMIT = flags.DEFINE_integer("limit", 8, "Prompts at most.", lower_bound=1)
_DRAFTER = flags.DEFINE_string("drafter", "ngram+eagle3", "The drafter.")
_BATCH = flags.DEFINE_integer("batch_size", 8, "Rows.", lower_bound=1)
_NEW = flags.DEFINE_integer("new_tokens", 48, "New tokens of each prompt.", lower_bound=1)
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "The temperature.", lower_bound=0.0)
_PASSES = flags.DEFINE_list(
    "passes",
    ["1", "1.3", "1.45", "1.6", "1.75"],
    "A pass of 1, 2, ... slots; wider ones cost more likewise.",
)
_FIRST = flags.DEFINE_list("first", ["0.02", "0.15"], "A first draft token, by drafter.")
_FURTHER = flags.DEFINE_list("further", ["0", "0.08"], "Each further draft token, by drafter.")
_CATCH_UP = flags.DEFINE_list(
    "catch_up", ["0", "0.2"], "A pass over what was missed while it slept, by drafter."
)
_NOISE = flags.DEFINE_float("noise", 0.08, "Of the logarithm of a step's time.", lower_bound=0.0)
_SEEDS = flags.DEFINE_integer("seeds", 4, "Clocks.", lower_bound=1)
_REPEATS = flags.DEFINE_integer("repeats", 3, "Runs with each clock.", lower_bound=1)
_FIXED = flags.DEFINE_bool("compare_fixed", False, "Whether to decode with fixed lengths, too.")

_BURST, _SLOWER = 0.1, 1.4
"""The share of steps beside other work, and how much longer they take."""
_SPEED_MEMORY = 0.8
"""Of the logarithm of the machine's speed, from one step to the next."""


@dataclass
class Clock:
    """A machine of known costs, by part as `Costs` has them, whose speed changes by `noise`."""

    costs: np.ndarray
    noise: float
    rng: np.random.Generator
    spent: float = 0.0
    _speed: float = 0.0

    def step(self, work: np.ndarray) -> float:
        """What the clock says of a step; what it really cost is added to `spent`."""
        seconds = float(work @ self.costs)
        self.spent += seconds
        self._speed = _SPEED_MEMORY * self._speed + self.rng.normal(0, self.noise)
        slower = _SLOWER if self.noise and self.rng.random() < _BURST else 1.0
        return seconds * slower * math.exp(self._speed + self.rng.normal(0, self.noise))


class SimulatedCosts(LearnedCosts):
    """What "auto" learns of costs where a `Clock` says how long a step took."""

    clock: Clock

    def after_step(
        self, state: State, seconds: float, drafts: bool | None = None, has_room: bool = False
    ) -> State:
        """As `LearnedCosts.after_step`, with the seconds of the clock."""
        del seconds
        work = fetch(state.policy.work)
        return super().after_step(state, self.clock.step(work.counts()), drafts, has_room)

    def save(self) -> None:
        """Keep nothing: the machine is not there."""


def pass_costs(widths: tuple[int, ...], passes: list[float]) -> list[float]:
    """The cost of each width; beyond the table, as between its last two."""
    slope = passes[-1] - passes[-2]
    return [
        passes[width - 1] if width <= len(passes) else passes[-1] + slope * (width - len(passes))
        for width in widths
    ]


def rounds_of(session: Session) -> int:
    """The rounds of a session's batch, decoded once."""
    engine = open_engine(session)
    for index in session.groups(session.batch_size):
        decode_session(session, index=index, engine=engine)
    return engine.statistics.rounds


def simulate(session: Session, passes: list[float], drafting: list[list[float]]) -> np.ndarray:
    """What "auto" spent in each repeat, [seeds, repeats], in plain rounds.

    `drafting` are the parts of `Costs` after its passes, each by drafter.
    """
    drafters = session.plan.drafter.parts
    costs = np.concatenate([pass_costs(session.plan.widths, passes), *drafting])
    engine, spent = open_engine(session), []
    for seed in range(_SEEDS.value):
        learned = SimulatedCosts(
            None, None, Measurement(len(session.plan.widths), [one.num_nodes for one in drafters])
        )
        learned.clock = Clock(costs, _NOISE.value, np.random.default_rng(seed))
        engine.costs = learned
        before = 0.0
        for _ in range(_REPEATS.value):
            for index in session.groups(session.batch_size):
                decode_session(session, index=index, engine=engine)
            spent.append(learned.clock.spent - before)
            before = learned.clock.spent
    return np.reshape(spent, (_SEEDS.value, _REPEATS.value))


def main(argv: list[str]) -> int:
    """Entry point; returns the exit code."""
    del argv
    logging.set_verbosity(logging.WARNING)
    passes, *drafting = (
        [float(one) for one in flag.value] for flag in (_PASSES, _FIRST, _FURTHER, _CATCH_UP)
    )
    # Passes are over all rows, as the costs say: not so with layers apart.
    model = load_model(_TARGET.value, dtype="float32", form=Form("stacked"))
    questions = questions_of(_PROMPTS.value)
    ids = [
        encode_prompt(model, question.first_turn) for question in spread(questions, _LIMIT.value)
    ]
    rows = -(-len(ids) // _BATCH.value) * _BATCH.value
    ids = list(itertools.islice(itertools.cycle(ids), rows))
    requests = SamplingParams(temperature=_TEMPERATURE.value, max_new_tokens=_NEW.value)
    options = DecodeOptions(num_speculative_tokens="auto", batch_size=_BATCH.value)
    drafter = make_drafter(_DRAFTER.value, model)
    plain = rounds_of(plan_session(model, ids, options=options.without_drafts(), requests=requests))
    session = plan_session(model, ids, drafter=drafter, options=options, requests=requests)
    parts = len(session.plan.drafter.parts)
    if len(passes) < 2 or min(map(len, drafting)) < parts:
        raise SystemExit(
            "error: --passes needs two costs at least, --first, --further and --catch_up one for "
            f"each of {parts} drafters"
        )
    first, further, catch_up = (each[-parts:] for each in drafting)
    share = simulate(session, passes, [first, further, catch_up]) / plain
    print("| repeat | auto / plain time, mean | least | most |")
    print("| --- | --- | --- | --- |")
    for number, each in enumerate(share.T, 1):
        print(f"| {number} | {each.mean():.3f} | {each.min():.3f} | {each.max():.3f} |", flush=True)
    if _FIXED.value:
        print("\n| fixed length | time / plain |")
        print("| --- | --- |")
        for length in range(1, max(session.plan.widths)):
            options = DecodeOptions(num_speculative_tokens=length, batch_size=_BATCH.value)
            made = make_drafter(_DRAFTER.value, model, num_speculative_tokens=length)
            fixed = plan_session(model, ids, drafter=made, options=options, requests=requests)
            (wide,) = pass_costs((max(fixed.plan.widths),), passes)
            cost = wide + max(first) + max(further) * (length - 1)
            print(f"| {length} | {rounds_of(fixed) * cost / plain:.3f} |", flush=True)
    return 0


if __name__ == "__main__":
    app.run(main, argv=sys.argv)
