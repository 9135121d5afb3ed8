"""The predicted speed-up of finished runs, from the parts of their rounds, each timed alone.

A run's report holds its whole config: the target is loaded, the prompts are encoded and the program
is planned again; then a draft and a pass of each width are timed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specjax import metrics
from specjax.cli.decode_config import (
    SIMULATED,
    DecodeConfig,
    make_config_drafter,
    read_decode_config,
    turn_prompts,
)
from specjax.cli.mesh_config import open_mesh
from specjax.decoding.setup import Session, plan_session
from specjax.distributed import sharding
from specjax.errors import InputError, one_line
from specjax.fields import dotted
from specjax.loading.load import load_model
from specjax.loading.model import Model
from specjax.reporting.decode_report import device_name
from specjax.reporting.records import Run
from specjax.reporting.statistics import batch_widths, summarize
from specjax.tuning import costs


@dataclass(frozen=True)
class RoundCosts:
    """Seconds of a full draft, and of a pass of each width."""

    draft_s: float
    width_s: dict[int, float]


def predicted_speedup(run: Run, parts: RoundCosts) -> float | None:
    """The run's speed-up predicted from the parts of its rounds (`metrics.predicted_speedup`)."""
    tokens = summarize(run.rows).tokens_per_round
    if tokens is None:
        return None
    widths = batch_widths(run.rows)
    return metrics.predicted_speedup(tokens, parts.width_s[1], parts.draft_s, widths, parts.width_s)


def key(run: Run) -> dict[str, Any]:
    """The key of a run's costs, JSON-ready: its config, and the device it ran on."""
    fields = {name: value for name, value in dotted(run.config).items() if name != "report"}
    return {"device": run.conditions.device, "versions": run.versions, **fields}


def check_measurable(runs: Sequence[Run]) -> None:
    """Raise InputError unless this machine can time what the runs did; before the long work."""
    here = device_name()
    for run in runs:
        where = f"predict: {str(run.path)!r}"
        if re.search(r" in \d+ processes$", run.conditions.device):
            raise InputError(f"{where} ran in several processes; leave --predict out")
        # A mesh's name begins with how many devices it has, and ends with its shape.
        if re.sub(r"^\d+ x | \([^()]*\)$", "", run.conditions.device) != here:
            raise InputError(
                f"{where} ran on {run.conditions.device}, this machine has {here}; run the "
                "report there, or leave --predict out"
            )
        _config(run)


def measure(runs: Sequence[Run], say: Callable[[str], None]) -> Iterator[tuple[Run, RoundCosts]]:
    """Time the parts of each run's rounds; each model is loaded, and each pass timed, once."""
    models: dict[str, Model] = {}
    passes: dict[Any, float] = {}
    for run in runs:
        config = _config(run)
        mesh = open_mesh(config.mesh, config.distributed, config.written)
        key = repr((config.target, config.dtype, mesh))
        if key not in models:
            # One at a time: there may be no memory for two.
            models.clear()
            say(f"loading {config.target}")
            models[key] = load_model(config.target, dtype=config.dtype, mesh=mesh)
        say(f"timing a draft and passes of {run.path.name}")
        with sharding.use(mesh):
            session = _session(run, config, models[key])
            yield run, _round_costs(session, run, key, passes)


def _round_costs(session: Session, run: Run, key: str, passes: dict[Any, float]) -> RoundCosts:
    mean = np.mean([len(ids) for ids in session.prompts])
    new = np.mean([row.new_tokens for row in run.rows])
    committed = min(int(mean + new / 2), session.plan.capacity - max(session.plan.widths))
    width_s = {}
    for width in sorted({1, *session.plan.widths}):
        # A few tokens more or less in the cache make no measurable difference.
        known = (key, session.num_rows, width, committed // 64, session.plan.capacity)
        if known not in passes:
            passes[known] = costs.extend_seconds(
                session.plan.target,
                session.params[0],
                batch=session.num_rows,
                width=width,
                committed=max(committed, 0),
                capacity=session.plan.capacity,
            )
        width_s[width] = passes[known]
    return RoundCosts(costs.propose_seconds(session), width_s)


def _session(run: Run, config: DecodeConfig, model: Model) -> Session:
    recorded = [list(row.token_ids) for row in run.rows if row.turn == 0]
    (own,) = config.drafters
    continuations = recorded if own.name == SIMULATED else None
    drafter = make_config_drafter(config, own, model, continuations).loaded
    seed, sampling = config.turn_seeds(0)
    return plan_session(
        model,
        turn_prompts(config, model, 0, {}),
        drafter=drafter,
        options=config.options,
        requests=sampling,
        seed=seed,
    )


def _config(run: Run) -> DecodeConfig:
    try:
        # Nothing is written here: the folder of the run's own report may be gone.
        return read_decode_config({**run.config, "report": None})
    except InputError as error:
        raise InputError(
            f"predict: the config in {str(run.path)!r} cannot be used here ({one_line(error)}); "
            "leave --predict out"
        ) from None
