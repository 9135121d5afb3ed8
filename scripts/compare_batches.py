"""Slots that are refilled against batches that wait for their slowest row.

    python scripts/compare_batches.py --prompts=FILE --seeds=5

The same requests in the same order, new tokens between `--new_tokens` by a seeded draw that the
scheduler does not know: decoded `--slots` at a time, each batch until its last row has ended, and
through as many slots that are refilled. Both ways run in turn for each seed, warm; tokens/s count
prefill and decoding. Prints both, their ratio with median and range, the rounds of each, the ratio
that those allow (if a round of a batch took as long as one of full slots), the share of busy slots
while requests waited, and whether all tokens agree. Exit code 1 if they do not.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import replace

import numpy as np
from absl import app, flags, logging

from specjax.cli.built_in_prompts import questions_of
from specjax.decoding.engine.statistics import EngineSummary
from specjax.decoding.generate import decode_session, open_engine
from specjax.decoding.options import DecodeOptions
from specjax.decoding.prompts import encode_prompt
from specjax.decoding.sampling_params import SamplingParams
from specjax.decoding.setup import Session, plan_session
from specjax.drafters import make_drafter
from specjax.loading.load import load_model

_TARGET = flags.DEFINE_string("target", "smollm2-135m-instruct", "The target.")
_PROMPTS = flags.DEFINE_string("prompts", None, "A JSONL file of questions; else built-in ones.")
_REQUESTS = flags.DEFINE_integer("requests", 64, "How many of them.", lower_bound=1)
_SLOTS = flags.DEFINE_integer("slots", 8, "Rows that decode together.", lower_bound=1)
_NEW = flags.DEFINE_list("new_tokens", ["8", "256"], "Fewest and most new tokens of an answer.")
_SEEDS = flags.DEFINE_integer("seeds", 5, "Draws of the lengths.", lower_bound=1)
_DRAFTER = flags.DEFINE_string("drafter", "none", "The drafter.")
_LENGTH = flags.DEFINE_string("num_speculative_tokens", None, "A number, or auto.")


def main(argv: list[str]) -> int:
    """Entry point; returns the exit code."""
    del argv
    logging.set_verbosity(logging.WARNING)
    model = load_model(_TARGET.value, dtype="float32")
    questions = questions_of(_PROMPTS.value)
    ids = [encode_prompt(model, question.first_turn) for question in questions[: _REQUESTS.value]]
    length = _LENGTH.value
    options = DecodeOptions(
        num_speculative_tokens=length if length in (None, "auto") else int(length),
        batch_size=_SLOTS.value,
    )
    fewest, most = map(int, _NEW.value)
    drafter = make_drafter(_DRAFTER.value, model)
    ratios, same = [], True
    print(
        f"{len(ids)} requests, {_SLOTS.value} slots, {fewest} to {most} new tokens, {drafter.name}"
    )
    for seed in range(_SEEDS.value):
        new = np.random.default_rng(seed).integers(fewest, most + 1, len(ids)).tolist()
        requests = [SamplingParams(max_new_tokens=count, ignore_eos=True) for count in new]
        session = plan_session(model, ids, drafter=drafter, options=options, requests=requests)
        # A capacity of all seeds alike: one program.
        session = replace(session, plan=replace(session.plan, capacity=_capacity(ids, most)))
        if not seed:
            _decode(session, session.groups(_SLOTS.value)[:1])
        slots, tokens = _decode(session, [list(range(len(ids)))])
        batches, expected = _decode(session, session.groups(_SLOTS.value))
        same &= tokens == expected
        ratios.append(_seconds(batches) / _seconds(slots))
        a_round = slots.decode_s / slots.rounds
        allowed = (batches.prefill_s + batches.rounds * a_round) / _seconds(slots)
        print(
            f"seed {seed}: batches {sum(new) / _seconds(batches):.1f} tokens/s, slots "
            f"{sum(new) / _seconds(slots):.1f}, {ratios[-1]:.2f} x; prefill "
            f"{batches.prefill_s:.1f} and {slots.prefill_s:.1f} s, decoding {batches.decode_s:.1f} "
            f"and {slots.decode_s:.1f} s; rounds {batches.rounds} and {slots.rounds}, which allow "
            f"{allowed:.2f} x; {slots.occupancy_waiting:.1%} of the slots busy while requests "
            "waited",
            flush=True,
        )
    print(
        f"slots / batches = {statistics.median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f}),"
        f" tokens {'equal' if same else 'DIFFERENT'}"
    )
    return 0 if same else 1


def _capacity(ids: list[list[int]], most: int) -> int:
    return 2 ** (max(map(len, ids)) + most).bit_length()


def _decode(session: Session, groups: list[list[int]]) -> tuple[EngineSummary, list[list[int]]]:
    """Each group of prompts until its last row has ended; what it took, and the tokens."""
    engine = open_engine(session)
    tokens = []
    for index in groups:
        tokens += decode_session(session, index=index, engine=engine).token_ids
    return engine.statistics.summary(), tokens


def _seconds(summary: EngineSummary) -> float:
    return summary.prefill_s + summary.decode_s


if __name__ == "__main__":
    app.run(main, argv=sys.argv)
