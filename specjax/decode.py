"""Decode prompts with a drafter, show what was drafted, and compare with plain decoding.

    python -m specjax.decode --config=configs/decode_smollm2.py --config.compare=true
    python -m specjax.decode --list

Exit code 0; 1 if the output differs from plain decoding where it must not; 2 for bad input; 130
after Ctrl-C, with what was finished in the report.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
from absl import logging
from rich.console import Console
from rich.table import Table

from specjax import drafters, frontdoor, identity, reporting, session
from specjax.built_in import BUILT_IN
from specjax.console import RowProgress, TokenPrinter, working
from specjax.errors import InputError
from specjax.frontdoor import optional
from specjax.generation import Follower, Generation, collect
from specjax.models.loading import load_model
from specjax.models.model import Model
from specjax.models.tokenizer import StreamDecoder
from specjax.prompts import Prompt, Question, read_questions, select
from specjax.reporting import Row, Totals
from specjax.sampling_params import SamplingParams

DEFAULT_CONFIG = "configs/decode_smollm2.py"
_ROUNDS = 8
"""Rounds between two looks from the host: often enough for progress and Ctrl-C."""
_STREAMED_PROMPTS = 12
"""With more prompts than these, their texts are not shown."""


@dataclasses.dataclass
class Run:
    """What one command does, and what it has found so far."""

    config: ml_collections.ConfigDict
    console: Console
    model: Model
    questions: list[Question]
    sampling: SamplingParams
    chat: bool
    rows: list[Row] = dataclasses.field(default_factory=list)
    drafted: Totals = dataclasses.field(default_factory=Totals)
    plain: Totals = dataclasses.field(default_factory=Totals)
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)

    def open(self, prompts: list[Prompt], drafter: drafters.Drafter | None) -> session.Session:
        """A session on these prompts with the config's choices."""
        config = self.config
        length = optional(config, "num_speculative_tokens") if drafter else None
        return session.open_session(
            self.model,
            prompts,
            drafter=drafter,
            num_speculative_tokens=_draft_length(length),
            num_speculative_tokens_per_batch_size=(
                config.num_speculative_tokens_per_batch_size if drafter else ()
            ),
            verify=config.verify,
            requests=self.sampling,
            seed=config.seed,
            batch_size=config.batch_size,
            max_length=config.max_length,
        )


def decode(config: ml_collections.ConfigDict, console: Console) -> int:
    """The main job; returns the exit code."""
    sampling = SamplingParams.of(config.sampling.to_dict())
    questions = _questions(config)
    options = _drafter_options(config)
    _check(config)
    begin = time.perf_counter()
    with working(console, f"loading {config.target}"):
        model = load_model(config.target, dtype=config.dtype)
    run = Run(config, console, model, questions, sampling, _chat(config, model))
    run.facts["load_s"] = time.perf_counter() - begin
    run.facts["compile_s"] = 0.0
    interrupted = False
    try:
        for turn in range(max(len(question.turns) for question in questions)):
            if turn and config.turns == "first":
                break
            _decode_turn(run, turn, options)
    except KeyboardInterrupt:
        interrupted = True
        console.print(f"\ninterrupted: {len(run.rows)} rows were finished")
    summary = _summary(run)
    if config.report:
        reporting.write(config.report, run.rows, summary)
    if run.rows:
        _print_summary(run, summary)
    if interrupted:
        return frontdoor.INTERRUPTED
    return 1 if any(row.wrong for row in run.rows) else 0


def _decode_turn(run: Run, turn: int, options: dict[str, Any]) -> None:
    """Decode turn `turn` of every question that has one, batch by batch, plain and drafted."""
    asked = [question for question in run.questions if len(question.turns) > turn]
    prompts = [_prompt(run, question, turn) for question in asked]
    simulated = run.config.drafter.name == "simulated"
    compares = run.config.compare or simulated
    plain = run.open(prompts, None)
    plain_programs = _compile(run, plain, "plain decoding") if compares else None
    if simulated:
        with working(run.console, "recording plain continuations"):
            batches = session.run_session(plain, _ROUNDS, plain_programs)
            done = [snapshot for snapshot in batches if snapshot.finished]
            options = options | {"continuations": collect(plain, done).token_ids}
    drafter = drafters.make_drafter(run.config.drafter.name, run.model, **options)
    drafted = run.open(prompts, drafter)
    programs = _compile(run, drafted, f"decoding with {drafter.name}")

    streams = len(run.questions) <= _STREAMED_PROMPTS
    with RowProgress(run.console, len(asked), quiet=streams) as progress:
        for batch, index in enumerate(drafted.batches()):
            subset = [asked[i] for i in index]
            snapshots = _watched(run, drafted, programs, index, subset, streams)
            result = collect(drafted, snapshots)
            rows = reporting.rows_of(result, subset, turn, drafter.name, batch)
            if run.config.compare:
                last = list(session.run_batch(plain, plain_programs, index, _ROUNDS))[-1]
                reference = collect(plain, [last])
                run.plain.add(reference)
                rows = _judge(run, drafted, rows, reference, index)
            run.drafted.add(result)
            run.rows.extend(rows)
            progress.update(index[-1] + 1, run.drafted.tokens_per_second or 0.0)


def _watched(
    run: Run,
    drafted: session.Session,
    programs: session.Programs,
    index: list[int],
    questions: Sequence[Question],
    streams: bool,
) -> list[session.Snapshot]:
    """Decode one batch, streaming its text if there is one row; the finished snapshot."""
    console = run.console
    streams = streams and run.model.tokenizer is not None
    live = streams and len(index) == 1
    printer, follower = TokenPrinter(console), Follower(drafted, index[0])
    decoder = StreamDecoder(run.model.tokenizer) if streams else None
    if live:
        _print_question(console, questions[0])
    for snapshot in session.run_batch(drafted, programs, index, _ROUNDS):
        run.facts.setdefault("first_token_s", _since_start())
        if live:
            delta = follower.follow(snapshot, session.cut(snapshot), 0)
            for token, was_drafted in zip(delta.token_ids, delta.drafted, strict=True):
                printer.show(decoder.feed([token]), was_drafted)
    if live:
        printer.show(decoder.flush() + "\n", False)
    elif streams:
        result = collect(drafted, [snapshot])
        for row, question in enumerate(questions):
            _print_question(console, question)
            decoder = StreamDecoder(run.model.tokenizer)
            for token, was_drafted in zip(
                result.token_ids[row], result.was_drafted(row), strict=True
            ):
                printer.show(decoder.feed([token]), was_drafted)
            printer.show(decoder.flush() + "\n", False)
    return [snapshot]


def _judge(
    run: Run,
    drafted: session.Session,
    rows: list[Row],
    reference: Generation,
    index: list[int],
) -> list[Row]:
    """The rows with what the comparison says of them."""
    if run.config.verify != "coupled" and run.sampling.temperature > 0:
        return rows
    judged = []
    for row, expected, prompt in zip(rows, reference.token_ids, index, strict=True):
        place = identity.first_difference(row.token_ids, expected)
        margin = None
        if place is not None:
            margin = identity.top2_margin(drafted, prompt, expected[:place])
        judged.append(
            dataclasses.replace(
                row, identical=place is None, first_difference=place, margin_at_difference=margin
            )
        )
    return judged


def _compile(run: Run, one: session.Session, what: str) -> session.Programs:
    with working(run.console, f"compiling {what}"):
        programs = session.compile_session(one)
    run.facts["compile_s"] += programs.seconds
    return programs


def _summary(run: Run) -> dict[str, Any]:
    device = jax.devices()[0]
    facts = run.facts | {
        "expected_acceptance": None,
        "device": f"{device.platform} ({device.device_kind})",
        "dtype": str(jnp.dtype(run.model.dtype)),
        "versions": reporting.versions(),
        "config": run.config.to_dict(),
    }
    return reporting.summarize(run.rows, run.drafted, run.plain, facts)


def _print_summary(run: Run, summary: dict[str, Any]) -> None:
    console, compares = run.console, run.config.compare
    table = Table(title=f"{run.model.name}, {summary['dtype']}, {summary['device']}")
    table.add_column("")
    if compares:
        table.add_column("plain", justify="right")
    table.add_column(summary["drafter"], justify="right")

    def line(name: str, plain: str, drafted: str) -> None:
        table.add_row(name, *([plain] if compares else []), drafted)

    base = summary["baseline_tokens_per_second"]
    line("tokens/s", _number(base, 1), _number(summary["tokens_per_second"], 1))
    if compares:
        line("speed-up", "1.00x", f"{_number(summary['speedup'], 2)}x")
    line("acceptance length (tau)", "1.00", _number(summary["acceptance_length"], 2))
    line("  over rounds with a draft", "", _number(summary["tau_drafted"], 2))
    line("acceptance rate", "", _number(summary["acceptance_rate"], 3))
    positions = " ".join(_number(value, 2) for value in summary["acceptance_at_pos"] or [])
    line("acceptance by position", "", positions or "-")
    if compares:
        same, count = summary["identical_rows"], summary["num_rows"]
        verdict = "not defined: random rule" if same is None else f"{same}/{count}"
        line("identical to plain", "", verdict)
    console.print(table)
    for row in run.rows:
        if row.identical is False:
            margin = row.margin_at_difference
            word = "WRONG" if row.wrong else "excused: a tie within rounding"
            console.print(
                f"question {row.question_id}: token {row.first_difference} differs, top-2 margin "
                f"{margin:.2e} ({word})",
                highlight=False,
            )


def _print_question(console: Console, question: Question) -> None:
    first = question.turns[0].strip().splitlines()[0]
    console.print(f"\n[bold]{question.category or 'prompt'}[/bold]: ", end="")
    console.print(first, style="dim", markup=False, highlight=False)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _questions(config: ml_collections.ConfigDict) -> list[Question]:
    if config.prompt and config.prompts:
        raise InputError("prompt and prompts are both given: leave one of them empty")
    if config.turns not in ("first", "all"):
        raise InputError(f"turns={config.turns!r}: use first or all")
    for name in ("limit", "per_task"):
        if config[name] is not None and config[name] < 1:
            raise InputError(f"{name}={config[name]}: use a whole number of at least 1")
    if config.prompt:
        questions = [Question(0, "", (config.prompt,))]
    else:
        questions = read_questions(config.prompts) if config.prompts else list(BUILT_IN)
    return select(questions, limit=config.limit, per_task=config.per_task)


def _drafter_options(config: ml_collections.ConfigDict) -> dict[str, Any]:
    """What `make_drafter` is given: the options that were set, checked before any loading."""
    given = {k: v for k, v in config.drafter.items() if k not in ("name", "path") and v is not None}
    if ":" not in config.drafter.name:
        drafters.check_options(
            config.drafter.name,
            config.drafter.path or None,
            given,
            supplied=("continuations",),
        )
    return given | ({"path": config.drafter.path} if config.drafter.path else {})


def _draft_length(value: str | None) -> int | str | None:
    if value is None or value == "auto":
        return value
    try:
        length = int(value)
    except ValueError:
        length = value
    drafters.check_length(length)
    return length


def _check(config: ml_collections.ConfigDict) -> None:
    """Raise InputError for what can be told before the model is loaded."""
    _draft_length(optional(config, "num_speculative_tokens"))
    if config.verify not in session.RULES:
        raise InputError(f"verify={config.verify!r} is unknown: use {', '.join(session.RULES)}")
    if config.batch_size < 1:
        raise InputError(f"batch_size={config.batch_size}: use a whole number of at least 1")
    if config.chat not in ("auto", "true", "false"):
        raise InputError(f"chat={config.chat!r}: use auto, true or false")
    if config.report:
        reporting.check_writable(config.report)


def _chat(config: ml_collections.ConfigDict, model: Model) -> bool:
    has_template = model.tokenizer is not None and model.tokenizer.chat_template is not None
    if config.chat == "true" and not has_template:
        raise InputError(f"chat='true': {model.name} has no chat template; use false")
    return has_template if config.chat == "auto" else config.chat == "true"


def _prompt(run: Run, question: Question, turn: int) -> Prompt:
    answers = {row.turn: row.text for row in run.rows if row.question_id == question.question_id}
    if not run.chat:
        parts = [part for t in range(turn) for part in (question.turns[t], answers[t])]
        return "\n\n".join([*parts, question.turns[turn]])
    messages = []
    for past in range(turn):
        messages.append({"role": "user", "content": question.turns[past]})
        messages.append({"role": "assistant", "content": answers[past]})
    return [*messages, {"role": "user", "content": question.turns[turn]}]


def _since_start() -> float:
    """Seconds since this process began, by the kernel's clock; since import elsewhere."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        return uptime - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return time.perf_counter() - _IMPORTED


_IMPORTED = time.perf_counter()


def _listing() -> Iterator[str]:
    yield "drafters (--config.drafter.name=...), with their options (--config.drafter.<option>=...):"
    for name, constructor in drafters.DRAFTERS.items():
        yield f"  {name}: {(constructor.__doc__ or '').splitlines()[0]}"
        for option, parameter in drafters.drafter_options(name).items():
            if drafters.option_type(parameter) is not None:
                yield f"      {option} = {parameter.default}"
    yield "  package.module:function: one of your own, called as function(target, **options)"
    yield "rules (--config.verify=...), all exact:"
    yield "  rejection: accept with min(1, p/q), else draw from what p has left"
    yield "  block: as rejection, but judges the draft as a whole and accepts no less"
    yield "  coupled: the output depends on the seed and the prompt only, whatever is drafted"
    yield "sampling (--config.sampling.<field>=...):"
    for field in dataclasses.fields(SamplingParams):
        yield f"      {field.name} = {field.default}"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    console = Console()
    if arguments == ["--list"]:
        print("\n".join(_listing()))
        return 0
    logging.set_verbosity(logging.WARNING)
    frontdoor.use_compilation_cache()
    return frontdoor.run(
        lambda config: decode(config, console), arguments, default=DEFAULT_CONFIG
    )


if __name__ == "__main__":
    raise SystemExit(main())
