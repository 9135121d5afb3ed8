"""A test of whether a verification rule is exact, by enumeration instead of sampling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from specjax import sampling
from specjax.core.verify import check_rule_shapes
from specjax.engine.options import RULE
from specjax.errors import InputError, shown
from specjax.fields import Choice, Function, Instance, Items, Whole, optional
from specjax.testing.enumeration import (
    Decide,
    Drafts,
    NotAStepFunction,
    Outcomes,
    Table,
    all_tokens,
    contexts,
    decisions,
    distributions_by_slot,
    output_distributions,
    target_distributions,
    walks,
)
from specjax.trees import Topology, chain_topology

TOLERANCE = 1e-10
_MOST_DRAFTS = 1024

Valid = Callable[[Int[np.ndarray, "I K"], Float[np.ndarray, "I K V"]], Int[np.ndarray, "I"]]


@dataclass(frozen=True)
class Check:
    """The result of `check_rule`; `max_error` is the largest error of an output's probability."""

    passed: bool
    max_error: float
    counterexample: str | None


@dataclass(frozen=True)
class DistributionPair:
    """A target distribution p and a draft distribution q of a chain, by context.

    Entry d has shape [V**d, V], one row for each context of d tokens, with the first token varying
    slowest. p has one entry more than q, for the token after the draft.
    """

    name: str
    p: Table
    q: Table

    @classmethod
    def constant(
        cls, name: str, p: Float[np.ndarray, "V"], q: Float[np.ndarray, "V"], length: int
    ) -> DistributionPair:
        """Return a pair with the same p and q in every context, for drafts of `length` tokens."""
        rows = [len(p) ** depth for depth in range(length + 1)]
        return cls(
            name,
            tuple(np.tile(p, (count, 1)) for count in rows),
            tuple(np.tile(q, (count, 1)) for count in rows[:-1]),
        )


@dataclass(frozen=True)
class _Group:
    """A set of drafts whose outputs have one distribution, and their description in messages."""

    distributions: DistributionPair
    drafted: str
    drafters: int


def check_rule(
    rule: str | sampling.Rule,
    topology: str | Topology = "chain",
    vocab: int = 4,
    *,
    length: int = 3,
    distributions: list[DistributionPair] | None = None,
    valid: Valid | None = None,
) -> Check:
    """Test whether a rule keeps the target's distribution: P(output) = product of p, to 1e-10.

    `rule` is the name of a rule, or a `sampling.UniformRule` whose `decide(tokens [B,K], num_valid
    [B], target, draft, uniforms [B,K]) -> Decision(num_accepted [B], next_logp [B,V])` is tested:

    - row b drafted `tokens[b, :num_valid[b]]`; later entries were never drafted;
    - `target(slots [B])` and `draft(slots [B])` are log-probabilities [B,V], p and q of the token
      after slot `slots[b]`, where slot 0 is the last committed token and slot i is `tokens[:, i -
      1]`; a deterministic draft has one-hot q;
    - `uniforms` in [0, 1) are independent of each other and of everything else, and the decision
      must be a step function of each with at most one step while the others are fixed;
    - the output is the first `num_accepted` tokens, then one token drawn from `next_logp`.

    With a branching `topology`, for rules that verify trees, the nodes are drawn without
    replacement from q, or are arbitrary, or only the first of siblings is drawn and the others are
    arbitrary or from another drafter's q, so that siblings may be equal.

    All drafts of up to `length` tokens are tested on many distributions (p = q, disjoint supports,
    zeros, one-hot, reduced draft vocabularies, random by context), sampled and deterministic, with
    every number of valid tokens; or on your own `distributions`, which then set the sizes. To test
    a drafter that stops early, `valid(tokens [I,K], logq [I,K,V]) -> [I]` returns how many tokens
    of each draft it keeps. Raises InputError for an unknown rule or topology and for sizes out of
    range.
    """
    rule, topology = check_input(rule, topology, vocab, length, distributions, valid)
    length = topology.depth
    if type(rule) not in map(type, sampling.RULES.values()):
        check_rule_shapes(rule, 2, (length + 1,), vocab)
    distributions = example_distributions(vocab, length) if distributions is None else distributions
    return check_outputs(rule, topology, distributions, valid)


def check_outputs(
    rule: sampling.Rule,
    topology: Topology,
    distributions: list[DistributionPair],
    valid: Valid | None = None,
    verified: Callable[[Drafts, list[DistributionPair]], Drafts] | None = None,
) -> Check:
    """Return whether outputs have the distribution p of each pair, for all drafts of a topology.

    `rule` and `valid` are as of `check_rule`. `verified` gets drafts, and the pair of each of their
    groups, and returns them with the log-probabilities of the target that the rule is given; by
    default these are those of the pairs.
    """
    if topology.is_chain:
        topology = chain_topology(len(distributions[0].q))
    results = []
    try:
        for drafter in _mixtures(topology):
            drafts = _drafts(topology, drafter, distributions, valid)
            if verified is not None:
                pairs = [group.distributions for group in drafts[1]]
                drafts = verified(drafts[0], pairs), drafts[1]
            if not isinstance(rule, sampling.Coupled):
                results.append((drafts, decisions(decision_function(rule, topology), drafts[0])))
            # Drafts without distributions are verified by the walk.
            walk = isinstance(rule, sampling.Coupled | sampling.Rejection)
            walk |= isinstance(rule, sampling.Block) and not topology.is_chain
            if walk and (drafter < 0).all():
                results.append((drafts, walks(drafts[0])))
    except NotAStepFunction:
        counterexample = (
            "the decision changes more than once while one uniform goes from 0 to 1: "
            "use each uniform once, against one threshold"
        )
        return Check(False, float("nan"), counterexample)
    return _compare(results)


def _mixtures(topology: Topology) -> list[Int[np.ndarray, "N"]]:
    """Return the ways to try in which nodes are drawn: the drafter of each node, -1 for none.

    One drafter draws all nodes, or none. In a tree it also draws only the first child of each
    parent, while the others are arbitrary tokens or are drawn by a second drafter.
    """
    nodes = topology.num_nodes
    tried = [np.zeros(nodes, int), np.full(nodes, -1)]
    if not topology.is_chain:
        first = [p not in topology.parents[:i] for i, p in enumerate(topology.parents)]
        tried += [np.where(first, 0, other) for other in (-1, 1)]
    return tried


def decision_function(rule: sampling.Rule, topology: Topology) -> Decide:
    """Return a function from uniforms to a rule's decision: the last slot, and what follows it."""

    def of_chain(drafted: Any, target: Any, uniforms: Any) -> tuple[Any, Any]:
        draft = drafted.distributions(drafted.logq.shape[-1], drafted.logq.dtype)
        return rule.decide(drafted.tokens, drafted.num_valid, target, draft, uniforms)

    def of_tree(drafted: Any, target: Any, uniforms: Any) -> tuple[Any, Any]:
        done = rule.decide_tree(drafted, target, uniforms)
        path = jnp.pad(jnp.maximum(done.path_slots, 0), ((0, 0), (1, 0)))
        return sampling.pick(path, done.num_accepted), done.next_logp

    def of_typical(drafted: Any, target: Any, uniforms: Any) -> tuple[Any, Any]:
        del uniforms
        *_, last = sampling.typical(drafted, target, rule.epsilon, rule.delta)
        return last, target(last)

    if isinstance(rule, sampling.Typical):
        return of_typical
    return of_chain if topology.is_chain else of_tree


def example_distributions(vocab: int, length: int) -> list[DistributionPair]:
    """Return pairs of distributions that together cover every branch of a rule.

    They are for drafts of `length` tokens out of `vocab`.
    """
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


def _second(q: Float[np.ndarray, "... V"]) -> Float[np.ndarray, "... V"]:
    """Return a second drafter's q: the first drafter's, shifted by one token."""
    return np.roll(q, 1, axis=-1)


def _normal(distribution: Float[np.ndarray, "contexts V"]) -> Float[np.ndarray, "contexts V"]:
    """Return distributions normalized to a sum of one."""
    return distribution / distribution.sum(axis=-1, keepdims=True)


def _log(distribution: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """Return logarithms, -inf for 0, without a warning."""
    with np.errstate(divide="ignore"):
        return np.log(distribution)


def _kept(
    topology: Topology,
    valid: Valid | None,
    tokens: Int[np.ndarray, "I N"],
    q: Float[np.ndarray, "I Q V"],
) -> list[tuple[str, Bool[np.ndarray, "I N"]]]:
    """Return masks of valid nodes, one for each way to try, with a name."""
    count, nodes = tokens.shape
    if valid is not None:
        number = np.asarray(valid(tokens, _log(q[:, :-1])))
        tried = [("as many tokens as `valid` keeps", number)]
    else:
        # Trees have more ways in which nodes are missing, so that only two of them are tried.
        numbers = range(nodes + 1) if topology.is_chain else (nodes - 1, nodes)
        tried = [(f"{n} of {nodes} tokens", np.full(count, n)) for n in numbers]
    return [(name, np.arange(nodes)[None] < number[:, None]) for name, number in tried]


def _drafts(
    topology: Topology,
    drafter: Int[np.ndarray, "N"],
    distributions: list[DistributionPair],
    valid: Valid | None,
) -> tuple[Drafts, list[_Group]]:
    """Return every draft of a shape, and the groups of drafts.

    Nodes that a drafter drew are weighted by q; other nodes may be any tokens.
    """
    drafts, groups = [], []
    sampled = drafter >= 0
    source = "q" if drafter.max() < 1 else "the q of two drafters"
    for pair in distributions:
        vocab = pair.p[0].shape[-1]
        tokens = all_tokens(vocab, topology.num_nodes)
        p = distributions_by_slot(pair.p, topology, tokens)
        q = distributions_by_slot(pair.q, topology, tokens)
        by_drafter = np.stack([q, _second(q)] if drafter.max() > 0 else [q], axis=1)
        weight, possible = draw_weights(topology, drafter, tokens, by_drafter)
        drawn = weight > 0
        tokens, p, by_drafter = tokens[drawn], p[drawn], by_drafter[drawn]
        q = by_drafter.reshape(len(tokens), -1, vocab)
        weight, possible = weight[drawn], possible[drawn]
        # There is one group for each choice of the tokens that are not drawn.
        fixed, group = np.zeros((1, 0), int), np.zeros(len(tokens), int)
        if not sampled.all():
            fixed, group = np.unique(tokens[:, ~sampled], axis=0, return_inverse=True)
        for name, kept in _kept(topology, valid, tokens, q):
            names = [
                f"{name} {f'of the deterministic {ids.tolist()}' if ids.size else f'from {source}'}"
                for ids in fixed
            ]
            drafts.append(
                Drafts(
                    topology,
                    drafter,
                    tokens,
                    kept & possible,
                    _log(p),
                    _log(q),
                    len(groups) + group.ravel(),
                    weight,
                )
            )
            groups.extend(_Group(pair, name, int(drafter.max()) + 1) for name in names)
    fields = zip(*(each[2:] for each in drafts), strict=True)
    return Drafts(topology, drafter, *(np.concatenate(arrays) for arrays in fields)), groups


def draw_weights(
    topology: Topology,
    drafter: Int[np.ndarray, "N"],
    tokens: Int[np.ndarray, "I N"],
    q: Float[np.ndarray, "I drafters W V"],
) -> tuple[Float[np.ndarray, "I"], Bool[np.ndarray, "I N"]]:
    """Return the probability of the drawn tokens, and a mask of the nodes that exist.

    A drafter draws siblings without replacement; once its q has no token left, there are no further
    siblings and nothing below them. Of the tokens that stand in for such a node only one is
    counted.
    """
    count, nodes = tokens.shape
    weight, possible = np.ones(count), np.ones((count, nodes + 1), bool)
    for node in range(nodes):
        parent = topology.parents[node]
        possible[:, node + 1] = possible[:, parent]
        if drafter[node] < 0:
            continue
        left = q[:, drafter[node], parent].copy()
        for before in range(node):
            if topology.parents[before] == parent and drafter[before] == drafter[node]:
                np.put_along_axis(left, tokens[:, before : before + 1], 0.0, axis=1)
        mass = left.sum(axis=1)
        possible[:, node + 1] &= mass > 0
        drawn = np.take_along_axis(left, tokens[:, node : node + 1], axis=1)[:, 0]
        drawn = drawn / np.where(mass > 0, mass, 1.0)
        weight *= np.where(possible[:, node + 1], drawn, tokens[:, node] == 0)
    return weight, possible[:, 1:]


def _compare(results: list[tuple[tuple[Drafts, list[_Group]], Outcomes]]) -> Check:
    """Return the comparison of output probabilities with the target's, over all results."""
    worst, counterexample = 0.0, None
    for (drafts, groups), outcomes in results:
        there = np.pad(drafts.valid, ((0, 0), (1, 0)), constant_values=True)[outcomes.item]
        inside = np.clip(outcomes.slot, 0, there.shape[1] - 1)
        wrong = (inside != outcomes.slot) | ~np.take_along_axis(there, inside[:, None], axis=1)[
            :, 0
        ]
        if np.any(wrong):
            first = np.argmax(wrong)
            counterexample = (
                f"num_accepted is {outcomes.slot[first]} where {there[first, 1:].sum()} tokens "
                "were drafted"
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
            # Of similar errors, the one in the shorter output is easier to read.
            if error.max() > 1.01 * worst:
                worst = float(error.max())
                prefix = [int(i) for i in np.unravel_index(output, (vocab,) * depth)]
                counterexample = _counterexample(
                    groups[group], prefix, here[group, output], there[group, output]
                )
    passed = worst <= TOLERANCE
    return Check(passed, worst, None if passed else counterexample)


def _counterexample(group: _Group, prefix: list[int], got: float, want: float) -> str:
    """Return a description of a wrong output, with the distributions of its last token.

    `got` and `want` are the output's probability under the rule and under the target.
    """
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
    if group.drafters and len(before) < len(group.distributions.q):
        distribution = group.distributions.q[len(before)][context]
        lines.append(f"q after {before} = {np.round(distribution, 4).tolist()}")
        if group.drafters > 1:
            other = np.round(_second(distribution), 4).tolist()
            lines.append(f"the second drafter's q after {before} = {other}")
    return "\n".join(lines)


def check_input(
    rule: str | sampling.Rule,
    topology: str | Topology,
    vocab: int,
    length: int,
    distributions: list[DistributionPair] | None,
    valid: Valid | None,
) -> tuple[sampling.Rule, Topology]:
    """Return the rule and the topology, after checking all arguments of `check_rule`."""
    rule = RULE.check("rule", rule)
    known = (sampling.UniformRule, *map(type, sampling.RULES.values()))
    if type(rule).verify not in [rule_type.verify for rule_type in known]:
        raise InputError(
            f"rule={shown(rule)}: the check enumerates decide of a specjax.sampling.UniformRule; "
            "leave its verify as it is"
        )
    Whole(2, 5, remedy="every output is enumerated, so use 2 to 5").check("vocab", vocab)
    Whole(1, 3, remedy="every draft is enumerated, so use 1 to 3").check("length", length)
    optional(Items(Instance(DistributionPair, "use DistributionPair"), least=1)).check(
        "distributions", distributions
    )
    optional(Function()).check("valid", valid)
    if not isinstance(topology, Topology):
        Choice(("chain",)).check("topology", topology)
        return rule, chain_topology(length)
    if topology.is_chain:
        return rule, topology
    if not rule.takes_trees:
        raise InputError(f"topology={topology.parents}: {rule.name} verifies chains; use rejection")
    if vocab**topology.num_nodes > _MOST_DRAFTS:
        raise InputError(
            f"topology={topology.parents}: its {topology.num_nodes} nodes make more than "
            f"{_MOST_DRAFTS} drafts of {vocab} tokens, and every draft is enumerated; use fewer"
        )
    if valid is not None:
        raise InputError("valid is given: it stops chains; leave it out with another topology")
    return rule, topology
