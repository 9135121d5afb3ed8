"""Counters of a server, and their export to Prometheus under vLLM's names."""

from __future__ import annotations

import collections
from collections.abc import Mapping

import numpy as np

from specjax import metrics
from specjax.engine.outputs import Delta

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""The media type of Prometheus's text format."""


class Counters:
    """Totals over the requests of a server; `positions` is the longest draft path in tokens.

    Tokens are counted when they arrive, drafts when their request ends.
    """

    def __init__(self, positions: int) -> None:
        self.prompt_tokens = self.generation_tokens = 0
        self.num_drafts = self.num_draft_tokens = self.num_accepted_tokens = 0
        self.num_accepted_tokens_per_pos = np.zeros(positions, np.int64)
        self.finished: collections.Counter[str] = collections.Counter()

    def add(self, delta: Delta) -> None:
        """Count the tokens of a delta of one sample and, once the sample has ended, its drafts."""
        self.generation_tokens += len(delta.token_ids)
        if delta.output is None:
            return
        self.finished[delta.output.finish_reason] += 1
        rounds = delta.output.rounds
        drafted, accepted = rounds.drafted[None], rounds.accepted[None]
        positions = len(self.num_accepted_tokens_per_pos)
        self.num_drafts += metrics.num_drafts(drafted)
        self.num_draft_tokens += metrics.num_draft_tokens(drafted)
        self.num_accepted_tokens += metrics.num_accepted_tokens(accepted)
        self.num_accepted_tokens_per_pos += np.array(
            metrics.num_accepted_tokens_per_pos(drafted, accepted, positions), np.int64
        )

    def text(self, model: str, *, running: int, waiting: int, preempted: int) -> str:
        """Return all counters in Prometheus's text format.

        `model` is the model's label, `running` and `waiting` are the current numbers of samples,
        and `preempted` is how often one was put back for lack of pages.
        """
        by_position = enumerate(self.num_accepted_tokens_per_pos.tolist())
        families = [
            ("num_requests_running", "Samples that decode.", [({}, running)]),
            ("num_requests_waiting", "Samples without a slot.", [({}, waiting)]),
            ("num_preemptions_total", "Samples put back to wait.", [({}, preempted)]),
            ("prompt_tokens_total", "Tokens of prompts.", [({}, self.prompt_tokens)]),
            ("generation_tokens_total", "Tokens of outputs.", [({}, self.generation_tokens)]),
            (
                "request_success_total",
                "Samples that ended, by reason.",
                [({"finished_reason": name}, count) for name, count in self.finished.items()],
            ),
            (
                "spec_decode_num_drafts_total",
                "Passes that verified a draft.",
                [({}, self.num_drafts)],
            ),
            (
                "spec_decode_num_draft_tokens_total",
                "Draft tokens.",
                [({}, self.num_draft_tokens)],
            ),
            (
                "spec_decode_num_accepted_tokens_total",
                "Accepted draft tokens.",
                [({}, self.num_accepted_tokens)],
            ),
            (
                "spec_decode_num_accepted_tokens_per_pos_total",
                "Accepted draft tokens by position in the draft.",
                [({"position": str(position)}, count) for position, count in by_position],
            ),
        ]
        lines = []
        for name, meaning, values in families:
            kind = "counter" if name.endswith("_total") else "gauge"
            lines += [f"# HELP vllm:{name} {meaning}", f"# TYPE vllm:{name} {kind}"]
            for labels, value in values:
                lines.append(f"vllm:{name}{_labels({'model_name': model, **labels})} {value}")
        return "\n".join(lines) + "\n"


def _labels(labels: Mapping[str, str]) -> str:
    """Return labels in Prometheus's text format."""
    escapes = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
    return (
        "{" + ",".join(f'{name}="{text.translate(escapes)}"' for name, text in labels.items()) + "}"
    )
