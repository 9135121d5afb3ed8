"""Calls, models and drafters for tests of the decoding loop."""

import dataclasses
import functools
from typing import NamedTuple

import conftest
import jax
import jax.numpy as jnp
import numpy as np

from specjax import trees
from specjax.controllers import Fixed, Limits
from specjax.core import drafter as base
from specjax.core import initial_state, turn_taking
from specjax.core.round import make_context
from specjax.core.state import RUNNING
from specjax.distributed.sharding import use
from specjax.drafters import (
    Drafter,
    LoadedDrafter,
    TokenRecycling,
    make_drafter,
    merge_drafters,
    take_turns,
)
from specjax.engine.generate import decode_requests
from specjax.engine.options import DecodeOptions
from specjax.engine.plan import DecodePlan, plan_requests
from specjax.engine.programs import compile_plan, row_arguments, run, start
from specjax.engine.requests import Request, SamplingParams
from specjax.methods.draft_model.drafter import DraftModel
from specjax.methods.early_exit import EarlyExit
from specjax.methods.layer_skip import LayerSkip
from specjax.methods.ngram import Ngram
from specjax.methods.self_drafter import SelfDrafter
from specjax.methods.suffix import Suffix
from specjax.sampling import UniformRule

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
    return [SamplingParams(**{**request, **fields}) for request in MIXED]


def greedy(**fields):
    return SamplingParams(temperature=0.0, **fields)


class Call(NamedTuple):
    """The plan and the requests of a call."""

    plan: DecodePlan
    requests: list[Request]

    def with_options(self, **changes):
        return self._replace(plan=self.plan.with_options(**changes))

    def controlled_by(self, controller):
        return self._replace(plan=self.plan.controlled_by(controller))

    def with_loop(self, **changes):
        loop = dataclasses.replace(self.plan.loop, **changes)
        return self._replace(plan=dataclasses.replace(self.plan, loop=loop))


def make_call(
    target,
    prompts,
    *,
    drafter=None,
    sampling=None,
    every_width=False,
    **options,
):
    """Return the plan and the requests of a call, by default with few compiled widths.

    Drafts of a fixed length are verified in passes of the largest width, however short they are,
    unless `every_width` is set or the whole suite runs, since each width is another copy of the
    pass and the rule. Where verification resumes the drafter's pass, rounds without nodes have
    a width of their own.
    """
    call = Call(
        *plan_requests(
            target,
            prompts,
            drafter=drafter,
            options=DecodeOptions(**options),
            sampling=SamplingParams() if sampling is None else sampling,
        )
    )
    if call.plan.options.length_controller != Fixed() or every_width or conftest.full:
        return call
    slept = isinstance(call.plan.loop.drafter.parts[0], SelfDrafter) and call.plan.loop.resumes
    widths = (*call.plan.loop.widths[:slept], call.plan.loop.widths[-1])
    return call.with_loop(widths=tuple(dict.fromkeys(widths)))


def decode(target, prompts, **options):
    """Return the result of `generate` with the widths of `make_call`."""
    return decode_requests(*make_call(target, prompts, **options))


def generate(target, prompts, drafter=None, verify="rejection", length="fixed", **sampling):
    """Return the result of `specjax.generate` with the widths of `make_call`."""
    if isinstance(drafter, str):
        drafter = make_drafter(drafter, target)
    options = dict(verify=verify, num_speculative_tokens=length)
    request = SamplingParams(**sampling)
    return decode(target, prompts, drafter=drafter, sampling=request, **options)


def coupled(target, drafter=None, new_tokens=24, **options):
    """Decode all prompts under the rule `coupled`, with greedy and sampled rows."""
    options = dict(verify="coupled", sampling=mixed(max_new_tokens=new_tokens), **options)
    return decode(target, PROMPTS, drafter=drafter, **options)


@dataclasses.dataclass(frozen=True)
class Scripted:
    """A length controller that repeats the given `steps`: (longest, confidence, rounds) each."""

    steps: tuple

    def init(self, sizes):
        return 0

    def choose(self, state, unfinished, most_rounds):
        longest, confidence, rounds = self.steps[state % len(self.steps)]
        return Limits(longest, confidence), min(rounds, most_rounds), state + 1

    def update(self, state, record):
        return state


def batch_arguments(call, index):
    """Return the arrays of the call's requests with the given indices."""
    return row_arguments(call.plan, [call.requests[number] for number in index])


def first_state(call):
    """Return the state of the call's first batch before its first round."""
    arguments = row_arguments(call.plan, call.requests[: call.plan.options.batch_size])
    with use(call.plan.mesh):
        return start(call.plan.loop, call.plan.params, *arguments)


def empty_state(call):
    """Return the state of an engine without rows, for the programs that decode the call."""
    arguments = row_arguments(call.plan, [])
    return compile_plan(call.plan).empty(call.plan.params, *arguments)


def loop_arguments(call):
    """Return the first batch's arguments of `loop.run` after the plan, the state as shapes."""
    arguments = batch_arguments(call, range(call.plan.options.batch_size))
    start = functools.partial(initial_state.start, call.plan.loop)
    return call.plan.params, jax.eval_shape(start, call.plan.params, *arguments), jnp.int32(1)


def rounds(call, state, counts=None):
    """Yield the state after each round until all rows are finished; `counts` collects each round's.

    The call's controller chooses limits before each round, and learns nothing.
    """
    memory = call.plan.options.length_controller.init(call.plan.step_sizes)
    while unfinished := int((state.status == RUNNING).sum()):
        limits, _, memory = call.plan.options.length_controller.choose(memory, unfinished, 1)
        # The program takes over the state's buffers: it gets a copy.
        with use(call.plan.mesh):
            state, new, _ = run(
                call.plan.loop,
                call.plan.params,
                copied(state),
                jnp.int32(1),
                limits=device_limits(*limits),
            )
        if counts is not None:
            counts.append(jax.tree.map(lambda leaf: np.asarray(leaf[:, 0]), new))
        yield state


def new_tokens(call, state):
    """Return the tokens of each row after its prompt."""
    tokens, lengths = np.asarray(state.tokens), state.length.tolist()
    begins = (len(request.prompt) for request in call.requests)
    return [
        row[begin:end].tolist() for row, begin, end in zip(tokens, begins, lengths, strict=True)
    ]


def device_limits(longest, confidence):
    """Return the limits of a step in the form that its program takes."""
    return base.StepLimits(np.array(longest, np.int32), np.array(confidence, np.float32))


def columns(counts):
    """Return the counts of several rounds as arrays [B, R]."""
    return jax.tree.map(lambda *of_rounds: np.stack(of_rounds, axis=1), *counts)


def accepted_lengths(counts):
    """Return the set of numbers of accepted tokens in the counts of several rounds."""
    counts = columns(counts)
    return set(counts.accepted[counts.emitted > 0].tolist())


@jax.jit
def copied(state):
    return jax.tree.map(jnp.copy, state)


@functools.partial(jax.jit, static_argnums=0)
def caught_up(plan, params, state):
    context = make_context(plan, params[0], state)

    def all_observed(drafter, drafter_params, before):
        if not drafter.observes:
            return before.drafter
        wanted = jnp.bool_(True)
        return turn_taking._observe_all(drafter, drafter_params, before, context, wanted).drafter

    return tuple(map(all_observed, plan.drafter.parts, params[1], state.drafter))


def observed(call, state):
    """Return the state of each drafter after it has observed all committed tokens."""
    return caught_up(call.plan.loop, call.plan.params, state)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shifting(Drafter):
    """A user-defined drafter that proposes the token before plus `step`, up to the limit."""

    vocab: int = dataclasses.field(kw_only=False)
    step: int = 7

    def propose(self, params, state, context, noise):
        root = context.token_at(context.length - 1)
        offset = self.step * (1 + jnp.arange(self.num_speculative_tokens))
        tokens = (root[:, None] + offset[None, :]) % self.vocab
        return trees.chain(tokens, context.limit), state


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomDistribution(Drafter):
    """A user-defined drafter whose distributions depend on the depth only.

    Some rows have short drafts.
    """

    sampled = True

    def propose(self, params, state, context, noise):
        length, vocab = self.num_speculative_tokens, params.shape[1]
        tokens, distributions = [], []
        for depth in range(length):
            logits = jnp.broadcast_to(params[depth][None, :], (context.length.shape[0], vocab))
            token, distribution = context.draw(logits, noise, depth)
            tokens.append(token)
            distributions.append(distribution)
        count = jnp.minimum(context.limit, context.length % (length + 1))
        logq = jnp.stack(distributions, axis=1) if context.needs_logq else None
        return trees.chain(jnp.stack(tokens, axis=1), count, logq), state


@dataclasses.dataclass(frozen=True, kw_only=True)
class Changed(Drafter):
    """A drafter with replaced functions, which get the original function and its arguments."""

    drafter: Drafter = dataclasses.field(kw_only=False)
    propose_with: object = None
    observe_with: object = None
    identity: object = None
    """Tells apart what is compiled."""
    features = property(lambda self: self.drafter.features)
    sampled = True
    stops = property(lambda self: self.drafter.stops)
    num_nodes = property(lambda self: self.inner.num_nodes)
    branches = property(lambda self: self.inner.branches)

    @property
    def inner(self):
        length = self.num_speculative_tokens
        return dataclasses.replace(self.drafter, num_speculative_tokens=length)

    def init(self, params, batch, capacity):
        return self.inner.init(params, batch, capacity)

    def propose(self, *arguments):
        real = self.inner.propose
        return self.propose_with(real, *arguments) if self.propose_with else real(*arguments)

    def observe(self, *arguments):
        real = self.inner.observe
        return self.observe_with(real, *arguments) if self.observe_with else real(*arguments)


def changed(loaded, *, propose=None, observe=None):
    """Return a loaded drafter with replaced functions, a new value each time, so compiled anew."""
    drafter, params = loaded if isinstance(loaded, LoadedDrafter) else (loaded, ())
    length = drafter.num_speculative_tokens
    other = Changed(
        drafter,
        propose_with=propose,
        observe_with=observe,
        identity=object(),
        num_speculative_tokens=length,
    )
    return LoadedDrafter(other, params)


def tampered(drafter, change):
    """Return a drafter whose drafts are replaced by `change(draft, context)`."""

    def propose(real, params, state, context, noise):
        draft, state = real(params, state, context, noise)
        return change(draft, context), state

    return changed(drafter, propose=propose)


@dataclasses.dataclass(frozen=True)
class Deciding(UniformRule):
    """A user-defined rule made from a function."""

    function: object

    def decide(self, *arguments):
        return self.function(*arguments)


def random_distribution(vocab, spread=1.0):
    table = spread * np.random.default_rng(0).standard_normal((16, vocab)).astype(np.float32)
    return LoadedDrafter(RandomDistribution(), jnp.asarray(table))


def draft_model(model, **options):
    """Return a drafter that runs a whole model."""
    architecture, params = model if isinstance(model, tuple) else (model.architecture, model.params)
    return LoadedDrafter(DraftModel(architecture, **options), params)


def drafters(tiny, unrelated, similar):
    """Return all drafters that need no plain run, by name."""
    layers = tiny.config.num_layers
    return {
        "ngram": Ngram(prompt_lookup_min=1),
        "suffix": Suffix(),
        "ngram_tree": Ngram(prompt_lookup_min=1, num_matches=3),
        "unrelated": draft_model(unrelated),
        "similar": draft_model(similar),
        "similar_greedy": draft_model(similar, draft_sample_method="greedy"),
        "itself": draft_model(tiny),
        "early_exit": EarlyExit(layers, exit_layer=2),
        "early_exit_p_min": EarlyExit(layers, exit_layer=2, draft_p_min=0.15),
        "layer_skip": LayerSkip(layers, skipped=(1,)),
        "turns": take_turns(Ngram(), EarlyExit(layers, exit_layer=2)),
        "merged": merge_drafters(
            Ngram(prompt_lookup_min=1, num_matches=2), EarlyExit(layers, exit_layer=2)
        ),
        "turns_trees": take_turns(Ngram(num_matches=2), TokenRecycling(tiny.config.vocab_size)),
        "turns_model": take_turns(Ngram(prompt_lookup_min=1), draft_model(similar)),
        "shifting": Shifting(tiny.config.vocab_size),
        "random_distribution": random_distribution(tiny.config.vocab_size),
    }


def replay(tiny, plain, acceptance):
    """Return the drafter `simulated` for a plain run, with an acceptance."""
    return make_drafter("simulated", tiny, continuations=plain.token_ids, acceptance=acceptance)
