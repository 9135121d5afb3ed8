"""The static configuration of a compiled loop."""

from __future__ import annotations

from dataclasses import dataclass

from specjax import sampling
from specjax.core.language_model import LanguageModel
from specjax.core.processor import Processor
from specjax.core.turn_taking import Turns


@dataclass(frozen=True)
class Recording:
    """The target's features, by name, that a loop keeps at the last `tokens` tokens of each row.

    They are kept for others than drafters, which read only those of the last rounds.
    """

    features: tuple[str, ...] = ()
    tokens: int = 0


@dataclass(frozen=True)
class LoopPlan:
    """The static configuration for which a loop is compiled.

    `widths` are the window sizes at which a round can run, ascending up to N + 1. `chunks` are the
    sizes of the passes that read prompts, descending (`prefill`). `rounds_per_step` (R) bounds the
    rounds of one call. With `overlaps`, rounds also record sum_x min(p, q) at each verified node,
    which costs one warp per node. With `processed_logprobs`
    log-probabilities are those after processors and sampling parameters, which visits the slots of
    the path one after another. With `full_drafts` the single drafter runs in each round for its
    full length, and limits only truncate its drafts; loops and branches then wait for no data,
    which an accelerator would have to send to the host. With a `page_size`, an engine's caches are
    pools of `num_pages` pages of so many tokens. `processors` change the logits of all rows, in
    this order. `recording` says which features are kept beside those that drafters read.
    """

    target: LanguageModel
    drafter: Turns
    rule: sampling.Rule
    widths: tuple[int, ...]
    flags: sampling.WarpFlags
    capacity: int
    chunks: tuple[int, ...]
    rounds_per_step: int = 64
    logprobs: bool = False
    processed_logprobs: bool = False
    overlaps: bool = False
    full_drafts: bool = False
    page_size: int | None = None
    num_pages: int = 0
    processors: tuple[Processor, ...] = ()
    recording: Recording = Recording()

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the target's features that the state keeps."""
        return tuple(dict.fromkeys((*self.drafter.features, *self.recording.features)))

    @property
    def kept_features(self) -> int:
        """The number of positions of each row at which the state keeps features (M).

        Recorded ones are kept beside those of a step, whose last tokens the host may leave out.
        """
        return self.drafter.kept_features + self.recording.tokens

    @property
    def resumes(self) -> bool:
        """Whether verification may resume the pass of a draft that has a `PartialPass`.

        It may where one drafter drafts alone, and has run: because there is a node, as rounds
        without nodes have a width of their own, in which all layers run, or because it runs in each
        round. Features may be those of layers that would not run again.
        """
        ran = self.widths[0] == 1 or self.full_drafts
        reads = self.features or self.drafter.pass_features
        return len(self.drafter.parts) == 1 and not reads and ran
