"""Single changes of a drafter's input or head, each of which would undo one known fault.

The faults are ones that engines and trainers have shipped: features of other layers or of the
position before or after, a missing or superfluous norm, a wrong map of a draft vocabulary, another
attention window, another mask token or kind of block. Changes are operands of one program, except
where the head computes differently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax.apps.doctor.answers import Answers
from specjax.apps.doctor.teacher_forced import Reading
from specjax.core.drafter import Drafter
from specjax.loading.model import Model
from specjax.methods.block import head as block
from specjax.methods.eagle import head as eagle
from specjax.methods.heads.examined import BLOCK, NORM, WINDOW, Fault
from specjax.methods.heads.own_cache import OwnCacheDrafter
from specjax.methods.heads.shared_parameters import share_anew
from specjax.models.config import DecoderConfig
from specjax.models.layers.decoder_layer import embed

TAPS, POSITIONS, VOCABULARY = "wrong taps", "shifted positions", "wrong vocabulary map"
MASK, CONFIDENCE = "wrong mask token", "uncalibrated confidence"
TEMPLATE, DTYPE, TARGET = "another chat template", "another dtype", "another target"
DECODING = "decoding differs from teacher forcing"

_OUTPUTS = ("final_norm", "pre_norm")
_MOST_MASKS = 24
"""The most tokens that are tried as mask tokens."""
_LEAST_COVERED = 0.7
"""The least probability that the target gives a draft vocabulary that is not suspected."""


@dataclass(frozen=True)
class Finding:
    """A fault that the measurement shows, with its evidence and its remedy.

    `before` and `after` are the mean of sum_x min(p, q) over all positions of drafts, for the
    drafter unchanged and with the fault undone; `after` is None if no change undoes the fault.
    `error` is the standard error of their difference. If the fault is an uncalibrated confidence
    head, `before` and `after` are its calibration errors.
    """

    fault: str
    evidence: str
    remedy: str
    before: float
    after: float | None = None
    error: float | None = None


@dataclass(frozen=True)
class Change:
    """A change that undoes one fault; `make` returns the changed drafter and answers to measure."""

    fault: str
    what: str
    remedy: str
    make: Callable[[], tuple[Reading, Answers]]


def readable_features(drafter: Drafter, num_layers: int) -> tuple[str, ...]:
    """Return the names of the drafter's features and of those that changes read in their place."""
    names = drafter.features
    others = [tap for taps in _other_taps(names, num_layers) for tap in taps]
    return tuple(dict.fromkeys((*names, *others)))


def changes(reading: Reading, answers: Answers, target: Model) -> Iterator[Change]:
    """Yield the changes that are possible for a drafter, those of likely faults first.

    `reading` is the drafter with what it reads, unchanged, and `answers` are those of the target
    that it is measured on.
    """
    drafter = reading.drafter
    if drafter.features:
        yield from _of_taps(reading, answers, target.config.num_layers)
        yield from _of_positions(reading, answers)
    yield from _of_norms(reading, answers)
    yield from _of_rotation(reading, answers, target.config)
    yield from _of_vocabulary(reading, answers, target)
    yield from _of_window(reading, answers)
    if drafter.mask_token_id is not None:
        yield from _of_mask(reading, answers, target)
    yield from _varied(reading, answers, BLOCK)


def _varied(reading: Reading, answers: Answers, fault: Fault) -> Iterator[Change]:
    """Yield the changes to other settings of the drafter's, each of which would undo a fault."""
    for variation in reading.drafter.variations():
        if variation.fault == fault:
            changed = reading.replace(drafter=variation.drafter)
            yield Change(fault, variation.what, variation.remedy, _constant(changed, answers))


def _other_taps(taps: tuple[str, ...], num_layers: int) -> list[tuple[str, ...]]:
    """Return taps often confused with the given ones: neighbours, defaults, another order."""
    if len(taps) == 1 and taps[0] in _OUTPUTS:
        return [
            (other,) for other in (*_OUTPUTS, f"layer_input:{num_layers - 1}") if other != taps[0]
        ]
    if not taps:
        return []
    inputs = [num_layers if tap in _OUTPUTS else int(tap.partition(":")[2]) for tap in taps]
    candidates = [
        tuple(_tap(layer + by, num_layers) for layer in inputs)
        for by in (-1, 1)
        if all(0 <= layer + by <= num_layers for layer in inputs)
    ]
    if len(taps) == 3:
        candidates.append(eagle.default_taps(num_layers))
    candidates.append(block.default_taps(num_layers, len(taps)))
    ascending = sorted(range(len(taps)), key=inputs.__getitem__)
    candidates.append(tuple(taps[index] for index in ascending))
    candidates += [taps[::-1], taps[1:] + taps[:1], taps[-1:] + taps[:-1]]
    candidates = [other for other in candidates if len(other) == len(taps)]
    return [other for other in dict.fromkeys(candidates) if other != taps]


def _tap(layer: int, num_layers: int) -> str:
    return "pre_norm" if layer == num_layers else f"layer_input:{layer}"


def _of_taps(reading: Reading, answers: Answers, num_layers: int) -> Iterator[Change]:
    """Yield changes to features of other layers or from before or after the final norm."""
    names = reading.drafter.features
    for taps in _other_taps(names, num_layers):
        is_norm = {*names, *taps} <= set(_OUTPUTS)
        features = {name: answers.features[tap] for name, tap in zip(names, taps, strict=True)}
        named = ", ".join(taps)
        yield Change(
            NORM if is_norm else TAPS,
            f"reading {named} of the target in place of {', '.join(names)}",
            reading.drafter.taps_remedy(named),
            _constant(reading.replace(features=features), answers),
        )


def _of_positions(reading: Reading, answers: Answers) -> Iterator[Change]:
    """Yield changes to the features of the position before and of the position after."""
    for by in (-1, 1):
        features = {name: jnp.roll(value, -by, axis=1) for name, value in reading.features.items()}
        side = "before" if by < 0 else "after"
        paired = reading.drafter.paired_with
        yield Change(
            POSITIONS,
            f"reading the target's features of the position {side}",
            f"pair {paired} with the feature of t, where training paired it with that of "
            f"t{by:+d}: train with the feature of t, or shift the drafter's features by {by:+d}",
            _constant(reading.replace(features=features), answers),
        )


def _of_norms(reading: Reading, answers: Answers) -> Iterator[Change]:
    """Yield changes of the norms in a head's config, or of the order of its inputs."""
    yield from _varied(reading, answers, NORM)
    for flag, together in reading.drafter.addable_norms:
        eps = reading.drafter.layers_config.rms_norm_eps
        features = _normed(reading.features, eps, together=together)
        yield Change(
            NORM,
            f"norming the features {'together' if together else 'one by one'} before fc",
            f"{flag}=true in the head's config, with the scale that was trained",
            _constant(reading.replace(features=features), answers),
        )


def _normed(features: dict[str, Any], eps: float, *, together: bool) -> dict[str, Any]:
    """Return features divided by their root mean square, each alone or all `together`."""
    squares = {name: jnp.square(value).mean(-1, keepdims=True) for name, value in features.items()}
    whole = sum(squares.values()) / len(squares)
    return {
        name: value / jnp.sqrt((whole if together else squares[name]) + eps)
        for name, value in features.items()
    }


def _of_rotation(reading: Reading, answers: Answers, target: DecoderConfig) -> Iterator[Change]:
    """Yield changes to the target's rotary embedding, if the head has another one."""
    drafter, own = reading.drafter, reading.drafter.layers_config
    for field in () if own is None else ("rope_theta", "rope_scaling"):
        if (value := getattr(target, field)) != getattr(own, field):
            changed = drafter.with_config(decoder=replace(own, **{field: value}))
            yield Change(
                POSITIONS,
                f"{field}={value}, the target's, in place of {getattr(own, field)}",
                f"{field}={value} in the head's config",
                _constant(reading.replace(drafter=changed), answers),
            )


def _of_vocabulary(reading: Reading, answers: Answers, target: Model) -> Iterator[Change]:
    """Yield changes to the maps of a draft vocabulary that common mistakes make."""
    if "draft_ids" not in reading.params:
        return
    ids, last = reading.params["draft_ids"], answers.logp.shape[-1] - 1
    others = {
        "token ids one lower": jnp.clip(ids - 1, 0, last),
        "token ids one higher": jnp.clip(ids + 1, 0, last),
        "the first token ids": jnp.arange(len(ids), dtype=ids.dtype),
        "offsets from their index": jnp.clip(ids + jnp.arange(len(ids)), 0, last).astype(ids.dtype),
    }
    # Columns that are gathered by the map are in its order, whatever that is.
    if not _gathers_all(reading):
        others |= {"the entry before": jnp.roll(ids, 1), "the entry after": jnp.roll(ids, -1)}
    for what, other in others.items():
        yield Change(
            VOCABULARY,
            f"{what} in the map of the draft vocabulary",
            f"d2t of the head with {what}: export it again, or take it from the trained head",
            lambda other=other: (_with_map(reading, target, other), answers),
        )


def of_other_tokens(reading: Reading, answers: Answers, target: Model) -> Iterator[Change]:
    """Yield a change to the likeliest tokens of the answers, if a draft vocabulary has few of them.

    It is possible for heads with logits for any token, by the target's output head, and shows any
    map of other tokens than the trained one, without naming the latter.
    """
    if "draft_ids" not in reading.params or not _gathers_all(reading):
        return
    ids, is_label = reading.params["draft_ids"], jnp.asarray(answers.is_label)[..., None]
    mean = jnp.where(is_label, jnp.exp(answers.logp), 0).sum(axis=(0, 1)) / is_label.sum()
    if (covered := float(mean[ids].sum())) >= _LEAST_COVERED:
        return
    likeliest = jnp.sort(jnp.argsort(-mean)[: len(ids)]).astype(ids.dtype)
    yield Change(
        VOCABULARY,
        f"the {len(ids)} likeliest tokens of these answers in place of the draft vocabulary, which "
        f"has {covered:.0%} of the target's probability,",
        "d2t of the head: take it from the trained head, or export it with whole_vocabulary",
        lambda: (_with_map(reading, target, likeliest), answers),
    )


def _gathers_all(reading: Reading) -> bool:
    """Return whether all parameters over a draft vocabulary are columns of the target's."""
    own = {"markov", "selector"} & reading.params.keys()
    return "draft_head" in reading.params.get("shared", {}) and not own


def _with_map(reading: Reading, target: Model, ids: Any) -> Reading:
    """Return the drafter with other ids, and the columns of the target's output head for them."""
    changed = {**reading.params, "draft_ids": ids}
    if "draft_head" in changed.get("shared", {}):
        changed = share_anew(changed, target.params)
    return reading.replace(params=changed)


def _of_window(reading: Reading, answers: Answers) -> Iterator[Change]:
    """Yield changes of the attention window of a head or of a draft model."""
    if not isinstance(reading.drafter, OwnCacheDrafter):
        return
    if variations := [*_varied(reading, answers, WINDOW)]:
        yield from variations
        return
    for size in (4 << power for power in range(20)):
        if size < answers.tokens.shape[1]:
            yield Change(
                WINDOW,
                f"attention to the latest {size} positions only",
                reading.drafter.window_remedy(size),
                _constant(reading.replace(window=np.int32(size)), answers),
            )


def _of_mask(reading: Reading, answers: Answers, target: Model) -> Iterator[Change]:
    """Yield changes of a drafter's mask token, to tokens that tools use as such."""
    params, drafter = reading.params, reading.drafter
    size, own = target.config.vocab_size, drafter.mask_token_id
    padding = target.padding_embeddings
    added = () if target.tokenizer is None else target.tokenizer.added_ids
    rows = size if padding is None else size + len(padding)
    candidates = (*target.config.unused_tokens[:4], *target.ends, size - 1, 0, own - 1, own + 1)
    candidates = dict.fromkeys((*range(size, min(size + 4, rows)), *candidates, *added))

    def with_mask(token: int) -> Reading:
        if token < size:
            ids = jnp.full((1, 1), token)
            row = embed(params["shared"], ids, drafter.head.dtype)[0, 0]
        else:
            row = jnp.asarray(padding[token - size], drafter.head.dtype)
        return reading.replace(params={**params, "mask": {"embedding": row}})

    tried = [token for token in candidates if 0 <= token < rows and token != own]
    for token in tried[:_MOST_MASKS]:
        yield Change(
            MASK,
            f"the embedding of token {token} for mask tokens, in place of that of {own}",
            f"mask_token_id={token} in the head's config",
            lambda token=token: (with_mask(token), answers),
        )


def _constant(reading: Reading, answers: Answers) -> Callable[[], tuple[Reading, Answers]]:
    return lambda: (reading, answers)
