"""The weights that a pass reads, and how fast this machine can read them.

A pass of few tokens is limited by reading weights, so the bytes that decoding reads per second,
beside those that the machine reads at best, say how much faster it could be.
"""

from __future__ import annotations

import functools
import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from specjax.apps.tuning.measure_costs import copy_bandwidth
from specjax.loading.model import Model
from specjax.theory import ExpertShape

_GATHERED = ("embed", "positions")
"""The parameters of which a pass gathers a row per token; a tied embedding is stored as `head`."""
_NUM_BYTES, _SECONDS, _LEAST_READS = 1 << 28, 0.2, 3
"""The size of the buffer, which exceeds caches, and how long and how often at least it is read."""


def pass_bytes(model: Model, tokens: int = 1) -> int:
    """Return the bytes of weights that a pass over `tokens` tokens of all rows together reads.

    These are all parameters of the target in the form in which they are stored, without the input
    embedding unless it is also the output layer, without MTP modules, and of experts the expected
    number that the tokens use (`theory.ExpertShape.distinct`). On a mesh they are those of one
    device, on a CPU of all its devices, which share the memory.
    """
    used = 1.0
    if (experts := model.config.experts) is not None:
        shape = ExpertShape(experts.num_experts, experts.per_token, experts.intermediate_size)
        used = shape.distinct(tokens) / experts.num_experts
    total = 0.0
    for path, leaf in jax.tree_util.tree_leaves_with_path(model.params):
        names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        if names[0] not in _GATHERED:
            total += _device_bytes(leaf) * (used if "experts" in names else 1.0)
    return round(total)


def _device_bytes(leaf: Any) -> int:
    """Return the bytes of an array that one device holds, or all devices that are a CPU."""
    if not isinstance(leaf, jax.Array):
        return leaf.nbytes
    copies = leaf.sharding.num_devices if jax.default_backend() == "cpu" else 1
    return copies * math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


@functools.cache
def memory_bandwidth() -> float:
    """Return the bytes per second that this machine's memory moves, measured once per process.

    On a CPU it is the fastest of the reads of a buffer within 0.2 s, by as many threads as XLA has;
    on an accelerator that of copies (`copy_bandwidth`). Call it while nothing else is timed.
    """
    if jax.default_backend() != "cpu":
        return copy_bandwidth(_NUM_BYTES)
    threads = _num_cpus()
    parts = np.array_split(np.ones(_NUM_BYTES, np.int8), threads)
    seconds: list[float] = []
    with ThreadPoolExecutor(threads) as pool:
        while sum(seconds) < _SECONDS or len(seconds) < _LEAST_READS:
            begin = time.perf_counter()
            # The maximum is the reduction that NumPy computes with the fewest instructions.
            list(pool.map(np.max, parts))
            seconds.append(time.perf_counter() - begin)
    return _NUM_BYTES / min(seconds)


def _num_cpus() -> int:
    """Return the number of processors that this process may use."""
    has_affinity = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
