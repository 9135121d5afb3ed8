"""Exports of reports for other programs, as CSV and as Spec-Bench's JSONL."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from typing import Any

from specjax.apps.report.runs import Entry
from specjax.apps.rows.statistics import OVERALL, tasks_of


def csv_text(entries: Sequence[Entry]) -> str:
    """Return CSV with one line per run and task, and one line per run over all its tasks.

    Undefined values are empty. Positions in a draft are counted from 1.
    """
    longest = max(len(entry.figures[OVERALL].counts.acceptance_at_pos) for entry in entries)
    lines = [
        _csv_row(entry, task, longest)
        for entry in entries
        for task in (*tasks_of([entry.run]), OVERALL)
    ]
    text = io.StringIO()
    writer = csv.DictWriter(text, lines[0].keys(), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def _csv_row(entry: Entry, task: str, longest: int) -> dict[str, Any]:
    """Return the values of a line of CSV by column, for a run and a task.

    `longest` is the number of draft positions that have columns.
    """
    figures, run = entry.figures[task].to_dict(), entry.run
    low, high = figures.pop("speedup_interval") or (None, None)
    tau_low, tau_high = figures.pop("acceptance_length_interval") or (None, None)
    row = {
        "subset": task,
        "drafter": run.drafter,
        "label": entry.label,
        "file": str(run.path),
        "target": run.target,
        "num_speculative_tokens": run.draft_length,
        "lossy": run.lossy,
        **vars(run.conditions),
        **{name: value for name, value in figures.items() if not isinstance(value, list | dict)},
        "speedup_low": low,
        "speedup_high": high,
        "acceptance_length_low": tau_low,
        "acceptance_length_high": tau_high,
    }
    whole = task == OVERALL
    row["predicted_speedup"] = entry.predicted if whole else None
    row["efficiency"] = entry.efficiency if whole else None
    for name in ("acceptance_at_pos", "cond_acceptance_at_pos"):
        values = figures[name] + [None] * longest
        row |= {f"{name}_{index + 1}": values[index] for index in range(longest)}
    return row


def jsonl_text(entry: Entry) -> str:
    """Return a run's answers in Spec-Bench's format, one question per line.

    `wall_time` is the time of prefill and decoding in seconds, for the whole batch of an answer;
    `accept_lengths` concatenates all turns. Other fields are specjax's own.
    """
    run = entry.run
    questions: dict[tuple[int | str, str], list] = {}
    for row in run.rows:
        questions.setdefault((row.question_id, row.category), []).append(row)
    lines = []
    for (question_id, category), rows in questions.items():
        rows = sorted(rows, key=lambda row: row.turn)
        choice = {
            "index": 0,
            "turns": [row.text for row in rows],
            "decoding_steps": [len(row.emitted) for row in rows],
            "new_tokens": [row.new_tokens for row in rows],
            "wall_time": [row.prefill_s + row.decode_s for row in rows],
            "accept_lengths": [count for row in rows for count in row.emitted],
        }
        line = {
            "question_id": question_id,
            "category": category,
            "model_id": run.target,
            "drafter": entry.label,
            "lossy": run.lossy,
            "choices": [choice],
            "prefill_s": [row.prefill_s for row in rows],
            "decode_s": [row.decode_s for row in rows],
            **vars(run.conditions),
            "seed": run.config.get("seed"),
        }
        lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    return "".join(lines)
