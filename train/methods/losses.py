"""Losses of drafts per label, and the functions of which they are composed.

They return one value per label or row, not a sum.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.errors import InputError
from specjax.fields import CrossCheck, Number, Text


def soft_cross_entropy(
    logits: Float[Array, "... Vd"], distribution: Float[Array, "... Vd"]
) -> Float[Array, "..."]:
    """Return -sum p log q, given the logits of q; its gradient equals that of KL(p || q)."""
    return jax.nn.logsumexp(logits, axis=-1) - jnp.sum(distribution * logits, axis=-1)


def total_variation(
    logits: Float[Array, "... Vd"], distribution: Float[Array, "... Vd"]
) -> Float[Array, "..."]:
    """Return half of sum |p - q|, one minus the acceptance of rejection (Leviathan 2211.17192).

    `logits` are those of q. With a draft vocabulary, p must be the distribution conditioned on it.
    """
    return 0.5 * jnp.sum(jnp.abs(distribution - jax.nn.softmax(logits, axis=-1)), axis=-1)


def smooth_l1(x: Float[Array, "... D"], y: Float[Array, "... D"]) -> Float[Array, "..."]:
    """Return the mean over D of the Huber loss of x - y, with its corner at 1."""
    apart = jnp.abs(x - y)
    return jnp.mean(jnp.where(apart < 1, 0.5 * apart * apart, apart - 0.5), axis=-1)


class Truth(NamedTuple):
    """The reference for a draft: the target's log-probabilities, and the index of the data's token.

    The log-probabilities are None if only the data is the reference.
    """

    log_probs: Float[Array, "B A Vd"] | None
    token: Int[Array, "B A"]


LabelLoss = Callable[[Float[Array, "B A Vd"], Truth], Float[Array, "B A"]]
"""A function that returns the loss of each label, given a draft's logits and the reference."""


def kl_divergence(logits: Float[Array, "B A Vd"], truth: Truth) -> Float[Array, "B A"]:
    """Return KL(p || q) per label, where p is the target's distribution and q the draft's."""
    distribution = jnp.exp(truth.log_probs)
    return soft_cross_entropy(logits, distribution) + jnp.sum(
        distribution * truth.log_probs, axis=-1
    )


def variation(logits: Float[Array, "B A Vd"], truth: Truth) -> Float[Array, "B A"]:
    """Return per label the total variation distance of p and q over the draft vocabulary."""
    return total_variation(logits, jnp.exp(truth.log_probs))


def cross_entropy(logits: Float[Array, "B A Vd"], truth: Truth) -> Float[Array, "B A"]:
    """Return -log q(token) per label, where the token is the data's and q the draft's."""
    own = jnp.take_along_axis(logits, truth.token[:, :, None], axis=-1)[:, :, 0]
    return jax.nn.logsumexp(logits, axis=-1) - own


def reverse_kl(logits: Float[Array, "B A Vd"], truth: Truth) -> Float[Array, "B A"]:
    """Return KL(q || p), which prefers tokens that the target would accept."""
    logq = jax.nn.log_softmax(logits, axis=-1)
    return jnp.sum(jnp.exp(logq) * (logq - truth.log_probs), axis=-1)


def overlap(logits: Float[Array, "B A Vd"], truth: Truth) -> Float[Array, "B A"]:
    """Return sum min(p, q), the probability that rejection accepts a token drawn from q."""
    both = jnp.minimum(jax.nn.softmax(logits, axis=-1), jnp.exp(truth.log_probs))
    return jnp.sum(both, axis=-1)


def log_acceptance(logits: Float[Array, "B A Vd"], truth: Truth) -> Float[Array, "B A"]:
    """Return -log sum min(p, q) (LK loss, TorchSpec)."""
    return -jnp.log(jnp.maximum(overlap(logits, truth), _LEAST_OVERLAP))


def kl_then_variation(logits: Float[Array, "B A Vd"], truth: Truth) -> Float[Array, "B A"]:
    """Return a blend of KL(p || q) and the total variation, by the acceptance a = sum min(p, q).

    KL has the weight exp(-3 a), a constant for gradients: it teaches what is far from accepted,
    where the gradient of the variation vanishes (hybrid LK loss, TorchSpec).
    """
    acceptance = jax.lax.stop_gradient(overlap(logits, truth))
    weight = jnp.exp(-3.0 * acceptance)
    return weight * kl_divergence(logits, truth) + (1.0 - weight) * variation(logits, truth)


LOSSES: dict[str, LabelLoss] = {
    "ce": cross_entropy,
    "kl": kl_divergence,
    "reverse_kl": reverse_kl,
    "tv": variation,
    "lk": log_acceptance,
    "lk_blend": kl_then_variation,
}
"""The label losses by name: of q against the data's token (ce) or the target's distribution p."""
_LEAST_OVERLAP = 1e-6


@dataclass(frozen=True)
class NamedLosses:
    """The weighted sum of some of `LOSSES`, as pairs of a name and a weight; a label loss."""

    pairs: tuple[tuple[str, float], ...]

    def __call__(self, logits: Float[Array, "B A Vd"], truth: Truth) -> Float[Array, "B A"]:
        """Return the weighted sum of the losses of each label."""
        return sum(weight * LOSSES[name](logits, truth) for name, weight in self.pairs)


@dataclass(frozen=True)
class LossNames:
    """The field type of label losses: a name, or NAME:WEIGHT with commas for a sum, or a function.

    None stands for the loss that a method uses by itself.
    """

    def check(self, name: str, value: Any) -> LabelLoss | None:
        """Return None or a label loss; raise InputError for a text that names none."""
        if value is None or callable(value):
            return value
        weights: dict[str, float] = {}
        for pair in Text().check(name, value).split(","):
            loss, mark, weight = map(str.strip, pair.partition(":"))
            if loss not in LOSSES or loss in weights:
                raise InputError(
                    f"{name}={value!r}: use {', '.join(LOSSES)}, or several of them with weights, "
                    "as ce:0.1,tv:0.9"
                )
            with suppress(ValueError):
                weight = float(weight) if mark else 1.0
            weights[loss] = Number(above=True).check(f"{name}.{loss}", weight)
        return NamedLosses(tuple(weights.items()))


LossName = Annotated[LabelLoss | None, LossNames()]
"""The label loss of a method: names with weights, a function, or None."""


Parts = dict[str, tuple[LabelLoss, float]]
"""The label losses of which a method's loss is the sum, by name, each with its weight."""
Settings = TypeVar("Settings")


def with_label_loss(settings: Settings, label_loss: LabelLoss | None) -> Settings:
    """Return the settings of a loss, a dataclass, with another label loss if one is given."""
    return settings if label_loss is None else replace(settings, label_loss=label_loss)


def parts_of(loss: LabelLoss) -> Parts:
    """Return the parts of a label loss by name, each with its weight."""
    if isinstance(loss, NamedLosses):
        return {name: (LOSSES[name], weight) for name, weight in loss.pairs}
    return {"label_loss": (loss, 1.0)}


def parts_for(labels: str, label_loss: LabelLoss | None = None) -> Parts:
    """Return the parts of `label_loss` or, for None, of the usual loss of a reference.

    That is the cross-entropy with the "tokens" of the data, or the KL divergence from the target's
    "distributions".
    """
    if label_loss is not None:
        return parts_of(label_loss)
    name = "kl" if labels == "distributions" else "ce"
    return {name: (LOSSES[name], 1.0)}


def reference_check(section: str) -> CrossCheck:
    """Return the check that a section's `label_loss` reads no distributions if it has none.

    The section has the field `labels`, which is "tokens" or "distributions".
    """

    def check(labels: str, loss: LabelLoss | None) -> None:
        names = [name for name, _ in loss.pairs] if isinstance(loss, NamedLosses) else []
        others = [name for name in names if name != "ce"]
        if labels == "tokens" and others:
            raise InputError(
                f"{section}.label_loss={others[0]!r}: reads the target's distributions; use "
                f"{section}.labels=distributions, or {section}.label_loss=ce"
            )

    return CrossCheck((f"{section}.labels", f"{section}.label_loss"), check)


@dataclass(frozen=True, kw_only=True)
class PositionWeights:
    """How the positions of a draft are weighted; a base of the settings of a method's loss."""

    weights: Literal["decay", "dpace"] = "decay"
    """The weights of a draft's positions: falling, or by what its tokens' probabilities contribute
    to the accepted length (D-PACE, 2605.18810).
    """
    alpha: Annotated[float, Number(0.0, 1.0, above=True)] = 0.5
    """With weights=dpace, a probability q counts as (1 - alpha) q + alpha."""

    @property
    def dpace_alpha(self) -> float | None:
        """The `alpha` of D-PACE's weights; None if the weights fall instead."""
        return self.alpha if self.weights == "dpace" else None

    def of_drafts(self, decay: float, count: int) -> Float[Array, "K"]:
        """Return the weights `decay` ** i of K = `count` drafts, or 1 if D-PACE weighs them."""
        return jnp.float32(decay if self.dpace_alpha is None else 1.0) ** jnp.arange(count)


def dpace_weights(
    probabilities: Float[Array, "K B A"], counted: Bool[Array, "K B A"], alpha: float
) -> Float[Array, "K B A"]:
    """Return the weights of a draft's K positions, given the probabilities q of its true tokens.

    D-PACE (2605.18810): with s = (1 - alpha) q + alpha, position k has the weight sum over m >= k
    of s_0 ... s_m, what the draft's expected length gains by it; a constant for gradients. A draft
    ends before the first position that is not `counted`: it has no label, or a label outside the
    draft vocabulary, which can never be accepted.
    """
    smoothed = (1 - alpha) * jax.lax.stop_gradient(probabilities) + alpha
    reached = jnp.cumprod(jnp.where(counted, smoothed, 0.0), axis=0)
    return jnp.cumsum(reached[::-1], axis=0)[::-1]
