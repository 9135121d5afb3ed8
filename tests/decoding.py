"""What the tests of the decoding loop share."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from specjax import trees
from specjax.decoding.executor import compile_session, run_session
from specjax.decoding.generate import collect
from specjax.decoding.open_session import open_session
from specjax.decoding.options import DecodeOptions
from specjax.decoding.plan import batch_arguments
from specjax.decoding.sampling_params import SamplingParams
from specjax.decoding.state import RUNNING
from specjax.drafters import (
    Drafter,
    draft_model,
    early_exit,
    fallback,
    ngram,
    simulated,
    stateless,
    unmoved,
)

PROMPTS = [
    [5],
    [3, 4, 5, 3, 4, 5, 3],
    list(range(40)),
    [1, 2],
    [9, 8, 9, 8, 9],
    [60],
    [7, 7, 7, 7, 7, 7],
    list(range(33, 0, -1)),
]
"""Ragged, with prompts of a single token and prompts that repeat themselves."""

MIXED = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_k": 5},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0.8, "min_p": 0.05},
    {"temperature": 0.0},
    {"temperature": 0.8, "top_k": 9, "top_p": 0.8},
    {"temperature": 1.3},
]
"""Greedy rows beside sampled ones."""


def mixed(**fields):
    return [SamplingParams(**{**each, **fields}) for each in MIXED]


def greedy(**fields):
    return SamplingParams(temperature=0.0, **fields)


def make_session(
    target, prompts, *, drafter=None, draft_length=None, sampling=None, seed=0, **options
):
    requests = SamplingParams() if sampling is None else sampling
    session = open_session(
        target,
        prompts,
        drafter=drafter,
        options=DecodeOptions(**options),
        requests=requests,
        seed=seed,
    )
    if draft_length is None:
        return session
    plan = dataclasses.replace(session.plan, draft_length=draft_length)
    return dataclasses.replace(session, plan=plan)


def decode(target, prompts, **options):
    """`generate`, with a `draft_length` that may be given outright."""
    session = make_session(target, prompts, **options)
    programs = compile_session(session)
    return collect(session, [s for s in run_session(session, None, programs) if s.finished])


def first_state(session):
    """The state of the session's first batch before its first round."""
    arguments = batch_arguments(session, session.batches()[0])
    return compile_session(session).start(session.params, *arguments)


def rounds(session, state):
    """The state after each round, until all rows are finished."""
    run = compile_session(session).run
    while bool((state.status == RUNNING).any()):
        # The program takes the state's buffers over; what a test holds is a copy.
        state = run(session.params, jax.tree.map(jnp.copy, state), jnp.int32(1))
        yield state


def shifting(target, step=7):
    """A drafter of one's own: the token before, plus `step`, as long as the row may draft."""

    def propose(params, state, context, noise):
        root = context.token_at(context.length - 1)
        offset = step * (1 + jnp.arange(context.num_tokens))
        tokens = (root[:, None] + offset[None, :]) % target.config.vocab_size
        return trees.chain(tokens, context.limit), state

    return Drafter("shifting", stateless, propose, unmoved, num_speculative_tokens=4)


def random_distribution(target, spread=1.0):
    """A drafter of one's own: distributions that only depend on depth, some rows short."""
    vocab = target.config.vocab_size
    table = spread * np.random.default_rng(0).standard_normal((16, vocab)).astype(np.float32)

    def propose(params, state, context, noise):
        tokens, distributions = [], []
        for depth in range(context.num_tokens):
            logits = jnp.broadcast_to(params[depth][None, :], (context.length.shape[0], vocab))
            token, distribution = context.draw(logits, noise, depth)
            tokens.append(token)
            distributions.append(distribution)
        if not tokens:
            return trees.chain(
                jnp.zeros((context.length.shape[0], 0), jnp.int32), context.limit
            ), state
        count = jnp.minimum(context.limit, context.length % (context.num_tokens + 1))
        logq = jnp.stack(distributions, axis=1) if context.needs_logq else None
        return trees.chain(jnp.stack(tokens, axis=1), count, logq), state

    return Drafter(
        "random_distribution",
        stateless,
        propose,
        unmoved,
        num_speculative_tokens=4,
        params=jnp.asarray(table),
        sampled=True,
    )


def drafters(tiny, unrelated, similar):
    """Every drafter that needs no plain run, by name."""
    layers = tiny.config.num_layers
    return {
        "ngram": ngram.make(prompt_lookup_min=1),
        "unrelated": draft_model.make(unrelated.architecture, unrelated.params),
        "similar": draft_model.make(similar.architecture, similar.params),
        "similar_greedy": draft_model.make(
            similar.architecture, similar.params, draft_sample_method="greedy"
        ),
        "itself": draft_model.make(tiny.architecture, tiny.params),
        "early_exit": early_exit.make(layers, exit_layer=2),
        "early_exit_p_min": early_exit.make(layers, exit_layer=2, draft_p_min=0.15),
        "fallback": fallback.make(ngram.make(), early_exit.make(layers, exit_layer=2)),
        "shifting": shifting(tiny),
        "random_distribution": random_distribution(tiny),
    }


def replay(tiny, plain, acceptance):
    """`simulated` on a plain run."""
    return simulated.make(
        tiny.config.vocab_size, continuations=plain.token_ids, acceptance=acceptance
    )
