"""What MTP modules cost and buy: the same model from scratch, with variants of their loss.

    python scripts/ablate_mtp.py --data=build/corpus/tokens --workdir=W [--tokens=2000000]
        [--seeds=3] [--variants=modules_0,modules_1] [--config.model.hidden_size=128 ...]

Each variant is trained with each seed by `train.mtp --config=configs/train_mtp_scratch.py`, on the
same tokens in the same order for a seed, and measured by `scripts/training/report_mtp.py`; fields
that begin with config., such as the model's sizes, are those of all runs. The means over seeds and
the standard deviations are printed and written to W/ablation.json: the model's own loss on held-out
text, how often the draft of each depth is what the model itself finds likeliest there, and the
tokens per target pass that this would give (`tau_sim`). Runs that have finished are not repeated,
and one that was interrupted is resumed by the same command. Exit codes: 0, also where the minutes
were over; 1 where a run failed; 2 for bad input; 130 after Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from types import SimpleNamespace
from typing import Any

from rich.console import Console
from rich.table import Table

from lib.child_processes import INTERRUPTED
from lib.stages import Stage, run_stages
from specjax.cli import command
from specjax.cli.config_file import read_config
from specjax.cli.flags import Listed, Parser
from specjax.distributed import folder_lock
from specjax.errors import InputError
from specjax.fields import Choice, Number, OutputFolder, Whole, optional
from train import mtp
from train.data.sources import DataFolders
from train.run.config import read_training_config
from train.run.workdir import Workdir, read_metrics, write_file

CONFIG = "configs/train_mtp_scratch.py"
_LOSS = "lm_loss"
_AGREES = "mtp_{}_agrees_with_model"


@dataclass(frozen=True)
class Variant:
    """What one variant of the MTP loss is: modules, draft steps, and lambda, early and late."""

    num_modules: int
    steps: int | None = None
    loss_weight: float = 0.3
    late_loss_weight: float = 0.3

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the config that it sets."""
        own = {f"mtp.{name}": value for name, value in vars(self).items() if value is not None}
        # A model without modules has nothing to decode with; the others are measured like it.
        return {**own, "eval.prompts": 0}


VARIANTS = {
    "modules_0": Variant(0),
    "modules_1": Variant(1),
    "modules_2": Variant(2),
    "lambda_0.1": Variant(1, loss_weight=0.1, late_loss_weight=0.1),
    "lambda_0.3_0.1": Variant(1, late_loss_weight=0.1),
    "recursion_2": Variant(1, steps=2),
}
"""By name; lambda is 0.3 unless the name has another, and `recursion_2` is one module that is
trained over two steps, as `modules_2` has two modules."""


@dataclass(frozen=True)
class Run:
    """One variant with one seed, in a folder of its own."""

    variant: str
    seed: int
    folder: Path

    @property
    def numbers(self) -> Path:
        """Where its measurements are written."""
        return self.folder.with_name(f"{self.folder.name}.json")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    return command.run(_ablate, argv, parser().format_help(), interrupted=INTERRUPTED)


def parser() -> Parser:
    """The flags, beside the fields of the config."""
    flags = Parser("python scripts/ablate_mtp.py", __doc__)
    add = flags.add_field
    add("data", DataFolders(), "tokens of texts, as train.corpus writes them, with commas")
    add("workdir", OutputFolder(), "where all runs keep their files", default="runs/ablate_mtp")
    add("tokens", Whole(1), "tokens that each run is trained on, about", default=2_000_000)
    add("seeds", Whole(1), "runs of each variant, with seeds from 0 on", default=3)
    which = Listed(Choice(tuple(VARIANTS)))
    add("variants", which, "with commas", default=",".join(VARIANTS))
    add("size", optional(Choice(("debug",))), "debug, or else the real thing", default=None)
    add("minutes", optional(Number(0.1, 1e9)), "stop cleanly after so long", default=None)
    add("held_out_tokens", Whole(1), "tokens that a run is measured on, about", default=200_000)
    add("depths", Whole(2, 64), "drafts that are measured", default=2)
    return flags


def _ablate(argv: list[str]) -> int:
    fields = [one for one in argv if re.match(r"--?(no)?config\.", one)]
    options = SimpleNamespace(**parser().read([one for one in argv if one not in fields]))
    until = math.inf if options.minutes is None else time.monotonic() + 60 * options.minutes
    root = options.workdir
    runs = [
        Run(variant, seed, root / f"{variant}-seed{seed}")
        for seed in range(options.seeds)
        for variant in options.variants
    ]
    common = _common(options, fields)
    row_tokens = read_config(common, CONFIG).row_tokens
    stages = [stage for run in runs for stage in _stages(run, common, row_tokens, options)]
    with folder_lock.lock(root, "recipe", f"workdir={str(root)!r}"):
        code = run_stages(stages, root, "the table", until)
        if code is None:
            report(runs, options, common)
    return code or 0


def _common(options: SimpleNamespace, fields: Sequence[str]) -> list[str]:
    """The arguments of all runs; raises InputError for what no run could be."""
    config = f"--config={CONFIG}{':' + options.size if options.size else ''}"
    begun = [config, f"--config.data={options.data}", *fields]
    sizes = read_config(begun, CONFIG)
    ours = {"steps", "seed", "workdir", "data"}.union(*(one.fields for one in VARIANTS.values()))
    for one in fields:
        name = re.sub(r"^--?(no)?config\.", "", one).partition("=")[0]
        if name in ours:
            raise InputError(f"config.{name}: each run has its own; leave it out")
    steps = max(1, round(options.tokens / (sizes.batch_size * sizes.row_tokens)))
    # The config's own warmup is for more steps; who gives one means it.
    warmup = f"--config.warmup={min(sizes.warmup, steps // 10)}"
    common = [config, f"--config.data={options.data}", f"--config.steps={steps}", warmup, *fields]
    for name in options.variants:
        arguments = [*common, *_arguments(VARIANTS[name].fields)]
        read_training_config(mtp.Config, read_config(arguments, CONFIG).to_dict())
    return common


def _arguments(fields: Mapping[str, Any]) -> list[str]:
    return [f"--config.{name}={value}" for name, value in fields.items()]


def _stages(
    run: Run, common: Sequence[str], row_tokens: int, options: SimpleNamespace
) -> list[Stage]:
    """A run's training and its measurement."""
    own = _arguments({**VARIANTS[run.variant].fields, "seed": run.seed, "workdir": run.folder})
    measured = [
        f"--model={Workdir(run.folder).export}",
        f"--data={options.data}",
        f"--out={run.numbers}",
        f"--row_tokens={row_tokens}",
        f"--tokens={options.held_out_tokens}",
        "--prompts=0",
    ]
    if VARIANTS[run.variant].num_modules:
        measured.append(f"--depths={options.depths}")
    script = str(Path(__file__).parent / "training" / "report_mtp.py")
    return [
        Stage(run.folder.name, [sys.executable, "-m", "train.mtp", *common, *own]),
        Stage(f"measuring {run.folder.name}", [sys.executable, script, *measured]),
    ]


def report(runs: Sequence[Run], options: SimpleNamespace, common: Sequence[str]) -> None:
    """Print the means and spreads of all variants, and write them."""
    found = {
        name: summary([_numbers(run) for run in runs if run.variant == name])
        for name in options.variants
    }
    table = Table(title=f"mean over {options.seeds} seeds, with the standard deviation")
    shown = {_LOSS: "LM loss"}
    shown |= {_AGREES.format(depth): f"draft {depth} agrees" for depth in range(options.depths)}
    shown |= {"tau_sim": "tau_sim", "trained_tokens": "trained tokens"}
    table.add_column("variant")
    for label in shown.values():
        table.add_column(label, justify="right")
    for name, numbers in found.items():
        table.add_row(name, *(_cell(numbers.get(key)) for key in shown))
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    variants = {
        name: {"fields": VARIANTS[name].fields, "numbers": numbers}
        for name, numbers in found.items()
    }
    content = {"seeds": options.seeds, "arguments": list(common), "variants": variants}
    where = options.workdir / "ablation.json"
    write_file(where, json.dumps(content, indent=1) + "\n")
    print(f"wrote {where}")


def summary(runs: Sequence[Mapping[str, float]]) -> dict[str, dict[str, Any]]:
    """Mean, standard deviation over seeds (None for one seed) and value of each number."""
    found = {}
    for name in runs[0]:
        values = [run[name] for run in runs]
        spread = stdev(values) if len(values) > 1 else None
        found[name] = {"mean": fmean(values), "spread": spread, "values": values}
    return found


def _numbers(run: Run) -> dict[str, float]:
    """A run's measurements, and how many tokens it was trained on."""
    measured = json.loads(run.numbers.read_text(encoding="utf-8"))
    rows = read_metrics(Workdir(run.folder))
    trained = max(row.get("train/tokens", 0) for row in rows)
    numbers = {name: value for name, value in measured.items() if not isinstance(value, str)}
    return {**numbers, "trained_tokens": trained}


def _cell(number: Mapping[str, Any] | None) -> str:
    if number is None:
        return ""
    digits = 0 if number["mean"] > 100 else 4
    spread = "" if number["spread"] is None else f" ± {number['spread']:.{digits}f}"
    return f"{number['mean']:,.{digits}f}{spread}"


if __name__ == "__main__":
    command.use_compilation_cache()
    raise SystemExit(main())
