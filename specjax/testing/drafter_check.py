"""A chi-square test of whether decoding with a drafter keeps the target's distribution."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats
from jaxtyping import Array, Float, Int

from specjax import sampling
from specjax.core.drafter import Sampling, StepLimits, warp_rows
from specjax.core.drafter_errors import errors_of
from specjax.core.language_model import LanguageModel
from specjax.core.plan import LoopPlan
from specjax.core.processor import Processor, advanced, states_of
from specjax.core.state import RUNNING, Rounds, RowProperties, State
from specjax.drafters import DRAFT_TOKENS, DRAFTER_KIND, Drafter, LoadedDrafter, Turns
from specjax.engine.options import RULE
from specjax.engine.plan import widths
from specjax.engine.processing import processors_of, requested_arrays
from specjax.engine.programs import run, start
from specjax.engine.requests import SEED, SamplingParams
from specjax.errors import InputError
from specjax.fields import Instance, Items, Whole, optional
from specjax.loading.model import Model
from specjax.testing.drafter_contract import check_contract

QUANTILE = 1e-6
"""The probability that an exact drafter fails by chance."""
THIN = 20.0
"""The expected count below which outputs are pooled."""
_BATCH = 20_000
_LEAST_OUTCOMES, _COMMON = 8, 1 / 20
"""The number of outcomes that must be common enough to be tested one by one, and the probability,
as a share of the likeliest outcome's, below which an outcome need not be."""
_MOST_VOCAB, _MOST_OUTPUTS = 16, 1 << 20


@dataclass(frozen=True, repr=False)
class Outcome:
    """Three consecutive tokens, their probability under the target, and observed frequency."""

    tokens: tuple[int, int, int]
    probability: float
    share: float

    def __repr__(self) -> str:
        return f"tokens {self.tokens} in {self.share:.2%} of the rows, not {self.probability:.2%}"


@dataclass(frozen=True, repr=False)
class DrafterCheck:
    """The result of `check_drafter`, which passes if `chi2` is below `threshold`.

    `degrees` are the degrees of freedom. `acceptance_length` is the mean number of tokens per
    round; if it is 1, no draft token was accepted, and the test has little power. `worst` is the
    outcome that contributes most to `chi2`.
    """

    passed: bool
    chi2: float
    threshold: float
    degrees: int
    rows: int
    acceptance_length: float
    worst: Outcome

    def __repr__(self) -> str:
        worst = "" if self.passed else f", worst={self.worst}"
        return (
            f"Check(passed={self.passed}, chi2={self.chi2:.1f}, threshold={self.threshold:.1f}, "
            f"degrees={self.degrees}, rows={self.rows}, "
            f"acceptance_length={self.acceptance_length:.2f}{worst})"
        )


class ChiSquare(NamedTuple):
    """A chi-square statistic, and the threshold that it exceeds once in a million by chance."""

    statistic: float
    threshold: float
    degrees: int


_PAIR = Items(
    Instance(object, ""), length=2, remedy="use a model, or a pair of functions and parameters"
)


def check_drafter(
    drafter: Drafter | LoadedDrafter,
    target: Model | tuple[LanguageModel, Any],
    rows: int = 200_000,
    *,
    prompt: Sequence[int] = (1, 2, 3, 1, 2),
    num_speculative_tokens: int = 2,
    limits: StepLimits | None = None,
    verify: str | sampling.Rule = "rejection",
    request: SamplingParams = SamplingParams(temperature=1.0),  # noqa: B008 - frozen
    seed: int = 0,
) -> DrafterCheck:
    """Test whether `rows` outputs of the real loop with a drafter have the target's distribution.

    This is a chi-square test of three consecutive tokens jointly, the K-th to the (K+2)-th after
    the prompt, where K = `num_speculative_tokens`. A round emits at most K + 1 tokens, so the last
    of the three is never from the first round. The target's distribution is enumerated, so the
    target must be small: a `specjax.loading.load.random_model` or a `Tabular` with its logits, of
    at most 16 tokens.

    `limits` apply to each round, and `request` sets the sampling parameters. Give the drafter a
    distribution at a total variation distance of 0.2 to 0.6 from the target's, so that acceptance
    and rejection both matter. An exact drafter fails for one seed in a million. Raises InputError
    for a drafter that breaks its contract (`drafter_contract.check_contract`) or fails, a target
    that is too large, invalid sizes, or too few rows: outcomes expected less than 20 times are
    tested together, so the eight likeliest (those that have at least 1/20 of the likeliest one's
    probability) must be expected that often.
    """
    loaded = DRAFTER_KIND.check("drafter", drafter)
    if isinstance(target, Model):
        target = target.architecture, target.params
    model, params = _PAIR.check("target", target)
    rows = Whole(1).check("rows", rows)
    prompt = Items(Whole(0, model.vocab_size - 1), least=1).check("prompt", prompt)
    DRAFT_TOKENS.check("num_speculative_tokens", num_speculative_tokens)
    optional(Instance(StepLimits, "use core.drafter.StepLimits")).check("limits", limits)
    rule = RULE.check("verify", verify)
    Instance(SamplingParams, "use SamplingParams").check("request", request)
    seed = SEED.check("seed", seed)
    length = num_speculative_tokens + 2
    _check_sizes(model, length)
    loop_plan = make_plan(
        model,
        loaded.drafter,
        num_speculative_tokens,
        verify=rule,
        request=request,
        capacity=len(prompt) + length + num_speculative_tokens,
    )
    # All batches have the same size, so that one program decodes them.
    batch = math.ceil(rows / math.ceil(rows / _BATCH))
    some = first_rows(loop_plan, prompt, request, np.arange(max(batch, length)), seed)
    with errors_of(loop_plan.drafter.name):
        check_contract(loop_plan, (params, loaded.params), some)
    distribution = output_distribution(model, params, prompt, request, length)
    distribution = distribution.reshape(-1, model.vocab_size**3).sum(axis=0)
    _check_rows(rows, distribution)
    counted, tested = np.zeros(model.vocab_size**3, np.int64), []
    for first in range(0, rows, batch):
        index = np.arange(first, first + batch)
        state, rounds = decode(
            loop_plan, (params, loaded.params), prompt, request, index, seed, length, limits
        )
        wanted, end = index < rows, len(prompt) + length
        outputs = np.asarray(state.tokens)[wanted, end - 3 : end]
        code = np.ravel_multi_index(tuple(outputs.T), (model.vocab_size,) * 3)
        counted += np.bincount(code, minlength=len(counted))
        accepted = np.asarray(rounds.accepted)[wanted]
        tested.append(accepted[accepted >= 0] + 1)
    test = chi_square(counted, distribution)
    return DrafterCheck(
        passed=bool(test.statistic < test.threshold),
        chi2=test.statistic,
        threshold=test.threshold,
        degrees=test.degrees,
        rows=int(counted.sum()),
        acceptance_length=float(np.concatenate(tested).mean()),
        worst=_worst(counted, distribution, model.vocab_size),
    )


def _worst(
    counted: Int[np.ndarray, "outputs"], distribution: Float[np.ndarray, "outputs"], vocab: int
) -> Outcome:
    """Return the outcome that contributes most to the chi-square statistic."""
    rows = counted.sum()
    expected = distribution * rows
    # Rare outputs are pooled in the statistic, so one more of them must not count as a large error.
    distance = (counted - expected) ** 2 / np.maximum(expected, THIN)
    index = int(np.argmax(np.where((distribution == 0) & (counted > 0), np.inf, distance)))
    tokens = tuple(int(token) for token in np.unravel_index(index, (vocab,) * 3))
    return Outcome(tokens, float(distribution[index]), float(counted[index] / rows))


def make_plan(
    model: LanguageModel,
    drafter: Turns,
    num_speculative_tokens: int,
    *,
    verify: sampling.Rule,
    request: SamplingParams,
    capacity: int,
) -> LoopPlan:
    """Return the plan of a loop over rows of `capacity` tokens with identical requests.

    Drafts have `num_speculative_tokens` tokens, and `verify` is the rule.
    """
    drafter = drafter.limited(num_speculative_tokens)
    return LoopPlan(
        target=model,
        drafter=drafter,
        rule=verify,
        widths=widths(drafter.num_nodes, "cpu"),
        flags=_flags(request),
        processors=processors_of([request]),
        capacity=capacity,
        chunks=(capacity,),
        rounds_per_step=capacity,
    )


def decode(
    loop_plan: LoopPlan,
    params: tuple[Any, Any],
    prompt: Sequence[int],
    request: SamplingParams,
    index: Int[Array | np.ndarray, "B"],
    seed: int,
    rounds: int,
    limits: StepLimits | None = None,
) -> tuple[State, Rounds]:
    """Decode `rounds` rounds of rows with the same prompt; return the state and the counts.

    `index` are the rows' numbers, from which, with `seed`, their keys derive; `limits` bound every
    draft.
    """
    state = start(loop_plan, params, *first_rows(loop_plan, prompt, request, index, seed))
    return run(loop_plan, params, state, jnp.int32(rounds), limits=limits)[:2]


def first_rows(
    loop_plan: LoopPlan,
    prompt: Sequence[int],
    request: SamplingParams,
    index: Int[Array | np.ndarray, "B"],
    seed: int,
) -> tuple[Any, ...]:
    """Return the arguments of `initial_state.start` for rows with the same prompt.

    `index` are the rows' numbers, from which, with `seed`, their keys derive.
    """
    batch = len(index)

    def every(value: float, dtype: type) -> Array:
        return jnp.full(batch, value, dtype)

    tokens = jnp.zeros((batch, loop_plan.capacity), jnp.int32)
    tokens = tokens.at[:, : len(prompt)].set(jnp.asarray(prompt, jnp.int32)[None, :])
    keys = jax.vmap(lambda number: sampling.row_key(seed, number))(jnp.asarray(index))
    rows = RowProperties(
        index=jnp.asarray(index, jnp.int32),
        prompt_length=every(len(prompt), jnp.int32),
        key=keys,
        sampling=_same_sampling(request, batch),
        max_length=every(loop_plan.capacity, jnp.int32),
        stop_ids=jnp.full((batch, 1), -1, jnp.int32),
    )
    vocab_size = loop_plan.target.vocab_size
    requested = requested_of(loop_plan.processors, request, batch, loop_plan.capacity, vocab_size)
    length, status = every(len(prompt), jnp.int32), every(RUNNING, jnp.int32)
    return tokens, rows, length, status, jnp.zeros_like(length), requested


def requested_of(
    processors: Sequence[Processor],
    request: SamplingParams,
    rows: int,
    capacity: int,
    vocab_size: int,
) -> tuple[Any, ...]:
    """Return the arrays that processors read of identical requests without stop tokens."""
    stop_ids = np.full((1, 1), -1, np.int32)
    each = requested_arrays(processors, [request], stop_ids, capacity, vocab_size)
    return jax.tree.map(lambda array: jnp.repeat(jnp.asarray(array), rows, axis=0), each)


def _same_sampling(request: SamplingParams, rows: int) -> Sampling:
    """Return the sampling parameters of `rows` identical requests as arrays."""
    return Sampling(
        temperature=jnp.full(rows, request.temperature, jnp.float32),
        top_k=jnp.full(rows, request.top_k, jnp.int32),
        top_p=jnp.full(rows, request.top_p, jnp.float32),
        min_p=jnp.full(rows, request.min_p, jnp.float32),
    )


def _flags(request: SamplingParams) -> sampling.WarpFlags:
    return sampling.WarpFlags.of(request.temperature, request.top_k, request.top_p, request.min_p)


def output_distribution(
    model: LanguageModel,
    params: Any,
    prompt: Sequence[int],
    request: SamplingParams,
    length: int,
    num_layers: int | None = None,
    processors: Sequence[tuple[Processor, Any]] = (),
) -> Float[np.ndarray, "outputs"]:
    """Return the probability of each output of `length` tokens under plain decoding.

    Outputs follow `prompt`, under the sampling parameters `request`; they are flattened, with the
    first token varying slowest. With `num_layers` they are those of an early exit after that many
    layers. `processors` are further ones, each with the arrays that its `init` reads of one row.
    """
    distributions = conditional_distributions(
        model, params, prompt, request, length, num_layers, processors
    )
    outputs = np.ones(1)
    for distribution in distributions:
        outputs = (outputs[:, None] * distribution).ravel()
    return outputs


def conditional_distributions(
    model: LanguageModel,
    params: Any,
    prompt: Sequence[int],
    request: SamplingParams,
    length: int,
    num_layers: int | None = None,
    processors: Sequence[tuple[Processor, Any]] = (),
) -> list[Float[np.ndarray, "_ V"]]:
    """Return the warped distributions of each of `length` tokens; entry d has shape [V**d, V].

    Row i of entry d is conditioned on `prompt` and the i-th sequence of d tokens. `request` has the
    sampling parameters. With `num_layers` they are the distributions of an early exit after that
    many layers. `processors` are further ones, each with the arrays that its `init` reads of one
    row.
    """
    vocab = model.vocab_size
    tails = np.indices((vocab,) * (length - 1)).reshape(length - 1, -1).T
    tokens = np.concatenate([np.tile(np.array(prompt), (len(tails), 1)), tails], axis=1)
    asked = processors_of([request])
    requested = requested_of(asked, request, len(tokens), tokens.shape[1], vocab)
    further = [
        jax.tree.map(lambda array: jnp.repeat(jnp.asarray(array), len(tokens), axis=0), arrays)
        for _, arrays in processors
    ]
    every = _every_distribution(
        (model, request, num_layers, len(prompt), (*asked, *(one for one, _ in processors))),
        params,
        jnp.asarray(tokens, jnp.int32),
        (*requested, *further),
    )
    # Where no token can follow nothing is drawn, and such tokens are not drawn either.
    distributions = np.nan_to_num(np.exp(np.asarray(every, np.float64)))
    total = distributions.sum(axis=-1, keepdims=True)
    distributions = np.divide(distributions, total, out=distributions, where=total > 0)
    # Entry d does not depend on tokens after the first d, so one continuation of each suffices.
    return [
        distributions[:: vocab ** (length - 1 - depth), len(prompt) - 1 + depth]
        for depth in range(length)
    ]


@functools.partial(jax.jit, static_argnums=0)
def _every_distribution(
    static: tuple[LanguageModel, SamplingParams, int | None, int, tuple[Processor, ...]],
    params: Any,
    tokens: Int[Array, "B T"],
    requested: tuple[Any, ...],
) -> Float[Array, "B T V"]:
    """Return the warped log-probabilities after each token, computed by one causal pass.

    `static` are the model, the request, the number of layers, the length of the prompt, which
    `tokens` begin with, and the processors. These have the arrays `requested`, and see one token
    after the other.
    """
    model, request, num_layers, first, processors = static
    count, total = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(total), (count, total))
    causal = jnp.tril(jnp.ones((1, total, total), bool))
    cache, window = model.make_cache(count, 1), model.make_window(count, total)
    result = model.extend(
        params, tokens, positions, cache, window, 0, causal, num_layers=num_layers
    )
    logits = result.logits
    lengths = jnp.full(count, first)
    states = states_of(processors, requested, tokens, lengths, lengths, model.vocab_size)
    for at in range(first - 1, total):
        after = logits[:, at]
        for processor, state in zip(processors, states, strict=True):
            after = processor.apply(state, after)
        logits = logits.at[:, at].set(after)
        states = advanced(processors, states, tokens[:, at + 1 : at + 2], jnp.ones_like(lengths))
    flat = logits.reshape(-1, model.vocab_size)
    warp = _same_sampling(request, len(flat))
    return warp_rows(flat, warp, _flags(request)).reshape(result.logits.shape)


def chi_square(
    counted: Int[np.ndarray, "outputs"], distribution: Float[np.ndarray, "outputs"]
) -> ChiSquare:
    """Return Pearson's statistic of counts under a distribution, pooling rare outputs.

    It is infinite if an output of probability 0 was observed. The threshold is infinite if there is
    only one output, which is then certain.
    """
    impossible = bool(counted[distribution == 0].any())
    expected = distribution * counted.sum()
    order = np.argsort(expected)
    expected, counted = expected[order], counted[order]
    thin = int(np.searchsorted(expected, THIN))
    # Rare outputs form one cell, which takes in the rarest others until it is no longer rare.
    while 0 < thin < len(expected) and expected[:thin].sum() < THIN:
        thin += 1
    heads = [0, *range(thin, len(expected))] if thin else np.arange(len(expected))
    expected, seen = np.add.reduceat(expected, heads), np.add.reduceat(counted, heads)
    statistic = np.inf if impossible else float(((seen - expected) ** 2 / expected).sum())
    degrees = len(expected) - 1
    threshold = float(scipy.stats.chi2.isf(QUANTILE, degrees)) if degrees else math.inf
    return ChiSquare(statistic, threshold, degrees)


def _check_rows(rows: int, distribution: Float[np.ndarray, "outputs"]) -> None:
    """Raise InputError if `rows` are too few to test the likeliest outcomes one by one."""
    likeliest = np.sort(distribution)[::-1]
    rarest = max(likeliest[:_LEAST_OUTCOMES][-1], _COMMON * likeliest[0])
    if rows < (least := math.ceil(THIN / rarest)):
        raise InputError(
            f"rows={rows} are too few: use at least {least}, in which each of the likeliest "
            f"outputs is expected {THIN:.0f} times"
        )


def _check_sizes(model: LanguageModel, length: int) -> None:
    """Raise InputError if the vocabulary or the number of outputs is too large to enumerate."""
    vocab = model.vocab_size
    if vocab > _MOST_VOCAB:
        raise InputError(
            f"target has a vocabulary of {vocab} tokens, and every output is enumerated: use one "
            f"of at most {_MOST_VOCAB}, such as specjax.loading.load.random_model or "
            "specjax.testing.Tabular gives, and a drafter for it"
        )
    if vocab**length > _MOST_OUTPUTS:
        raise InputError(
            f"num_speculative_tokens={length - 2} with {vocab} tokens makes {vocab**length} "
            f"outputs, more than {_MOST_OUTPUTS}: lower it, or use a smaller vocabulary"
        )
