"""The speed-up of speculation by batch size: measured here, and at the limits of a chip.

    python scripts/load_speedups.py --prompts=FILE --drafter=eagle3 --batches=1,4,16,64

"The fuller the batch, the less speculation gains" is often shown as 3.0, 2.3, 1.3 and 0.9 times
plain decoding at 1, 4, 16 and 64 rows, with a fixed draft length. Here `auto` decides the length in
every round, so that it should not fall below plain decoding. Both decode the same prompts in turn,
group by group, warm; in brackets is the 95 % interval of the mean ratio. Beside it stands the
roofline of `--chip` for an 8B model, whose draft tokens have the chance `--alpha`, at the best
fixed length for each batch.
"""

from __future__ import annotations

import sys

import numpy as np
from absl import app, flags, logging

from specjax import theory
from specjax.cli.built_in_prompts import questions_of
from specjax.cli.measure_speedups import measure_speedups
from specjax.decoding.prompts import encode_prompt, spread
from specjax.drafters import make_drafter
from specjax.loading.load import load_model

_TARGET = flags.DEFINE_string("target", "smollm2-135m-instruct", "The target.")
_PROMPTS = flags.DEFINE_string("prompts", None, "A JSONL file of questions; else built-in ones.")
_LIMIT = flags.DEFINE_integer("limit", 8, "Prompts; repeated where a batch has more rows.")
_DRAFTER = flags.DEFINE_string("drafter", "eagle3", "The drafter.")
_BATCHES = flags.DEFINE_list("batches", ["1", "4", "16", "64"], "Batch sizes.")
_NEW = flags.DEFINE_integer("new_tokens", 48, "New tokens of each prompt.")
_REPEATS = flags.DEFINE_integer("repeats", 3, "Runs of each group.", lower_bound=2)
_ALPHA = flags.DEFINE_float("alpha", 0.7, "Chance of a draft token, for the roofline.")
_CHIP = flags.DEFINE_enum("chip", "h100-sxm", sorted(theory.CHIPS), "The chip of the roofline.")

LLAMA_8B = theory.ModelShape(
    num_layers=32,
    hidden_size=4096,
    intermediate_size=14336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128256,
)
_CONTEXT, _LENGTHS, _DRAFT_COST = 2048, range(11), 0.05
_OFTEN_TAUGHT = {1: 3.0, 4: 2.3, 16: 1.3, 64: 0.9}
"""Speed-ups with a fixed length, by batch size, as introductions give them."""


def main(argv: list[str]) -> int:
    """Entry point; returns the exit code."""
    del argv
    logging.set_verbosity(logging.WARNING)
    model = load_model(_TARGET.value, dtype="float32")
    questions = questions_of(_PROMPTS.value)
    ids = [
        encode_prompt(model, question.first_turn) for question in spread(questions, _LIMIT.value)
    ]
    drafter = make_drafter(_DRAFTER.value, model)
    print(
        "| B | tokens/s plain | auto | auto / plain | drafted per round | "
        f"roofline of {_CHIP.value}, 8B | often taught |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for batch in map(int, _BATCHES.value):
        (cell,) = measure_speedups(
            model,
            ids,
            {_DRAFTER.value: drafter},
            batch_size=batch,
            max_new_tokens=_NEW.value,
            repeats=_REPEATS.value,
        )
        found = [
            float(
                theory.roofline(
                    LLAMA_8B, _CHIP.value, batch, _CONTEXT, k, _ALPHA.value, draft_cost=_DRAFT_COST
                ).speedup
            )
            for k in _LENGTHS
        ]
        best, taught = int(np.argmax(found)), _OFTEN_TAUGHT.get(batch)
        print(
            f"| {batch} | {cell.plain_tokens_per_second:.1f} | {cell.tokens_per_second:.1f} | "
            f"{cell.speedup.mean:.2f} [{cell.speedup.low:.2f}..{cell.speedup.high:.2f}] | "
            f"{cell.mean_draft:.1f} | {found[best]:.2f}x (K = {_LENGTHS[best]}) | "
            f"{'-' if taught is None else f'{taught:.1f}x'} |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    app.run(main, argv=sys.argv)
