"""Sampling and verification: pure functions on log-probabilities; -inf never makes NaN.

Nothing here knows a model, a cache or a decoding loop, and importing it loads no other part of
specjax.
"""

from specjax.sampling.chain import (
    Decision,
    Distributions,
    Verification,
    block,
    by_slot,
    conclude,
    draft_distributions,
    one_hot_distributions,
    pick,
    rejection,
)
from specjax.sampling.distributions import (
    acceptance_probability,
    excess,
    log_ratio,
    overlap,
    residual,
)
from specjax.sampling.keys import (
    RoundKeys,
    coupled_noise,
    derived_seed,
    draft_noise,
    drafter_noise,
    fold_round,
    position_gumbel,
    round_keys,
    row_key,
    split_keys,
    uniforms,
)
from specjax.sampling.rules import (
    RULES,
    Block,
    Coupled,
    Rejection,
    Rule,
    Target,
    Typical,
    UniformRule,
)
from specjax.sampling.tree import (
    Drafted,
    Recursion,
    chain_drafted,
    node_distribution,
    recursion,
    typical,
    walk,
    walk_greedy,
)
from specjax.sampling.verify import verify_chain
from specjax.sampling.warp import WarpFlags, argmax, warp

__all__ = [
    "RULES",
    "Block",
    "Coupled",
    "Decision",
    "Distributions",
    "Drafted",
    "Recursion",
    "Rejection",
    "RoundKeys",
    "Rule",
    "Target",
    "Typical",
    "UniformRule",
    "Verification",
    "WarpFlags",
    "acceptance_probability",
    "argmax",
    "block",
    "by_slot",
    "chain_drafted",
    "conclude",
    "coupled_noise",
    "derived_seed",
    "draft_distributions",
    "draft_noise",
    "drafter_noise",
    "excess",
    "fold_round",
    "log_ratio",
    "node_distribution",
    "one_hot_distributions",
    "overlap",
    "pick",
    "position_gumbel",
    "recursion",
    "rejection",
    "residual",
    "round_keys",
    "row_key",
    "split_keys",
    "typical",
    "uniforms",
    "verify_chain",
    "walk",
    "walk_greedy",
    "warp",
]
