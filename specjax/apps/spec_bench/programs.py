"""The programs of a Spec-Bench run, as few as its cells allow; planned but not compiled."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from specjax.apps.command_line.console import Screen
from specjax.apps.run.conversations import Conversations
from specjax.apps.run.decode_config import ConfigDrafter, make_config_drafter
from specjax.apps.run.runner import Program
from specjax.apps.spec_bench.config import Cell, SpecBenchConfig
from specjax.drafters import DRAFTER_KIND
from specjax.engine.options import AUTO, FIXED


class Programs:
    """The programs of a config's cells, whose drafters are loaded only once.

    Cells of a drafter that differ in a numeric draft length or in a temperature above 0 share a
    program. Greedy decoding has a program of its own, and so has the drafter's default length. The
    controller `auto` learns, so such a cell shares its program with no other length.
    """

    def __init__(
        self, config: SpecBenchConfig, conversations: Conversations, screen: Screen
    ) -> None:
        """Keep the arguments; the programs decode all turns of `conversations`."""
        lengths = config.num_speculative_tokens
        self._longest = max((k for k in lengths if isinstance(k, int)), default=None)
        self._conversations, self._screen = conversations, screen
        self._drafters: dict[tuple[str, bool], ConfigDrafter] = {}
        self._programs: dict[Any, Program] = {}

    def program(self, cell: Cell) -> Program:
        """Return the program of a cell. Raises InputError."""
        length = AUTO if cell.length == AUTO else FIXED
        options = replace(cell.config.options, num_speculative_tokens=length)
        loaded = self.drafter(cell).loaded
        plan = self._conversations.plan(loaded, options, cell.config.sampling)
        # An engine keeps the limit of its latest cell, so other lengths need engines of their own.
        key = cell.entry, plan.loop, None if isinstance(cell.length, int) else cell.length
        return self._programs.setdefault(key, Program(plan))

    def close_all_but(self, used: Collection[Program]) -> None:
        """Free the caches of all programs but those in `used`."""
        for program in self._programs.values():
            if program not in used:
                program.close()

    def drafter(self, cell: Cell) -> ConfigDrafter:
        """Return a cell's drafter; for numeric draft lengths, a chain as long as the largest."""
        numbered = isinstance(cell.length, int)
        key = cell.entry, numbered
        if key not in self._drafters:
            made = self._made(cell, FIXED)
            parts = DRAFTER_KIND.check("drafter", made.loaded).drafter.parts
            if numbered and not any(part.branches for part in parts):
                made = self._made(cell, self._longest)
            self._drafters[key] = made
        return self._drafters[key]

    def _made(self, cell: Cell, length: int | str) -> ConfigDrafter:
        """Return a cell's drafter, made with a draft length."""
        config = cell.config
        options = replace(config.options, num_speculative_tokens=length)
        (drafter,) = config.drafters
        return make_config_drafter(
            replace(config, options=options),
            drafter,
            self._conversations.model,
            tell=self._screen.say,
        )
