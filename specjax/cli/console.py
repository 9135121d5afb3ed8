"""Output of `decode`: progress, text with accepted draft tokens marked, the final table.

On a terminal with colour and a status line; elsewhere plain lines.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.control import Control
from rich.segment import ControlType
from rich.table import Table
from rich.text import Text

from specjax import metrics
from specjax.decoding.engine.outputs import Delta
from specjax.decoding.prompts import Question
from specjax.loading.tokenizers.tokenizer import StreamDecoder, Tokenizer
from specjax.reporting.decode_report import PLAIN, DrafterRun
from specjax.reporting.records import Row
from specjax.reporting.statistics import Figures, figures

ACCEPTED = "green"
_OPEN, _CLOSE = "\u27e6", "\u27e7"
_QUIET_S = 10.0
"""Seconds between two lines of progress where there is no terminal."""


class Marker:
    """Splits one prompt's text into pieces that were drafted and accepted, and the rest.

    A character belongs to the token that completes it.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._decoder = None if tokenizer is None else StreamDecoder(tokenizer)
        self._drafted: list[bool] = []

    def mark(self, delta: Delta) -> list[tuple[str, bool]]:
        """The pieces of a delta's text, in order, with whether they were drafted."""
        if self._decoder is not None:
            for token, drafted in zip(delta.token_ids, delta.drafted, strict=True):
                self._drafted += [drafted] * len(self._decoder.feed([token]))
        pieces: list[tuple[str, bool]] = []
        for index, character in enumerate(delta.text):
            drafted = self._drafted[index] if index < len(self._drafted) else False
            if pieces and pieces[-1][1] == drafted:
                pieces[-1] = (pieces[-1][0] + character, drafted)
            else:
                pieces.append((character, drafted))
        del self._drafted[: len(delta.text)]
        return pieces


class Screen:
    """The lines of one run."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._waiting = False
        self._inside = False
        self._spoke = time.monotonic()
        self._begin: tuple[float, float] | None = None
        self._marks = console.is_terminal or _can_print(console, _OPEN + _CLOSE)

    def say(self, line: str, style: str = "") -> None:
        """One line."""
        self.rest()
        self._console.print(Text(line, style), soft_wrap=True)
        self._spoke = time.monotonic()

    @contextmanager
    def working(self, doing: str) -> Iterator[None]:
        """Print what is being done, and afterwards how long it took."""
        begin = time.perf_counter()
        if not self._console.is_terminal:
            self.say(f"{doing} ...")
        with self._console.status(Text(f"{doing} ...")):
            yield
        if self._console.is_terminal or time.perf_counter() - begin > 1:
            self.say(f"{doing}: {time.perf_counter() - begin:.1f} s", "dim")

    def legend(self, drafter: str) -> None:
        """Print how accepted draft tokens are marked; `drafter` is the one whose text is shown."""
        if drafter == "none":
            return
        if self._console.is_terminal:
            legend = Text.assemble(("Text like this", ACCEPTED), " was drafted and accepted.")
        elif self._marks:
            legend = Text(f"{_OPEN}Text like this{_CLOSE} was drafted and accepted.")
        else:
            return
        self._console.print(legend)

    def progress(self, label: str, rows: int, total: int, speed: float, share: float) -> None:
        """Show rows done, tokens/s and the time left; `share` is the finished part of all work."""
        now = time.monotonic()
        if self._begin is None:
            self._begin = (now, share)
        since, before = self._begin
        line = f"{label}: {rows} of {total} rows, {speed:.1f} tokens/s"
        if share > before:
            line += f", about {_clock((now - since) / (share - before) * (1 - share))} left"
        if self._inside:
            return
        if self._console.is_terminal:
            # Written between steps: a line that updates itself would take time from the timed ones.
            self._erase()
            self._console.print(Text(line[: self._console.width - 1]), end="")
            self._waiting = True
        elif now - self._spoke > _QUIET_S:
            self.say(line)

    def rest(self) -> None:
        """End the status line, and the line of text that is being written."""
        if self._waiting:
            self._erase()
            self._waiting = False
        if self._inside:
            self._console.print()
            self._inside = False

    def _erase(self) -> None:
        erase = (ControlType.ERASE_IN_LINE, 2)
        self._console.control(Control(ControlType.CARRIAGE_RETURN, erase))

    @property
    def live(self) -> bool:
        """Whether text is shown while it is being decoded."""
        return self._console.is_terminal

    def question(self, number: int, total: int, question: Question, turn: int) -> None:
        """Print the heading of a prompt: its index and its beginning."""
        self.say("")
        words = " ".join(question.turns[turn].split())
        head = f"[{number}/{total}] " + (f"{question.category}: " if question.category else "")
        head += f"turn {turn + 1}: " if turn else ""
        room = max(self._console.width - len(head), 20)
        words = words if len(words) <= room else words[: room - 3] + "..."
        self.say(_harmless(head + words), "bold")

    def text(self, pieces: Sequence[tuple[str, bool]]) -> None:
        """Print the next pieces of a prompt's text; `rest` ends it."""
        for piece, drafted in pieces:
            if not self._inside:
                self.rest()
            piece = _harmless(piece)
            if self._console.is_terminal:
                shown = Text(piece, ACCEPTED if drafted else "")
            else:
                shown = Text(_between_marks(piece) if drafted and self._marks else piece)
            self._console.print(shown, end="", soft_wrap=True, highlight=False)
            self._inside = True

    def row_result(self, row: Row, drafter: str = "", *, brief: bool, timed: bool) -> None:
        """Print the line after a text: draft tokens, accepted ones, and the speeds.

        Where there are several drafters, the line begins with the name of this one; `brief` is for
        all but the first of them. `timed` says that the row was decoded alone.
        """
        parts = [] if brief else [f"{row.new_tokens} tokens"]
        if sum(row.drafted) and not brief:
            parts.append(f"{sum(row.accepted)} of {sum(row.drafted)} draft tokens accepted")
        if timed:
            one = figures([row])
            parts.append(f"{_number(one.tokens_per_second, 1)} tokens/s")
            if one.plain_tokens_per_second is not None and not brief:
                parts[-1] += f" against {_number(one.plain_tokens_per_second, 1)}"
        if row.identical is not None:
            parts.append("same tokens" if row.identical else "DIFFERENT TOKENS")
        if row.finish_reason == "error":
            parts.append(f"ENDED BY AN ERROR: {row.text_error or 'logits that are not numbers'}")
        if parts:
            self.say("    " + f"{drafter}: " * bool(drafter) + ", ".join(parts), "dim")

    def table(
        self,
        runs: Sequence[DrafterRun],
        title: str,
        comparison: Callable[[Figures], str] | None,
    ) -> None:
        """Print the final table, a column per drafter; lines that say nothing are left out.

        `comparison` is what the line on the comparison with plain decoding says, if there is one.
        """
        columns = [_Column(run, found) for run in runs if (found := run.figures())]
        if len(columns) < len(runs):
            self.say("No batch was finished.")
            return
        first = columns[0].figures
        compared = first.plain_tokens_per_second is not None
        table = Table(title=title, title_justify="left")
        table.add_column("", no_wrap=True)
        for name in [PLAIN] * compared + [run.drafter for run in runs]:
            table.add_column(name, justify="right")
        lines = [*_LINES]
        if comparison is not None:
            line = _Line("identical to plain", lambda column: comparison(column.figures))
            lines.insert(-3, line)
        for line in lines:
            cells = [line.cell(column) for column in columns]
            if any(cells):
                table.add_row(line.name, *[line.plain(first)] * compared, *cells)
        self.say("")
        self._console.print(table)
        if compared:
            self.say("speeds are without loading and compiling", "dim")

    def differences(self, rows: Sequence[Row], drafter: str = "") -> None:
        """Print every row that differs from plain decoding, with the margins of its near-ties.

        `drafter` is its name where there are several.
        """
        for row in rows:
            if row.difference is None:
                continue
            closeness = [
                f"margin {tie.margin:.3g} at new token {tie.index} "
                + (
                    f"(excused: a near-tie, below {tie.resolution:.3g})"
                    if tie.excused
                    else f"(not below {tie.resolution:.3g}: NOT EXACT)"
                )
                for tie in row.near_ties
            ]
            self.say(
                f"{drafter}: " * bool(drafter)
                + f"question {row.question_id}: first difference at new token "
                + f"{row.difference.first}; {', '.join(closeness)}",
                "" if row.difference.excused else "bold red",
            )


@dataclass(frozen=True)
class _Column:
    """A drafter's run, and its figures."""

    run: DrafterRun
    figures: Figures

    @property
    def counts(self) -> metrics.Summary:
        return self.figures.counts


@dataclass(frozen=True)
class _Line:
    """A line of the final table: a drafter's cell, empty where it says nothing, and plain's."""

    name: str
    cell: Callable[[_Column], str]
    plain: Callable[[Figures], str] = lambda figures: ""


def _speedup(speedup: float | None) -> str:
    return "" if speedup is None else f"{speedup:.2f}x"


def _expected(run: DrafterRun) -> str:
    expected = run.expected_acceptance()
    if expected is None:
        return ""
    return f"{_number(expected.mean, 3)} +- {expected.decision_error:.3f}"


def _by_width(counts: metrics.Summary) -> str:
    return " ".join(f"{width}:{rounds}" for width, rounds in counts.rounds_by_width.items())


_LINES = (
    _Line(
        "tokens/s",
        lambda column: _number(column.figures.tokens_per_second, 1),
        lambda plain: _number(plain.plain_tokens_per_second, 1),
    ),
    _Line("speed-up", lambda column: _speedup(column.figures.speedup), lambda plain: "1.00x"),
    _Line(
        "  with prefill",
        lambda column: _speedup(column.figures.speedup_with_prefill),
        lambda plain: "1.00x",
    ),
    _Line(
        "acceptance length",
        lambda column: _number(column.counts.acceptance_length),
        lambda plain: "1.00",
    ),
    _Line(
        "  where drafted",
        lambda column: _number(column.counts.tau_drafted) if column.counts.num_drafts else "",
    ),
    _Line(
        "draft tokens accepted",
        lambda column: (
            f"{column.counts.num_accepted_tokens} of {column.counts.num_draft_tokens}"
            if column.counts.num_draft_tokens
            else ""
        ),
    ),
    _Line(
        "acceptance by position",
        lambda column: (
            " ".join(_number(rate) for rate in column.counts.acceptance_at_pos)
            if column.counts.num_drafts
            else ""
        ),
    ),
    _Line("tree", lambda column: "; ".join(map(str, column.run.trees.values()))),
    _Line(
        "accepted of tested",
        lambda column: (
            _number(column.figures.acceptance_of_tested, 3) if column.run.expected else ""
        ),
    ),
    _Line("  expected from p and q", lambda column: _expected(column.run)),
    _Line(
        "prefill, s",
        lambda column: _number(column.figures.prefill_s),
        lambda plain: _number(plain.plain_prefill_s),
    ),
    _Line(
        "draft tokens per round",
        lambda column: _number(column.counts.drafted_per_round) if column.run.header.auto else "",
    ),
    _Line(
        "rounds by width",
        lambda column: _by_width(column.counts) if column.run.header.auto else "",
    ),
)


def _harmless(text: str) -> str:
    """Text without control characters: a model's output must not steer the terminal."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\ufffd", text.replace("\r\n", "\n"))


def _between_marks(piece: str) -> str:
    inner = piece.strip("\n")
    if not inner:
        return piece
    before, _, after = piece.partition(inner)
    return f"{before}{_OPEN}{inner}{_CLOSE}{after}"


def _can_print(console: Console, text: str) -> bool:
    try:
        text.encode(console.encoding)
    except UnicodeEncodeError:
        return False
    return True


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"


def _number(value: float | None, digits: int = 2) -> str:
    return "n/a" if value is None else f"{value:.{digits}f}"
