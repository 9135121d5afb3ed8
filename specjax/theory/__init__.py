"""What speculative decoding can gain in theory: expected tokens, speed-up, memory.

    expected_tokens(alpha, k)              tokens that a round with k draft tokens emits
    speedup(alpha, k, c)                   over plain decoding; c is the cost of a draft step
    optimal_k(alpha, c)                    the draft length with the greatest speed-up
    break_even_alpha(k, c)                 the acceptance at which drafting begins to pay
    acceptance_from_tv(tv)                 acceptance probability, given the distance of p and q
    pass_seconds, memory, roofline         of a `ModelShape` on a `Chip`, from data sheets
    MODELS["llama-3.1-8b"], CHIPS["h200"]  published sizes of both, by name
    roofline_tree                          the fastest token tree on a chip
    ExpertUse.count(texts, num_experts)    how many experts passes read, from a router's choices
    stored_bits(bits, group=32)            bits per weight, including its share of the scales
    weight_bytes(shape, tokens=1)          weights that a pass reads, in bytes

    speedup(0.8, np.arange(1, 9), 0.05)    # an array: one speed-up for each draft length
    roofline(shape, "h100-sxm", batch=8, context=1000, k=4, alpha=0.8).speedup

`alpha` is the probability that a draft token is accepted, assumed to be the same at all positions
and independent (Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding",
section 3). Numbers may be scalars or NumPy arrays, which broadcast (except in `roofline_tree`);
results are floats if all arguments are scalars. Bad input raises `specjax.errors.InputError`.
docs/theory.md compares the results with published tables, some of which are wrong.

After this text `help` lists classes, then functions; `help(speedup)` explains one of them.
"""

from specjax.theory.chip_roofline import (
    CHIPS,
    Chip,
    ExpertShape,
    Memory,
    ModelShape,
    RecurrentShape,
    Roofline,
    memory,
    pass_seconds,
    roofline,
    stored_bits,
    weight_bytes,
)
from specjax.theory.expected_speedup import (
    acceptance_from_tv,
    break_even_alpha,
    expected_tokens,
    optimal_k,
    speedup,
)
from specjax.theory.expert_use import ExpertUse
from specjax.theory.published_models import MODELS
from specjax.theory.trees import roofline_tree

__all__ = [
    "CHIPS",
    "MODELS",
    "Chip",
    "ExpertShape",
    "ExpertUse",
    "Memory",
    "ModelShape",
    "RecurrentShape",
    "Roofline",
    "acceptance_from_tv",
    "break_even_alpha",
    "expected_tokens",
    "memory",
    "optimal_k",
    "pass_seconds",
    "roofline",
    "roofline_tree",
    "speedup",
    "stored_bits",
    "weight_bytes",
]
