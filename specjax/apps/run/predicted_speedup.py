"""Predict the speed-ups of finished runs from the parts of their rounds, each timed alone.

A run's report has its whole config. From it the target is loaded, the prompts are encoded and the
program is planned again; then a draft and a pass of each width are timed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np

from specjax import metrics
from specjax.apps.command_line.config_file import config_of
from specjax.apps.command_line.mesh_config import open_mesh
from specjax.apps.rows.decode_report import device_name
from specjax.apps.rows.records import DecodedRow, Run
from specjax.apps.rows.statistics import batch_widths, summarize
from specjax.apps.run.decode_config import (
    DecodeConfig,
    TargetFields,
    load_target,
    make_config_drafter,
    read_decode_config,
)
from specjax.apps.tuning import measure_costs
from specjax.core.none import PLAIN_DECODING
from specjax.distributed import sharding
from specjax.engine.plan import DecodePlan, plan_requests
from specjax.engine.requests import Request
from specjax.errors import InputError, one_line, shown
from specjax.loading.model import Model


@dataclass(frozen=True)
class RoundCosts:
    """The seconds of a draft of full length, and of a pass of the target by its width in slots."""

    draft_s: float
    width_s: dict[int, float]

    def speedup_of(self, rows: Sequence[DecodedRow]) -> float | None:
        """Return the predicted speed-up of rows over plain decoding, or None without passes."""
        tokens, widths = summarize(rows).tokens_per_round, batch_widths(rows)
        if tokens is None:
            return None
        return metrics.predicted_speedup(
            tokens, self.width_s[1], self.draft_s, widths, self.width_s
        )


def measure_round_costs(
    plan: DecodePlan, requests: Sequence[Request], new_tokens: float
) -> RoundCosts:
    """Return the measured seconds of the drafter's draft, and of passes of the target by width.

    The cache has as many tokens as in the middle of a run: the mean prompt length plus half of
    `new_tokens`, the number of new tokens per row.
    """
    loop_plan, prompts = plan.loop, np.mean([len(request.prompt) for request in requests])
    room = loop_plan.capacity - max(loop_plan.widths)
    width_s = measure_costs.widths_seconds(
        loop_plan.target,
        plan.params[0],
        sorted({1, *loop_plan.widths}),
        batch=plan.num_rows,
        committed=max(0, min(int(prompts + new_tokens / 2), room)),
        capacity=loop_plan.capacity,
    )
    return RoundCosts(measure_costs.propose_seconds(plan, requests), width_s)


def predicted_speedups(runs: Sequence[Run], say: Callable[[str], None]) -> list[float | None]:
    """Return the predicted speed-up of each run that drafts, and None for each other run.

    `say` is called with lines of progress. Raises InputError, before any long work, unless all runs
    can be repeated on this machine.
    """
    predicted: list[float | None] = [None] * len(runs)
    for index, plan, requests in run_plans(runs, "predict", say):
        run = runs[index]
        say(f"timing a draft and passes of {run.path.name}")
        with sharding.use(plan.mesh):
            new_tokens = np.mean([row.new_tokens for row in run.rows])
            parts = measure_round_costs(plan, requests, new_tokens)
        predicted[index] = parts.speedup_of(run.rows)
    return predicted


def run_plans(
    runs: Sequence[Run], flag: str, say: Callable[[str], None]
) -> Iterator[tuple[int, DecodePlan, list[Request]]]:
    """Yield the index of each run that drafts, with the plan and requests of its first turns.

    `say` is called with lines of progress. Raises InputError, before a model is loaded, unless this
    machine can repeat all runs; the error tells the user to leave out `flag`.
    """
    configs = [run_config(run, flag) if run.drafter != PLAIN_DECODING else None for run in runs]
    models: dict[str, Model] = {}
    for index, (run, config) in enumerate(zip(runs, configs, strict=True)):
        if config is None:
            continue
        mesh = open_mesh(config.mesh, config.distributed, config.written)
        key = repr([getattr(config, field.name) for field in fields(TargetFields)] + [mesh])
        if key not in models:
            # Only one model is kept, since there may be no memory for two.
            models.clear()
            say(f"loading {config.target}")
            models[key] = load_target(config, mesh)
        with sharding.use(mesh):
            plan, requests = _planned(run, config, models[key])
        yield index, plan, requests


def _planned(run: Run, config: DecodeConfig, model: Model) -> tuple[DecodePlan, list[Request]]:
    """Return the plan and requests of a run's first turns, made again from its config."""
    recorded = [list(row.token_ids) for row in run.rows if row.turn == 0]
    (drafter,) = config.drafters
    continuations = recorded if drafter.replays else None
    return plan_requests(
        model,
        config.first_prompts(model),
        drafter=make_config_drafter(config, drafter, model, continuations).loaded,
        options=config.options,
        sampling=config.sampling,
    )


def run_config(run: Run, flag: str) -> DecodeConfig:
    """Return the checked config with which a run can be repeated on this machine.

    Raises InputError, which tells the user to leave out `flag`, for runs of several processes, on
    other devices or with user code.
    """
    where, here = f"{flag}: {str(run.path)!r}", device_name()
    if re.search(r" in \d+ processes$", run.conditions.device):
        raise InputError(f"{where} ran in several processes; leave --{flag} out")
    # The name of a mesh begins with the number of devices and ends with its shape.
    if re.sub(r"^\d+ x | \([^()]*\)$", "", run.conditions.device) != here:
        raise InputError(
            f"{where} ran on {run.conditions.device}, this machine has {here}; run the report "
            f"there, or leave --{flag} out"
        )
    if ":" in run.drafter:
        raise InputError(
            f"{where}: drafter {shown(run.drafter)} is code named in the report, which is not "
            f"run; leave --{flag} out"
        )
    # Older reports lack options. No report is written, and the folder of the run's own may be gone.
    config = {**config_of(DecodeConfig).to_dict(), **run.config, "report": None}
    try:
        return read_decode_config(config)
    except InputError as error:
        raise InputError(
            f"{flag}: the config in {str(run.path)!r} cannot be used here ({one_line(error)}); "
            f"leave --{flag} out"
        ) from None
