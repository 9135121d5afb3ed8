"""What `Auto` loses to the best fixed limits, on a simulated clock.

    python scripts/simulate_controllers.py --seeds=20

Each line is a drafter on a machine: the regret over 64 and over 512 rounds from the first step on,
in percent, as a mean over seeds (and the worst tenth), and the speed over plain decoding.
"""

from __future__ import annotations

import numpy as np
from absl import app, flags

from specjax.controllers import Auto
from specjax.testing.simulated_steps import plain_seconds, regret, simulate
from specjax.testing.simulated_steps import simulations as all_simulations

_SEEDS = flags.DEFINE_integer("seeds", 20, "Runs of each kind.", lower_bound=1)
_AHEAD = flags.DEFINE_integer("ahead", 0, "Steps chosen before a record is known.", lower_bound=0)
_ONLY = flags.DEFINE_string("only", "", "Only lines whose name has this.")


def main(argv: list[str]) -> None:
    """Print the table."""
    del argv
    print(f"{'':44} {'64 rounds':>16} {'512 rounds':>16}   x plain (64, 512)")
    for name, simulation in all_simulations().items():
        if _ONLY.value not in name:
            continue
        cells, speeds = [], []
        for rounds in (64, 512):
            runs = simulation.over(rounds)
            steps = [simulate(Auto(), runs, seed, _AHEAD.value) for seed in range(_SEEDS.value)]
            lost = 100 * np.array([regret(runs, each) for each in steps])
            cells.append(f"{lost.mean():6.1f} ({np.quantile(lost, 0.9):5.1f})")
            speed = [plain_seconds(runs, each) / sum(s.seconds for s in each) for each in steps]
            speeds.append(f"{np.mean(speed):.2f}")
        print(f"{name:44} {cells[0]:>16} {cells[1]:>16}   {', '.join(speeds)}")


if __name__ == "__main__":
    app.run(main)
