"""Expected tokens and speed-ups on the grid of the page's sliders, by `specjax.theory`."""

from __future__ import annotations

from typing import Any

import numpy as np

from specjax import theory

_ALPHA = np.round(np.arange(0.05, 1.0, 0.05), 2)
_LENGTHS = np.arange(13)
_COSTS = np.array([0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4])
_BATCHES = np.array([1, 4, 16, 64, 256])
_CHIPS = ("a100-80g", "h100-sxm", "tpu-v5e", "tpu-v6e")
CONTEXT = 1000
LLAMA_8B = theory.ModelShape(
    num_layers=32,
    hidden_size=4096,
    intermediate_size=14336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128256,
)


def theory_tables() -> dict[str, Any]:
    """Return what theory predicts for every position of the page's sliders, JSON-ready.

    `tokens[alpha][k]` are expected tokens per round. `speedup[chip][batch]` is a flat table by
    cost, alpha and k in hundredths; the first chip is an ideal one, on which a pass over a draft
    costs as much as over a single token. `fits` says whether model and caches fit into a chip's
    memory.
    """
    alpha, k = _ALPHA[:, None], _LENGTHS[None, :]
    costs = _COSTS[:, None, None]
    ideal = theory.speedup(alpha[None], k[None], costs)
    speedup, fits = [[_hundredths(ideal)] * len(_BATCHES)], [[True] * len(_BATCHES)]
    for chip in _CHIPS:
        of_chip = [
            theory.roofline(
                LLAMA_8B,
                chip,
                batch=int(batch),
                context=CONTEXT,
                k=k[None],
                alpha=alpha[None],
                draft_cost=costs,
            )
            for batch in _BATCHES
        ]
        speedup.append([_hundredths(roofline.speedup) for roofline in of_chip])
        fits.append([bool(np.all(roofline.fits)) for roofline in of_chip])
    return {
        "alpha": _ALPHA.tolist(),
        "k": _LENGTHS.tolist(),
        "cost": _COSTS.tolist(),
        "batch": _BATCHES.tolist(),
        "chip": ["", *_CHIPS],
        "tokens": np.round(theory.expected_tokens(alpha, k), 3).tolist(),
        "speedup": speedup,
        "fits": fits,
    }


def nearest_alpha(tokens_per_round: float, k: int) -> float:
    """Return the slider's alpha whose expected tokens for k draft tokens are closest to a number.

    `tokens_per_round` is that number.
    """
    expected = np.asarray(theory.expected_tokens(_ALPHA, k))
    return float(_ALPHA[np.argmin(np.abs(expected - tokens_per_round))])


def _hundredths(table: np.ndarray) -> list[int]:
    return np.round(100 * table).astype(int).ravel().tolist()
