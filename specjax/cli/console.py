"""Output of `decode`: progress, text with accepted draft tokens marked, the final table.

On a terminal with colour and a status line; elsewhere plain lines.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.control import Control
from rich.segment import ControlType
from rich.table import Table
from rich.text import Text

from specjax.decoding.engine.outputs import Delta
from specjax.decoding.generate import Generation
from specjax.decoding.prompts import Question
from specjax.loading.tokenizers.tokenizer import StreamDecoder, Tokenizer
from specjax.reporting.decode_report import PLAIN, DrafterRun, Totals

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

    def row_result(
        self,
        ours: Generation,
        row: int,
        plain: Generation | None,
        same: str,
        drafter: str = "",
        *,
        brief: bool = False,
    ) -> None:
        """Print the line after a text: draft tokens, accepted ones, and the speeds.

        Where there are several drafters, the line begins with the name of this one; `brief` is for
        all but the first of them.
        """
        accepted = int(ours.accepted[row][ours.accepted[row] > 0].sum())
        drafted = int(ours.drafted[row][ours.drafted[row] > 0].sum())
        parts = [] if brief else [f"{len(ours.token_ids[row])} tokens"]
        if drafted and not brief:
            parts.append(f"{accepted} of {drafted} draft tokens accepted")
        if len(ours.token_ids) == 1:
            parts.append(f"{ours.tokens_per_second:.1f} tokens/s")
            if plain is not None and not brief:
                parts[-1] += f" against {plain.tokens_per_second:.1f}"
        if same:
            parts.append(same)
        if row in ours.failed_rows:
            why = ours.failed_rows[row].text_error or "logits that are not numbers"
            parts.append(f"ENDED BY AN ERROR: {why}")
        if parts:
            self.say("    " + f"{drafter}: " * bool(drafter) + ", ".join(parts), "dim")

    def table(
        self,
        runs: Sequence[DrafterRun],
        title: str,
        comparison: Callable[[Totals], str] | None,
    ) -> None:
        """Print the final table, a column per drafter.

        `comparison` is what the line on the comparison with plain decoding says, if there is one.
        """
        all_totals = [run.total() for run in runs]
        if any(totals.metrics is None for totals in all_totals):
            self.say("No batch was finished.")
            return
        table = Table(title=title, title_justify="left")
        table.add_column("", no_wrap=True)
        first = all_totals[0]
        compared = first.baseline_tokens_per_second is not None
        for name in [PLAIN] * compared + [run.drafter for run in runs]:
            table.add_column(name, justify="right")

        def add(name: str, cell: Callable[[Totals], str], baseline: str = "") -> None:
            cells = [cell(totals) for totals in all_totals]
            if any(cells):
                table.add_row(name, *[baseline] * compared, *cells)

        def count(name: str) -> Callable[[Totals], str]:
            return lambda totals: _number(getattr(totals.metrics, name))

        add(
            "tokens/s",
            lambda totals: _number(totals.tokens_per_second, 1),
            _number(first.baseline_tokens_per_second, 1),
        )
        if compared:
            add("speed-up", lambda totals: f"{_number(totals.speedup)}x", "1.00x")
            add(
                "  with prefill", lambda totals: f"{_number(totals.speedup_with_prefill)}x", "1.00x"
            )
        add("acceptance length", count("acceptance_length"), "1.00")
        if any(totals.metrics.num_draft_tokens for totals in all_totals):
            add("  where drafted", count("tau_drafted"))
            add("draft tokens accepted", _accepted)
            add("acceptance by position", _by_position)
        if any(run.trees for run in runs):
            cells = ["; ".join(map(str, run.trees.values())) for run in runs]
            table.add_row("tree", *[""] * compared, *cells)
        if any(totals.expected is not None for totals in all_totals):
            add("accepted of tested", lambda totals: _number(totals.acceptance_of_tested, 3))
            add("  expected from p and q", _expected)
        if comparison is not None:
            add("identical to plain", comparison)
        add(
            "prefill, s",
            lambda totals: _number(totals.prefill_s),
            _number(first.baseline_prefill_s),
        )
        for name, cells in _auto_rows(runs, all_totals):
            table.add_row(name, *[""] * compared, *cells)
        self.say("")
        self._console.print(table)
        if compared:
            self.say(
                "speeds are without loading and compiling",
                "dim",
            )

    def differences(self, totals: Totals, drafter: str = "") -> None:
        """Print every row that differs from plain decoding, with the margins of its near-ties.

        `drafter` is its name where there are several.
        """
        for question, one in totals.differences:
            closeness = [
                f"margin {tie.margin:.3g} at new token {tie.index} "
                + (
                    f"(excused: a near-tie, below {tie.resolution:.3g})"
                    if tie.excused
                    else f"(not below {tie.resolution:.3g}: NOT EXACT)"
                )
                for tie in one.near_ties
            ]
            self.say(
                f"{drafter}: " * bool(drafter)
                + f"question {question.question_id}: first difference at new token {one.first}; "
                + ", ".join(closeness),
                "" if one.excused else "bold red",
            )


def _auto_rows(
    runs: Sequence[DrafterRun], all_totals: Sequence[Totals]
) -> Iterator[tuple[str, list[str]]]:
    """The rows on what `auto` chose; none where no draft length was chosen so."""
    if not any(run.auto for run in runs):
        return
    for name, cell in (
        ("draft tokens per round", lambda counts: _number(counts.drafted_per_round)),
        ("rounds by width", lambda counts: _by_width(counts.rounds_by_width, "d")),
    ):
        yield (
            name,
            [
                cell(totals.metrics) if run.auto else ""
                for run, totals in zip(runs, all_totals, strict=True)
            ],
        )


def _accepted(totals: Totals) -> str:
    counts = totals.metrics
    if not counts.num_draft_tokens:
        return ""
    return f"{counts.num_accepted_tokens} of {counts.num_draft_tokens}"


def _by_position(totals: Totals) -> str:
    return " ".join(_number(rate) for rate in totals.metrics.acceptance_at_pos)


def _expected(totals: Totals) -> str:
    if totals.expected is None:
        return ""
    error = totals.expected.decision_error
    return f"{_number(totals.expected.mean, 3)} +- {error:.3f}"


def _by_width(values: Mapping[int, float], form: str) -> str:
    return " ".join(f"{width}:{value:{form}}" for width, value in values.items())


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
