"""The programs of a Spec-Bench run, as few as its cells allow; planned but not compiled."""

from __future__ import annotations

from dataclasses import replace

from specjax.apps.command_line.console import Screen
from specjax.apps.run.decode_config import ConfigDrafter, make_config_drafter
from specjax.apps.spec_bench.config import Cell, SpecBenchConfig
from specjax.drafters import DRAFTER_KIND
from specjax.engine.options import AUTO, FIXED
from specjax.engine.plan import DecodePlan, plan_rows
from specjax.loading.model import Model


class Programs:
    """The plans of a config's cells, whose drafters are loaded only once.

    Cells of a drafter that differ in a numeric draft length or in a temperature above 0 share a
    plan. Greedy decoding has a plan of its own, and so has the drafter's default length.
    """

    def __init__(
        self, config: SpecBenchConfig, model: Model, capacity: int, screen: Screen
    ) -> None:
        """Keep the arguments; `capacity` is the maximum number of tokens of a row."""
        lengths = config.num_speculative_tokens
        self._longest = max((k for k in lengths if isinstance(k, int)), default=None)
        self._model, self._capacity, self._screen = model, capacity, screen
        self._drafters: dict[tuple[str, bool], ConfigDrafter] = {}

    def plan(self, cell: Cell) -> DecodePlan:
        """Return the plan of a cell. Raises InputError."""
        length = AUTO if cell.length == AUTO else FIXED
        options = replace(cell.config.options, num_speculative_tokens=length)
        loaded = self.drafter(cell).loaded
        return plan_rows(self._model, loaded, options, self._capacity, [cell.config.sampling])

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
            replace(config, options=options), drafter, self._model, tell=self._screen.say
        )
