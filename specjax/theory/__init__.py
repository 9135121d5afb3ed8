"""Expected tokens, speed-up and memory of speculative decoding, in closed form.

The formulas assume that `alpha`, the probability that a draft token is accepted, is equal at all
positions and independent of the others (Leviathan et al. 2023, "Fast Inference from Transformers
via Speculative Decoding", section 3). Numbers may be scalars or numpy arrays that broadcast
together; results are floats where all of them were scalars. Bad input raises
`specjax.errors.InputError`.
"""

from specjax.theory.deployment import (
    CHIPS,
    Chip,
    ExpertShape,
    Memory,
    ModelShape,
    Roofline,
    memory,
    pass_seconds,
    roofline,
)
from specjax.theory.rounds import (
    acceptance_from_tv,
    break_even_alpha,
    expected_tokens,
    optimal_k,
    speedup,
)
from specjax.theory.trees import roofline_tree

__all__ = [
    "CHIPS",
    "Chip",
    "ExpertShape",
    "Memory",
    "ModelShape",
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
]
