"""Sampling and verification: pure functions on log-probabilities; -inf never makes NaN.

Nothing here knows a model, a cache or a decoding loop, and importing it loads no other part of
specjax.
"""

from specjax.sampling.chain import (
    Decision,
    Laws,
    Rule,
    Verdict,
    block,
    by_slot,
    conclude,
    draft_laws,
    one_hot_laws,
    pick,
    rejection,
    walk,
    walk_greedy,
)
from specjax.sampling.laws import acceptance_probability, excess, log_ratio, overlap, residual
from specjax.sampling.noise import RoundKeys, position_gumbel, round_keys, split_keys, uniforms
from specjax.sampling.verify import CHAIN_RULES, verify_chain, verify_laws
from specjax.sampling.warp import WarpFlags, argmax, warp

__all__ = [
    "CHAIN_RULES",
    "Decision",
    "Laws",
    "RoundKeys",
    "Rule",
    "Verdict",
    "WarpFlags",
    "acceptance_probability",
    "argmax",
    "block",
    "by_slot",
    "conclude",
    "draft_laws",
    "excess",
    "log_ratio",
    "one_hot_laws",
    "overlap",
    "pick",
    "position_gumbel",
    "rejection",
    "residual",
    "round_keys",
    "split_keys",
    "uniforms",
    "verify_chain",
    "verify_laws",
    "walk",
    "walk_greedy",
    "warp",
]
