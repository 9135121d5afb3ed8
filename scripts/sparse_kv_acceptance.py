# ruff: noqa
"""Measure the acceptance of `sparse_kv` by budget, on texts of this repository.

    python scripts/sparse_kv_acceptance.py TOKENS ROWS NEW 64,256,1024 recent,scores

Prints for each budget and choice of keys: tokens per round, the mean of sum_x min(p, q) at each
depth of chains of four tokens at temperature 1, and the number of rounds with a full draft.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding import initial_state, loop
from specjax.decoding.options import DecodeOptions
from specjax.decoding.rows import batch_arguments
from specjax.decoding.sampling_params import SamplingParams
from specjax.decoding.session import plan_session
from specjax.drafters import make_drafter
from specjax.loading.load import load_model

K = 4
count, rows, new = map(int, sys.argv[1:4])
model = load_model("smollm2-135m-instruct")
texts = [page.read_text() for page in sorted(Path("docs").glob("*.md")) if page.name != "api.md"]
for page in sorted(Path("notebooks").glob("*.ipynb")):
    cells = json.loads(page.read_text())["cells"]
    texts += ["\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")]
ids = model.tokenizer.encode("\n\n".join(texts))
step = (len(ids) - count) // rows
prompts = [ids[row * step : row * step + count] for row in range(rows)]
request = SamplingParams(temperature=1.0, max_new_tokens=new, ignore_eos=True, seed=1)


def session_of(drafter):
    options = DecodeOptions(batch_size=rows)
    return plan_session(model, prompts, drafter=drafter, options=options, requests=request)


def empty(session):
    arguments = batch_arguments(session, range(rows))
    return initial_state.empty_state(session.plan, session.params, *arguments)


plain = session_of(None)
read = jax.jit(lambda params, state: initial_state.read_prompts(plain.plan, params, state).cache)
cache = read(plain.params, empty(plain))
for budget in map(int, sys.argv[4].split(",")):
    for keep in sys.argv[5].split(","):
        options = dict(budget=budget, keep=keep, num_speculative_tokens=K)
        session = session_of(make_drafter("sparse_kv", model, **options))
        plan = dataclasses.replace(session.plan, overlaps=True, widths=(1 + K,))
        run = jax.jit(
            lambda params, state, plan=plan: loop.run(
                plan, params, state, jnp.int32(plan.rounds_per_step)
            )[:2],
            donate_argnums=1,
        )
        state = empty(session).replace(cache=jax.tree.map(jnp.copy, cache))
        parts = []
        while bool(state.active.any()):
            state, rounds = run(session.params, state)
            parts.append(jax.tree.map(np.asarray, rounds))
        rounds = jax.tree.map(lambda *each: np.concatenate(each, axis=1), *parts)
        full = rounds.drafted == K
        tau = float((rounds.accepted[full] + 1).mean())
        overlap = np.nanmean(rounds.overlaps[full], axis=0).round(3).tolist()
        print(budget, keep, round(tau, 2), overlap, int(full.sum()), flush=True)
