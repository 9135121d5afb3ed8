"""Is a verification rule exact? Answered by enumeration, without sampling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from specjax import sampling
from specjax.decoding.options import RULE
from specjax.errors import InputError, shown
from specjax.fields import Choice, Function, Instance, Items, Whole, optional
from specjax.testing.enumeration import (
    Drafts,
    NotAStepFunction,
    Outcomes,
    Table,
    all_tokens,
    contexts,
    decisions,
    distributions_along,
    output_distributions,
    target_distributions,
    walks,
)

TOLERANCE = 1e-10

Valid = Callable[[Int[np.ndarray, "I K"], Float[np.ndarray, "I K V"]], Int[np.ndarray, "I"]]


@dataclass(frozen=True)
class Check:
    """The answer of `check_rule`: `max_error` is the largest error of an output's probability."""

    passed: bool
    max_error: float
    counterexample: str | None


@dataclass(frozen=True)
class DistributionPair:
    """A target distribution p and a draft distribution q of a chain, by context.

    Entry d is [V**d, V], one row for each d tokens before, the first token slowest; p has one entry
    more than q, for the token after the draft.
    """

    name: str
    p: Table
    q: Table

    @classmethod
    def constant(
        cls, name: str, p: Float[np.ndarray, "V"], q: Float[np.ndarray, "V"], length: int
    ) -> DistributionPair:
        """The same p and q whatever came before."""
        rows = [len(p) ** depth for depth in range(length + 1)]
        return cls(
            name,
            tuple(np.tile(p, (count, 1)) for count in rows),
            tuple(np.tile(q, (count, 1)) for count in rows[:-1]),
        )


@dataclass(frozen=True)
class _Group:
    """Drafts whose outputs have one distribution, and how to name them."""

    distributions: DistributionPair
    drafted: str
    sampled: bool


def check_rule(
    rule: str | sampling.Rule,
    topology: str = "chain",
    vocab: int = 4,
    *,
    length: int = 3,
    distributions: list[DistributionPair] | None = None,
    valid: Valid | None = None,
) -> Check:
    """Whether a rule keeps the target's distribution: P(output prefix) = product of p, to 1e-10.

    `rule` is a `sampling.UniformRule`, whose `decide(tokens [B,K], num_valid [B], target, draft,
    uniforms [B,K]) -> Decision(num_accepted [B], next_logp [B,V])` is checked, or the name of a
    rule:

    - row b drafted `tokens[b, :num_valid[b]]`; what stands after them was never drafted;
    - `target(slots [B])` and `draft(slots [B])` are log-probabilities [B,V], p and q of the token
      that follows slot `slots[b]`: slot 0 is the last committed token, slot i is `tokens[:, i -
      1]`; a deterministic draft has one-hot q;
    - `uniforms` in [0, 1) are independent of each other and of all else, and the decision is a
      step function of each, with one step at most while the others stay;
    - the first `num_accepted` tokens come out, then one more, drawn from `next_logp`
      (log-probabilities).

    All drafts of up to `length` tokens are tried on many distributions (p = q, disjoint supports,
    zeros, one-hot, reduced draft vocabularies, random ones by context), sampled and deterministic,
    with every number of valid tokens; or on your own `distributions`, whose sizes then count. A
    drafter that stops early is checked by `valid(tokens [I,K], logq [I,K,V]) -> [I]`, the number of
    tokens that it keeps of each draft. Raises InputError for an unknown rule or topology and for
    sizes that are out of range.
    """
    rule = _check_input(rule, topology, vocab, length, distributions, valid)
    distributions = example_distributions(vocab, length) if distributions is None else distributions
    sampled, fixed = _sampled(distributions, valid), _deterministic(distributions, valid)
    if rule.position_noise:
        return _compare([(fixed, walks(fixed[0]))])
    decide = rule.decide
    try:
        found = [(sampled, decisions(decide, sampled[0])), (fixed, decisions(decide, fixed[0]))]
    except NotAStepFunction:
        counterexample = (
            "the decision changes more than once while one uniform goes from 0 to 1: "
            "use each uniform once, against one threshold"
        )
        return Check(False, float("nan"), counterexample)
    if rule == sampling.Rejection():
        # Deterministic drafts take this way when no distribution is stored.
        found.append((fixed, walks(fixed[0])))
    return _compare(found)


def example_distributions(vocab: int, length: int) -> list[DistributionPair]:
    """Pairs of distributions that between them reach every corner of a rule."""
    rng = np.random.default_rng(0)

    def table(spread: float, depths: int, keep: float = 1.0) -> Table:
        distributions = []
        for depth in range(depths):
            distribution = rng.dirichlet(np.full(vocab, spread), vocab**depth)
            mask = rng.uniform(size=distribution.shape) < keep
            mask[np.arange(len(distribution)), rng.integers(vocab, size=len(distribution))] = True
            distributions.append(_normal(distribution * mask))
        return tuple(distributions)

    def only(table: Table, tokens: slice) -> Table:
        mask = np.zeros(vocab)
        mask[tokens] = 1
        return tuple(_normal((distribution + 0.1) * mask) for distribution in table)

    half = vocab // 2
    p, q = table(1.0, length + 1), table(1.0, length)
    return [
        DistributionPair("random", p, q),
        DistributionPair("sharp", table(0.3, length + 1), table(0.3, length)),
        DistributionPair("p = q", p, p[:-1]),
        DistributionPair("close", p, tuple(0.9 * a + 0.1 * b for a, b in zip(p, q, strict=False))),
        DistributionPair("zeros", table(1.0, length + 1, keep=0.4), table(1.0, length, keep=0.4)),
        DistributionPair("disjoint", only(p, slice(half)), only(q, slice(half, None))),
        DistributionPair("reduced draft vocabulary", p, only(q, slice(half))),
        DistributionPair("reduced target vocabulary", only(p, slice(half)), q),
        DistributionPair("one-hot p", table(1.0, length + 1, keep=0.0), q),
        DistributionPair("one-hot q", p, table(1.0, length, keep=0.0)),
        DistributionPair(
            "both one-hot", table(1.0, length + 1, keep=0.0), table(1.0, length, keep=0.0)
        ),
        DistributionPair.constant("constant", p[0][0], q[0][0], length),
    ]


def _normal(distribution: Float[np.ndarray, "contexts V"]) -> Float[np.ndarray, "contexts V"]:
    return distribution / distribution.sum(axis=-1, keepdims=True)


def _log(distribution: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    with np.errstate(divide="ignore"):
        return np.log(distribution)


def _kept(
    valid: Valid | None, tokens: Int[np.ndarray, "I K"], q: Float[np.ndarray, "I K V"]
) -> list[tuple[str, Int[np.ndarray, "I"]]]:
    """The numbers of valid tokens to try, with their names."""
    count, length = tokens.shape
    if valid is not None:
        return [("as many tokens as `valid` keeps", np.asarray(valid(tokens, _log(q))))]
    return [(f"{n} of {length} tokens", np.full(count, n)) for n in range(length + 1)]


def _sampled(
    distributions: list[DistributionPair], valid: Valid | None
) -> tuple[Drafts, list[_Group]]:
    """Every draft that q can propose, weighted by q."""
    drafts, groups = [], []
    for pair in distributions:
        length, vocab = len(pair.q), pair.p[0].shape[-1]
        tokens = all_tokens(vocab, length)
        q = distributions_along(pair.q, tokens, length)
        weight = np.take_along_axis(q, tokens[:, :, None], axis=2)[..., 0].prod(axis=1)
        tokens, q, weight = tokens[weight > 0], q[weight > 0], weight[weight > 0]
        p = distributions_along(pair.p, tokens, length + 1)
        for name, num_valid in _kept(valid, tokens, q):
            group = np.full(len(tokens), len(groups))
            groups.append(_Group(pair, f"{name} from q", sampled=True))
            drafts.append(
                Drafts(tokens, num_valid.astype(np.int32), _log(p), _log(q), group, weight)
            )
    return _join(drafts), groups


def _deterministic(
    distributions: list[DistributionPair], valid: Valid | None
) -> tuple[Drafts, list[_Group]]:
    """Every draft, each on its own: a deterministic drafter may propose any."""
    drafts, groups = [], []
    for pair in distributions:
        length, vocab = len(pair.q), pair.p[0].shape[-1]
        tokens = all_tokens(vocab, length)
        q = np.eye(vocab)[tokens]
        p = distributions_along(pair.p, tokens, length + 1)
        for name, num_valid in _kept(valid, tokens, q):
            group = len(groups) + np.arange(len(tokens))
            groups.extend(
                _Group(pair, f"{name} of the deterministic {draft}", sampled=False)
                for draft in tokens.tolist()
            )
            weight = np.ones(len(tokens))
            drafts.append(
                Drafts(tokens, num_valid.astype(np.int32), _log(p), _log(q), group, weight)
            )
    return _join(drafts), groups


def _join(drafts: list[Drafts]) -> Drafts:
    return Drafts(*(np.concatenate(parts) for parts in zip(*drafts, strict=True)))


def _compare(found: list[tuple[tuple[Drafts, list[_Group]], Outcomes]]) -> Check:
    worst, counterexample = 0.0, None
    for (drafts, groups), outcomes in found:
        accepted, allowed = outcomes.num_accepted, drafts.num_valid[outcomes.item]
        wrong = (accepted < 0) | (accepted > allowed)
        if np.any(wrong):
            first = np.argmax(wrong)
            counterexample = (
                f"num_accepted is {accepted[first]} where {allowed[first]} tokens were drafted"
            )
            return Check(False, float("nan"), counterexample)
        tables = [group.distributions.p for group in groups]
        got, want = output_distributions(drafts, outcomes, tables), target_distributions(tables)
        vocab = outcomes.distribution.shape[-1]
        for depth in range(1, len(tables[0]) + 1):
            shape = (len(groups), vocab**depth, -1)
            here, there = got.reshape(shape).sum(axis=2), want.reshape(shape).sum(axis=2)
            error = np.nan_to_num(np.abs(here - there), nan=np.inf)
            group, output = np.unravel_index(error.argmax(), error.shape)
            # Of errors that are much alike the one in the shorter output is easier to read.
            if error.max() > 1.01 * worst:
                worst = float(error.max())
                prefix = [int(i) for i in np.unravel_index(output, (vocab,) * depth)]
                counterexample = _counterexample(
                    groups[group], prefix, here[group, output], there[group, output]
                )
    passed = worst <= TOLERANCE
    return Check(passed, worst, None if passed else counterexample)


def _counterexample(group: _Group, prefix: list[int], got: float, want: float) -> str:
    """What came out wrong, in words, with the distributions of its last token."""
    before = prefix[:-1]
    context = contexts(
        np.array([before], np.int32), group.distributions.p[0].shape[-1], len(before)
    )[0]
    lines = [
        f"distributions {group.distributions.name!r}, drafting {group.drafted}: the output begins "
        f"with {prefix} "
        f"with probability {got:.6g}, and should with {want:.6g}",
        f"p after {before} = {np.round(group.distributions.p[len(before)][context], 4).tolist()}",
    ]
    if group.sampled and len(before) < len(group.distributions.q):
        distribution = group.distributions.q[len(before)][context]
        lines.append(f"q after {before} = {np.round(distribution, 4).tolist()}")
    return "\n".join(lines)


def _check_input(
    rule: str | sampling.Rule,
    topology: str,
    vocab: int,
    length: int,
    distributions: list[DistributionPair] | None,
    valid: Valid | None,
) -> sampling.Rule:
    rule = RULE.check("rule", rule)
    if not isinstance(rule, sampling.UniformRule | sampling.Coupled):
        raise InputError(
            f"rule={shown(rule)}: only a specjax.sampling.UniformRule is enumerated; subclass it"
        )
    Choice(("chain",)).check("topology", topology)
    Whole(2, 5, remedy="every output is enumerated, so use 2 to 5").check("vocab", vocab)
    Whole(1, 3, remedy="every draft is enumerated, so use 1 to 3").check("length", length)
    optional(Items(Instance(DistributionPair, "use DistributionPair"), least=1)).check(
        "distributions", distributions
    )
    optional(Function()).check("valid", valid)
    return rule
