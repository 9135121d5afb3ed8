"""LayerSkip: train a model so that its first layers draft well (Elhoushi et al. 2404.16710).

Layers are dropped at random, later ones more often, and the final norm and head learn to read the
output of earlier layers. No parameter is added; `early_exit` drafts with the result.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from specjax.errors import InputError
from specjax.fields import Items, Number, Whole, optional
from specjax.loading.model import Model
from specjax.models.decoder import Decoder
from specjax.models.features import LAYER_INPUTS
from train.data.batches import Batch
from train.methods.blockwise_loss import Scores, Scoring, Teacher, score_drafts
from train.methods.losses import LossName, Parts, cross_entropy, parts_for
from train.methods.method import Measures, Method, measure
from train.methods.packed_rows import ahead, at_rows, features_of, label_ahead
from train.methods.target_layers import in_float32, with_params

_LOG2 = float(np.log(2))


@dataclass(frozen=True)
class LayerSkipOptions:
    """Layer dropout, the loss of early exits, and the exits that are measured.

    Layers are numbered from 0, and an exit by the number of layers before it, which is the
    drafter's `exit_layer`.
    """

    max_dropout: Annotated[float, Number(0.0, 0.999999, remedy="use a number in [0, 1)")] = 0.1
    """p_max: the probability with which a sequence leaves out the last layer."""
    dropout_schedule: Literal["constant", "exponential"] = "constant"
    """S(t): 1, for a trained model; or rising from 0 to 1, from scratch."""
    e_scale: Annotated[float, Number()] = 0.2
    """The scale of the losses of early exits beside that of the last layer; 0 = none."""
    curriculum: Literal["rotational", "gradual", "decoded"] = "rotational"
    """Exits in the loss: every rotation-th, others in each step; from the last one down; or the
    decoded one alone, for short runs.
    """
    rotation: Annotated[int, Whole(1)] = 8
    """R: of the rotational curriculum, steps until every exit was in the loss."""
    labels: Literal["tokens", "distributions"] = "tokens"
    """Tokens of the data, or distributions of the original model, so that it stays itself."""
    label_loss: LossName = None
    """A loss that replaces the one that labels selects: ce, kl, reverse_kl, tv, lk, lk_blend, or
    several as ce:0.1,tv:0.9. All but ce read distributions.
    """
    exit_layer: Annotated[int | None, optional(Whole(1))] = None
    """The exit that is decoded, and of which tau_sim is; a third of the layers by default."""
    exits: Annotated[tuple[int, ...], Items(Whole(1))] = ()
    """Further exits whose losses and acceptance are measured; by default four of the first 2/3."""
    depths: Annotated[int, Whole(1, 64)] = 4
    """Drafts per round that are simulated."""


@dataclass(frozen=True)
class LayerSkipLoss(LayerSkipOptions):
    """The loss for a model of `num_layers` in a run whose schedules have `steps` steps."""

    num_layers: int = 2
    steps: int = 1

    @property
    def decoded_exit(self) -> int:
        """The exit that is decoded: the number of layers before it."""
        return self.exit_layer or max(1, self.num_layers // 3)

    @property
    def measured(self) -> tuple[int, ...]:
        """The exits that an evaluation measures, ascending; the last layer is not among them."""
        shares = (1 / 6, 1 / 3, 1 / 2, 2 / 3)
        some = self.exits or tuple(round(share * self.num_layers) for share in shares)
        exits = {*some, self.decoded_exit}
        return tuple(sorted(exit for exit in exits if 0 < exit < self.num_layers))

    def dropout(self, step: Int[Array, ""]) -> Float[Array, "n"]:
        """Return for each of the n layers the probability of leaving it out at a step.

        In the paper this is p_{l,t} = S(t) D(l) p_max.
        """
        depth = jnp.arange(self.num_layers, dtype=jnp.float32) / max(self.num_layers - 1, 1)
        done = jnp.float32(1)
        if self.dropout_schedule == "exponential":
            done = jnp.clip(jnp.asarray(step, jnp.float32) / max(self.steps - 1, 1), 0.0, 1.0)
        rising = jnp.expm1(_LOG2 * done)
        return self.max_dropout * rising * jnp.expm1(_LOG2 * depth)

    def trained(self, step: Int[Array, ""]) -> tuple[Int[Array, "n"], Bool[Array, "n"]]:
        """Return n exits, and a mask of those that are in the loss of a step.

        The last layer, which is always in the loss, is not among them. n is the same for all steps.
        The mask is the paper's C(t, l).
        """
        count = self.num_layers - 1
        if self.curriculum == "decoded":
            return jnp.asarray([self.decoded_exit]), jnp.ones(1, bool)
        if self.curriculum == "gradual":
            exits = jnp.arange(1, count + 1)
            opened = jnp.asarray(step, jnp.float32) * (2 * self.num_layers / self.steps)
            return exits, exits > count - jnp.floor(opened)
        turns = -(-count // self.rotation)
        exits = 1 + step % self.rotation + self.rotation * jnp.arange(turns)
        return jnp.minimum(exits, count), exits <= count

    def weights(self, exits: Int[Array, "n"], enabled: Bool[Array, "n"]) -> Float[Array, "n+1"]:
        """Return the weights of the given exits and, as the last entry, of the last layer.

        They sum to one, and an exit that is not `enabled` has weight 0. Before that, with l = exit
        - 1, they are e(l) = e_scale (0 + ... + l), and e(L-1) = L - 1 + e_scale (0 + ... + L-2).
        """
        last = self.num_layers - 1
        early = jnp.where(enabled, self.e_scale * (exits * (exits - 1) / 2), 0.0)
        whole = max(last, 1) + self.e_scale * last * (last - 1) / 2
        weights = jnp.append(early, whole).astype(jnp.float32)
        return weights / weights.sum()


class _Exits(NamedTuple):
    """The exits of a pass with their weights and scores; the last entry is the last layer."""

    weights: Float[Array, "n+1"]
    scores: Scores
    parts: Parts

    @property
    def losses(self) -> Float[Array, "n"]:
        """The loss of each exit, as a sum."""
        weights = jnp.asarray([weight for _, weight in self.parts.values()])
        return (self.scores.losses * weights[None]).sum(axis=1)

    @property
    def of_last(self) -> dict[str, Float[Array, ""]]:
        """The last layer's loss and, by name, its parts if there are several, or have no weight."""
        several = sum(weight > 0 for _, weight in self.parts.values()) > 1
        parts = zip(self.parts.items(), self.scores.losses[-1], strict=True)
        named = {f"last_{name}": loss for (name, (_, w)), loss in parts if several or not w}
        return {"last": self.losses[-1], **named}


def layerskip_method(target: Model, loss: LayerSkipLoss, *, multiply: Any = None) -> Method:
    """Return a method that trains a whole model with layer dropout and early exits.

    `multiply` is the dtype of products, None for float32. Raises InputError for options that do not
    fit the model.
    """
    _check(target, loss)
    dtype = jnp.dtype(jnp.float32)
    decoder = dataclasses.replace(target.architecture, dtype=dtype, multiply=multiply)

    def loss_of(
        params: Any,
        target_params: Any,
        batch: Batch,
        key: Key[Array, ""] | None,
        step: Int[Array, ""],
    ) -> tuple[Float[Array, ""], Measures]:
        return layerskip_loss(decoder, params["target"], target_params, batch, key, step, loss)

    return Method(
        "layerskip",
        ("final_norm",) if loss.labels == "distributions" else (),
        lambda key: {"target": in_float32(target)},
        loss_of,
        None,
        lambda params: with_params(target, params["target"]),
        exports="model",
        trains_target=True,
        takes_step=True,
        schedules={"dropout": lambda step: loss.dropout(step)[-1]},
        least_tokens=loss.depths + 2,
        layers=target.config,
        drafter_options={"name": "early_exit", "exit_layer": loss.decoded_exit},
    )


def layerskip_loss(
    decoder: Decoder,
    params: dict[str, Any],
    frozen: dict[str, Any],
    batch: Batch,
    key: Key[Array, ""] | None,
    step: Int[Array, ""],
    loss: LayerSkipLoss,
) -> tuple[Float[Array, ""], Measures]:
    """Return the sum of the loss over the batch's labels at a step, and measures.

    `key` draws the layers that are left out. Without a key (evaluation) no layer is left out, and
    the exits are the measured ones. `frozen` are the parameters of the original model, which are
    read only if `loss.labels` is "distributions"; the batch then has that model's features.
    """
    labels = batch.labels
    if key is None:
        exits = jnp.asarray(loss.measured, jnp.int32)
        enabled, kept = jnp.ones(len(loss.measured), bool), None
    else:
        exits, enabled = loss.trained(step)
        shape = (loss.num_layers, len(labels))
        kept = jax.random.bernoulli(key, 1 - loss.dropout(step)[:, None], shape)
    features = features_of(decoder, params, batch, (LAYER_INPUTS, "final_norm"), kept=kept)

    def read(exit: Int[Array, ""]) -> Float[Array, "B A D"]:
        states = at_rows(features[LAYER_INPUTS][exit], labels - 1)
        return decoder.arithmetic.norm(states, params["final_norm"])

    last = at_rows(features["final_norm"], labels - 1)
    columns = frozen["head"]["kernel"] if loss.labels == "distributions" else None
    teacher = Teacher.of(batch, columns, None)
    parts = parts_for(loss.labels, loss.label_loss)
    if key is None and loss.labels == "distributions":
        parts["tokens"] = (cross_entropy, 0.0)
    weights = loss.weights(exits, enabled)
    count = len(weights)
    total, scores = score_drafts(
        Scoring(tuple(parts.values()), True, decoder.multiply, ahead=False),
        jnp.concatenate([jax.vmap(read)(exits), last[None]]),
        params["head"]["kernel"],
        teacher,
        jnp.broadcast_to(labels >= 0, (count, *labels.shape)),
        weights,
    )
    found = _Exits(weights, scores, parts)
    measures = _measured(found, labels, loss) if key is None else _of_step(found, labels, enabled)
    return total, measures


def _of_step(found: _Exits, labels: Int[Array, "B A"], enabled: Bool[Array, "n"]) -> Measures:
    """Return the measures of a training step: the last layer's loss, and that of its exits."""
    choices = found.scores.choices
    shares = found.weights[:-1] / jnp.maximum(found.weights[:-1].sum(), 1e-9)
    agree = (choices[:-1] == choices[-1:]) & (labels >= 0)[None] & enabled[:, None, None]
    counted = enabled.sum() * (labels >= 0).sum()
    each = {**found.of_last, "exits": jnp.sum(shares * found.losses[:-1])}
    measures = measure(each, jnp.zeros((0, *labels.shape), bool), labels)
    rates = jnp.stack([agree.sum(dtype=jnp.float32), counted.astype(jnp.float32)])
    return measures.replace(rates={"exit_accept_now": rates})


def _measured(found: _Exits, labels: Int[Array, "B A"], loss: LayerSkipLoss) -> Measures:
    """Return the measures of an evaluation, by exit: losses, greedy acceptance, simulated tau.

    A draft is accepted if it is the last layer's most likely token. Tau is the mean over labels
    with `depths` further ones; `exit_accept_E` over all.
    """
    choices = found.scores.choices
    agree = (choices[:-1] == choices[-1:]) & (labels >= 0)[None]
    names = [f"exit_{exit}" for exit in loss.measured]
    losses = {**dict(zip(names, found.losses[:-1], strict=True)), **found.of_last}
    whole = label_ahead(labels, loss.depths - 1)
    rates = {}
    for number, exit in enumerate(loss.measured):
        drafts = jnp.stack([ahead(agree[number], depth) for depth in range(loss.depths)])
        length = 1 + jax.lax.cumprod(drafts.astype(jnp.int32), axis=0).sum(axis=0)
        rates[f"exit_accept_{exit}"] = _pair(agree[number], labels >= 0)
        rates[f"exit_tau_{exit}"] = _pair(length, whole)
    decoded = agree[loss.measured.index(loss.decoded_exit)]
    right = jnp.stack([ahead(decoded, depth) for depth in range(loss.depths)])
    return measure(losses, right, labels).replace(rates=rates)


def _pair(values: Any, counted: Bool[Array, "B A"]) -> Float[Array, "2"]:
    return jnp.stack([jnp.where(counted, values, 0).sum(), counted.sum()]).astype(jnp.float32)


def _check(target: Model, loss: LayerSkipLoss) -> None:
    """Raise InputError for options that do not fit the model."""
    count = loss.num_layers
    if target.config.experts is not None:
        raise InputError(
            f"target: {target.name} has experts, whose loads are not balanced where layers are "
            "left out; use a dense model"
        )
    if count < 2:
        raise InputError(f"target: {target.name} has one layer, so no earlier exit")
    named = [("exit_layer", loss.decoded_exit), *(("exits", exit) for exit in loss.exits)]
    for name, exit in named:
        if exit >= count:
            raise InputError(
                f"layerskip.{name}={exit}: {target.name} has {count} layers; use exits after 1 to "
                f"{count - 1} of them"
            )
    if loss.curriculum == "rotational" and loss.rotation > count - 1:
        raise InputError(
            f"layerskip.rotation={loss.rotation}: {target.name} has {count - 1} early exits, so "
            "that some steps would have none; use at most as many"
        )
    if loss.curriculum == "decoded" and not loss.e_scale * (loss.decoded_exit - 1):
        raise InputError(
            f"layerskip.curriculum='decoded': the only exit in the loss, after "
            f"{loss.decoded_exit} of {count} layers, has weight 0; use layerskip.exit_layer of 2 "
            "or more and layerskip.e_scale above 0, or another curriculum"
        )
    if loss.curriculum == "gradual" and loss.steps < 2 * count:
        raise InputError(
            f"layerskip.curriculum='gradual': adds an exit every decay_steps / {2 * count} steps, "
            f"and the schedule has {loss.steps}; use at least {2 * count} steps, or rotational"
        )
