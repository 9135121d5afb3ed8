"""Terminal output of `decode`: progress, text with accepted draft tokens marked, results.

A terminal gets color and a status line; other outputs get plain lines.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from specjax.apps.rows.decode_report import DrafterRun
from specjax.apps.rows.decode_table import (
    LEAST_TOKENS,
    Compared,
    drift,
    result_lines,
    result_table,
    slower,
    too_short,
)
from specjax.apps.rows.records import DecodedRow
from specjax.apps.rows.statistics import figures
from specjax.apps.rows.weight_reads import weight_reads_line
from specjax.core.none import PLAIN_DECODING
from specjax.core.turn_taking import NO_DRAFTER
from specjax.engine.outputs import Delta
from specjax.files.log import QUIET_S, duration, shown_by
from specjax.loading.texts.questions import Question
from specjax.loading.tokenizers.tokenizer import StreamDecoder, Tokenizer

ACCEPTED = "green"
_OPEN, _CLOSE = "\u27e6", "\u27e7"


class Marker:
    """A splitter of one prompt's text into pieces, by the drafter that proposed their tokens.

    A character belongs to the token that completes it. Without a tokenizer no token counts as
    drafted.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._decoder = None if tokenizer is None else StreamDecoder(tokenizer)
        self._drafter: list[int] = []

    def mark(self, delta: Delta) -> list[tuple[str, int]]:
        """Return the next text of the prompt as (piece, drafter) pairs, in order.

        `delta` has the new tokens and text. `drafter` is the index of the drafter that proposed the
        piece's tokens, or -1 for tokens that the target chose.
        """
        if self._decoder is not None:
            for token, drafter in zip(delta.token_ids, delta.drafter, strict=True):
                self._drafter += [drafter] * len(self._decoder.feed([token]))
        pieces: list[tuple[str, int]] = []
        for index, character in enumerate(delta.text):
            drafter = self._drafter[index] if index < len(self._drafter) else NO_DRAFTER
            if pieces and pieces[-1][1] == drafter:
                pieces[-1] = (pieces[-1][0] + character, drafter)
            else:
                pieces.append((character, drafter))
        del self._drafter[: len(delta.text)]
        return pieces


class Screen:
    """The terminal output of one run of `decode`, on a console of the package rich."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._inside_text = False
        self._last_line = time.monotonic()
        # The bar is drawn between steps, since refreshing in a thread would slow timed steps.
        self._bar = Progress(
            TextColumn("{task.description}, time left"),
            TimeRemainingColumn(),
            console=console,
            auto_refresh=False,
            transient=True,
            # Some answers take minutes, and drafters differ in speed.
            speed_estimate_period=1800.0,
        )
        self._task = self._bar.add_task("", total=1.0)
        self._marks = console.is_terminal or _can_print(console, _OPEN + _CLOSE)

    def say(self, line: str, style: str = "") -> None:
        """Print a line of text; `style` is a style of the package rich, such as "bold red"."""
        self.rest()
        self._console.print(Text(line, style), soft_wrap=True)
        self._last_line = time.monotonic()

    @contextmanager
    def working(self, doing: str, *, timed: bool = False) -> Iterator[Callable[[str], None]]:
        """Print `doing`, such as "loading", when a context begins, and at its end the seconds.

        What is being done within it is shown, too: the lines that specjax logs about long
        operations, and those with which the yielded function is called. On a terminal they replace
        one another, elsewhere one is printed every `QUIET_S` seconds at most. Work that is `timed`
        is not disturbed by an animation.
        """
        frames = 0.1 if timed else 12.5  # per second
        begin = time.perf_counter()
        if not self._console.is_terminal:
            self.say(f"{doing} ...")
        with self._console.status(Text(f"{doing} ..."), refresh_per_second=frames) as status:

            def note(line: str) -> None:
                if self._console.is_terminal:
                    status.update(Text(f"{doing} ... {_harmless(line)}"))
                elif time.monotonic() - self._last_line > QUIET_S:
                    self.say(f"{doing}: {line}")

            with shown_by(note):
                yield note
        if self._console.is_terminal or time.perf_counter() - begin > 1:
            self.say(f"{doing}: {time.perf_counter() - begin:.1f} s", "dim")

    def legend(self, drafter: str) -> None:
        """Print how accepted draft tokens are marked, for the drafter whose text is shown."""
        if drafter == PLAIN_DECODING:
            return
        if self._console.is_terminal:
            legend = Text.assemble(("Text like this", ACCEPTED), " was drafted and accepted.")
        elif self._marks:
            legend = Text(f"{_OPEN}Text like this{_CLOSE} was drafted and accepted.")
        else:
            return
        self._console.print(legend)

    def progress(self, label: str, rows: int, total: int, speed: float, share: float) -> None:
        """Show that `rows` of `total` rows have finished at `speed` tokens/s, and the time left.

        `label` names what runs, such as a drafter. `share`, from 0 to 1, is the fraction of all the
        work that is done.
        """
        line = f"{label}: {rows} of {total} rows, {speed:.1f} tokens/s"
        if share < self._bar.tasks[self._task].completed:
            self._bar.reset(self._task)  # other work, of which the times say nothing
        self._bar.update(self._task, description=line, completed=share)
        if self._inside_text:
            return
        if self._console.is_terminal:
            self._bar.start()
            self._bar.refresh()
        elif time.monotonic() - self._last_line > QUIET_S:
            left = self._bar.tasks[self._task].time_remaining
            self.say(line if left is None else f"{line}, {duration(left)} left")

    def rest(self) -> None:
        """End the progress bar and the current line of text."""
        if self._bar.live.is_started:
            self._bar.stop()
        if self._inside_text:
            self._console.print()
            self._inside_text = False

    @property
    def live(self) -> bool:
        """Whether text is shown while it is being decoded."""
        return self._console.is_terminal

    def question(self, number: int, questions: Sequence[Question], turn: int) -> None:
        """Print the heading of a prompt: its number (from 1), its category, and its first words.

        `turn` (from 0) is the turn of the conversation that is decoded.
        """
        self.say("")
        question = questions[number - 1]
        words = " ".join(question.turns[turn].split())
        head = f"[{number}/{len(questions)}] "
        head += f"{question.category}: " if question.category else ""
        head += f"turn {turn + 1}: " if turn else ""
        room = max(self._console.width - len(head), 20)
        words = words if len(words) <= room else words[: room - 3] + "..."
        self.say(_harmless(head + words), "bold")

    def text(self, pieces: Sequence[tuple[str, int]]) -> None:
        """Print the next (piece, drafter) pairs of a prompt's text, as `Marker.mark` returns them.

        The line remains open until `rest` is called.
        """
        for piece, drafter in pieces:
            drafted = drafter != NO_DRAFTER
            if not self._inside_text:
                self.rest()
            piece = _harmless(piece)
            if self._console.is_terminal:
                shown = Text(piece, ACCEPTED if drafted else "")
            else:
                shown = Text(_between_marks(piece) if drafted and self._marks else piece)
            self._console.print(shown, end="", soft_wrap=True, highlight=False)
            self._inside_text = True

    def row_length(self, row: DecodedRow) -> None:
        """Print how many tokens a row's answer has, if it was cut at the limit."""
        if row.finish_reason == "length":
            self.say("    " + _length(row), "dim")

    def row_result(self, row: DecodedRow, drafter: str = "", *, brief: bool, timed: bool) -> None:
        """Print a line about one row, after its text: its length, acceptance, speed and comparison.

        The line begins with `drafter`, the drafter's name, unless that is empty. With `brief`, for
        all drafters but the first one, it leaves out the numbers of tokens. `timed` says that the
        row was decoded alone, so that its speed in tokens/s is known.
        """
        phrases = [] if brief else [_length(row)]
        if sum(row.drafted) and not brief:
            phrases.append(f"{sum(row.accepted)} of {sum(row.drafted)} draft tokens accepted")
        if timed:
            speeds = figures([row])
            phrases.append(f"{_number(speeds.tokens_per_second, 1)} tokens/s")
            if speeds.plain_tokens_per_second is not None and not brief:
                phrases[-1] += f" against {_number(speeds.plain_tokens_per_second, 1)}"
        if row.identical is not None:
            phrases.append("same tokens" if row.identical else "DIFFERENT TOKENS")
        if row.finish_reason == "grammar":
            phrases.append("ENDED WHERE ITS GRAMMAR AND OTHER CONSTRAINTS ALLOW NO TOKEN")
        if row.finish_reason == "error":
            phrases.append(f"ENDED BY AN ERROR: {row.text_error or 'logits that are not numbers'}")
        if phrases:
            self.say("    " + f"{drafter}: " * bool(drafter) + ", ".join(phrases), "dim")

    def results(
        self,
        runs: Sequence[DrafterRun],
        title: str,
        compared: Compared | None,
        *,
        verbose: bool = False,
        memory_bandwidth: float | None = None,
    ) -> None:
        """Print the results of runs: three lines for one run, a table for several or if `verbose`.

        `title` is the heading. `compared(run)` returns a text about the run's comparison with plain
        decoding; `compared` is None if runs are not compared. `memory_bandwidth` is what the
        machine's memory moves in bytes per second, for the line about the weights read.
        """
        self.say("")
        all_figures = [run.figures() for run in runs]
        if None in all_figures:
            self.say("No batch was finished.")
            return
        if len(runs) == 1 and not verbose:
            lines = result_lines(runs[0], compared)
            self.say(title, "dim")
            width = max(map(len, lines))
            for name, text in lines.items():
                self.say(f"{name:<{width}}  {text}", "bold")
        else:
            self._table(title, result_table(runs, compared, verbose=verbose))
        if short := [run.counts.num_emitted_tokens for run in all_figures if too_short(run)]:
            self.say(
                f"{min(short)} new tokens are too few to tell a speed-up, at least {LEAST_TOKENS} "
                "are needed; use longer answers (sampling.max_new_tokens) or more prompts"
            )
        elif all_figures[0].plain_tokens_per_second is not None:
            for run, run_figures in zip(runs, all_figures, strict=True):
                if line := slower(run_figures):
                    self.say(f"{run.drafter}: " * (len(runs) > 1) + line)
            if line := drift(all_figures[0]):
                self.say(line)
            self.say("speeds are without loading, compiling and prefill", "dim")
        if line := weight_reads_line(runs[0].header, all_figures[0], memory_bandwidth):
            self.say(line, "dim")

    def _table(self, title: str, rows: Mapping[str, Mapping[str, str]]) -> None:
        """Print a table with the cells of each row by column name."""
        table = Table(title=Text(title), title_justify="left")
        table.add_column("", no_wrap=True)
        for name in next(iter(rows.values())):
            table.add_column(Text(name), justify="right")
        for name, cells in rows.items():
            table.add_row(name, *map(Text, cells.values()))
        self._console.print(table)

    def differences(self, rows: Sequence[DecodedRow], drafter: str = "") -> None:
        """Print every row that differs from plain decoding, with the margins of its near-ties.

        `drafter` is the drafter's name if there are several.
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


def _length(row: DecodedRow) -> str:
    """Return the number of a row's tokens, and whether a limit on their number ended the row."""
    return f"{row.new_tokens} tokens" + ", cut at the limit" * (row.finish_reason == "length")


def _harmless(text: str) -> str:
    """Return text without control characters, with which a model could control the terminal."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\ufffd", text.replace("\r\n", "\n"))


def _between_marks(piece: str) -> str:
    """Return a piece of text between marks, which leave line ends outside."""
    inner = piece.strip("\n")
    if not inner:
        return piece
    before, _, after = piece.partition(inner)
    return f"{before}{_OPEN}{inner}{_CLOSE}{after}"


def _can_print(console: Console, text: str) -> bool:
    """Return whether the console's encoding has all characters of a text."""
    try:
        text.encode(console.encoding)
    except UnicodeEncodeError:
        return False
    return True


def _number(value: float | None, digits: int = 2) -> str:
    return "n/a" if value is None else f"{value:.{digits}f}"
