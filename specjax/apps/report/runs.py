"""The runs of a comparison: their labels and order, and which of them are comparable."""

from __future__ import annotations

import functools
import operator
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specjax.apps.rows.records import Conditions, DecodedRow, Run
from specjax.apps.rows.statistics import OVERALL, Figures, figures_by_task
from specjax.errors import InputError
from specjax.fields import dotted


@dataclass(frozen=True)
class Entry:
    """A run with its label and its figures by task, as one line of the leaderboard.

    `predicted` is the speed-up computed from parts of a round that were timed alone, if any.
    """

    label: str
    run: Run
    figures: Mapping[str, Figures]
    predicted: float | None = None

    @classmethod
    def of(cls, run: Run, label: str, predicted: float | None = None) -> Entry:
        """Return the entry of a run, computing its figures by task."""
        return cls(label, run, figures_by_task(run), predicted)

    @property
    def family(self) -> str:
        """A text that is equal for runs whose configs differ only in the draft length K."""
        apart = ("num_speculative_tokens", "report", "compare")
        fields = dotted(self.run.config)
        return repr([(name, value) for name, value in fields.items() if name not in apart])

    @property
    def efficiency(self) -> float | None:
        """The measured speed-up divided by the predicted one; None if one of them is missing."""
        measured = self.figures[OVERALL].speedup
        return measured / self.predicted if measured and self.predicted else None


def in_order(entries: Sequence[Entry]) -> list[Entry]:
    """Return entries by decreasing speed-up, those without a speed-up last.

    A speed-up counts as no more than what is possible (`Figures.credible_speedup`). If some run has
    few answers, all keep their order, since such speed-ups cannot be ranked.
    """
    if any(entry.figures[OVERALL].few for entry in entries):
        return list(entries)
    return sorted(entries, key=lambda entry: -(entry.figures[OVERALL].credible_speedup or 0.0))


def by_conditions(entries: Iterable[Entry]) -> dict[Conditions, list[Entry]]:
    """Return entries grouped by conditions, in sorted order; speeds are comparable in a group."""
    groups: dict[Conditions, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry.run.conditions, []).append(entry)
    return dict(sorted(groups.items()))


def comparable(runs: Sequence[Run]) -> list[Run]:
    """Return the runs with only the answers that can be compared, those to the same prompts.

    If a run was stopped early, the prompts that it did not answer are left out of the other runs
    under the same conditions. Raises InputError for runs of different targets, for runs on
    different prompts that were not stopped, and for runs without an answered prompt in common.
    """
    first = runs[0]
    for run in runs[1:]:
        if run.target != first.target:
            raise InputError(
                f"target: {str(run.path)!r} is of {run.target}, {str(first.path)!r} of "
                f"{first.target}; report each target separately"
            )
    groups: dict[Conditions, list[Run]] = {}
    for run in runs:
        # If no run was stopped, runs under different conditions must cover the same prompts, too.
        conditions = run.conditions if any(map(_stopped, runs)) else first.conditions
        groups.setdefault(conditions, []).append(run)
    reduced = {id(run): new for group in groups.values() for run, new in _same_prompts(group)}
    return [reduced[id(run)] for run in runs]


def _same_prompts(runs: Sequence[Run]) -> Iterator[tuple[Run, Run]]:
    """Yield each run, and a copy with only the answers to prompts that all runs answered."""
    kept = [run.rows for run in runs]
    while len({tuple(sorted(map(_prompt, rows))) for rows in kept}) > 1:
        if not any(_stopped(run) for run in runs):
            other = next(run for run in runs if run.prompts != runs[0].prompts)
            sizes = (f"{str(run.path)!r} ({len(run.rows)} rows)" for run in (other, runs[0]))
            raise InputError(
                f"prompts: {' and '.join(sizes)} answer other prompts; report each set separately"
            )
        shared = functools.reduce(operator.and_, (Counter(map(_prompt, rows)) for rows in kept))
        kept = [_answering(shared, rows) for rows in kept]
    if not all(kept):
        names = " and ".join(repr(str(run.path)) for run in runs)
        raise InputError(f"prompts: {names} have no answered prompt in common; run them further")
    for run, rows in zip(runs, kept, strict=True):
        yield run, replace(run, rows=rows, num_left_out=len(run.rows) - len(rows))


def _answering(prompts: Counter, rows: Sequence[DecodedRow]) -> tuple[DecodedRow, ...]:
    """Return the rows of the batches all of whose rows answer one of `prompts`.

    Whole batches are dropped, since the seconds of a batch are those of all its rows.
    """
    left, partial = Counter(prompts), set()
    for row in rows:
        left[_prompt(row)] -= 1
        if left[_prompt(row)] < 0:
            partial.add(row.batch)
    return tuple(row for row in rows if row.batch not in partial)


def _prompt(row: DecodedRow) -> tuple[int, str]:
    """Return the identity of a row's prompt: its turn and the hash of its question."""
    return row.turn, row.prompt_hash


def _stopped(run: Run) -> bool:
    """Return whether a run ended before all of its prompts were answered."""
    return run.end.interrupted or run.end.refused is not None


def labels(runs: Sequence[Run]) -> list[str]:
    """Return a label for each run: its drafter, and the settings in which the runs differ.

    No two runs under the same conditions have the same label.
    """
    fields = [_distinguishing_fields(run) for run in runs]
    names = dict.fromkeys(name for of_run in fields for name in of_run)
    differing = [name for name in names if len({str(of_run.get(name)) for of_run in fields}) > 1]
    short_labels = []
    for run, values in zip(runs, fields, strict=True):
        words = [_words(name, values[name]) for name in differing if values.get(name) is not None]
        label = f"{run.drafter} (lossy)" if run.lossy else run.drafter
        short_labels.append(", ".join([label, *filter(None, words)]))
    conditions = [run.conditions for run in runs]
    keys = list(zip(short_labels, conditions, strict=True))
    # Equal labels get the shortest end of the path that distinguishes them: the stem, then folders.
    for above in range(max((len(run.path.parts) for run in runs), default=1)):
        named = [
            f"{key[0]} ({Path(*run.path.parts[-1 - above :]).with_suffix('')})"
            if keys.count(key) > 1
            else key[0]
            for run, key in zip(runs, keys, strict=True)
        ]
        if len(set(zip(named, conditions, strict=True))) == len(named):
            return named
    # The same file is given twice, or two files differ only in their suffixes.
    return [f"{label}, {number}" for number, label in enumerate(named, 1)]


_LENGTH = "draft length"
_SHOWN_ELSEWHERE = (
    *("report", "compare", "batch_size", "dtype"),
    *("sampling.temperature", "sampling.max_new_tokens"),
    # Prompts are compared by content: two paths may name the same ones.
    *("target", "prompt", "prompts", "limit", "per_task", "num_speculative_tokens"),
)


def _distinguishing_fields(run: Run) -> dict[str, Any]:
    """Return the fields in which runs may differ: the config's, without those shown elsewhere."""
    section = run.config.get("tree")
    tree = _tree_words(section) if isinstance(section, Mapping) else None
    fields = {
        name: value
        for name, value in dotted(run.config).items()
        if name not in _SHOWN_ELSEWHERE and not name.startswith("tree.")
    }
    return {_LENGTH: "auto" if run.auto else run.draft_length, "tree": tree, **fields}


def _words(name: str, value: Any) -> str:
    """Return a field and its value as words of a label, or "" if the label has them already."""
    last = name.rpartition(".")[2].replace("_", " ")
    if name == "drafter.name":
        return ""
    if name == _LENGTH:
        return "auto" if value == "auto" else _counted(value, "draft token")
    if name == "verify":
        return f"{value} verification"
    if value is True or value is False:
        return last if value else f"no {last}"
    return str(value) if name == "tree" else f"{last} {value}"


def _tree_words(tree: Mapping[str, Any]) -> str | None:
    """Return the words for a config's section `tree`, or None if it is empty.

    An example is "dynamic tree, 32 nodes, depth 5".
    """
    options = {name: value for name, value in tree.items() if value is not None}
    if not options:
        return None
    kind = options.pop("kind", "")
    words = [kind if kind == "chain" else f"{kind} tree".strip()]
    if (nodes := options.pop("num_nodes", None)) is not None:
        words.append(_counted(nodes, "node"))
    if (depth := options.pop("depth", None)) is not None:
        words.append(f"depth {depth}")
    if (children := options.pop("topk", None)) is not None:
        words.append(f"{children} per node")
    words += [f"{name.replace('_', ' ')} {value}" for name, value in options.items()]
    return ", ".join(words)


def _counted(number: Any, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def without_length(label: str) -> str:
    """Return a label of `labels` without its draft length."""
    return re.sub(r", (?:\d+ draft tokens?|auto)(?=,|$| \()", "", label, count=1)
