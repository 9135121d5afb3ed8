"""Metrics of speculative decoding, derived from raw counts per verify pass.

    summarize(drafted, accepted, emitted, width)   all of the following at once, as a `Summary`
    acceptance_length(accepted)                    tau: tokens per pass, bonus token included
    acceptance_rate(drafted, accepted)             accepted / drafted tokens
    acceptance_at_pos, cond_acceptance_at_pos      by position in the draft
    tokens_per_round(emitted)                      tokens per pass that reached the output
    predicted_speedup(...)                         from the measured parts of a round

    print(result.summary())                        of a `specjax.generate`: a small table
    acceptance_length(np.array([[2, 0, 3]]))       (3 + 1 + 4) / 3 tokens per pass

Counts are integer arrays [B, R], one entry for each pass (round) of each request (row), -1 where
the row was not active:

  drafted   draft tokens verified (the nodes, if the draft is a tree; 0 = an empty draft)
  accepted  draft tokens accepted; each pass adds one more token of the target
  emitted   tokens appended to the output: accepted + 1, less those truncated by the end of the
            sequence, max_new_tokens or a stop string
  width     window slots that the pass computed: the compiled width, root included

An undefined number, such as an acceptance rate without drafts, is None and never NaN. Functions
pool over all passes of all requests, which weights long outputs more; `per_request_mean` weights
requests equally.

After this text `help` lists classes, then functions; `help(summarize)` explains one of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Float, Int

__all__ = [
    "ExpectedAcceptance",
    "Summary",
    "accept_lengths",
    "acceptance_at_pos",
    "acceptance_length",
    "acceptance_rate",
    "cond_acceptance_at_pos",
    "expected_acceptance",
    "num_accepted_tokens",
    "num_accepted_tokens_per_pos",
    "num_draft_tokens",
    "num_drafts",
    "per_request_mean",
    "predicted_speedup",
    "summarize",
    "tau_drafted",
    "tokens_per_round",
    "truncate_rounds",
]

Counts = Int[np.ndarray, "B R"]
"""One count per pass of each request; -1 where the row was not active."""
Widths = Int[np.ndarray, "B R"] | Int[np.ndarray, "R"]
"""The width of each pass in slots, by row or the same for all rows."""


def num_drafts(drafted: Counts) -> int:
    """Return the number of passes with at least one draft token (vLLM's `num_drafts`)."""
    return int((drafted > 0).sum())


def num_draft_tokens(drafted: Counts) -> int:
    """Return the number of verified draft tokens (vLLM's name; llama.cpp calls it `draft_n`)."""
    return int(drafted[drafted > 0].sum())


def num_accepted_tokens(accepted: Counts) -> int:
    """Return the number of accepted draft tokens (vLLM's name; `draft_n_accepted` in llama.cpp)."""
    return int(accepted[accepted > 0].sum())


def num_accepted_tokens_per_pos(
    drafted: Counts, accepted: Counts, positions: int | None = None
) -> tuple[int, ...]:
    """Return, for i = 0, 1, ..., how many passes accepted at least i + 1 draft tokens.

    The counter is named as in vLLM. `positions` is the number of entries and should be the
    drafter's longest path. By default it is the largest number of draft tokens in a pass, which
    suits chains but is too long for trees.
    """
    length = int(max(drafted.max(initial=0), 0)) if positions is None else positions
    return tuple(int((accepted > i).sum()) for i in range(length))


def acceptance_length(accepted: Counts) -> float | None:
    """Return tau: the mean number of tokens per verify pass, including bonus tokens.

    Passes with an empty draft count, so that this is the mean of `accepted` + 1, and 1 for plain
    decoding. Spec-Bench calls it "#Mean accepted tokens", EAGLE tau, SGLang and SpecForge accept
    length.
    """
    return _mean(accepted[accepted >= 0] + 1)


def tau_drafted(drafted: Counts, accepted: Counts) -> float | None:
    """Return the mean number of tokens per verify pass, over passes with a nonempty draft.

    This is 1 + num_accepted_tokens / num_drafts: vLLM's "Mean acceptance length", llama.cpp's "mean
    len".
    """
    return _mean(accepted[drafted > 0] + 1)


def acceptance_rate(drafted: Counts, accepted: Counts) -> float | None:
    """Return the number of accepted draft tokens divided by the number of verified ones.

    This is vLLM's "Avg Draft acceptance rate", SGLang's `spec_accept_rate` and llama.cpp's ratio.
    It is meaningful for chains. In a tree at most one path is accepted, so the ratio says more
    about the width of the tree than about the drafter.
    """
    return _ratio(num_accepted_tokens(accepted), num_draft_tokens(drafted))


def acceptance_at_pos(
    drafted: Counts, accepted: Counts, positions: int | None = None
) -> tuple[float | None, ...]:
    """Return the fraction of nonempty drafts whose first i + 1 tokens were accepted, for each i.

    The values never increase with i, and their sum plus 1 is `tau_drafted`. A draft that is too
    short counts as not accepted at the missing positions. vLLM calls this "Per-position acceptance
    rate", speculators `acceptance_at_pos_i`. `positions` is as in `num_accepted_tokens_per_pos`.
    """
    drafts = num_drafts(drafted)
    counts = num_accepted_tokens_per_pos(drafted, accepted, positions)
    return tuple(_ratio(count, drafts) for count in counts)


def cond_acceptance_at_pos(
    drafted: Counts, accepted: Counts, positions: int | None = None
) -> tuple[float | None, ...]:
    """Return P(token i + 1 is accepted | it was drafted and the first i were accepted), by i.

    If all drafts have the same length, this is the ratio of successive values of
    `acceptance_at_pos`, called n-alpha by EAGLE and `cond_acc_i` by speculators. A draft does not
    count at positions beyond its end, except in a tree, where the accepted path may end at a leaf
    although other paths are longer: it counts as not accepted at the next position. `positions` is
    as in `num_accepted_tokens_per_pos`.
    """
    counts = num_accepted_tokens_per_pos(drafted, accepted, positions)
    tested = [int(((accepted >= i) & (drafted > i)).sum()) for i in range(len(counts))]
    return tuple(_ratio(count, tests) for count, tests in zip(counts, tested, strict=True))


def tokens_per_round(emitted: Counts) -> float | None:
    """Return the mean number of tokens per verify pass that reached the output.

    It is at most `acceptance_length`, and lower if the end of a sequence, `max_new_tokens` or a
    stop string truncated the tokens of a pass. Divided by the time of a round, it is the decoding
    speed.
    """
    return _mean(emitted[emitted >= 0])


def accept_lengths(emitted: Counts) -> list[list[int]]:
    """Return the tokens emitted by each pass of each request (Spec-Bench's name)."""
    return [row[row >= 0].tolist() for row in emitted]


def per_request_mean(metric: Callable[..., float | None], *counts: Counts) -> float | None:
    """Return the mean over requests of a metric, skipping requests for which it is undefined.

    `counts` are the arguments of the metric: `per_request_mean(tau_drafted, drafted, accepted)`.
    """
    rows = range(counts[0].shape[0])
    values = [metric(*(array[row : row + 1] for array in counts)) for row in rows]
    return _mean(np.array([value for value in values if value is not None]))


def truncate_rounds(
    drafted: Counts,
    accepted: Counts,
    emitted: Counts,
    width: Widths,
    kept_tokens: Int[np.ndarray, "B"],
) -> tuple[Counts, Counts, Counts, Counts]:
    """Return the counts after each row's output is truncated to `kept_tokens`, as by a stop string.

    Passes of which no token is kept become -1. The pass in which a row is truncated keeps its
    `drafted` and `width`, which were computed, while `emitted` and `accepted` lose the removed
    tokens; all tokens that it keeps are draft tokens, because the target's token comes last.
    Returns (drafted, accepted, emitted, width), each [B, R]. Raises ValueError if the counts are
    inconsistent.
    """
    width = _checked_width(drafted, accepted, emitted, width)
    pass_sizes = np.maximum(emitted, 0)
    remaining_tokens = kept_tokens[:, None] - (pass_sizes.cumsum(axis=1) - pass_sizes)
    keeps_tokens = (drafted >= 0) & (remaining_tokens > 0)
    accepted = np.where(
        remaining_tokens < emitted, np.minimum(accepted, remaining_tokens), accepted
    )
    truncated = (drafted, accepted, np.minimum(emitted, remaining_tokens), width)
    drafted, accepted, emitted, width = (np.where(keeps_tokens, array, -1) for array in truncated)
    return drafted, accepted, emitted, width


@dataclasses.dataclass(frozen=True)
class Summary:
    """All metrics of a run, in fields named after this module's functions.

    Fields ending in `_per_request` are means over requests; all others are pooled. A round is a
    pass of the target over one row. `rounds_by_width` counts passes by their width in slots, and
    `mean_width` is the mean width. Undefined metrics are None.

    `print(summary)` shows `num_requests` as "requests", `num_emitted_tokens` as "new tokens",
    `num_rounds` as "passes of the target", `acceptance_length` as "tokens per pass (tau)",
    `acceptance_rate` by its name, `acceptance_at_pos` as "cumulative acceptance", and
    `rounds_by_width` as "passes by width".
    """

    num_requests: int
    num_rounds: int
    num_emitted_tokens: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_tokens_per_pos: tuple[int, ...]
    acceptance_length: float | None
    acceptance_length_per_request: float | None
    tau_drafted: float | None
    tau_drafted_per_request: float | None
    acceptance_rate: float | None
    acceptance_rate_per_request: float | None
    acceptance_at_pos: tuple[float | None, ...]
    cond_acceptance_at_pos: tuple[float | None, ...]
    tokens_per_round: float | None
    tokens_per_round_per_request: float | None
    mean_width: float | None
    rounds_by_width: Mapping[int, int]

    @property
    def drafted_per_round(self) -> float | None:
        """The mean draft length, counting empty drafts; None without rounds."""
        return self.num_draft_tokens / self.num_rounds if self.num_rounds else None

    @property
    def share_drafted(self) -> float | None:
        """The fraction of rounds with at least one draft token; None without rounds."""
        return _ratio(self.num_drafts, self.num_rounds)

    def __str__(self) -> str:
        """Return a small table with the most common figures."""

        def number(value: float | None) -> str:
            return "-" if value is None else f"{value:.2f}"

        by_position = " ".join(map(number, self.acceptance_at_pos)) or "-"
        widths = " ".join(f"{width}:{count}" for width, count in self.rounds_by_width.items())
        lines = {
            "requests": str(self.num_requests),
            "new tokens": str(self.num_emitted_tokens),
            "passes of the target": str(self.num_rounds),
            "tokens per pass (tau)": number(self.acceptance_length),
            "acceptance rate": number(self.acceptance_rate),
            "cumulative acceptance": by_position,
            "passes by width": widths or "-",
        }
        return "\n".join(f"{name:<24}{value}" for name, value in lines.items())

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON types: lists for tuples, string keys, None if undefined."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields = {k: list(v) if isinstance(v, tuple) else v for k, v in fields.items()}
        fields["rounds_by_width"] = {str(k): v for k, v in self.rounds_by_width.items()}
        return fields


def summarize(
    drafted: Counts,
    accepted: Counts,
    emitted: Counts,
    width: Widths,
    positions: int | None = None,
) -> Summary:
    """Return all metrics of a run, given the counts [B, R] of its passes.

    `width` may be [R]. `positions` is the number of per-position entries: the drafter's longest
    path, by default the longest draft in the counts. Raises ValueError if the counts are
    inconsistent.
    """
    width = _checked_width(drafted, accepted, emitted, width)
    slots = width[drafted >= 0]
    widths, rounds = np.unique(slots, return_counts=True)
    return Summary(
        num_requests=drafted.shape[0],
        num_rounds=slots.size,
        num_emitted_tokens=int(np.maximum(emitted, 0).sum()),
        num_drafts=num_drafts(drafted),
        num_draft_tokens=num_draft_tokens(drafted),
        num_accepted_tokens=num_accepted_tokens(accepted),
        num_accepted_tokens_per_pos=num_accepted_tokens_per_pos(drafted, accepted, positions),
        acceptance_length=acceptance_length(accepted),
        acceptance_length_per_request=per_request_mean(acceptance_length, accepted),
        tau_drafted=tau_drafted(drafted, accepted),
        tau_drafted_per_request=per_request_mean(tau_drafted, drafted, accepted),
        acceptance_rate=acceptance_rate(drafted, accepted),
        acceptance_rate_per_request=per_request_mean(acceptance_rate, drafted, accepted),
        acceptance_at_pos=acceptance_at_pos(drafted, accepted, positions),
        cond_acceptance_at_pos=cond_acceptance_at_pos(drafted, accepted, positions),
        tokens_per_round=tokens_per_round(emitted),
        tokens_per_round_per_request=per_request_mean(tokens_per_round, emitted),
        mean_width=_mean(slots),
        rounds_by_width=dict(zip(widths.tolist(), rounds.tolist(), strict=True)),
    )


@dataclasses.dataclass(frozen=True)
class ExpectedAcceptance:
    """Acceptance computed from a run's distributions instead of its sampled decisions.

    `standard_error` is that of `mean` as an estimate for other requests of the same kind, None for
    a single request. `decision_error` is the standard deviation around `mean` of the acceptance
    rate that sampled decisions at these nodes would have.
    """

    mean: float | None
    standard_error: float | None
    decision_error: float | None
    num_nodes: int


def expected_acceptance(overlaps: Float[np.ndarray, "B *nodes"]) -> ExpectedAcceptance:
    """Return the pooled mean of the overlaps sum_x min(p(x), q(x)) of drafted nodes, with errors.

    The first axis of `overlaps` is the request; NaN and negative entries are padding. For a
    comparison with accepted / tested nodes, include only nodes that were tested, and thus none
    after a rejection. Nodes of one request are correlated, so `standard_error` is that of a ratio
    of sums over independent requests (Cochran, Sampling Techniques, section 6.4), which equals the
    usual one if each request has one node. The overlap is from Leviathan et al. 2023, section 3.2.
    """
    flat = overlaps.reshape(overlaps.shape[0], -1).astype(np.float64)
    is_node = flat >= 0
    values = np.where(is_node, flat, 0.0)
    count = int(is_node.sum())
    if count == 0:
        return ExpectedAcceptance(None, None, None, 0)
    mean = float(values.sum()) / count
    rows = int(is_node.any(axis=1).sum())
    standard_error = None
    if rows > 1:
        row_errors = values.sum(axis=1) - mean * is_node.sum(axis=1)
        standard_error = float(np.sqrt(rows / (rows - 1) * (row_errors**2).sum())) / count
    # An overlap that was summed in float32 can exceed 1 by rounding.
    total_variance = (values * np.maximum(1.0 - values, 0.0)).sum()
    return ExpectedAcceptance(mean, standard_error, float(np.sqrt(total_variance)) / count, count)


def predicted_speedup(
    tokens_per_round: float,
    round_seconds_plain: float,
    draft_seconds: float,
    widths: Int[np.ndarray, "*R"],
    seconds_of_width: Mapping[int, float],
) -> float | None:
    """Return the speed-up over plain decoding, predicted from the times of a round's phases.

    The result is tokens_per_round * T(1) / (draft_seconds + mean over rounds of T(width)), where T
    is the time in seconds of an isolated pass: T(1) is `round_seconds_plain`, and other times come
    from `seconds_of_width`. `widths` are the rounds' widths; negative entries are padding. Measured
    divided by predicted speed-up is the efficiency of the decoding loop. Returns None if there is
    no round. Raises ValueError for a width without a time, and for arguments of other kinds.
    """
    for name, value in (
        ("tokens_per_round", tokens_per_round),
        ("round_seconds_plain", round_seconds_plain),
        ("draft_seconds", draft_seconds),
    ):
        if np.shape(value) or not np.issubdtype(np.asarray(value).dtype, np.number):
            raise ValueError(f"{name}={value!r:.60}: pass one number")
    widths = np.asarray(widths)
    if widths.size and not np.issubdtype(widths.dtype, np.integer):
        raise ValueError(
            f"widths are {widths.dtype}{list(widths.shape)}: pass the width of each round, such as "
            "the `width` of a result"
        )
    if not isinstance(seconds_of_width, Mapping):
        raise ValueError(
            f"seconds_of_width={seconds_of_width!r:.60}: pass seconds by width, such as "
            "{1: 0.02, 5: 0.03}"
        )
    used, rounds = np.unique(widths[widths >= 0], return_counts=True)
    missing = sorted(set(used.tolist()) - set(seconds_of_width))
    if missing:
        raise ValueError(f"seconds_of_width has no entry for width {missing[0]}: time that width")
    if not used.size:
        return None
    seconds = np.array([seconds_of_width[width] for width in used.tolist()])
    verify_seconds = float((seconds * rounds).sum() / rounds.sum())
    return tokens_per_round * round_seconds_plain / (draft_seconds + verify_seconds)


def _checked_width(drafted: Counts, accepted: Counts, emitted: Counts, width: Widths) -> Counts:
    for name, array in (("accepted", accepted), ("emitted", emitted)):
        if array.shape != drafted.shape:
            raise ValueError(
                f"{name} has shape {array.shape}, drafted {drafted.shape}: count the same rounds"
            )
        if ((array >= 0) != (drafted >= 0)).any():
            raise ValueError(f"{name} and drafted are padded with -1 in different rounds")
    if (accepted > drafted).any():
        raise ValueError("accepted exceeds drafted in some round: were the two exchanged?")
    if width.shape not in (drafted.shape, drafted.shape[1:]):
        raise ValueError(
            f"width has shape {width.shape}, drafted {drafted.shape}: give one width per round"
        )
    return np.broadcast_to(width, drafted.shape)


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if values.size else None


def _ratio(numerator: int, denominator: int) -> float | None:
    return numerator / denominator if denominator else None
