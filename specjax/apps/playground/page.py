"""The page of a run: a single HTML file that contains its data as JSON."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Any

from specjax.apps.playground.replay_round import RecordedRow, RoundTrace, replay_rounds
from specjax.apps.playground.theory_tables import nearest_alpha, theory_tables
from specjax.apps.rows import records
from specjax.apps.rows.records import Run
from specjax.apps.rows.statistics import OVERALL, figures_by_task
from specjax.apps.run.predicted_speedup import run_plans
from specjax.engine.plan import DecodePlan
from specjax.engine.requests import Request
from specjax.errors import InputError
from specjax.files import atomic_writes
from specjax.loading.tokenizers.tokenizer import Tokenizer

_ROWS, _ROUNDS = 4, 100
"""Answers of a run, and rounds of an answer, that a page shows."""
_MARK = '<meta name="generator" content="specjax">'
_DATA = "{{data}}"


def check_page(path: Path) -> None:
    """Raise InputError if the file at `path` exists and is not a page of specjax."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            ours = _MARK in file.read(1000)
    except FileNotFoundError:
        ours = True
    except OSError as error:
        raise InputError(f"html={str(path)!r}: cannot be read ({error.strerror})") from None
    if not ours:
        raise InputError(
            f"html={str(path)!r} is a file that is no page of specjax; move it away, or name "
            "another file"
        )


def write_runs(path: Path, runs: Sequence[Run], say: Callable[[str], None]) -> None:
    """Write a page of some runs, whose rounds are computed again.

    `say` is called with lines of progress. Raises InputError for runs that this machine cannot
    repeat, and if another file is in the way.
    """
    check_page(path)
    shown = []
    for index, plan, requests in run_plans(runs, "html", say):
        say(f"computing the rounds of {runs[index].path.name} again")
        shown.append(run_data(runs[index], plan, requests))
    if not shown:
        raise InputError("html: none of the runs has a drafter; give one that drafts")
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_writes.write_text(path, page({"runs": shown}))


def page(data: dict[str, Any]) -> str:
    """Return the HTML of a page with the given data and the tables of `specjax.theory`."""
    content = {"theory": _tables(), **data}
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # Nothing in a text ends the script, or begins another one.
    text = text.replace("&", r"\u0026").replace("<", r"\u003c")
    template = resources.files(__package__).joinpath("playground.html").read_text("utf-8")
    return template.replace(_DATA, text, 1)


_tables = functools.cache(theory_tables)


def run_data(run: Run, plan: DecodePlan, requests: Sequence[Request]) -> dict[str, Any]:
    """Return what a page shows of a run, JSON-ready: its figures, and its first answers."""
    figures = figures_by_task(run)[OVERALL]
    counts = figures.counts
    rows = [(index, row) for index, row in enumerate(r for r in run.rows if r.turn == 0)]
    longest = plan.loop.drafter.num_speculative_tokens
    answers = [
        answer_data(plan, requests[index], _recorded(row), str(row.question_id))
        for index, row in rows[:_ROWS]
    ]
    return {
        "target": run.target,
        "drafter": run.drafter,
        "rule": plan.loop.rule.name,
        "temperature": run.conditions.temperature,
        "device": run.conditions.device,
        "tau": counts.acceptance_length,
        "speedup": None if figures.noisy else figures.speedup,
        "tokens_per_second": figures.tokens_per_second,
        "plain_tokens_per_second": figures.plain_tokens_per_second,
        "k": run.draft_length or longest,
        "alpha": nearest_alpha(counts.acceptance_length or 1.0, run.draft_length or longest),
        "answers": answers,
        "num_answers": len(rows),
    }


def answer_data(
    plan: DecodePlan, request: Request, recorded: RecordedRow, name: str
) -> dict[str, Any]:
    """Return the answer to a request as a page reads it, with its rounds computed again.

    `recorded` is what the run recorded of it, and `name` its heading.
    """
    answer, *rounds = answer_parts(plan, request, recorded, name)
    answer["rounds"] = [part["round"] for part in rounds]
    for part in rounds:
        answer["texts"] |= part["texts"]
    return answer


def answer_parts(
    plan: DecodePlan, request: Request, recorded: RecordedRow, name: str
) -> Iterator[dict[str, Any]]:
    """Yield an answer without rounds, then each `round` as it is computed, with new `texts`.

    All are as a page reads them. `recorded` is what the run recorded of the answer, and `name` its
    heading.
    """
    tokenizer = plan.model.tokenizer
    known = {*request.prompt, *recorded.token_ids}
    parts = plan.loop.drafter.parts
    names = [[one.name for one in getattr(part, "parts", (part,))] for part in parts]
    yield answer_of(name, names, request.prompt, recorded, (), token_texts(tokenizer, known))
    for trace in islice(replay_rounds(plan, request, recorded), _ROUNDS):
        new = _tokens(trace) - known
        known |= new
        yield {"round": asdict(trace), "texts": token_texts(tokenizer, new)}


def answer_of(
    name: str,
    drafters: Sequence[Sequence[str]],
    prompt: Sequence[int],
    recorded: RecordedRow,
    traces: Sequence[RoundTrace],
    texts: Mapping[int, str],
) -> dict[str, Any]:
    """Return an answer as a page reads it.

    `name` is its heading, and `drafters` are the names of drafters that take turns, each with those
    that it merges. `prompt` are its token ids, `recorded` what the run recorded of it, and `traces`
    its rounds computed again. `texts` has the text of each token in them.
    """
    return {
        "name": name,
        "drafters": drafters,
        "prompt": prompt,
        "tokens": recorded.token_ids,
        "emitted": recorded.emitted,
        "accepted": recorded.accepted,
        "drafted": recorded.drafted,
        "drafter": recorded.drafter_index,
        "rounds": [asdict(trace) for trace in traces],
        "texts": texts,
    }


def token_texts(tokenizer: Tokenizer | None, tokens: Iterable[int]) -> dict[int, str]:
    """Return the text that each token adds to a text, by id; without a tokenizer the id itself."""
    if tokenizer is None:
        return {token: f"{token} " for token in tokens}
    pieces = {token: tokenizer.detokenizer.piece(token, token) or b"" for token in tokens}
    return {token: piece.decode(errors="replace") for token, piece in pieces.items()}


def _tokens(trace: RoundTrace) -> set[int]:
    found = {trace.root, trace.next_token, *trace.tokens, *trace.emitted}
    likeliest = [trace.next_likeliest, *(test.likeliest for test in trace.tests)]
    found |= {token for one in likeliest for token, _, _ in one}
    return found | {test.choice for test in trace.tests if test.choice is not None}


def _recorded(row: records.DecodedRow) -> RecordedRow:
    return RecordedRow(row.token_ids, row.drafted, row.accepted, row.emitted, row.drafter_index)
