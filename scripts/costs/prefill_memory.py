"""What a long prefill takes in memory: temporary buffers of the compiled program, by drafter.

    python scripts/costs/prefill_memory.py --tokens=4000 --drafters=none,eagle3

Read from the compiler's own plan, so nothing is run. Prints one line per drafter: megabytes of
temporary buffers and of outputs (the caches), and what is above plain decoding's.
"""

from __future__ import annotations

import sys

from absl import app, flags

from specjax.decoding.programs import compile_session
from specjax.decoding.sampling_params import SamplingParams
from specjax.decoding.setup import plan_session
from specjax.drafters import make_drafter
from specjax.loading.load import load_model

_TOKENS = flags.DEFINE_integer("tokens", 4000, "tokens of each prompt", lower_bound=2)
_ROWS = flags.DEFINE_integer("rows", 1, "rows of the batch", lower_bound=1)
_DRAFTERS = flags.DEFINE_list("drafters", ["none", "eagle3"], "names of drafters, with commas")


def main(argv: list[str]) -> int:
    """Entry point; returns the exit code."""
    del argv
    model = load_model("smollm2-135m-instruct", dtype="float32")
    plain = None
    for name in _DRAFTERS.value:
        session = plan_session(
            model,
            [[1] * _TOKENS.value] * _ROWS.value,
            drafter=make_drafter(name, model),
            requests=SamplingParams(max_new_tokens=16),
        )
        memory = compile_session(session).read.memory_analysis()
        sizes = (memory.temp_size_in_bytes / 1e6, memory.output_size_in_bytes / 1e6)
        plain = plain or sizes
        print(
            f"{name}: temporary {sizes[0]:.1f} MB ({sizes[0] - plain[0]:+.1f}), "
            f"outputs {sizes[1]:.1f} MB ({sizes[1] - plain[1]:+.1f})",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    app.run(main, argv=sys.argv)
