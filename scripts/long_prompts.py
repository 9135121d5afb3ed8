# ruff: noqa
"""Decode after long prompts from this repository's documents: tau and acceptance by position.

    python long_prompts.py OUT.jsonl LENGTH:PROMPTS,... VARIANT,...

A variant is eagle3:WINDOW (0: none) or sparse_kv:KEEP:BUDGET:RATIO. Every prompt is read once, and then
decoded greedily and at temperature 1 by each variant from copies of the same caches.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding import initial_state
from specjax.decoding.options import DecodeOptions
from specjax.decoding.programs import run, start
from specjax.decoding.prompts import encode_prompt
from specjax.decoding.rows import batch_arguments
from specjax.decoding.sampling_params import SamplingParams
from specjax.decoding.session import plan_session
from specjax.decoding.state import take
from specjax.drafters import make_drafter
from specjax.loading.load import load_model

K, NEW, CAPACITY, TOGETHER = 4, int(os.environ.get("NEW", 96)), int(os.environ.get("CAP", 6400)), 2
ASKED = (
    "Summarise the text below in detail.",
    "Explain the text below to someone who is new to the subject.",
    "Write a short article about what the text below says.",
    "What are the most important results in the text below? Explain each.",
)
out = Path(sys.argv[1])
lengths = [tuple(map(int, one.split(":"))) for one in sys.argv[2].split(",")]
model = load_model("smollm2-135m-instruct")
pages = [Path("README.md"), *sorted(Path("docs").glob("*.md"))]
texts = [page.read_text() for page in pages if page.name != "api.md"]
for page in sorted(Path("notebooks").glob("*.ipynb")):
    cells = json.loads(page.read_text())["cells"]
    texts += ["\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")]
ids = model.tokenizer.encode("\n\n".join(texts))
print(len(ids), "tokens of documents", flush=True)


def prompts_of(length, count):
    step = (len(ids) - length) // count
    made = []
    for number in range(count):
        text = model.tokenizer.decode(ids[number * step : number * step + length - 50])
        content = f"{ASKED[number % len(ASKED)]}\n\n{text}"
        made.append(encode_prompt(model, [{"role": "user", "content": content}]))
    return made


def session_of(prompts, drafter, requests):
    options = DecodeOptions(batch_size=len(prompts), max_length=CAPACITY)
    session = plan_session(model, prompts, drafter=drafter, options=options, requests=requests)
    plan = replace(session.plan, capacity=CAPACITY, widths=(1 + K,) if drafter else (1,))
    return replace(session, plan=plan)


def drafter_of(variant):
    name, *rest = variant.split(":")
    if name == "eagle3":
        window = {"sliding_window": int(rest[0]) or None}
        return make_drafter(name, model, num_speculative_tokens=K, **window)
    keep, budget, ratio = rest
    return make_drafter(
        name, model, num_speculative_tokens=K, keep=keep, budget=int(budget), ratio=float(ratio)
    )


take_rows = jax.jit(take)
empty = jax.jit(
    lambda plan, params, cache, *arguments: initial_state.empty_state(plan, params, *arguments).replace(cache=cache),
    static_argnums=0,
)
drafters = {}
have = set()
if out.exists():
    have = {(r["length"], r["prompt"], r["variant"]) for r in map(json.loads, out.open())}
all_prompts = {length: prompts_of(length, count) for length, count in lengths}
for first in range(0, max(count for _, count in lengths), TOGETHER):
    for length, count in lengths:
        prompts = all_prompts[length]
        left = []
        for variant in sys.argv[3].split(","):
            variant, _, only = variant.partition("@")
            at, most = only.split("/") if only else (length, count)
            if int(at) == length and first < int(most) and (length, first, variant) not in have:
                left.append(variant)
        if not left:
            continue
        group = prompts[first : first + TOGETHER]
        begun = time.monotonic()
        greedy = SamplingParams(max_new_tokens=NEW)
        reader = session_of(group, drafters.setdefault("eagle3:0", drafter_of("eagle3:0")), greedy)
        read = start(reader.plan, reader.params, *batch_arguments(reader, range(len(group))))
        twice = np.repeat(np.arange(len(group)), 2)
        read = jax.block_until_ready(take_rows(read, twice))
        said = [f"{length} {first} read {time.monotonic() - begun:.0f}s"]
        for variant in left:
            begun = time.monotonic()
            drafter = drafters.setdefault(variant, drafter_of(variant))
            requests = [
                SamplingParams(max_new_tokens=NEW, temperature=float(n % 2), seed=first + n // 2)
                for n in range(2 * len(group))
            ]
            session = session_of([group[n] for n in twice], drafter, requests)
            tokens, rows, size, status, rounds = batch_arguments(session, range(len(twice)))
            if variant.startswith("eagle3"):
                state = read.replace(tokens=tokens, rows=rows, length=size, status=status)
                state = jax.tree.map(jnp.copy, state)
            else:
                cache = jax.tree.map(jnp.copy, read.cache)
                state = empty(session.plan, session.params, cache, tokens, rows, size, status, rounds)
            parts = []
            while bool(state.active.any()):
                state, rounds, _ = run(session.plan, session.params, state, np.int32(64))
                parts.append(jax.tree.map(np.asarray, rounds))
            rounds = jax.tree.map(lambda *each: np.concatenate(each, axis=1), *parts)
            state_tokens = np.asarray(state.tokens)
            ends = np.asarray(state.length)
            with out.open("a") as file:
                for row in range(len(twice)):
                    ran = np.asarray(rounds.emitted[row]) >= 0
                    new = state_tokens[row, len(group[twice[row]]) : ends[row]].tolist()
                    record = {
                        "length": length, "tokens": len(group[twice[row]]), "prompt": first + int(twice[row]),
                        "temperature": row % 2, "variant": variant,
                        "drafted": rounds.drafted[row][ran].tolist(),
                        "accepted": rounds.accepted[row][ran].tolist(),
                        "emitted": rounds.emitted[row][ran].tolist(), "new": new,
                    }
                    file.write(json.dumps(record) + "\n")
            said.append(f"{variant} {time.monotonic() - begun:.0f}s")
            del state
        print(time.strftime("%H:%M"), *said, f"cpu {time.process_time():.0f}", flush=True)
