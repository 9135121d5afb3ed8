"""The rounds of decoding beside what teacher forcing predicts for the very tokens they tested."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float

from specjax.apps.doctor.teacher_forced import Scores
from specjax.engine.generate import Generation


@dataclass(frozen=True)
class Rounds:
    """The draft tokens that R rounds of decoding tested, up to the first refused one of each.

    `predicted[r, i]` is the probability that token i of round r's draft is accepted after the
    tokens that were committed before it, and `accepted` says whether it was. Entries that were not
    `tested` are arbitrary. Rounds whose draft has no score are left out.

    A round begins after the tokens that the previous one accepted, so mostly where the drafter is
    wrong: only predictions for the same positions can be compared with decoding. Under greedy
    decoding they are 0 or 1, and equal to what is accepted. Otherwise the differences of successive
    tokens have mean 0, whatever came before them.
    """

    predicted: Float[np.ndarray, "R K"]
    accepted: Bool[np.ndarray, "R K"]
    tested: Bool[np.ndarray, "R K"]

    @property
    def shortfall(self) -> Float[np.ndarray, "R"]:
        """The predicted number of accepted tokens of each round, less the accepted ones."""
        return np.where(self.tested, self.predicted - self.accepted, 0).sum(axis=1)


def read_rounds(
    generation: Generation, scores: Scores, acceptance: Float[np.ndarray, "B A K"]
) -> Rounds:
    """Return the rounds of a call whose answers were scored.

    `acceptance` is the probability that decoding accepts each draft token of `scores`.
    """
    emitted = np.maximum(generation.emitted, 0)
    first = np.cumsum(emitted, axis=1) - emitted
    steps = np.arange(scores.tested.shape[2])
    rows = np.arange(len(emitted))[:, None]
    # Of rounds after the last one nothing is tested.
    labels = np.minimum(first, scores.tested.shape[1] - 1)
    tested = scores.tested[rows, labels] & (emitted > 0)[:, :, None]
    tested &= steps < generation.drafted[:, :, None]
    tested &= steps <= generation.accepted[:, :, None]
    accepted = steps < generation.accepted[:, :, None]
    with_score = tested.any(axis=2)
    return Rounds(acceptance[rows, labels][with_score], accepted[with_score], tested[with_score])
