"""Sampling and verification: pure functions on log-probabilities; -inf never produces NaN.

    warp(logits, temperature, top_k, top_p, min_p)    log-probabilities to sample from
    verify_chain(key, tokens, logq, logp, rule=...)   accept drafted tokens and draw the next one
    verify_tree(key, tokens, parents, logq, logp)     the same for a token tree
    draw_siblings(key, logq, count)                   tokens of a tree, without replacement or not
    acceptance_probability, overlap, residual         the parts of rejection sampling, for p and q

    logp = warp(target_logits, temperature=0.8)       # [K+1, V]; or [B, K+1, V]
    logq = warp(draft_logits, temperature=0.8)        # [K, V]
    tokens = jax.random.categorical(key, logq)        # [K]
    verify_chain(other_key, tokens, logq, logp).tokens(tokens)   # tokens to emit, padded with -1

    # By hand: keep a token with probability min(1, p/q), else draw from max(0, p - q). Here for
    # all K tokens at once; only what comes before the first False of `keep`, and one more, counts.
    accept = acceptance_probability(logp[:K], logq)                        # [K, V]
    accept = jnp.take_along_axis(accept, tokens[:, None], axis=-1)[:, 0]   # [K]
    keep = jax.random.uniform(key_1, K) < accept
    replacing = jax.random.categorical(key_2, residual(logp[:K], logq))    # [K]

Rules are values (`RULES`, `Rejection`, `Block`, `Coupled`, `Typical`); subclass `UniformRule` to
write one. `walk`, `recursion` and functions of a `Drafted` serve decoding loops. The package knows
no model, cache or loop, and importing it loads no other part of specjax. docs/sampling.md has an
example of each rule, and of a tree.

After this text `help` lists the rules, then the functions; `help(verify_chain)` explains one of
them. The tuples that they take and return have explanations of their own: `help(Verification)`.
"""

from specjax.sampling.chain_verification import (
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
    draw_siblings,
    excess,
    log_ratio,
    overlap,
    residual,
)
from specjax.sampling.keys import (
    RoundKeys,
    SeparateNoise,
    SharedNoise,
    array_digest,
    coupled_noise,
    derive_from_text,
    derived_seed,
    draft_noise,
    fold_round,
    position_gumbel,
    round_keys,
    row_key,
    sample_key,
    split_keys,
    text_digest,
    uniforms,
)
from specjax.sampling.multipath import block_weights, multipath_block
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
from specjax.sampling.tree_verification import (
    Drafted,
    Recursion,
    chain_drafted,
    node_distribution,
    recursion,
    typical,
    walk,
    walk_greedy,
)
from specjax.sampling.verify_arrays import verify_chain, verify_tree
from specjax.sampling.warp import WarpFlags, argmax, top_k, warp

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
    "SeparateNoise",
    "SharedNoise",
    "Target",
    "Typical",
    "UniformRule",
    "Verification",
    "WarpFlags",
    "acceptance_probability",
    "argmax",
    "array_digest",
    "block",
    "block_weights",
    "by_slot",
    "chain_drafted",
    "conclude",
    "coupled_noise",
    "derive_from_text",
    "derived_seed",
    "draft_distributions",
    "draft_noise",
    "draw_siblings",
    "excess",
    "fold_round",
    "log_ratio",
    "multipath_block",
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
    "sample_key",
    "split_keys",
    "text_digest",
    "top_k",
    "typical",
    "uniforms",
    "verify_chain",
    "verify_tree",
    "walk",
    "walk_greedy",
    "warp",
]


def __dir__() -> list[str]:
    """Return the public names, for `help`, without the tuples: these have pages of methods."""
    return [name for name in __all__ if not hasattr(globals()[name], "_fields")]
