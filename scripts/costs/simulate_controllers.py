"""Simulate how much slower the controller `Auto` is than the best fixed limits.

    python scripts/costs/simulate_controllers.py --seeds=20
    python scripts/costs/simulate_controllers.py --seeds=20 --experts=128,8,0.6

The second command has a target with 128 experts, of which a token uses 8 in 0.6 of the time of its
pass. Each line is a drafter on a machine: the regret over 64 and over 512 rounds from the first
step on, in percent, as a mean over seeds (and the worst tenth), and the speed over plain decoding.
"""

from __future__ import annotations

import itertools

import numpy as np
from absl import app, flags

from specjax.controllers import Auto
from specjax.testing.controller_simulation import (
    CLOCKS,
    DRAFTERS,
    SimulatedExperts,
    Simulation,
    changes,
    plain_seconds,
    regret,
    simulate,
    simulation,
)

_SEEDS = flags.DEFINE_integer("seeds", 20, "Runs of each kind.", lower_bound=1)
_AHEAD = flags.DEFINE_integer("ahead", 1, "Steps chosen before a record is known.", lower_bound=0)
_FIRST_RUN = flags.DEFINE_float("first_run", 0.0, "How much longer first runs take, relative.")
_COSTS_KNOWN = flags.DEFINE_bool("costs_known", True, "Time each width and drafter before.")
_EXPERTS = flags.DEFINE_list("experts", [], "Experts, those of a token, their share of its pass.")
_TIMED_ALIKE = flags.DEFINE_bool("timed_alike", False, "Time passes over equal tokens.")
_ONLY = flags.DEFINE_list("only", [], "Only lines whose name has all of these.")


def all_simulations() -> dict[str, Simulation]:
    """Return simulations of drafters on machines, by name."""
    found, experts = {}, None
    if _EXPERTS.value:
        num_experts, per_token, share = _EXPERTS.value
        experts = SimulatedExperts(int(num_experts), int(per_token), float(share))
    more = {
        "first_run": _FIRST_RUN.value,
        "experts": experts,
        "timed_alike": _TIMED_ALIKE.value,
    }
    for clock, rows, drafter, later in itertools.product(CLOCKS, (1, 4, 8), DRAFTERS, (1.0, 3.0)):
        name = f"{clock}, B = {rows}, {drafter}{'; costs treble' if later > 1 else ''}"
        found[name] = simulation(drafter, clock, rows, later=later, **more)
    return found | changes()


def main(argv: list[str]) -> None:
    """Print the table."""
    del argv
    print(f"{'':60} {'64 rounds':>16} {'512 rounds':>16}   x plain (64, 512)")
    for name, each in all_simulations().items():
        if not all(part in name for part in _ONLY.value):
            continue
        cells, speeds = [], []
        for rounds in (64, 512):
            runs = each.over(rounds)
            known = _COSTS_KNOWN.value
            steps = [
                simulate(Auto(), runs, seed, _AHEAD.value, costs_known=known)
                for seed in range(_SEEDS.value)
            ]
            lost = 100 * np.array([regret(runs, each) for each in steps])
            cells.append(f"{lost.mean():6.1f} ({np.quantile(lost, 0.9):5.1f})")
            speed = [plain_seconds(runs, each) / sum(s.seconds for s in each) for each in steps]
            speeds.append(f"{np.mean(speed):.2f}")
        print(f"{name:60} {cells[0]:>16} {cells[1]:>16}   {', '.join(speeds)}", flush=True)


if __name__ == "__main__":
    app.run(main)
