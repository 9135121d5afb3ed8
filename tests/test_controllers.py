"""Length controllers: what they choose, on a simulated clock, and what they survive."""

from dataclasses import replace

import jaxtyping
import numpy as np
import pytest
from conftest import slow

from specjax.controllers import (
    Auto,
    ByBatch,
    DrafterSizes,
    Fixed,
    Limits,
    Recorded,
    StepRecord,
    StepSizes,
    auto,
)
from specjax.controllers.acceptance_estimates import forecast, no_counts
from specjax.controllers.cost_estimates import count_work, initial_costs, learn_costs
from specjax.controllers.throughput import Estimates, highest_rates
from specjax.testing.controller_simulation import (
    SimulatedDrafter,
    SimulatedExperts,
    changes,
    plain_seconds,
    regret,
    simulate,
    simulation,
)

SIZES = StepSizes((DrafterSizes(4, stops=True), DrafterSizes(32)), (1, 5, 33), 1)
BOTH = simulation("ngram + eagle3", "50 ms", 1)


def make_record(limits, rounds=1, seconds=1.0, rows=1, accepted=0):
    """A step whose drafts were as long as allowed, the first nodes of them accepted."""
    longest = np.array(limits.longest)
    most = max(one.num_nodes for one in SIZES.drafters)
    first = int(np.argmax(longest > 0))
    turns = np.where(np.arange(len(longest)) == first, rounds * rows * (longest > 0), 0)
    drafted = (np.arange(most) < longest[:, None]) * rounds * (turns[:, None] > 0)
    width = np.searchsorted(SIZES.widths, 1 + longest[first])
    return StepRecord(
        limits=limits,
        seconds=seconds,
        passes=np.eye(len(SIZES.widths), dtype=int)[width] * rounds,
        ran=(turns > 0) * rounds,
        further=np.where(turns > 0, np.maximum(longest - 1, 0), 0) * rounds,
        drafted=drafted,
        accepted=(np.arange(most) < accepted) * turns[:, None],
        turns=turns,
        row_rounds=rounds * rows,
    )


def test_fixed_limits():
    state = Fixed().init(SIZES)
    assert Fixed().choose(state, 1, 16)[:2] == (Limits((4, 32), (0.0, 0.0)), 16)
    assert Fixed(6).choose(state, 1, 16)[0].longest == (4, 6)
    by_batch = ByBatch(((1, 2, 4), (3, 8, 1)), longest=0)
    chosen = [by_batch.choose(state, rows, 16)[0].longest for rows in (1, 2, 3, 8, 9)]
    assert chosen == [(4, 4), (4, 4), (1, 1), (1, 1), (0, 0)]


@pytest.mark.parametrize("ahead", [0, 1])
def test_recorded_limits_repeat_a_run_with_steps_under_way(ahead):
    run = BOTH.over(96)
    steps = simulate(Auto(), run, 0, ahead)
    recorded = Recorded(tuple((step.limits, step.rounds) for step in steps))
    assert simulate(recorded, run, 5, ahead) == steps
    state = recorded.init(run.sizes)
    for _ in steps:
        *_, state = recorded.choose(state, 1, 16)
    assert recorded.choose(state, 1, 16)[0].longest == (0, 0)


ACCELERATOR = "2 ms on an accelerator"
# Mean regret in percent over 64 and over 512 rounds, of one, four and eight rows, with a step under
# way: 5 and 2 are the aims. docs/draft_length.md says why 64 rounds are too few for some of them.
LOSSES = {
    ACCELERATOR: {
        "ngram": (14, 2.5),
        "eagle3": (20, 3),
        "ngram + eagle3": (18, 4),
        "token_recycling": (14, 2),
        "dynamic tree": (14, 2),
        "medusa tree": (14, 2),
        "never pays": (25, 4),
    },
    "0.1 ms": {
        "ngram": (35, 7),
        "eagle3": (50, 8),
        "ngram + eagle3": (50, 8),
        "token_recycling": (45, 8),
        "dynamic tree": (55, 10),
        "never pays": (70, 9),
    },
    "5 ms": {
        "ngram": (6, 2.5),
        "eagle3": (9, 5),
        "ngram + eagle3": (7, 3),
        "token_recycling": (8, 3),
        "dynamic tree": (8, 3),
        "medusa tree": (8, 3),
        "never pays": (8, 2.5),
    },
    "50 ms": {
        "ngram": (5, 2),
        "eagle3": (6, 2),
        "ngram + eagle3": (6, 2),
        "token_recycling": (7, 2),
        "dynamic tree": (7, 2),
        "medusa tree": (7, 2),
        "never pays": (6, 2),
    },
}


def mean_regret(settings, rounds, seeds):
    """In percent."""
    runs = [setting.over(rounds) for setting in settings]
    return 100 * np.mean(
        [regret(run, simulate(Auto(), run, seed, ahead=1)) for run in runs for seed in range(seeds)]
    )


@pytest.mark.parametrize(
    ("clock", "drafter"),
    [
        # A lookup and a head, a tree, and what never pays; the others are alike.
        *(("50 ms", drafter) for drafter in ("ngram + eagle3", "token_recycling", "never pays")),
        (ACCELERATOR, "ngram + eagle3"),
        ("0.1 ms", "never pays"),
        ("0.1 ms", "ngram"),
        *slow(
            *(("50 ms", drafter) for drafter in ("ngram", "eagle3", "dynamic tree", "medusa tree")),
            *((ACCELERATOR, drafter) for drafter in LOSSES[ACCELERATOR] if "+" not in drafter),
            *(("5 ms", drafter) for drafter in LOSSES["5 ms"]),
            *(("0.1 ms", drafter) for drafter in list(LOSSES["0.1 ms"])[1:-1]),
        ),
    ],
)
def test_regret_from_the_first_step_on(clock, drafter):
    settings = [
        simulation(drafter, clock, rows, later=later)
        for rows, later in ((1, 1.0), (1, 3.0), (4, 1.0), (8, 1.0))
    ]
    lost = mean_regret(settings, 64, 4), mean_regret(settings, 512, 2)
    assert (np.array(lost) <= LOSSES[clock][drafter]).all(), lost


@pytest.mark.parametrize(("name", "most"), [("bad", 5), ("good", 5), ("costs treble", 5)])
def test_regret_where_drafters_change(name, most):
    settings = [setting for key, setting in changes().items() if key.endswith(name)]
    assert mean_regret(settings, 512, 4) <= most


@pytest.mark.parametrize("drafter", ["eagle3", *slow("token_recycling", "never pays")])
def test_first_runs_that_take_longer_mislead_for_a_while(drafter):
    """A width's first run takes 1.7 times as long."""
    settings = [simulation(drafter, "50 ms", rows, first_run=0.7) for rows in (1, 4, 8)]
    assert mean_regret(settings, 512, 4) <= 5


@pytest.mark.parametrize("plain_s", [0.005, 1.5])
@pytest.mark.parametrize("ahead", [0, 1])
def test_the_size_of_the_model_makes_no_difference(plain_s, ahead):
    run = simulation("eagle3", "50 ms", 4, later=3.0).over(128)
    other = replace(run, machine=replace(run.machine, plain_s=plain_s))
    steps, others = simulate(Auto(), run, 3, ahead), simulate(Auto(), other, 3, ahead)
    assert [(step.limits, step.rounds) for step in steps] == [
        (step.limits, step.rounds) for step in others
    ]


@pytest.mark.parametrize(("clock", "least"), [("5 ms", 0.97), ("50 ms", 0.97), (ACCELERATOR, 0.93)])
@pytest.mark.parametrize("rows", [1, 8])
def test_a_drafter_that_never_pays_costs_little(clock, rows, least):
    run = simulation("never pays", clock, rows)
    for seed in range(4):
        steps = simulate(Auto(), run, seed)
        assert plain_seconds(run, steps) / sum(step.seconds for step in steps) >= least


@pytest.mark.parametrize("drafter", ["never pays", "token_recycling", *slow("slow draft model")])
def test_known_costs_make_trials_cheaper(drafter):
    """Over answers of 64 tokens: less regret, and nearly the speed of plain decoding at least."""
    runs = [simulation(drafter, "5 ms", rows).over(64) for rows in (1, 4, 8)]
    regrets = []
    for known in (False, True):
        steps = [
            (run, simulate(Auto(), run, seed, ahead=1, costs_known=known))
            for run in runs
            for seed in range(6)
        ]
        regrets.append(np.mean([regret(run, each) for run, each in steps]))
    speeds = [plain_seconds(run, each) / sum(one.seconds for one in each) for run, each in steps]
    assert regrets[1] < 0.7 * regrets[0]
    assert np.mean(speeds) >= 0.97


@pytest.mark.parametrize("rows", [1, 8])
def test_what_cannot_pay_is_never_tried(rows, monkeypatch):
    """A drafter that takes longer than four tokens of plain decoding."""
    slow_drafter = SimulatedDrafter((0.9,) * 4, first=6.0)
    run = simulation("ngram", "5 ms", rows).over(4096)
    run = replace(run, drafters=(slow_drafter,))

    def tried(run):
        steps = simulate(Auto(), run, 0, ahead=1, costs_known=True)
        return any(any(step.limits.longest) for step in steps)

    assert not tried(run)
    # A drafter of the same costs that could pay is tried.
    assert tried(replace(run, drafters=(replace(slow_drafter, first=0.05),)))
    monkeypatch.setattr(auto, "highest_rates", lambda _, arms, *more: np.full(len(arms), np.inf))
    assert tried(run)


def test_the_highest_rates_are_those_of_full_acceptance():
    """A tree of 32 nodes adds no more tokens than its longest path has."""
    sizes = StepSizes((DrafterSizes(4, True, 4), DrafterSizes(32, False, 3)), (1, 5, 33), 2)
    costs = initial_costs(sizes)._replace(seconds=np.array([0.8, 1, 0.5, 2, 0.1, 0.25, 0.05, 0.0]))
    estimates = Estimates(sizes, costs, forecast(no_counts(sizes)))
    arms = np.array([[0, 0], [1, 0], [4, 0], [0, 2], [0, 32], [4, 32]])
    rates = highest_rates(estimates, arms, 2.0, 8)
    chain, tree = 10 / (0.1 + 1.5 + 0.1 + 0.15), 8 / (0.1 + 3.5 + 0.25)
    wanted = [2 / 1.1, 4 / 1.7, chain, 6 / (0.1 + 1.5 + 0.25), tree, max(chain, tree)]
    np.testing.assert_allclose(rates, wanted)


def test_what_did_not_pay_is_tried_again_at_a_bounded_share_of_the_time():
    steps = simulate(Auto(), simulation("never pays", "50 ms", 1).over(8192), 0)
    trials = np.array([step.rounds * (step.limits.longest[0] > 0) for step in steps])
    done = np.cumsum([step.rounds for step in steps])
    early, late = trials[done <= 2048].sum(), trials[done > 4096].sum()
    assert early > 0
    assert 0 < late <= 2 * early  # in twice as many rounds


@pytest.mark.parametrize(
    ("drafter", "clock"),
    [("eagle3", ACCELERATOR), ("never pays", ACCELERATOR), ("eagle3", "50 ms")],
)
def test_steps_are_long_once_it_is_known_what_pays(drafter, clock):
    steps = simulate(Auto(), simulation(drafter, clock, 1), 1)
    assert np.mean([step.rounds for step in steps[-10:]]) > 12


def test_first_steps_on_accelerators_have_rounds_enough():
    """A step costs the host more than a round does, so that steps of one round mislead."""
    steps = simulate(Auto(), simulation("eagle3", ACCELERATOR, 1), 0, ahead=1)
    assert steps[0].rounds >= 4
    assert [step.limits.longest for step in steps[:2]] == [(4,), (0,)]
    assert np.mean([step.rounds for step in steps[2:]]) > 8


def test_the_first_step_is_short_and_plain():
    state = Auto().init(SIZES)
    limits, rounds, _ = Auto().choose(state, 1, 16)
    assert (limits.longest, rounds) == ((0, 0), 1)


def test_choices_follow_from_the_state_alone():
    run = BOTH.over(64)
    assert simulate(Auto(), run, 7) == simulate(Auto(), run, 7)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "seconds", [None, 0.0, -1.0, np.nan, np.inf, -np.inf, 1e-300, 1e300, 1e5, 1e-6]
)
@pytest.mark.parametrize("when", [0, 1, 40])
def test_a_clock_that_stops_or_jumps_changes_speed_only(seconds, when):
    auto = Auto()
    state = auto.init(SIZES)
    drafted = []
    for number in range(60):
        limits, rounds, state = auto.choose(state, 1, 16)
        drafted.append(any(limits.longest))
        assert 1 <= rounds <= 16
        assert all(
            0 <= k <= one.num_nodes for k, one in zip(limits.longest, SIZES.drafters, strict=True)
        )
        jumps = when <= number < when + 3
        usual = rounds * (0.2 if any(limits.longest) else 0.1)
        state = auto.update(state, make_record(limits, rounds, seconds if jumps else usual))
        assert np.isfinite(state.estimates.costs.seconds).all()
        assert np.isfinite(state.credit)
    assert sum(drafted[-20:]) <= 10


@pytest.mark.filterwarnings("error")
def test_a_clock_that_never_says_anything():
    auto = Auto()
    state = auto.init(SIZES)
    for _ in range(20):
        limits, rounds, state = auto.choose(state, 1, 16)
        state = auto.update(state, make_record(limits, rounds, None))
    assert limits.longest == (0, 0)


@pytest.mark.filterwarnings("error")
def test_steps_without_rounds_and_loops_without_drafters():
    auto = Auto()
    none = StepSizes((), (1,), 1)
    limits, rounds, _ = auto.choose(auto.init(none), 1, 16)
    assert (limits, rounds) == (Limits((), ()), 16)
    limits, rounds, state = auto.choose(auto.init(SIZES), 0, 16)
    state = auto.update(state, make_record(limits, 0, 0.1))
    assert auto.choose(state, 0, 16)[1] == 1


def test_costs_are_told_apart():
    """Constant, passes and drafters, from steps whose counts differ."""
    sizes = StepSizes((DrafterSizes(4, stops=True),), (1, 3, 5), 1)
    truth = np.array([0.01, 0.05, -0.005, 0.02, 0.01, 0.004])
    rng = np.random.default_rng(0)
    costs = initial_costs(replace(sizes, dispatch_s=0.01, wide_is_cheap=True))
    for _ in range(300):
        rounds, longest = int(rng.integers(1, 17)), int(rng.integers(0, 5))
        record = StepRecord(
            limits=Limits((longest,), (0.0,)),
            seconds=0.0,
            passes=np.eye(3, dtype=int)[(longest + 1) // 2] * rounds,
            ran=np.array([longest > 0]) * rounds,
            further=np.array([max(longest - 1, 0)]) * rounds,
            drafted=np.zeros((1, 4), int),
            accepted=np.zeros((1, 4), int),
            turns=np.zeros(1, int),
            row_rounds=rounds,
        )
        work = count_work(np.ones(()), record.passes, record.ran, record.further)
        seconds = float(work @ truth) * np.exp(0.02 * rng.normal())
        costs = learn_costs(
            costs,
            replace(sizes, dispatch_s=0.01, wide_is_cheap=True),
            replace(record, seconds=seconds),
        )
    # A drafter runs where passes are wide: its own cost and the pass's are not told apart.
    assert costs.seconds[:2] == pytest.approx(truth[:2], abs=0.004)
    for longest, width, further in ((0, 0, 0), (1, 1, 0), (2, 1, 1), (4, 2, 3)):
        drafts = np.array([longest > 0], float)
        work = count_work(np.ones(()), np.eye(3)[width], drafts, further * np.ones(1))
        assert work @ costs.seconds == pytest.approx(work @ truth, rel=0.06)


def test_passes_that_never_ran_follow_those_that_did():
    """A width that is not known lies above the next narrower one, however cheap that became."""
    sizes = StepSizes((DrafterSizes(32),), (1, 5, 33), 1)
    costs = initial_costs(sizes)
    for width, seconds in [(0, 1.0), (1, 0.86)] * 20:
        record = StepRecord(
            limits=Limits((4 * width,), (0.0,)),
            seconds=10 * seconds,
            passes=np.eye(3, dtype=int)[width] * 10,
            ran=np.zeros(1, int),
            further=np.zeros(1, int),
            drafted=np.zeros((1, 32), int),
            accepted=np.zeros((1, 32), int),
            turns=np.zeros(1, int),
            row_rounds=10,
        )
        costs = learn_costs(costs, sizes, record)
    passes = np.cumsum(costs.seconds[1:4])
    assert abs(passes[1] / passes[0] - 0.86) < 0.02
    assert passes[2] > passes[1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Fixed(-1), "Fixed.longest=-1: use a whole number"),
        (lambda: Fixed(1.5), "Fixed.longest=1.5"),
        (lambda: ByBatch(3), "ByBatch.table has 3: use steps"),
        (lambda: ByBatch(((1, 2),)), r"ByBatch.table has \(1, 2\)"),
        (lambda: ByBatch(((1, 4, -5),)), "ByBatch.table=-5"),
        (lambda: Recorded(3), r"Recorded.steps has 3: use steps of \(Limits, rounds\)"),
        (lambda: Recorded(((Limits((1,), (0.0,)), 0),)), "Recorded.steps has"),
        (lambda: Auto(first_credit=-1), "Auto.first_credit=-1: use a number of at least 0"),
        (lambda: Auto(optimism=float("nan")), "Auto.optimism=nan"),
    ],
)
def test_lengths_of_controllers_are_checked(make, message, monkeypatch):
    # As for users: without a type checker in front of specjax's own messages.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(ValueError, match=message):
        make()


def test_no_credit_is_no_trial():
    steps = simulate(Auto(first_credit=0, trial_share=0), BOTH.over(64), 0)
    assert steps


@pytest.mark.parametrize(
    ("clock", "drafter", "rows", "experts"),
    [
        (ACCELERATOR, "eagle3", 8, SimulatedExperts(256, 8, 0.8)),
        ("50 ms", "dynamic tree", 8, SimulatedExperts(32, 4)),
        *slow((ACCELERATOR, "ngram + eagle3", 8, SimulatedExperts(256, 8, 0.8))),
    ],
)
def test_experts_are_known_from_timed_passes(clock, drafter, rows, experts):
    """Timed passes over different tokens suffice; those over equal ones mislead for long.

    Drafts are too long on the accelerator, and none are tried on the CPU.
    """

    def lost(timed_alike):
        run = simulation(drafter, clock, rows, experts=experts, timed_alike=timed_alike)
        steps = [simulate(Auto(), run, seed, 1, costs_known=True) for seed in range(4)]
        return 100 * np.mean([regret(run, each) for each in steps])

    assert lost(False) <= 4
    assert lost(True) >= 8


def test_a_pass_costs_what_its_distinct_experts_do():
    experts = SimulatedExperts(num_experts=8, per_token=2, share=0.5)
    cost = experts.pass_cost(np.array([1.0, 1.2, 1.2]), np.array([1, 2, 10**6]), rows=1)
    np.testing.assert_allclose(cost, [1, 0.6 + 0.5 * 1.75, 0.6 + 0.5 * 4])
    # Four rows read more in a plain pass, and a draft adds less to it.
    of_four = experts.pass_cost(np.array([1.0, 1.2]), np.array([4, 8]), rows=4)
    assert of_four[0] == pytest.approx(1)
    assert of_four[1] < cost[1]
