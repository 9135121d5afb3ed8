"""Verification of a draft: one pass of the target over the window, then a rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from specjax import sampling
from specjax.core.cache import Window
from specjax.core.drafter import TargetPass, warp_rows
from specjax.core.plan import LoopPlan
from specjax.core.processor import largest_logits, processed
from specjax.core.state import State
from specjax.errors import InputError, one_line, shown
from specjax.trees import AnyTopology, Draft, Topology


class VerifiedDraft(NamedTuple):
    """The result of verifying a draft at one compiled width; P is the longest path in that width.

    `tokens` are the accepted ones and, after them, the target's next token. `numbers` marks those
    before which the largest logit is finite, and `some_left`, unless None, those before which
    processors leave some token. `features` are those along the path, and `target_pass` has the
    features of the whole window, if a drafter reads any.
    """

    verification: sampling.Verification
    tokens: Int[Array, "B P+1"]
    numbers: Bool[Array, "B P+1"]
    some_left: Bool[Array, "B P+1"] | None
    window: Window
    features: dict[str, Float[Array, "B P+1 D"]]
    target_pass: TargetPass | None
    logprobs: Float[Array, "B P+1"] | None
    overlaps: Float[Array, "B longest"] | None


def check_rule_shapes(
    rule: sampling.Rule, rows: int, widths: Sequence[int], vocab_size: int
) -> None:
    """Raise InputError unless a user-defined rule returns the required shapes at every width.

    The rule is called as in a round of `rows` rows, but evaluated abstractly, so nothing is
    computed.
    """
    remedy = (
        "decide returns Decision(num_accepted [B] whole numbers, next_logp [B, V] "
        "log-probabilities), verify a Verification; see specjax.testing.check_rule"
    )
    for width in widths:
        tokens = jax.ShapeDtypeStruct((rows, width - 1), jnp.int32)
        count = jax.ShapeDtypeStruct((rows,), jnp.int32)
        logp = jax.ShapeDtypeStruct((rows, width, vocab_size), jnp.float32)
        uniforms = jax.ShapeDtypeStruct((rows, width - 1), jnp.float32)
        keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), rows))

        def decide(tokens: Any, count: Any, logp: Any, uniforms: Any) -> Any:
            draft = sampling.one_hot_distributions(tokens, vocab_size, jnp.float32)
            return rule.decide(tokens, count, sampling.by_slot(logp), draft, uniforms)

        def verify(keys: Any, tokens: Any, count: Any, logp: Any) -> Any:
            drafted = sampling.chain_drafted(tokens, count)
            target = sampling.Target(sampling.by_slot(logp), count, vocab_size)
            return rule.verify(keys, drafted, target)

        calls: list[tuple[Any, tuple, dict[str, tuple]]] = []
        if isinstance(rule, sampling.UniformRule):
            wanted = {"num_accepted": (jnp.integer, (rows,))}
            wanted["next_logp"] = (jnp.floating, (rows, vocab_size))
            calls.append((decide, (tokens, count, logp, uniforms), wanted))
        wanted = {"path_slots": (jnp.integer, (rows, width - 1))}
        wanted |= dict.fromkeys(("num_accepted", "next_token"), (jnp.integer, (rows,)))
        calls.append((verify, (keys, tokens, count, logp), wanted))
        for call, arguments, wanted in calls:
            returned = _shapes_returned(rule, call, arguments, width, remedy)
            for name, (kind, shape) in wanted.items():
                part = getattr(returned, name, None)
                if getattr(part, "shape", None) != shape or not jnp.issubdtype(part.dtype, kind):
                    raise InputError(
                        f"verify={shown(rule)}: {call.__name__} returns {shown(returned, 120)}; "
                        f"{remedy}"
                    )


def _shapes_returned(
    rule: sampling.Rule, call: Any, arguments: tuple, width: int, remedy: str
) -> Any:
    """Return the shapes that `call`, a function of a rule, returns for arrays of these shapes.

    Raises InputError, ending with `remedy`, if the call fails.
    """
    returned: Any = None

    def keep(*arrays: Any) -> None:
        nonlocal returned
        returned = call(*arrays)

    try:
        hash(rule)  # a rule is part of the key of compiled programs
        jax.eval_shape(keep, *arguments)
    except Exception as error:  # a rule is the user's own code and may raise anything
        raise InputError(
            f"verify={shown(rule)}: fails for drafts of {width - 1} tokens "
            f"({type(error).__name__}: {one_line(error):.200}); {remedy}"
        ) from error
    return returned


def verify_draft(
    plan: LoopPlan,
    params: Any,
    state: State,
    draft: Draft,
    keys: Key[Array, "B"],
    width: int,
) -> VerifiedDraft:
    """Run the target over the root and the first `width` - 1 nodes, and verify these nodes.

    `params` are the target's parameters, and `keys` are from `noise_keys`. All drafted nodes must
    be among the first `width` - 1. Where the draft has a partial pass, only the remaining layers
    run; at width 1 all layers do, since the drafter may not have run.
    """
    nodes = width - 1
    root = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)
    topology = draft.topology.first(nodes)
    window_tokens = jnp.concatenate([root, draft.tokens[:, :nodes]], axis=1)
    partial = draft.partial if nodes else None
    resumed: dict[str, Any] = {}
    if partial is None:
        window = plan.target.make_window(root.shape[0], width)
    else:
        window = partial.window.at_slots(slice(width))
        resumed = {"first_layer": partial.num_layers, "states": partial.states[:, :width]}
    result = plan.target.extend(
        params,
        window_tokens,
        (state.length - 1)[:, None] + topology.row_depths,
        state.cache,
        window,
        0,
        jnp.asarray(topology.row_ancestors),
        features=(*plan.features, *plan.drafter.pass_features),
        **resumed,
    )
    logits = result.logits
    # A token may be ruled out (-inf); NaN, inf and -inf alone leave no finite largest one.
    largest = jnp.max(logits, axis=-1, keepdims=True)
    numbers = jnp.isfinite(largest)[:, :, 0]
    tree = as_drafted(draft, topology)
    logits_at = processed(
        plan.processors, state.processors, sampling.by_slot(logits), tree.tokens, topology
    )

    def target(slots: Int[Array, "B"]) -> Float[Array, "B V"]:
        own = logits_at(slots)
        if plan.processors:
            # Where no token can follow, the path is cut afterwards. Until then it needs some
            # distribution: without one, `block` would give no path that ends there its probability.
            some_left = jnp.isfinite(jnp.max(own, axis=1, keepdims=True))
            own = jnp.where(some_left, own, 0)
        return warp_rows(own, state.rows.sampling, plan.flags)

    if not plan.flags.sampled and plan.rule.greedy_walk and not plan.processors:
        verification = sampling.walk_greedy(tree, sampling.argmax(logits, largest))
    elif not plan.flags.sampled and plan.rule.greedy_walk:
        verification = sampling.walk(tree, lambda slots, depth: sampling.argmax(logits_at(slots)))
    else:
        distributions = sampling.Target(target, state.length, logits.shape[2])
        verification = plan.rule.verify(keys, tree, distributions)

    path = verification.path_slots
    slots = jnp.pad(jnp.maximum(path, 0), ((0, 0), (1, 0)))
    after = jnp.arange(path.shape[1] + 1)[None, :] >= verification.num_accepted[:, None]
    proposed = jnp.take_along_axis(window_tokens, jnp.pad(slots[:, 1:], ((0, 0), (0, 1))), axis=1)
    tokens = jnp.where(after, verification.next_token[:, None], proposed)
    logprobs = None
    if plan.logprobs and plan.processed_logprobs:
        greedy = state.rows.sampling.temperature <= 0

        def chosen(slots: Int[Array, "B"]) -> Float[Array, "B V"]:
            # A greedy row's temperature would leave a single token.
            own = jax.nn.log_softmax(logits_at(slots), axis=-1)
            return jnp.where(greedy[:, None], own, target(slots)) if plan.flags.sampled else own

        logprobs = _logprobs(chosen, slots, tokens, verification.num_accepted)
    elif plan.logprobs:
        norm = jax.scipy.special.logsumexp(logits, axis=-1, keepdims=True)
        along = jnp.take_along_axis(logits - norm, slots[:, :, None], axis=1)
        logprobs = jnp.take_along_axis(along, tokens[:, :, None], axis=2)[:, :, 0]
    target_pass = None
    if plan.drafter.pass_features:
        computed = jnp.pad(draft.valid[:, :nodes], ((0, 0), (1, 0)), constant_values=True)
        parents = jnp.broadcast_to(topology.row_parents, (len(root), nodes))
        target_pass = TargetPass(
            window_tokens,
            jnp.pad(parents, ((0, 0), (1, 0))),
            computed & state.active[:, None],
            {name: result.features[name] for name in plan.drafter.pass_features},
        )
    numbers, some_left = jnp.take_along_axis(numbers, slots, axis=1), None
    along_path = largest_logits(plan.processors, logits_at, slots, verification.num_accepted)
    if along_path is not None:
        some_left = along_path != -jnp.inf
        numbers &= jnp.isfinite(along_path) | ~some_left
    return VerifiedDraft(
        verification,
        tokens,
        numbers,
        some_left,
        result.window,
        {
            name: jnp.take_along_axis(result.features[name], slots[:, :, None], axis=1)
            for name in plan.features
        },
        target_pass,
        logprobs,
        _overlaps(tree, verification, target, draft.topology.depth) if plan.overlaps else None,
    )


def _logprobs(
    distributions: sampling.Distributions,
    slots: Int[Array, "B T"],
    tokens: Int[Array, "B T"],
    accepted: Int[Array, "B"],
) -> Float[Array, "B T"]:
    """Return the log-probability of the token after each of a path's slots.

    Entries after the first `accepted[b]` + 1 may be 0.
    """

    def visit(depth: Int[Array, ""], found: Float[Array, "B T"]) -> Float[Array, "B T"]:
        slot, token = (
            lax.dynamic_index_in_dim(each, depth, axis=1, keepdims=False)
            for each in (slots, tokens)
        )
        own = jnp.take_along_axis(distributions(slot), token[:, None], axis=1).astype(found.dtype)
        return lax.dynamic_update_slice(found, own, (0, depth))

    return lax.fori_loop(0, jnp.max(accepted) + 1, visit, jnp.zeros(slots.shape, jnp.float32))


def as_drafted(draft: Draft, topology: AnyTopology) -> sampling.Drafted:
    """Return the first nodes of a draft in the form that rules read.

    `topology` is the shape of these nodes.
    """
    nodes, static = topology.num_nodes, isinstance(topology, Topology)
    parents = topology.parents if static else topology.row_parents
    return sampling.Drafted(
        draft.tokens[:, :nodes],
        draft.valid[:, :nodes],
        parents,
        topology.depth,
        draft.logq_row[:, :nodes],
        draft.logq if nodes else None,
        draft.topology.parents if static else None,
    )


def _overlaps(
    drafted: sampling.Drafted,
    verification: sampling.Verification,
    target: sampling.Distributions,
    longest: int,
) -> Float[Array, "B P"]:
    """Return sum_x min(p, q) at each slot of the path, q being the distribution of its first child.

    Slots without a child, and those after the path, have NaN.
    """
    batch = drafted.tokens.shape[0]
    nothing = jnp.full((batch, longest), jnp.nan)
    if not drafted.depth:
        return nothing
    path = jnp.pad(verification.path_slots, ((0, 0), (1, 0)))

    def visit(depth: Int[Array, ""], found: Float[Array, "B P"]) -> Float[Array, "B P"]:
        slots = jnp.maximum(sampling.pick(path, jnp.broadcast_to(depth, (batch,))), 0)
        children = drafted.valid & (drafted.parent_slots == slots[:, None])
        tested = children.any(axis=1) & (depth <= verification.num_accepted)
        logp = target(slots)
        first = jnp.argmax(children, axis=1)
        logq = sampling.node_distribution(drafted, first, logp.shape[1], logp.dtype)
        share = sampling.overlap(logp, logq)
        return found.at[:, depth].set(jnp.where(tested, share, jnp.nan))

    return lax.fori_loop(0, drafted.depth, visit, nothing)
