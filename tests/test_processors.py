"""Penalties, biases and constraints mean what they say, and are exact with any draft."""

import dataclasses
import functools
import itertools
from typing import ClassVar

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
import scipy.special
import scipy.stats
from bad_input import refused
from conftest import row_count, slow
from decoding import PROMPTS, decode, draft_model, make_call
from test_engine import own_results
from test_paged_engine import NEW, paged, results
from test_paged_engine import PROMPTS as PAGED_PROMPTS
from tiny_models import bigrams, small_model

import specjax
from specjax import SamplingParams, trees
from specjax.apps.rows.compare_outputs import compare_row
from specjax.core import processor as core_processor
from specjax.core import round as core_round
from specjax.core.processor import NewRows, tokens_to
from specjax.drafters import Drafter, TreeOptions, take_turns
from specjax.engine.engine import Engine
from specjax.engine.processing import processors_of, requested_arrays
from specjax.methods.ngram import Ngram
from specjax.methods.suffix import Suffix
from specjax.processors import (
    ForcedTokens,
    Grammar,
    MinTokens,
    NoRepeatNgrams,
    Penalties,
    Processor,
    TokenBias,
    one_by_one,
)
from specjax.testing import check_drafter, check_processor, processor_check
from specjax.trees import Topology

VOCAB = 61
ASKED = (
    {},
    {"repetition_penalty": 1.4},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"logit_bias": {3: 4.0, 5: -100.0}, "banned_token_ids": [1, 2]},
    {"allowed_token_ids": [5, 6, 7, 8, 9, 10]},
    {"no_repeat_ngram_size": 2, "repetition_penalty": 0.7},
    {"forced_token_ids": [9, 9, 8, 1, 60], "no_repeat_ngram_size": 3, "frequency_penalty": -0.3},
    {"min_tokens": 9, "stop_token_ids": list(range(20, 28)), "logit_bias": {20: 2.0, 22: 2.0}},
)
"""What rows of one batch ask for: each kind, and several at once."""
EVERY = tuple(processors_of([SamplingParams(**fields) for fields in ASKED]))


def asked(new_tokens=20, **fields):
    """The sampling parameters of eight rows, every other one sampled unless `fields` say how."""
    warps = [{"temperature": 0.8 * (row % 2)} | fields for row in range(len(ASKED))]
    return [
        SamplingParams(max_new_tokens=new_tokens, **one, **warp)
        for one, warp in zip(ASKED, warps, strict=True)
    ]


def by_hand(logits, prompt, output, params, ends=()):
    """The logits of one token by the definitions, from lists of the tokens before it."""
    logits = np.array(logits, np.float64)
    vocab = range(len(logits))
    for token, bias in params.logit_bias:
        logits[token] += bias
    for token in vocab:
        banned = token in params.banned_token_ids
        banned |= bool(params.allowed_token_ids) and token not in params.allowed_token_ids
        banned |= len(output) < params.min_tokens and token in (*params.stop_token_ids, *ends)
        text, size = [*prompt, *output, token], params.no_repeat_ngram_size
        ngrams = [tuple(text[at : at + size]) for at in range(len(text) - size + 1)]
        banned |= size > 0 and len(ngrams) > 0 and ngrams[-1] in ngrams[:-1]
        if banned:
            logits[token] = -np.inf
    for token in vocab:
        if token in prompt or token in output:
            penalty = params.repetition_penalty
            logits[token] *= 1 / penalty if logits[token] > 0 else penalty
        logits[token] -= params.frequency_penalty * output.count(token)
        logits[token] -= params.presence_penalty * (token in output)
    if len(output) < len(params.forced_token_ids):
        forced = params.forced_token_ids[len(output)]
        logits[:] = -np.inf
        logits[forced] = 0
    return logits


def started(processors, params, prompts, capacity=16, vocab=VOCAB):
    """The states of rows with prompts, each with its sampling parameters."""
    tokens = np.zeros((len(prompts), capacity), np.int32)
    stops = np.full((len(prompts), 8), -1, np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
        stops[row, : len(params[row].stop_token_ids)] = params[row].stop_token_ids
    lengths = jnp.array([len(prompt) for prompt in prompts], jnp.int32)
    arrays = requested_arrays(processors, params, stops, capacity, vocab)
    return tuple(
        one.init(NewRows(jnp.asarray(tokens), lengths, vocab, jax.tree.map(jnp.asarray, of_one)))
        for one, of_one in zip(processors, arrays, strict=True)
    )


def applied(processors, states, logits):
    for one, state in zip(processors, states, strict=True):
        logits = one.apply(state, logits)
    return logits


def test_logits_are_those_of_the_definitions():
    """After every token, told one by one or several at once, with others that do not count."""
    rng = np.random.default_rng(0)
    params = [SamplingParams(**fields) for fields in ASKED]
    prompts = [rng.integers(4, size=row % 5 + 1).tolist() for row in range(len(ASKED))]
    outputs = rng.integers(4, size=(len(ASKED), 8)).astype(np.int32)
    states = started(EVERY, params, prompts)
    one = jnp.ones(len(ASKED), jnp.int32)
    for count in range(9):
        logits = rng.normal(size=(len(ASKED), VOCAB)).astype(np.float32)
        told_at_once = core_processor.advanced(
            EVERY, started(EVERY, params, prompts), jnp.asarray(outputs), count * one
        )
        for found in (states, told_at_once):
            got = np.asarray(applied(EVERY, found, jnp.asarray(logits)))
            for row, prompt in enumerate(prompts):
                output = outputs[row, :count].tolist()
                wanted = by_hand(logits[row], prompt, output, params[row])
                np.testing.assert_allclose(got[row], wanted, rtol=2e-6, atol=1e-6)
        if count < 8:
            states = core_processor.advanced(
                EVERY, states, jnp.asarray(outputs[:, count : count + 1]), one
            )


def test_rows_that_ask_for_nothing_keep_the_bits_of_their_logits():
    params = [SamplingParams()] * 2
    states = started(EVERY, params, [[1, 2, 3], [4]])
    logits = jax.random.normal(jax.random.key(0), (2, VOCAB)).at[0, 3].set(-jnp.inf)
    assert np.array_equal(applied(EVERY, states, logits), logits)


def test_only_what_is_asked_for_is_in_the_program(tiny):
    assert processors_of([SamplingParams()]) == ()
    for fields, kinds in zip(
        ASKED[1:],
        (
            [Penalties()],
            [Penalties()],
            [TokenBias()],
            [TokenBias()],
            [NoRepeatNgrams(), Penalties()],
            [NoRepeatNgrams(), Penalties(), ForcedTokens()],
            [TokenBias(), MinTokens()],
        ),
        strict=True,
    ):
        assert list(processors_of([SamplingParams(), SamplingParams(**fields)])) == kinds
    call = make_call(tiny, [[1]], sampling=SamplingParams(presence_penalty=0.5))
    assert call.plan.loop.processors == (Penalties(),)
    assert make_call(tiny, [[1]]).plan.loop.processors == ()


@functools.partial(jax.jit, static_argnums=0)
def every_logits(model, params, tokens):
    length = tokens.shape[1]
    causal = jnp.tril(jnp.ones((1, length, length), bool))
    positions = jnp.arange(length)[None]
    cache, window = model.make_cache(1, 1), model.make_window(1, length)
    return model.extend(params, tokens, positions, cache, window, 0, causal).logits[0]


def test_greedy_tokens_are_the_likeliest_by_the_definitions(tiny):
    sampling = asked(temperature=0.0)
    outputs = decode(tiny, PROMPTS, sampling=sampling, drafter=Ngram(prompt_lookup_min=1)).token_ids
    ended = outputs[-1]
    assert 9 <= len(ended) <= 20
    assert set(ended[:8]).isdisjoint(range(20, 28))
    for prompt, output, params in zip(PROMPTS, outputs, sampling, strict=True):
        tokens = jnp.array([[*prompt, *output, *[0] * 70][:70]], jnp.int32)
        logits = np.asarray(every_logits(tiny.architecture, tiny.params, tokens))
        for at, token in enumerate(output):
            found = by_hand(logits[len(prompt) - 1 + at], prompt, output[:at], params)
            assert found[token] > found.max() - 1e-4


@pytest.mark.parametrize("drafter", [None, Ngram(prompt_lookup_min=1)])
def test_processed_log_probabilities_are_those_of_the_definitions(drafter, tiny):
    """After processors and, in sampled rows, the temperature; top-k leaves some tokens."""
    sampling = [dataclasses.replace(one, logprobs=True, top_k=9) for one in asked(12)]
    options = dict(sampling=sampling, drafter=drafter, logprobs_mode="processed_logprobs")
    got = decode(tiny, PROMPTS, **options)
    for row, (prompt, params) in enumerate(zip(PROMPTS, sampling, strict=True)):
        output = got.token_ids[row]
        tokens = jnp.array([[*prompt, *output, *[0] * 70][:70]], jnp.int32)
        logits = np.asarray(every_logits(tiny.architecture, tiny.params, tokens))
        for at, token in enumerate(output):
            found = by_hand(logits[len(prompt) - 1 + at], prompt, output[:at], params)
            if params.temperature:
                found = np.where(found >= np.sort(found)[-9], found, -np.inf) / params.temperature
            wanted = found[token] - scipy.special.logsumexp(found)
            np.testing.assert_allclose(got.logprobs[row][at], wanted, atol=1e-4)


DRAFTERS = {
    "lookup": lambda tiny, similar: Ngram(prompt_lookup_min=1),
    "chain": lambda tiny, similar: draft_model(similar),
    "tree": lambda tiny, similar: draft_model(
        similar, tree=TreeOptions(kind="static", choices=((0,), (1,), (0, 0), (1, 0), (0, 0, 0)))
    ),
    "dynamic": lambda tiny, similar: Suffix(tree=TreeOptions(kind="dynamic", num_nodes=6)),
    "turns": lambda tiny, similar: take_turns(Ngram(prompt_lookup_min=2), draft_model(similar)),
}


@pytest.mark.parametrize(
    ("sampled", "name"),
    [
        (False, "lookup"),
        (True, "tree"),
        *slow((True, "lookup"), (False, "tree")),
        *slow(*itertools.product((False, True), ("chain", "dynamic", "turns"))),
    ],
)
def test_tokens_are_those_of_plain_decoding(name, sampled, tiny, similar):
    """Greedy rows in a program of their own, and all rows under `coupled`, in mixed batches."""
    sampling = asked(24) if sampled else asked(24, temperature=0.0)
    options = dict(sampling=sampling, verify="coupled" if sampled else "block", batch_size=4)
    plain = decode(tiny, PROMPTS, **options)
    found = decode(tiny, PROMPTS, drafter=DRAFTERS[name](tiny, similar), **options)
    assert found.token_ids == plain.token_ids
    assert (np.asarray(found.accepted) > 0).any()


GRAMMAR = {
    "classes": np.array([0, 1, 2], np.int32),
    "successors": np.array([1, 0, 2, 2, -1, 0, -1, 1, 2], np.int16),
    "width": np.int32(3),
    "least": np.array([1, 2, 0], np.int32),
    "drafts": np.array([-1, 2, -1], np.int32),
    "room": np.int32(5),
}
"""The table of a row: what may follow differs after each token, and less near its end."""
REQUESTED = {
    "penalties": (Penalties(), {"repetition": 1.7, "presence": 0.6, "frequency": -0.4}),
    "bias": (TokenBias(), [0.5, -np.inf, -1.0]),
    "min_tokens": (MinTokens(), {"least": 3, "stop_ids": [2, -1]}),
    "ngrams": (NoRepeatNgrams(), 3),
    "forced": (ForcedTokens(), [1, 2, 0, 1, -1]),
    "grammar": (Grammar(3, 3, 9), None),
}
SHAPES = {
    "chain": "chain",
    "tree": Topology((0, 0, 1)),
    "wide": Topology((0, 0, 0, 2)),
    "twins": Topology((0, 0, 1, 1)),
}


def requested(name):
    """A processor, and the arrays that it reads of one row of three tokens."""
    processor, values = REQUESTED[name]
    if values is None:
        return processor, jax.tree.map(lambda array: array[None], GRAMMAR)

    def row(value):
        array = np.asarray(value)
        kind = np.float32 if array.dtype.kind == "f" else np.int32
        return array.astype(kind)[None]

    values = {key: row(one) for key, one in values.items()} if isinstance(values, dict) else values
    return processor, values if isinstance(values, dict) else row(values)


@functools.partial(jax.jit, static_argnums=(0, 1))
def call_compiled(processor, name, *arguments):
    return getattr(processor, name)(*arguments)


@dataclasses.dataclass(frozen=True)
class Compiled(Processor):
    """A processor whose functions are compiled: `check_processor` calls them on small arrays."""

    own: Processor

    def init(self, rows):
        return call_compiled(self.own, "init", rows)

    def advance(self, state, tokens, count):
        return call_compiled(self.own, "advance", state, tokens, count)

    def apply(self, state, logits):
        return call_compiled(self.own, "apply", state, logits)

    def allows(self, state, tokens):
        return call_compiled(self.own, "allows", state, tokens)


def checked(name, shape, rule="rejection"):
    processor, arrays = requested(name)
    processor = Compiled(processor)
    length = 3 if shape == "chain" else 2
    return check_processor(
        processor, SHAPES[shape], 3, length=length, rule=rule, committed=(1,), requested=arrays
    )


USUAL = [
    *((name, "chain", "rejection") for name in REQUESTED),
    *(("penalties", "tree", rule) for rule in ("block", "coupled")),
    ("ngrams", "tree", "rejection"),
    ("forced", "wide", "block"),
    ("grammar", "tree", "block"),
]
ALL = [
    (name, shape, rule)
    for name in REQUESTED
    for shape in SHAPES
    for rule in ("rejection", "block", "coupled")
]


@pytest.mark.parametrize(
    ("name", "shape", "rule"), [*USUAL, *slow(*(one for one in ALL if one not in USUAL))]
)
def test_outputs_have_the_distribution_of_plain_decoding(name, shape, rule):
    check = checked(name, shape, rule)
    assert check.passed, check.counterexample
    assert check.max_error < 1e-12


def of_the_last_position_only(topology, tokens, slots):
    """Broken: every slot has the state of the deepest one, as if all tokens were committed."""
    return tokens_to(topology, tokens, jnp.full_like(slots, topology.width - 1))


def of_the_sibling(topology, tokens, slots):
    """Broken: a slot has the state of the slot before it."""
    return tokens_to(topology, tokens, jnp.maximum(slots - 1, 0))


def of_the_root(topology, tokens, slots):
    """Broken: drafted tokens change nothing."""
    return tokens_to(topology, tokens, jnp.zeros_like(slots))


def without_the_bonus_token(processors, states, logits_at, tokens, topology):
    """Broken: the token after a whole path has logits without processors."""
    inner = core_processor.processed(processors, states, logits_at, tokens, topology)
    depths = jnp.broadcast_to(jnp.asarray(topology.row_depths), (len(tokens), topology.width))

    def at(slots):
        last = jnp.take_along_axis(depths, slots[:, None], axis=1) == topology.depth
        return jnp.where(last, logits_at(slots), inner(slots))

    return at


def at_the_root_only(processors, states, logits_at, tokens, topology):
    """Broken: processors change the first of a round's positions only."""
    inner = core_processor.processed(processors, states, logits_at, tokens, topology)
    return lambda slots: jnp.where(slots[:, None] == 0, inner(slots), logits_at(slots))


@pytest.mark.parametrize(
    "broken",
    [
        of_the_last_position_only,
        of_the_sibling,
        of_the_root,
        without_the_bonus_token,
        at_the_root_only,
    ],
)
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("penalties", "tree"),
        *slow(("ngrams", "chain"), ("penalties", "wide"), ("grammar", "tree")),
    ],
)
def test_broken_variants_are_found(broken, name, shape, monkeypatch):
    if broken in (without_the_bonus_token, at_the_root_only):
        monkeypatch.setattr(processor_check, "processed", broken)
    else:
        monkeypatch.setattr(core_processor, "tokens_to", broken)
    check = checked(name, shape)
    assert not check.passed
    assert check.max_error > 1e-4


@dataclasses.dataclass(frozen=True)
class NoLongRuns(Processor):
    """A user's own: at most `most` equal tokens in a row, counted from the end of the prompt."""

    most: int = 2

    def init(self, rows):
        return -jnp.ones_like(rows.prompt_length), jnp.zeros_like(rows.prompt_length)

    def advance(self, state, tokens, count):
        def step(state, token):
            last, run = state
            return token, jnp.where(token == last, run + 1, 1)

        return one_by_one(step, state, tokens, count)

    def apply(self, state, logits):
        last, run = state
        banned = (jnp.arange(logits.shape[1])[None] == last[:, None]) & (run >= self.most)[:, None]
        return jnp.where(banned, -jnp.inf, logits)


@dataclasses.dataclass(frozen=True)
class CountsPadding(NoLongRuns):
    """Broken: tokens that do not count are counted."""

    def advance(self, state, tokens, count):
        return super().advance(state, tokens, jnp.full_like(count, tokens.shape[1]))


@dataclasses.dataclass(frozen=True)
class ForbidsInDrafts(NoLongRuns):
    """Broken: says of possible tokens that they are not allowed."""

    def allows(self, state, tokens):
        return tokens != state[0]


def test_an_own_processor(tiny):
    for topology in ("chain", SHAPES["tree"]):
        assert check_processor(Compiled(NoLongRuns()), topology, 3).passed
    assert not check_processor(Compiled(CountsPadding()), vocab=3).passed
    assert "allows is False" in check_processor(ForbidsInDrafts(), vocab=3).counterexample
    sampling = [
        SamplingParams(max_new_tokens=20, logit_bias={7: 9.0}, temperature=t) for t in (0, 1)
    ]
    options = dict(sampling=sampling, verify="coupled", processors=[NoLongRuns()])
    plain = decode(tiny, PROMPTS[:2], **options)
    found = decode(tiny, PROMPTS[:2], drafter=Ngram(prompt_lookup_min=1), **options)
    assert found.token_ids == plain.token_ids
    text = found.token_ids[0]
    assert [7, 7] in [text[at : at + 2] for at in range(19)]
    assert not any(text[at] == text[at + 1] == text[at + 2] for at in range(18))


PENALISED = SamplingParams(
    temperature=1.0, repetition_penalty=1.5, presence_penalty=0.7, frequency_penalty=0.4
)
CONSTRAINED = SamplingParams(
    temperature=1.0, no_repeat_ngram_size=2, banned_token_ids=[4], logit_bias={1: 1.0}
)
JOINT = {
    "penalties-chain-rejection": (PENALISED, None, "rejection"),
    "penalties-tree-block": (PENALISED, ((0,), (1,), (0, 0), (1, 0)), "block"),
    "constraints-tree-rejection": (CONSTRAINED, ((0,), (1,), (0, 0), (1, 0)), "rejection"),
    "constraints-chain-block": (CONSTRAINED, None, "block"),
}


def joint_check(name, rows):
    request, choices, rule = JOINT[name]
    model, table = bigrams(6)
    noised = table + 0.9 * jax.random.normal(jax.random.key(1), table.shape)
    options = {} if choices is None else {"tree": TreeOptions(kind="static", choices=choices)}
    drafter = draft_model((model, noised), **options)
    return check_drafter(drafter, (model, table), rows, verify=rule, request=request)


@pytest.mark.parametrize(
    "name", ["penalties-tree-block", "constraints-chain-block", *slow(*[*JOINT][::2])]
)
def test_three_tokens_of_the_loop_have_their_joint_distribution(name):
    check = joint_check(name, row_count(20_000))
    assert check.passed, check
    assert check.acceptance_length > 1.2


def test_a_loop_with_broken_states_is_found(monkeypatch):
    monkeypatch.setattr(core_round, "advanced", lambda processors, states, tokens, count: states)
    assert not joint_check("penalties-chain-rejection", 20_000).passed


def test_rows_that_wait_are_put_back_and_resume_as_alone(tiny):
    """In pages, in slots, in programs of fewer rows: as each row alone."""
    sampling = [
        SamplingParams(
            **ASKED[row % len(ASKED)], temperature=0.9 * (row % 3 > 0), max_new_tokens=new
        )
        for row, new in enumerate(NEW)
    ]
    options = dict(drafter=Ngram(prompt_lookup_min=1), verify="coupled", num_speculative_tokens=3)
    call = make_call(tiny, PAGED_PROMPTS, sampling=sampling, batch_size=3, **options)
    alone = {}
    for number, request in enumerate(call.requests):
        engine = Engine.of(call.plan)
        engine.submit([request])
        (output,) = (one.output for one in engine if one.output is not None)
        alone[number] = own_results(output)
    assert results(Engine.of(call.plan), call) == alone
    engine = Engine.of(paged(call, 13, False).plan)
    assert results(engine, call) == alone
    assert engine.statistics.put_back


def outputs_of(engine):
    return {one.id: one.output for one in engine if one.output is not None}


@pytest.mark.parametrize("kinds", [(0, 1, 2, 6), *slow((range(8),))])
def test_a_request_that_needs_other_processors_joins_rows_that_decode(kinds, tiny):
    """Rows continue as if alone; the same prompt is read once for rows that ask for others."""
    asks = [asked(30)[kind] for kind in kinds]
    engine = Engine(tiny, batch_size=4, verify="coupled", drafter=Ngram(prompt_lookup_min=1))
    alone = []
    for params in asks:
        engine.add(PROMPTS[1], params, id="alone", seed=3)
        alone.append(outputs_of(engine)["alone"].token_ids)
    assert len({*map(tuple, alone)}) == len(asks)
    engine = Engine(tiny, batch_size=4, verify="coupled", drafter=Ngram(prompt_lookup_min=1))
    found = {}
    for row, params in enumerate(asks):
        engine.add(PROMPTS[1], params, id=row, seed=3)
        found |= {one.id: one.output for one in engine.step() if one.output is not None}
    assert engine.plan.loop.processors == tuple(processors_of(asks))
    found |= outputs_of(engine)
    assert [found[row].token_ids for row in range(len(asks))] == alone


def test_a_row_ends_where_no_token_is_left(tiny):
    """With an error that says why, after the same tokens with and without drafts."""
    params = SamplingParams(
        allowed_token_ids=[3, 4], no_repeat_ngram_size=2, temperature=1.0, max_new_tokens=30
    )
    others = SamplingParams(max_new_tokens=8)
    ended = []
    for drafter in (None, Ngram(prompt_lookup_min=1)):
        engine = Engine(tiny, batch_size=2, drafter=drafter, verify="coupled")
        engine.add([5, 3], params, id="ends")
        engine.add([5, 3], others, id="goes on")
        outputs = outputs_of(engine)
        assert outputs["goes on"].finish_reason == "length"
        output = outputs["ends"]
        assert output.finish_reason == "error"
        assert "allow no further token" in output.error
        assert "\n" not in output.error
        pairs = [*zip([5, 3, *output.token_ids], [3, *output.token_ids], strict=False)]
        assert len(pairs) == len(set(pairs)) > 1
        ended.append(output.token_ids)
    assert ended[0] == ended[1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fixed(Drafter):
    """Chosen tokens, the same in every round; the second is the sibling of the first."""

    tokens: tuple = (1, 5, 5)
    num_nodes = property(lambda self: len(self.tokens))
    parents: ClassVar = (0, 0, 2)

    def propose(self, params, state, context, noise):
        batch = len(context.length)
        tokens = jnp.broadcast_to(jnp.array(self.tokens, jnp.int32), (batch, len(self.tokens)))
        topology = Topology(self.parents)
        valid = topology.row_depths[:, 1:] <= context.limit[:, None]
        rows = jnp.full_like(tokens, -1)
        return trees.Draft(tokens, valid, rows, None, topology), state


def test_forbidden_tokens_are_not_drafted(tiny):
    """Nor are the nodes after them; other rows draft as before, and tokens are the same."""
    sampling = [
        SamplingParams(max_new_tokens=6, **fields)
        for fields in (
            {},
            {"banned_token_ids": [1]},
            {"allowed_token_ids": [5, 6, 7]},
            {"no_repeat_ngram_size": 1},
            {"forced_token_ids": [5] * 6},
        )
    ]
    options = dict(sampling=sampling, num_speculative_tokens=2)
    prompts = [[9, 5, 8]] * len(sampling)
    found = decode(tiny, prompts, drafter=Fixed(), **options)
    assert found.token_ids == decode(tiny, prompts, sampling=sampling).token_ids
    # Of the nodes 1, 5 and, after it, 5; with n-grams of one token, 5 is in the prompt.
    assert np.asarray(found.drafted)[:, 0].tolist() == [3, 2, 2, 1, 2]


def test_log_probabilities_are_those_before_processors(tiny):
    sampling = SamplingParams(max_new_tokens=5, logprobs=True, logit_bias={3: 100.0})
    found = decode(tiny, [[5]], sampling=sampling)
    assert found.token_ids == [[3] * 5]
    tokens = jnp.array([[5, *[3] * 5]], jnp.int32)
    logp = jax.nn.log_softmax(every_logits(tiny.architecture, tiny.params, tokens))[:5, 3]
    np.testing.assert_allclose(found.logprobs[0], logp, atol=1e-4)


def test_rows_are_compared_under_their_processors(tiny):
    """The margin of a token is that of the penalised logits."""
    params = SamplingParams(max_new_tokens=8, repetition_penalty=1.6, presence_penalty=0.8)
    call = make_call(tiny, [[3, 4, 5, 3]], sampling=params)
    plain = decode(tiny, [[3, 4, 5, 3]], sampling=params).token_ids[0]
    tokens = jnp.array([[3, 4, 5, 3, *plain, 0]], jnp.int32)
    logits = np.asarray(every_logits(tiny.architecture, tiny.params, tokens))[3:]
    found = by_hand(logits[5], [3, 4, 5, 3], plain[:5], params)
    first, second = np.argsort(found)[::-1][:2]
    assert first == plain[5]
    ours = [*plain[:5], int(second), *plain[6:]]
    assert compare_row(call.plan, call.requests[0], plain, plain) is None
    difference = compare_row(call.plan, call.requests[0], ours, plain)
    assert difference.first == 5
    assert difference.near_ties[0].margin == pytest.approx(found[first] - found[second], abs=1e-4)
    assert not difference.excused


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"logit_bias": {VOCAB: 1.0}}, f"sampling.logit_bias: token id {VOCAB} is outside"),
        ({"banned_token_ids": [VOCAB]}, "sampling.banned_token_ids: .*outside the vocabulary"),
        ({"allowed_token_ids": [99]}, "sampling.allowed_token_ids: .*outside the vocabulary"),
        ({"forced_token_ids": [99]}, "sampling.forced_token_ids: .*outside the vocabulary"),
        (
            {"banned_token_ids": range(VOCAB)},
            "sampling.banned_token_ids=.*no allowed token is left",
        ),
        ({"banned_token_ids": [1, 2], "allowed_token_ids": [1]}, "no allowed token is left"),
        ({"min_tokens": 9, "max_new_tokens": 8}, "sampling.min_tokens=9 exceeds max_new_tokens=8"),
        ({"logit_bias": {3: 101}}, r"sampling.logit_bias\[3\]=101: use a bias from -100"),
        ({"logit_bias": [(3, 1), (3, 2)]}, "sampling.logit_bias: token 3 has two biases"),
        ({"repetition_penalty": 0}, "sampling.repetition_penalty=0: use 1 for off"),
        ({"frequency_penalty": 2.5}, "sampling.frequency_penalty=2.5: use 0 for off"),
    ],
)
def test_what_cannot_be_asked_for(fields, said, tiny):
    fields = {key: list(one) if isinstance(one, range) else one for key, one in fields.items()}
    refused(lambda: specjax.generate(tiny, [[1, 2]], **fields), said)
    engine = Engine(tiny, batch_size=1)
    refused(lambda: engine.add([1, 2], **fields), said)


@dataclasses.dataclass(frozen=True)
class OtherState(NoLongRuns):
    def advance(self, state, tokens, count):
        return state[0]


@dataclasses.dataclass(frozen=True)
class OtherShape(NoLongRuns):
    def apply(self, state, logits):
        return logits[:, :-1]


@dataclasses.dataclass(frozen=True)
class Unhashable(NoLongRuns):
    table: object = dataclasses.field(default_factory=list)


@pytest.mark.parametrize(
    ("processor", "said"),
    [
        (NoLongRuns, "processors.0.=.*a processor is a value"),
        (3, "processors.0.=3: a processor is a value; subclass specjax.processors.Processor"),
        (Unhashable(), "processors.0.=.*a processor is a value"),
        (Processor(), "processor .* fails .NotImplementedError"),
        (OtherState(), "advance returns .* where init made"),
        (OtherShape(), "apply returns .*; return logits as it gets them"),
    ],
)
def test_own_processors_that_cannot_be_used(processor, said, tiny, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    refused(lambda: specjax.generate(tiny, [[1, 2]], processors=[processor]), said)


def test_the_forms_of_a_bias():
    """A dict, pairs, and an object of JSON are the same; None is nothing."""
    wanted = SamplingParams(logit_bias={3: 1.0, 5: -2.0})
    for bias in ([(5, -2), (3, 1)], {"5": -2, "3": 1}, [[3, 1.0], [5, -2.0]]):
        assert SamplingParams(logit_bias=bias) == wanted
    assert SamplingParams(logit_bias=None) == SamplingParams(logit_bias={}) == SamplingParams()
    assert hash(wanted) == hash(SamplingParams(logit_bias=((3, 1.0), (5, -2.0))))


@pytest.mark.parametrize("rows", slow(12_000))
def test_a_model_of_two_layers_under_all_at_once(rows, fast_programs):
    """All processors in the same rows, joint over three tokens of a model with attention."""
    request = SamplingParams(
        temperature=0.9,
        top_k=7,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        logit_bias={2: 1.5},
        banned_token_ids=[6],
        forced_token_ids=[3],
        no_repeat_ngram_size=3,
    )
    drafter = draft_model(small_model(8, 1, seed=1))
    check = check_drafter(drafter, small_model(8), rows, request=request)
    assert check.passed, check


@dataclasses.dataclass(frozen=True)
class EndsAfter(Processor):
    """Leaves no token after token 1."""

    def init(self, rows):
        return jnp.full(rows.prompt_length.shape, -1)

    def advance(self, state, tokens, count):
        return one_by_one(lambda _, token: token, state, tokens, count)

    def apply(self, state, logits):
        return jnp.where((state == 1)[:, None], -jnp.inf, logits)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_token_after_which_none_is_left_keeps_its_probability(rule):
    """Also if it was drawn: it is the last of the row, as in plain decoding.

    Half of its probability, which is a quarter to a third, would be found in 512 rows.
    """
    target, drafter = small_model(3), draft_model(small_model(3, 1, seed=1))
    options = dict(batch_size=128, max_length=8, num_speculative_tokens=2, verify=rule)
    engine = Engine(target, drafter=drafter, processors=[EndsAfter()], **options)
    params = SamplingParams(temperature=1.0, max_new_tokens=4, ignore_eos=True)
    for _ in range(512):
        engine.add([0, 2], params)
    outputs = [delta.output for delta in engine if delta.output is not None]
    for output in outputs:
        ended = 1 in output.token_ids
        assert output.finish_reason == ("error" if ended else "length") or (
            output.token_ids[-1] == 1 and len(output.token_ids) == 4
        )
    counts = np.bincount([output.token_ids[0] for output in outputs], minlength=3)
    logits = every_logits(target.architecture, target.params, jnp.array([[0, 2]]))[-1]
    wanted = len(outputs) * scipy.special.softmax(np.asarray(logits, np.float64))
    assert scipy.stats.chisquare(counts, wanted).pvalue > 1e-6, (counts, wanted)
    assert min(wanted) > 34
