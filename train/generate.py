"""Let the target answer prompts, and store its answers as a dataset to train drafters on.

    python -m train.generate --config=configs/generate_smollm2.py --config.workdir=DIRECTORY

With --config.prompts=target_questions, the target first asks the questions itself. Finished answers
are saved to the work folder at once, so that the same command resumes where it stopped; the dataset
is written at the end. Exit codes: 0, also if config.minutes ran out before the end; 2 for bad
input; 130 after Ctrl-C or SIGTERM. With several processes, only the first prints and writes.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from specjax.apps.command_line import command
from specjax.apps.command_line.console import Screen
from specjax.apps.command_line.mesh_config import open_mesh
from specjax.apps.rows import decode_report
from specjax.distributed import folder_lock, processes
from specjax.engine.outputs import Failure, Output, failure_message
from specjax.errors import InputError
from specjax.files import folders
from specjax.loading.load import load_model
from specjax.loading.model import Model
from train.data.examples import METADATA, target_metadata
from train.data.responses import open_responses
from train.data.write_responses import write_responses
from train.generation import answers, questions
from train.generation.answers import AnswersConfig, Job
from train.generation.prompts import Request
from train.generation.saved_answers import SavedAnswers, open_answers

CONFIG = "generate_smollm2"
RESPONSES = "responses"
"""The name of the dataset in the work folder."""
_KIND = "answers"
_MOST_FAILED = 300
"""The number of failures without any answer after which the run ends, since the model must be at
fault: more than there are consecutive prompts of one length.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv`, by default the process's arguments; return its exit code."""
    return command.run_config(
        generate,
        argv,
        default=CONFIG,
        read=answers.read_answers_config,
        documentation=__doc__,
        source=AnswersConfig,
    )


def generate(config: AnswersConfig, console: Console | None = None) -> int:
    """Let the target answer the prompts of a config; write its answers and return the exit code.

    Progress is printed on `console`, by default the terminal. Raises InputError.
    """
    begin = time.monotonic()
    mesh = open_mesh(config.mesh, config.distributed, config.written)
    writes = processes.is_first()
    console = console or Console(width=None if sys.stdout.isatty() else 120)
    screen = Screen(console if writes else Console(quiet=True))
    root, where = config.workdir, f"workdir={str(config.workdir)!r}"
    output = config.output or root / RESPONSES
    # Before minutes of loading.
    processes.together(lambda: _check_folders(root, where, output) if writes else None)
    with screen.working(f"loading {config.target}"):
        model = processes.together(
            lambda: load_model(config.target, dtype=config.dtype, mesh=mesh, field="target")
        )
    if config.asks:
        asking = processes.together(lambda: questions.frame_of(model, config.chat))
        job = processes.together(lambda: answers.plan_questions(config, model, asking))
    else:
        requests = processes.together(lambda: answers.find_requests(config, screen))
        job = _planned(config, model, requests, screen)
    record = {"config": dict(config.written), "target": target_metadata(model)}
    with folder_lock.hold(root, _KIND, where):
        if config.asks:
            saved = open_answers(root / questions.NAME, record | _identity(job))
            if not _run(config, model, job, saved, screen, begin):
                return 0
            requests, counts = _asked(config, model, asking, saved, screen)
            record["questions"] = counts
            job = _planned(config, model, requests, screen)
        record |= _identity(job)
        saved = open_answers(root, record)
        if processes.from_first((output / METADATA).exists() if writes else False):
            return _already(output, record, screen)
        if not _run(config, model, job, saved, screen, begin):
            return 0
        left_out = _left_out(config, model, job, saved, screen) if writes else {}
        if config.asks:
            counts = dict(Counter(left_out.values()))
            record["answers"] = {"kept": len(job.rows) - len(left_out), "left_out": counts}
        with screen.working(f"writing {output}"):
            processes.together(
                lambda: _write(job, saved, left_out, output, record) if writes else None
            )
    return _summary(output, screen)


def _planned(
    config: AnswersConfig, model: Model, requests: Sequence[Request], screen: Screen
) -> Job:
    """Return the job of answering some prompts, after printing what is left out of it."""
    job = processes.together(lambda: answers.plan(config, model, requests))
    for line in job.remarks:
        screen.say(line)
    return job


def _identity(job: Job) -> dict[str, Any]:
    """Return what a run records of its prompts, which are the same on all processes."""
    processes.agree({job.noun: job.digest})
    return {"prompts": {"count": len(job.rows), "sha256": job.digest}}


def _asked(
    config: AnswersConfig,
    model: Model,
    asking: questions.Frame,
    saved: SavedAnswers,
    screen: Screen,
) -> tuple[list[Request], dict[str, Any]]:
    """Return the saved questions that are of use, and counts for the dataset; print the counts."""
    found = saved.read() if processes.is_first() else {}
    written = processes.from_first([found[number] for number in sorted(found)])
    requests, left_out = processes.together(
        lambda: questions.requests_of(
            written, model, asking, config.questions, config.max_prompt_tokens
        )
    )
    counts = {"asked": len(written), "kept": len(requests), "left_out": left_out}
    said = f"{len(written)} questions asked, {len(requests)} kept"
    screen.say(f"{said}; left out: {questions.listed(left_out) or 'none'}")
    return requests, counts


def _check_folders(root: Path, where: str, output: Path) -> None:
    """Raise InputError if the work folder or the output is nested wrongly or not ours to write."""
    root, output = root.resolve(), output.resolve()
    if root.is_relative_to(output):
        raise InputError(
            f"output={str(output)!r}: the work folder is in it; name a folder of its own, or leave "
            "it out"
        )
    if output.is_relative_to(root) and output != root / RESPONSES:
        raise InputError(
            f"output={str(output)!r}: in the work folder only {RESPONSES!r} is free for it; name a "
            "folder elsewhere, or leave it out"
        )
    folders.check_claimable(root, _KIND, where)
    if not (output / METADATA).exists():  # else the run is done, or another's
        folders.check_replaceable(output, "dataset", str(output), overwrite=False)


def _run(
    config: AnswersConfig,
    model: Model,
    job: Job,
    saved: SavedAnswers,
    screen: Screen,
    begin: float,
) -> bool:
    """Decode the rows that are not saved; return False if the minutes ran out before the end."""
    answered = processes.from_first(sorted(saved.read()) if processes.is_first() else None)
    answered = set(answered) & {row.request.id for row in job.rows}
    todo = [row for row in job.order if job.rows[row].request.id not in answered]
    total = len(job.rows)
    if answered:
        screen.say(f"resuming: {total - len(todo)} of {total} {job.noun} are done")
    if not todo:
        return True
    requests, engine = processes.together(lambda: answers.open_job(config, model, job))
    screen.say(
        f"{total} {job.noun} in {engine.plan.options.batch_size} slots, up to "
        f"{job.rows[0].sampling.max_new_tokens} new tokens, {model.dtype}, on "
        f"{decode_report.device_name(model.mesh)}"
    )
    with screen.working("compiling"):
        engine.compile()
    keeper = _Keeper(model, job, saved, bool(answered))
    try:
        for ended in answers.answer(engine, requests, job, todo, screen):
            keeper.take(ended)
            late = config.minutes and time.monotonic() - begin > 60 * config.minutes
            # However short the time, a run gets on.
            if processes.from_first(bool(late)) and 0 < keeper.count < len(todo):
                done = len(answered) + keeper.count
                screen.say(
                    f"{config.minutes:g} minutes are over: {done} of {total} {job.noun} are done, "
                    f"{total - done} are left; the same command resumes it"
                )
                return False
        keeper.check()
    finally:
        screen.rest()
        keeper.say_failures(screen)
    summary = engine.statistics.summary()
    screen.say(
        f"{summary.tokens} tokens at {summary.tokens_per_second:.1f} tokens/s, "
        f"{summary.occupancy:.0%} of the slots busy"
    )
    return True


@dataclass
class _Keeper:
    """The writer of finished answers: `count` counts this run's, and failures have a reason.

    Nothing is saved before the first prompt is `answered`, since the model is at fault if every
    prompt fails. For a prompt that fails, it is saved that there is no answer.
    """

    model: Model
    job: Job
    saved: SavedAnswers
    answered: bool
    count: int = 0
    failed: dict[str, Failure] = field(default_factory=dict)
    _waiting: dict[int, Sequence[int]] = field(default_factory=dict)

    def take(self, ended: Sequence[Output]) -> None:
        """Save finished outputs. Raises InputError if too many prompts fail and none succeeds."""
        for output in ended:
            row = self.job.rows[output.id]
            self._waiting[row.request.id] = [] if output.failure else output.token_ids
            if output.failure is None:
                self.answered = True
            else:
                self.failed[row.name] = output.failure
        if len(self.failed) >= _MOST_FAILED:
            self.check()
        if self.answered and self._waiting:
            kept, self._waiting = self._waiting, {}
            self.count += len(kept)
            processes.together(lambda: self.saved.add(kept) if processes.is_first() else None)

    def check(self) -> None:
        """Raise InputError if all prompts of the run have failed."""
        if self.failed and not self.answered:
            raise InputError(failure_message(self.model, self.failed))

    def say_failures(self, screen: Screen) -> None:
        """Print which prompts have no answer and why, if other prompts have one."""
        if self.failed and self.answered:
            why = failure_message(self.model, self.failed)
            screen.say(f"without an answer: {why}", "yellow")


def _left_out(
    config: AnswersConfig, model: Model, job: Job, saved: SavedAnswers, screen: Screen
) -> dict[int, str]:
    """Return why an answer is left out, by the number of its prompt, after printing how many are.

    Those that failed are, and of the target's own questions all degenerate ones.
    """
    found = saved.read()
    if config.asks:
        problems = questions.degenerate_answers(found, model.ends)
        why = questions.listed(Counter(problems.values()))
    else:
        problems = {number: "failed" for number, tokens in found.items() if not tokens}
        why = "they have no answer"
    if problems:
        what = "answers" if config.asks else "prompts"
        screen.say(f"{len(problems)} of {len(job.rows)} {what} are left out: {why}", "yellow")
    return problems


def _write(
    job: Job, saved: SavedAnswers, left_out: Collection[int], output: Path, record: dict
) -> None:
    examples = answers.examples(job, saved, left_out)
    write_responses(output, examples, record["target"], generation=record)


def _already(output: Path, record: dict, screen: Screen) -> int:
    """Return the exit code of a run whose dataset is already written, after printing that.

    Raises InputError if another run wrote the dataset.
    """

    def check() -> None:
        written = open_responses(output, record["target"]) if processes.is_first() else None
        if written is not None and written.generation.get("prompts") != record["prompts"]:
            folders.check_replaceable(output, "dataset", str(output), overwrite=False)

    processes.together(check)
    screen.say(f"{output} is written already")
    return _summary(output, screen)


def _summary(output: Path, screen: Screen) -> int:
    if processes.is_first():
        responses = open_responses(output)
        labels = int(responses.num_labels.sum())
        screen.say(
            f"{len(responses)} conversations, {labels} tokens of the target "
            f"({labels / len(responses):.0f} a conversation), "
            f"{int(responses.validation.sum())} held out: {output}"
        )
    return 0


if __name__ == "__main__":
    command.use_compilation_cache()
    raise SystemExit(main())
