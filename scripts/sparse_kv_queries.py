# ruff: noqa
"""Overlap sum min(p,q) of drafts over few keys by which queries choose them (teacher-forced)."""
import sys, json, time
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from specjax.cache import commit
from specjax.loading.load import load_model
from specjax.models.causal_mask import causal
from specjax.models.layers.attention import group_queries
from specjax.models.prefill import prefill
K, KEPT = 4, 32
end, texts_n, places = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
budgets = [int(b) for b in sys.argv[4].split(",")]
model = load_model("smollm2-135m-instruct")
dec, params = model.architecture, model.params
texts = [p.read_text() for p in sorted(Path("docs").glob("*.md")) if p.name != "api.md"]
for page in sorted(Path("notebooks").glob("*.ipynb")):
    cells = json.loads(page.read_text())["cells"]
    texts += ["\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")]
ids = model.tokenizer.encode("\n\n".join(texts))
STEP, HIST = 24, 128
CAP = -(-(end + 16) // 256) * 256
L, G, C = dec.config.num_layers, dec.cached_heads, dec.config.head_dim

@jax.jit
def read(params, tokens, n):
    return prefill(dec, params, tokens, n, dec.make_cache(1, CAP), (256, 32), carry=())[0]

@jax.jit
def queries_of(params, cache, tokens, first):
    """tokens [1,HIST] at positions first.."""
    i = jnp.arange(tokens.shape[1])
    r = dec.extend(params, tokens, first + i[None], cache.replace(length=first[None]), dec.make_window(1, tokens.shape[1]), 0,
                   causal(i, tokens.shape[1]), features=("queries",), logits=False)
    return r.features["queries"]

@jax.jit
def truth(params, cache, tokens, n):
    """tokens [1,K] at positions n-1..; cache of n-1"""
    i = jnp.arange(K)
    r = dec.extend(params, tokens, n - 1 + i[None], cache.replace(length=(n-1)[None]), dec.make_window(1, K), 0, causal(i, K))
    return jax.nn.log_softmax(r.logits[0])

import functools
@functools.partial(jax.jit, static_argnums=(5,))
def scored(params, cache, tokens, n, q, A, chosen_at, weights):
    """choose A-KEPT among the first chosen_at-KEPT keys with queries q [1,T,D]; all after are kept."""
    q = q.reshape(1, q.shape[1], L, -1, C); q = [group_queries(q[:, :, l], G, 1.0) for l in range(L)]
    m = chosen_at - KEPT
    view = cache.replace(length=m[None])
    slots = jnp.stack([most_w(q[l], view, l, A - KEPT, weights) for l in range(L)], 1)  # B L G A
    extra = 0
    idx = jnp.arange(-(-(A + 64) // 256) * 256)
    skipped = m - (A - KEPT)
    s = jnp.where(idx < A - KEPT, jnp.pad(slots, ((0,0),(0,0),(0,0),(0, len(idx) - (A-KEPT)))), idx + skipped)
    few = cache.gathered(s, (n - 1 - skipped)[None])
    return drafted(params, few, tokens, n)

def most_w(query, cache, layer, count, weights):
    # as most_attended with a weight per token
    from specjax.models.layers.attention import _read, _POOL, _LOWEST
    key = _read(cache, layer, 0, CAP, query.dtype)[0][0]
    visible = jnp.arange(CAP) < cache.length[0]
    s = jnp.einsum("gxc,gyc->gxy", query[0], key)
    w = jax.nn.softmax(jnp.where(visible, s, _LOWEST), -1)
    per = query.shape[2] // weights.shape[0]
    total = jnp.einsum("gxy,x->gy", w, jnp.repeat(weights, per))
    total = jnp.where(visible, total, 0)
    pooled = jax.lax.reduce_window(total, 0.0, jax.lax.add, (1, _POOL), (1, 1), "SAME")
    return jax.lax.top_k(jnp.where(visible, pooled, -1.0), count)[1][None]

def drafted(params, few, tokens, n):
    i = jnp.arange(K)
    r = dec.extend(params, tokens, n - 1 + i[None], few, dec.make_window(1, K), 0, causal(i, K))
    return jax.nn.log_softmax(r.logits[0])

@functools.partial(jax.jit, static_argnums=(4,))
def recent(params, cache, tokens, n, A):
    idx = jnp.arange(-(-A // 256) * 256)
    skipped = n - 1 - A
    slots = jnp.where(idx < 4, idx, idx + skipped)[None]
    return drafted(params, cache.gathered(slots, jnp.array([A])), tokens, n)

def overlap(p, q): return np.minimum(np.exp(np.asarray(p)), np.exp(np.asarray(q))).sum(-1)

ones = lambda k: jnp.ones(k)
VARIANTS = {  # name: (number of queries, back from chosen_at, chosen back from n, weights)
    "32": (32, 0, ones(32)), "16": (16, 0, ones(16)), "8": (8, 0, ones(8)), "5": (5, 0, ones(5)), "3": (3, 0, ones(3)), "1": (1, 0, ones(1)),
    "64": (64, 0, ones(64)),
    "32 decay .9": (32, 0, .9 ** jnp.arange(31, -1, -1.)), "32 decay .95": (32, 0, .95 ** jnp.arange(31, -1, -1.)),
    "32, 16 ago": (32, 16, ones(32)), "32, 32 ago": (32, 32, ones(32)), "32, 60 ago": (32, 60, ones(32)),
    "8, 4 ago": (8, 4, ones(8)), "8, 16 ago": (8, 16, ones(8)), "8, 32 ago": (8, 32, ones(8)), "8, 60 ago": (8, 60, ones(8)),
    "16, 16 ago": (16, 16, ones(16)), "16, 32 ago": (16, 32, ones(16)), "16, 60 ago": (16, 60, ones(16)), "16, 4 ago": (16, 4, ones(16)), "32, 4 ago": (32, 4, ones(32)), 
    "5, 4 ago": (5, 4, ones(5)), "5, 16 ago": (5, 16, ones(5)), "5, 60 ago": (5, 60, ones(5)),
}
pick = sys.argv[5].split(";") if len(sys.argv) > 5 else list(VARIANTS)
out = {}
step = (len(ids) - end - 16) // texts_n
for t in range(texts_n):
    row = ids[t * step : t * step + CAP]
    tok = jnp.asarray(row)[None]
    begun = time.time()
    cache = jax.block_until_ready(read(params, tok, jnp.array([end])))
    print("read", time.time() - begun, flush=True)
    for place in range(places):
        n = end - STEP * place - K
        x = tok[:, n-1:n-1+K]
        p = truth(params, cache, x, jnp.int32(n))
        # queries of positions n-1-HIST .. n-2
        q = queries_of(params, cache, tok[:, n-1-HIST:n-1], jnp.int32(n-1-HIST))
        for A in budgets:
            out.setdefault((A, "recent"), []).append(overlap(p, recent(params, cache, x, jnp.int32(n), A)).mean())
            for name in pick:
                k, ago, w = VARIANTS[name]
                at = n - ago   # row length when chosen; queries of positions at-1-k..at-2
                hi = HIST - ago
                o = overlap(p, scored(params, cache, x, jnp.int32(n), q[:, hi-k:hi], A, jnp.int32(at), w)).mean()
                out.setdefault((A, name), []).append(o)
    print("text", t, time.time() - begun, flush=True)
    for (A, name), v in out.items():
        base = np.array(out[A, "32"]) if (A, "32") in out else np.array(v)
        v = np.array(v); d = v - base
        print(f"{end} {A:4d} {name:14s} {v.mean():.3f} ± {v.std(ddof=1)/len(v)**.5:.3f}   diff to 32: {d.mean():+.3f} ± {d.std(ddof=1)/len(d)**.5:.3f}", flush=True)
