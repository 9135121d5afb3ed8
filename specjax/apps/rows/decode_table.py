"""The results that `decode` shows: three lines for one drafter, a table for several."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from specjax.apps.rows.decode_report import PLAIN, DrafterRun
from specjax.apps.rows.records import RunHeader
from specjax.apps.rows.statistics import Figures, noise_remark
from specjax.core.none import PLAIN_DECODING
from specjax.metrics import ExpectedAcceptance, Summary

LEAST_TOKENS = 32
"""The minimum number of new tokens for which a speed-up is shown.

In shorter runs controllers still try lengths, and clocks are too coarse.
"""
SPEEDUP, TOKENS_PER_PASS, SAME_TOKENS = "speed-up", "tokens per pass", "same tokens as plain"
_DRAFTED = "passes with a draft"
_ROWS = (
    *("tokens/s", SPEEDUP, "  with prefill", TOKENS_PER_PASS, _DRAFTED, "draft tokens accepted"),
    *("accepted of tested", "  expected from p and q", SAME_TOKENS),
)
_VERBOSE_ROWS = (
    *("tokens per pass with a draft", "cumulative acceptance, from position 1"),
    *("conditional acceptance, from position 1", "tree", "draft tokens per pass"),
    *("passes by width", "passes by limit", "prefill, s", "compiling, s"),
)
"""The additional rows of a table with --verbose."""
_TOO_SHORT = "too short to tell"
SLOWER_PAGE = "docs/faq.md#why-is-it-slower"
_SLOWER, _DRIFT = 0.95, 1.2
"""The speed-up below which a reason is shown, and the ratio of plain decoding's speeds in two
repeats above which a warning is shown."""
_NO_DRAFT = "nothing was drafted"
Compared = Callable[[Figures], str]
"""A function that returns the text about the comparison of a run with plain decoding."""


def nothing_drafted(header: RunHeader, figures: Figures, allowed: bool | None = None) -> str | None:
    """Return why a run has no speed-up to speak of, since it drafted nothing; None if it drafted.

    The speed of such a run differs from plain decoding's by chance, or by the cost of looking for a
    draft. Plain decoding itself returns None. `allowed` says whether the controller allowed a draft
    in some pass; None if that is not known.
    """
    if figures.counts.num_draft_tokens or header.drafter == PLAIN_DECODING:
        return None
    if header.config.get("num_speculative_tokens") == 0:
        return f"{_NO_DRAFT}: num_speculative_tokens is 0"
    unmatched = f"{header.drafter} found no draft in the repeat reported here"
    if allowed or not header.auto:
        return f"{_NO_DRAFT}: {unmatched}"
    return (
        f"{_NO_DRAFT}: auto found that drafting does not pay here"
        + (f", or {unmatched}" if allowed is None else "")
        + "; --config.num_speculative_tokens=fixed drafts anyway"
    )


def _allowed(run: DrafterRun) -> bool:
    """Return whether a drafter of the run was allowed to draft in some pass."""
    return any(max(longest) > 0 and rounds for longest, _, rounds in run.step_limits)


def too_short(figures: Figures) -> bool:
    """Return whether a run has too few new tokens to tell its speed-up over plain decoding.

    False if it was not compared with plain decoding.
    """
    compared = figures.plain_tokens_per_second is not None
    return compared and figures.counts.num_emitted_tokens < LEAST_TOKENS


def result_lines(run: DrafterRun, compared: Compared | None) -> dict[str, str]:
    """Return the lines that describe a run of one drafter: text by heading.

    They give the speed, the tokens per pass, how often `auto` drafted, the acceptance of tested
    tokens if its expectation was computed, and, unless `compared` is None, `compared(run)`: the
    equality with plain decoding.
    """
    run_figures = run.figures()
    no_draft = nothing_drafted(run.header, run_figures, _allowed(run))
    counts, speed = run_figures.counts, f"{_number(run_figures.tokens_per_second, 1)} tokens/s"
    lines = {"speed": speed}
    if too_short(run_figures):
        lines = {SPEEDUP: _TOO_SHORT}
    elif run_figures.plain_tokens_per_second is not None:
        plain = _number(run_figures.plain_tokens_per_second, 1)
        lines = {SPEEDUP: f"{_speedup(run_figures)}: {speed}, plain decoding {plain}"}
        if no_draft is not None:
            lines = {"speed": f"{speed}, plain decoding {plain}", SPEEDUP: no_draft}
    lines[TOKENS_PER_PASS] = _number(counts.acceptance_length)
    if counts.num_draft_tokens or no_draft is not None:
        share = ""
        if run.header.auto and no_draft is None:
            share = f"; {_share(counts)} of passes had a draft"
        lines[TOKENS_PER_PASS] += f" ({_accepted(run_figures)} draft tokens accepted{share})"
    if (expected := run.expected) is not None:
        accepted = _number(run_figures.acceptance_of_tested, 3)
        lines["accepted of tested"] = f"{accepted} (expected from p and q: {_mean(expected)})"
    if compared is not None:
        lines[SAME_TOKENS] = compared(run_figures)
    return lines


def result_table(
    runs: Sequence[DrafterRun], compared: Compared | None, *, verbose: bool
) -> dict[str, dict[str, str]]:
    """Return the cells of a table of results, as texts by row and then by column.

    The columns are plain decoding, if it was run, and the drafters. Rows without information are
    omitted; `verbose` adds rows. `compared(run)` is the text of the row about equality with plain
    decoding, which is missing if `compared` is None.
    """
    columns: dict[str, dict[str, str]] = {}
    for run in runs:
        run_figures = run.figures()
        if run_figures.plain_tokens_per_second is not None:
            columns.setdefault(PLAIN, _plain_column(run_figures))
        columns[run.drafter] = _column(run, run_figures)
        if compared is not None:
            columns[run.drafter][SAME_TOKENS] = compared(run_figures)
    rows = (*_ROWS, *(_VERBOSE_ROWS if verbose else ()))
    return {
        row: {name: cells.get(row, "") for name, cells in columns.items()}
        for row in rows
        if any(row in cells for cells in columns.values())
    }


def _plain_column(figures: Figures) -> dict[str, str]:
    """Return the cells of plain decoding by row."""
    return {
        "tokens/s": _number(figures.plain_tokens_per_second, 1),
        SPEEDUP: "1.00x",
        "  with prefill": "1.00x",
        TOKENS_PER_PASS: "1.00",
        "prefill, s": _number(figures.plain_prefill_s),
    }


def _column(run: DrafterRun, figures: Figures) -> dict[str, str]:
    """Return the cells of a drafter by row."""
    counts, expected = figures.counts, run.expected
    cells = {
        "tokens/s": _number(figures.tokens_per_second, 1),
        TOKENS_PER_PASS: _number(counts.acceptance_length),
        "passes by width": _by_name(counts.rounds_by_width),
        "prefill, s": _number(figures.prefill_s),
        "compiling, s": _number(run.engine["compile_s"] if run.engine else 0.0, 1),
    }
    if too_short(figures):
        cells[SPEEDUP] = _TOO_SHORT
    elif nothing_drafted(run.header, figures) is not None:
        cells[SPEEDUP], cells["draft tokens accepted"] = _NO_DRAFT, _accepted(figures)
    elif figures.plain_tokens_per_second is not None:
        cells[SPEEDUP] = _speedup(figures)
        cells["  with prefill"] = f"{_number(figures.speedup_with_prefill)}x"
    if run.header.auto:
        cells[_DRAFTED] = _share(counts)
    if counts.num_draft_tokens:
        cells["draft tokens accepted"] = _accepted(figures)
        cells["tokens per pass with a draft"] = _number(counts.tau_drafted)
        for name, shares in (
            ("cumulative", counts.acceptance_at_pos),
            ("conditional", counts.cond_acceptance_at_pos),
        ):
            cells[f"{name} acceptance, from position 1"] = " ".join(map(_number, shares))
    if run.trees:
        cells["tree"] = "; ".join(map(str, run.trees.values()))
    if expected is not None:
        cells["accepted of tested"] = _number(figures.acceptance_of_tested, 3)
        cells["  expected from p and q"] = _mean(expected)
    if run.step_limits:
        limits: Counter[str] = Counter()
        for longest, _, rounds in run.step_limits:
            limits["+".join(map(str, longest))] += rounds
        cells["draft tokens per pass"] = _number(counts.drafted_per_round)
        cells["passes by limit"] = _by_name(limits)
    return cells


def slower(figures: Figures) -> str | None:
    """Return a line that says why a drafter is slower than plain decoding, or None if it is not.

    It compares the tokens that a round emits with the cost of a round in passes of plain decoding,
    which is that number of tokens divided by the speed-up. A run that drafted nothing has no line.
    """
    if not figures.counts.num_draft_tokens:
        return None
    speedup, emitted = figures.speedup, figures.counts.acceptance_length
    if speedup is None or emitted is None or speedup >= _SLOWER or too_short(figures):
        return None
    cost = f"a round costs {_number(emitted / speedup, 1)} plain passes"
    return f"{_number(speedup)}x: {cost} and emits {_number(emitted, 1)} tokens; {SLOWER_PAGE}"


def drift(figures: Figures) -> str | None:
    """Return a warning if plain decoding's speed varied by more than a fifth between repeats."""
    low, high = figures.plain_range or (1.0, 1.0)
    if high <= _DRIFT * low:
        return None
    return (
        f"plain decoding ran at {_number(low, 1)} to {_number(high, 1)} tokens/s between repeats: "
        "the machine is not quiet, so trust the speed-up less"
    )


def _speedup(figures: Figures) -> str:
    """Return the speed-up with its rank among repeats, their range, and a remark on noise.

    The remark is about the largest of them.
    """
    notes, largest = [], figures.speedup
    if figures.speedup_range is not None:
        low, largest = figures.speedup_range
        notes.append(f"{_rank(figures)} of {figures.repeats}: {_number(low)} to {_number(largest)}")
    if remark := noise_remark(largest, figures.possible_speedup):
        notes.append(remark)
    return f"{_number(figures.speedup)}x" + (f" ({'; '.join(notes)})" if notes else "")


def _rank(figures: Figures) -> str:
    """Return which of several repeats the speed-up is from (`speedups.median_repeat`).

    If some row's tokens differ from plain decoding's, the repeat is the first one with such a row.
    """
    if figures.identical_rows != (figures.compared_rows or None):
        return "one"
    if figures.repeats % 2:
        return "median"
    return "lower" if figures.repeats == 2 else "lower median"


def _mean(expected: ExpectedAcceptance) -> str:
    return f"{_number(expected.mean, 3)} +- {_number(expected.decision_error, 3)}"


def _share(counts: Summary) -> str:
    """Return the share of passes with a draft, which tells how often `auto` drafted."""
    return "n/a" if counts.share_drafted is None else f"{counts.share_drafted:.0%}"


def _accepted(figures: Figures) -> str:
    counts = figures.counts
    return f"{counts.num_accepted_tokens} of {counts.num_draft_tokens}"


def _by_name(counts: Mapping[int | str, int]) -> str:
    return " ".join(f"{name}:{count}" for name, count in counts.items())


def _number(value: float | None, digits: int = 2) -> str:
    return "n/a" if value is None else f"{value:.{digits}f}"
