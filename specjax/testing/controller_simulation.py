"""A simulated decoding loop, without models, that measures how well a controller chooses limits.

Drafters have given acceptance probabilities and machines given costs. The regret of a controller
compares the time of its steps with the time of as many tokens under the fixed limits that are best
in hindsight. Both use expected tokens and seconds per round, so that neither sampling nor timing
noise contributes.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Int, Real

from specjax.controllers.base import Controller, DrafterSizes, Limits, StepRecord, StepSizes
from specjax.theory import ExpertShape

_TIMED_ROUNDS = 4
"""The rounds of a step that an engine times after compiling."""
_SAMPLE = 8_000
"""The number of pairs of row and round over which expectations are averaged."""


@dataclass(frozen=True)
class SimulatedDrafter:
    """A drafter whose nodes are accepted with given probabilities; costs are in plain passes.

    It has a draft in a fraction `drafts` of its turns. In a `chain`, `chances[n]` is the mean
    probability of accepting token n after the tokens before it; the probability of each single
    token, which is also its confidence, follows a Beta distribution around that mean with the
    weight of `certainty` observations. In a tree, `chances[n]` is the probability of accepting node
    n. A draft costs `first`; with `stops`, each token after the first costs `further`.
    """

    chances: tuple[float, ...]
    first: float
    further: float = 0.0
    drafts: float = 1.0
    stops: bool = False
    chain: bool = True
    certainty: float = 2.0

    @property
    def sizes(self) -> DrafterSizes:
        """The number of nodes and whether drafts can stop early, as a controller is told."""
        return DrafterSizes(len(self.chances), self.stops)


@dataclass(frozen=True)
class SimulatedExperts:
    """Experts of a target, which a pass reads in proportion to the distinct ones of its tokens.

    `share` is their part of the time of a pass over one token, which uses `per_token` of them.
    Tokens are independent. Unused slots have one token, so that they use the experts of one.
    """

    num_experts: int = 128
    per_token: int = 8
    share: float = 0.6

    def pass_cost(
        self, dense: Real[np.ndarray, "*A"], tokens: Int[np.ndarray, "*A"], rows: int
    ) -> Real[np.ndarray, "*A"]:
        """Return the costs of passes over `tokens` different tokens of all rows, in plain passes.

        `dense` is what such a pass costs without experts. A plain pass has `rows` tokens.
        """
        shape = ExpertShape(self.num_experts, self.per_token, 1)
        read = np.asarray(shape.distinct(tokens)) / self.per_token
        plain = 1 - self.share + self.share * shape.distinct(rows) / self.per_token
        return ((1 - self.share) * dense + self.share * read) / plain


@dataclass(frozen=True)
class Machine:
    """The costs of a machine: a plain pass in seconds, everything else in plain passes.

    `noise` is a relative standard deviation; a fraction `outliers` of steps takes `outlier` times
    as long. From the middle of the run, all costs are multiplied by `later` and drafting costs also
    by `drafting`. `first_run` is the relative extra time of the first run of a width or a drafter;
    the clock includes it, but regret does not, since no controller could avoid it. With `experts`,
    `passes` are the costs of all else. If `timed_alike`, all rows and unused slots of the steps
    that an engine times have equal tokens, so that these read the experts of few.
    """

    widths: tuple[int, ...]
    passes: tuple[float, ...]
    plain_s: float = 0.05
    constant: float = 0.004
    rows: int = 1
    noise: float = 0.05
    outliers: float = 0.01
    outlier: float = 2.5
    later: float = 1.0
    drafting: float = 1.0
    dispatch_s: float = 0.0
    wide_is_cheap: bool = False
    first_run: float = 0.0
    experts: SimulatedExperts | None = None
    timed_alike: bool = False

    def pass_costs(
        self, width: Int[np.ndarray, "A"], tokens: Int[np.ndarray, "A"]
    ) -> Real[np.ndarray, "A"]:
        """Return the costs of passes in plain passes.

        `width` is the index of their compiled widths, and `tokens` how many different tokens they
        have in all rows.
        """
        dense = np.array(self.passes)[width]
        return dense if self.experts is None else self.experts.pass_cost(dense, tokens, self.rows)


@dataclass(frozen=True)
class Simulation:
    """Drafters on a machine for a number of rounds; `later` replaces the drafters halfway."""

    machine: Machine
    drafters: tuple[SimulatedDrafter, ...]
    rounds: int = 512
    most_rounds: int = 16
    later: tuple[SimulatedDrafter, ...] | None = None

    @property
    def sizes(self) -> StepSizes:
        """The sizes of the simulated loop, as a controller is told."""
        parts = tuple(drafter.sizes for drafter in self.drafters)
        machine = self.machine
        return StepSizes(
            parts, machine.widths, machine.rows, machine.dispatch_s, machine.wide_is_cheap
        )

    def over(self, rounds: int) -> Simulation:
        """Return the same simulation with another number of rounds."""
        return replace(self, rounds=rounds)

    @property
    def halves(self) -> tuple[tuple[tuple[SimulatedDrafter, ...], float], ...]:
        """The drafters, and the factor of all costs, in each half of the run."""
        later = self.drafters if self.later is None else self.later
        dearer = tuple(
            replace(
                drafter,
                first=drafter.first * self.machine.drafting,
                further=drafter.further * self.machine.drafting,
            )
            for drafter in later
        )
        return (self.drafters, 1.0), (dearer, self.machine.later)


@dataclass(frozen=True)
class Step:
    """A simulated step: the expected tokens of all its rows, and its true seconds.

    `half` is the half of the run in which it began, 0 or 1.
    """

    limits: Limits
    rounds: int
    tokens: float
    seconds: float
    half: int


def simulate(
    controller: Controller,
    simulation: Simulation,
    seed: int,
    ahead: int = 0,
    *,
    costs_known: bool = False,
) -> list[Step]:
    """Return the simulated steps under a controller, with random numbers from `seed`.

    Limits are chosen `ahead` steps before the record of the latest step is known. With
    `costs_known`, the controller is first told the costs, as an engine does after compiling.
    """
    rng = np.random.default_rng(seed)
    state, done, steps, records = controller.init(simulation.sizes), 0, [], []
    if costs_known:
        state = controller.know_costs(state, _timed_steps(simulation, rng))
    new = np.ones(len(simulation.machine.widths)), np.ones(len(simulation.drafters))
    while done < simulation.rounds:
        half = int(2 * done >= simulation.rounds)
        drafters, dearer = simulation.halves[half]
        machine = simulation.machine
        limits, rounds, state = controller.choose(state, machine.rows, simulation.most_rounds)
        assert 1 <= rounds <= simulation.most_rounds
        record, passes = _draw_step(drafters, machine, limits, rounds, rng)
        clock_s = dearer * _seconds(drafters, machine, record, passes)
        clock_s += dearer * machine.first_run * _first_runs(drafters, machine, record, *new)
        new = new[0] * (record.passes == 0), new[1] * (record.ran == 0)
        clock_s *= np.exp(machine.noise * rng.normal())
        if rng.random() < machine.outliers:
            clock_s *= machine.outlier
        records.append(replace(record, seconds=float(clock_s)))
        tokens, seconds = expected_round(drafters, machine, limits)
        seconds = dearer * machine.plain_s * (machine.constant + rounds * seconds)
        steps.append(Step(limits, rounds, rounds * tokens, seconds, half))
        done += rounds
        if len(records) > ahead:
            state = controller.update(state, records.pop(0))
    return steps


def _timed_steps(simulation: Simulation, rng: np.random.Generator) -> list[StepRecord]:
    """Return records of the steps that an engine times: plain ones, widths, and drafters."""
    machine, count = simulation.machine, len(simulation.drafters)
    most = max(len(drafter.chances) for drafter in simulation.drafters)
    timed = []
    widths = range(len(machine.widths))
    for number, rounds in [(0, 1), *((number, _TIMED_ROUNDS) for number in widths)]:
        width = machine.widths[number]
        record = StepRecord(
            Limits((0,) * count, (0.0,) * count),
            None,
            rounds * (np.arange(len(machine.widths)) == number),
            *np.zeros((2, count), int),
            *np.zeros((2, count, most), int),
            np.zeros(count, int),
            rounds * machine.rows,
        )
        tokens = min(width, 2) if machine.timed_alike else machine.rows * width
        cost = machine.pass_costs(np.array([number]), np.array([tokens]))[0]
        timed.append((record, rounds * float(cost)))
    for number, drafter in enumerate(simulation.drafters):
        short = min(machine.widths[1] - 1, len(drafter.chances))
        for length in {1, short} if drafter.stops else {short}:
            longest = [length * (index == number) for index in range(count)]
            limits = Limits(tuple(longest), (0.0,) * count)
            alike = machine.timed_alike
            timed.append(
                _draw_step(simulation.drafters, machine, limits, _TIMED_ROUNDS, rng, alike)
            )
    clock = (_seconds(simulation.drafters, machine, *step) for step in timed)
    noise = np.exp(machine.noise * rng.normal(size=len(timed)))
    triples = zip(timed, clock, noise.tolist(), strict=True)
    return [replace(record, seconds=seconds * factor) for (record, _), seconds, factor in triples]


def regret(simulation: Simulation, steps: list[Step]) -> float:
    """Return how much longer the steps took than the best fixed limits would have.

    The result is the extra time divided by the time of the best fixed limits for as many tokens.
    """
    tokens = [sum(step.tokens for step in steps if step.half == half) for half in (0, 1)]
    return sum(step.seconds for step in steps) / best_fixed(simulation, tuple(tokens))[1] - 1


def plain_seconds(simulation: Simulation, steps: list[Step]) -> float:
    """Return the seconds that plain decoding takes for the tokens of the steps."""
    none = Limits((0,) * len(simulation.drafters), (0.0,) * len(simulation.drafters))
    tokens = [sum(step.tokens for step in steps if step.half == half) for half in (0, 1)]
    return _seconds_of_tokens(simulation, none, tuple(tokens))


def best_fixed(simulation: Simulation, tokens: tuple[float, float]) -> tuple[Limits, float]:
    """Return the fixed limits that decode fastest, and their seconds.

    `tokens` are the numbers of tokens to decode in each half of the run.
    """
    grids = [_grid(drafter.sizes.num_nodes, simulation) for drafter in simulation.drafters]
    confidence = (0.0,) * len(grids)
    limits = [Limits(longest, confidence) for longest in itertools.product(*grids)]
    times = [_seconds_of_tokens(simulation, choice, tokens) for choice in limits]
    best = int(np.argmin(times))
    return limits[best], times[best]


def _grid(most: int, simulation: Simulation) -> list[int]:
    """Return the draft lengths, up to `most`, that `best_fixed` compares."""
    ends = {width - 1 for width in simulation.machine.widths if width <= most}
    return list(range(most + 1)) if most <= 8 else sorted({0, 1, 2, 3, 4, 6, 8, most} | ends)


def _seconds_of_tokens(
    simulation: Simulation, limits: Limits, tokens: tuple[float, float]
) -> float:
    """Return the seconds for the tokens of each half under fixed limits, in the longest steps."""
    machine, total = simulation.machine, 0.0
    for (drafters, dearer), count in zip(simulation.halves, tokens, strict=True):
        per_round, seconds = expected_round(drafters, machine, limits)
        seconds += machine.constant / simulation.most_rounds
        total += count / per_round * dearer * machine.plain_s * seconds
    return total


@functools.lru_cache(maxsize=4096)
def expected_round(
    drafters: tuple[SimulatedDrafter, ...], machine: Machine, limits: Limits
) -> tuple[float, float]:
    """Return the mean tokens of all rows in a round, and its mean cost in plain passes."""
    rounds = _SAMPLE // machine.rows
    record, passes = _draw_step(drafters, machine, limits, rounds, np.random.default_rng(0))
    free = replace(machine, constant=0.0)
    seconds = _seconds(drafters, free, record, passes) / machine.plain_s
    tokens = record.row_rounds + int(record.accepted.sum())
    return tokens / rounds, seconds / rounds


def _seconds(
    drafters: tuple[SimulatedDrafter, ...], machine: Machine, record: StepRecord, passes: float
) -> float:
    """Return the seconds that a step costs, given the record of what it ran.

    `passes` is what its passes cost, in plain passes.
    """
    first = np.array([drafter.first for drafter in drafters])
    further = np.array([drafter.further for drafter in drafters])
    drafting = record.ran @ first + record.further @ further
    return float(machine.plain_s * (machine.constant + passes + drafting))


def _first_runs(
    drafters: tuple[SimulatedDrafter, ...],
    machine: Machine,
    record: StepRecord,
    new_widths: Real[np.ndarray, "widths"],
    new_drafters: Real[np.ndarray, "drafters"],
) -> float:
    """Return the extra seconds for the widths and drafters that a step ran for the first time."""
    passes = (record.passes > 0) * new_widths @ np.array(machine.passes)
    drafting = (record.ran > 0) * new_drafters @ np.array([drafter.first for drafter in drafters])
    return float(machine.plain_s * (passes + drafting))


def _draw_step(
    drafters: tuple[SimulatedDrafter, ...],
    machine: Machine,
    limits: Limits,
    rounds: int,
    rng: np.random.Generator,
    alike: bool = False,
) -> tuple[StepRecord, float]:
    """Return the record of a step with random drafts, without its seconds, and its passes' cost.

    If `alike`, the drafts of all rows have the same tokens.
    """
    rows, most = machine.rows, max(len(drafter.chances) for drafter in drafters)
    waiting = np.ones((rounds, rows), bool)
    used = np.zeros((rounds, rows), int)
    counts = np.zeros((2, len(drafters), most), int)
    ran, further, turns = np.zeros((3, len(drafters)), int)
    for number, (drafter, limit) in enumerate(zip(drafters, limits.longest, strict=True)):
        if not limit:
            continue
        runs = waiting.any(axis=1)
        length, made, accepted = _draw_drafts(
            drafter, limit, limits.confidence[number], waiting, rng
        )
        turn = waiting & (length > 0)
        drafted = (np.arange(most) < length[..., None]) & turn[..., None]
        counts[0, number] = drafted.any(axis=1).sum(axis=0)
        counts[1, number, : accepted.shape[-1]] = (accepted & turn[..., None]).sum(axis=(0, 1))
        ran[number], turns[number] = runs.sum(), turn.sum()
        further[number] = np.where(waiting, made, 0).max(axis=1).sum() if drafter.stops else 0
        used = np.where(turn, length, used)
        waiting &= ~turn
    slots = np.searchsorted(machine.widths, 1 + used.max(axis=1))
    tokens = 1 + used.max(axis=1) if alike else rows + used.sum(axis=1)
    tokens += rows + used.sum(axis=1) < rows * np.array(machine.widths)[slots]
    record = StepRecord(
        limits=limits,
        seconds=None,
        passes=np.bincount(slots, minlength=len(machine.widths)),
        ran=ran,
        further=further,
        drafted=counts[0],
        accepted=counts[1],
        turns=turns,
        row_rounds=rounds * rows,
    )
    return record, float(machine.pass_costs(slots, tokens).sum())


def _draw_drafts(
    drafter: SimulatedDrafter,
    limit: int,
    least: float,
    waiting: Bool[np.ndarray, "rounds rows"],
    rng: np.random.Generator,
) -> tuple[
    Int[np.ndarray, "rounds rows"],
    Int[np.ndarray, "rounds rows"],
    Bool[np.ndarray, "rounds rows N"],
]:
    """Return the lengths of drafts, the further passes made for them, and the accepted nodes.

    `least` is the confidence below which a chain stops, and `waiting` marks the rows without a
    draft.
    """
    shape, chances = waiting.shape, np.array(drafter.chances[:limit])
    has = rng.random(shape) < drafter.drafts
    full = np.full(shape, len(chances))
    if not drafter.chain:
        accepted = rng.random((*shape, len(chances))) < chances
        return full * has, np.zeros(shape, int), accepted & has[..., None]
    certainty = drafter.certainty
    each = rng.beta(certainty * chances, certainty * (1 - chances), (*shape, len(chances)))
    confident = np.cumprod(each >= least, axis=-1).astype(bool) if drafter.stops else each > -1
    length = confident.sum(axis=-1)
    accepted = np.cumprod((rng.random(each.shape) < each) & confident, axis=-1).astype(bool)
    return length * has, np.minimum(length, len(chances) - 1), accepted & has[..., None]


def _chain(chance: float, length: int, first: float, further: float = 0.0, **more: Any) -> Any:
    """Return a chain in which every token is accepted with probability `chance`."""
    return SimulatedDrafter((chance,) * length, first, further, **more)


def _tree(accepted: float, nodes: int, first: float) -> SimulatedDrafter:
    """Return a tree that adds `accepted` tokens on average, node n in proportion to 1/(n+1)."""
    weights = 1 / np.arange(1, nodes + 1)
    return SimulatedDrafter(tuple(accepted * weights / weights.sum()), first, chain=False)


_EAGLE = _chain(0.55, 4, 0.12, 0.07, stops=True)
_NGRAM = _chain(0.5, 4, 0.005, drafts=0.2)
_NEVER = _chain(0.05, 4, 2.2)
DRAFTERS: dict[str, tuple[SimulatedDrafter, ...]] = {
    "ngram": (_NGRAM,),
    "eagle3": (_EAGLE,),
    "ngram + eagle3": (_NGRAM, _EAGLE),
    "token_recycling": (_tree(1.0, 24, 0.01),),
    "dynamic tree": (_tree(1.9, 16, 0.4),),
    "medusa tree": (_tree(1.2, 24, 0.05),),
    "never pays": (_NEVER,),
    "ngram + never pays": (_NGRAM, _NEVER),
    "slow draft model": (_chain(0.35, 4, 0.6, 0.55, stops=True),),
}
CLOCKS: dict[str, tuple[float, float]] = {
    "2 ms on an accelerator": (0.002, 0.005),
    "0.1 ms": (0.0001, 0.001),
    "5 ms": (0.005, 0.0005),
    "50 ms": (0.05, 0.0005),
    "1.5 s": (1.5, 0.0005),
}
"""The seconds of a plain pass, and of the host per step, by the machine's name."""
_SLOT = {1: 0.1, 4: 0.2, 8: 0.35}
"""The cost of a further window slot on a CPU in plain passes, by the number of rows."""


def machine(clock: str, rows: int, most: int, **more: Any) -> Machine:
    """Return a machine for drafts of up to `most` nodes, whose batch has `rows` rows.

    `clock` is a name in `CLOCKS`, and `more` are further fields of `Machine`.
    """
    plain_s, host_s = CLOCKS[clock]
    accelerator = clock == "2 ms on an accelerator"
    widths = (1, 1 + most) if accelerator else (1, 1 + -(-most // 2), 1 + most)
    base, slot = (0.9, 0.005 * rows) if accelerator else (1.0, _SLOT[rows])
    passes = (1.0, *(base + slot * (width - 1) for width in widths[1:]))
    return Machine(
        widths,
        passes,
        plain_s,
        host_s / plain_s,
        rows,
        dispatch_s=0.005 if accelerator else 0.001,
        wide_is_cheap=accelerator,
        **more,
    )


def simulation(drafter: str, clock: str, rows: int, **more: Any) -> Simulation:
    """Return a simulation of a drafter on a machine.

    `drafter` is a name in `DRAFTERS`; the other arguments are those of `machine`.
    """
    drafters = DRAFTERS[drafter]
    most = max(len(each.chances) for each in drafters)
    return Simulation(machine(clock, rows, most, **more), drafters)


def changes() -> dict[str, Simulation]:
    """Return simulations by name in which the drafters or their costs change halfway."""
    better, worse = (_chain(chance, 4, 0.12, 0.07, stops=True) for chance in (0.75, 0.1))
    steady = machine("50 ms", 4, 4)
    return {
        "eagle3 becomes bad": Simulation(steady, (better,), later=(worse,)),
        "eagle3 becomes good": Simulation(steady, (worse,), later=(better,)),
        "eagle3, drafting costs treble": Simulation(replace(steady, drafting=3.0), (_EAGLE,)),
    }
