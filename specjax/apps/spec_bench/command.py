r"""Compare drafters as Spec-Bench does: tau and speed by task, over its questions or your own.

    python -m specjax.spec_bench --config.prompts=question.jsonl
    python -m specjax.spec_bench --config.drafters="ngram,eagle3,eagle3 tree.kind=dynamic" \
        --config.temperatures="(0.0, 1.0)" --config.num_speculative_tokens="(1, 2, 4, 8)"

Decodes every question plainly and with each drafter, at each temperature and draft length, one row
at a time and in turn, so that speeds are compared within the same minute. Finished answers are kept
in the folder `out`, from which the same command resumes. At the end, OUT/report has the leaderboard
(report.md, report.html), report.csv, the answers in Spec-Bench's format, and pictures. All turns of
a question are asked; every drafter gets plain decoding's answers as history.

Exit codes: 0; 1 if the output differs from plain decoding by more than rounding explains; 2 for bad
input or a folder that cannot be written; 130 after Ctrl-C, SIGTERM or a closed terminal.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from specjax.apps.command_line import command
from specjax.apps.command_line.config_file import config_of
from specjax.apps.command_line.console import Screen
from specjax.apps.command_line.mesh_config import ONE_PROCESS, open_mesh
from specjax.apps.report import report
from specjax.apps.rows.decode_report import device_name
from specjax.apps.spec_bench.config import (
    SpecBenchConfig,
    read_spec_bench_config,
)
from specjax.apps.spec_bench.run import Measuring
from specjax.distributed import folder_lock, sharding
from specjax.errors import InputError, printable, shown
from specjax.fields import dotted
from specjax.files import atomic_writes
from specjax.files.json_files import read_json_file
from specjax.files.path_checks import output_folder

_SETTINGS = "settings.json"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv`, by default the process's arguments; return its exit code."""
    return command.run_config(
        run,
        argv,
        default="spec_bench",
        read=read_spec_bench_config,
        documentation=__doc__,
        source=SpecBenchConfig,
    )


def run(config: SpecBenchConfig) -> int:
    """Measure all that is not finished yet, and write the report; return the exit code.

    Raises InputError.
    """
    screen = Screen(Console(width=None if sys.stdout.isatty() else 100))
    out = output_folder("out", config.out)
    where = f"out={str(config.out)!r}"
    mesh = open_mesh(config.mesh, ONE_PROCESS, asdict(config.mesh))
    settings = {**config.settings, "device": device_name(mesh)}
    _check_settings(out / _SETTINGS, settings, where)
    report.check_out(out / "report")
    with folder_lock.hold(out, "spec-bench run", where):
        (out / "answers").mkdir(exist_ok=True)
        with sharding.use(mesh):
            measuring = Measuring(config, out / "answers", mesh, screen)
            # After every check, so that a refused run leaves nothing to be resumed.
            atomic_writes.write_text(out / _SETTINGS, json.dumps(settings, indent=2) + "\n")
            screen.say(
                f"{measuring.num_units} units of work, {measuring.num_finished} of them finished"
            )
            try:
                measuring.measure()
            except KeyboardInterrupt:
                screen.say(
                    f"stopped: {measuring.num_finished} of {measuring.num_units} units are in "
                    f"{printable(str(out))}; the same command resumes the run"
                )
                return command.INTERRUPTED
        for path in report.write(measuring.paths, out / "report", formats=config.formats):
            screen.say(f"wrote {printable(str(path))}")
    return 0 if measuring.exact else command.DIFFERENT


def _check_settings(path: Path, settings: dict[str, Any], where: str) -> None:
    """Raise InputError, naming the field, if an earlier run in the folder had other settings.

    `path` is the file with the earlier settings, and `where` names the folder in errors.
    """
    if not path.exists():
        return
    earlier = read_json_file(path)
    if not isinstance(earlier, dict):
        raise InputError(f"{where}: {_SETTINGS} holds {shown(earlier)}; use another folder")
    defaults = dotted(config_of(SpecBenchConfig).to_dict())  # of options that were added later
    for name in {**settings, **earlier}:
        ours, theirs = settings.get(name), earlier.get(name, defaults.get(name))
        if ours != theirs:
            raise InputError(
                f"{name}={shown(ours)}: the run in {where} has {shown(theirs)}; give that, or "
                "another out"
            )
