# ruff: noqa
"""Seconds of a round by committed tokens, in turn: dense caches against pages of 64, and drafts over few keys.

    python round_costs.py CALLS LENGTH,... ROWS VARIANT,...

A variant is plain, free (a chain of four that costs nothing), sparse_kv:KEEP:BUDGET:RATIO or eagle3:WINDOW, with /64 for
pages of 64 tokens. Caches hold zeros. Each call runs four rounds; the first variant is what others are divided by.
"""

from __future__ import annotations

import functools
import sys
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding import initial_state, loop
from specjax.decoding.options import DecodeOptions
from specjax.decoding.rows import batch_arguments
from specjax.decoding.sampling_params import SamplingParams
from specjax.decoding.session import plan_session
from specjax.decoding.state import with_cached_lengths, with_pages, with_pools
from specjax.drafters import make_drafter
from specjax.loading.load import load_model
from specjax.trees import chain_topology
from specjax.tuning.round_seconds import FreeTree

K, ROUNDS = 4, 4
calls, lengths, batch, variants = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4].split(",")
model = load_model("smollm2-135m-instruct")


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def rounds_of(plan, params, state, length, pages):
    state = with_cached_lengths(state, length - 1).replace(length=length)
    if pages is not None:
        state = with_pages(state, pages)
    state, rounds, _ = loop.run(plan, params, state, jnp.int32(ROUNDS))
    return (state if pages is None else with_pages(state, None)), rounds.emitted


@functools.partial(jax.jit, static_argnums=(0, 1))
def make(plan, size, params, *arguments):
    state = initial_state.empty_state(plan, params, *arguments)
    if size is None:
        return state
    pools = plan.target.make_cache(*size), plan.drafter.init(params[1], *size)
    return with_pools(state, pools)


def call_of(variant, length):
    name, _, page = variant.partition("/")
    kind, *rest = name.split(":")
    drafter = None
    if kind == "free":
        drafter = FreeTree(topology=chain_topology(K))
    elif kind == "sparse_kv":
        drafter = make_drafter(kind, model, num_speculative_tokens=K, keep=rest[0], budget=int(rest[1]), ratio=float(rest[2]))
    elif kind == "eagle3":
        window = {"sliding_window": int(rest[0]) or None}
        drafter = make_drafter(kind, model, num_speculative_tokens=K, **window)
    prompts = [[1] * (length - 1) + [7 * row + 5] for row in range(batch)]
    session = plan_session(
        model, prompts, drafter=drafter, options=DecodeOptions(batch_size=batch),
        requests=SamplingParams(max_new_tokens=100, ignore_eos=True),
    )
    capacity = -(-(length + 200) // 256) * 256
    plan = replace(session.plan, capacity=capacity, widths=(1,) if drafter is None else (1 + K,))
    session = replace(session, plan=plan)
    size = pages = None
    if page:
        page = int(page)
        each = capacity // page
        size = batch * each, page
        pages = jnp.asarray(np.random.default_rng(0).permutation(batch * each).reshape(batch, each), jnp.int32)
    state = make(plan, size, session.params, *batch_arguments(session, range(batch)))
    held = [state]
    start = jnp.full(batch, length, jnp.int32)

    def call():
        begun, cpu = time.perf_counter(), time.process_time()
        held[0], emitted = rounds_of(plan, session.params, held[0], start, pages)
        np.asarray(emitted)
        return (time.perf_counter() - begun) / ROUNDS, (time.process_time() - cpu) / ROUNDS

    call()
    return call


for length in map(int, lengths.split(",")):
    made = {variant: call_of(variant, length) for variant in variants}
    spent = {variant: [] for variant in variants}
    for number in range(calls):
        order = variants if number % 2 == 0 else variants[::-1]
        for variant in order:
            spent[variant].append(made[variant]())
    base = np.array(spent[variants[0]])
    for variant in variants:
        seconds = np.array(spent[variant])
        ratio = np.quantile(seconds / base, (0.25, 0.5, 0.75), axis=0)
        ms = np.median(seconds, axis=0) * 1e3
        print(f"{length:6} x{batch} {variant:28} wall {ms[0]:7.2f} cpu {ms[1]:7.2f} ms/round; ratio wall "
              + " ".join(f"{x:.3f}" for x in ratio[:, 0]) + "; cpu " + " ".join(f"{x:.3f}" for x in ratio[:, 1]), flush=True)
