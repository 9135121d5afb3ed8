"""A trained drafter: its parameters, config, draft vocabulary and target."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh

from specjax.core.draft_vocabulary import check_draft_ids
from specjax.errors import InputError
from specjax.loading import checkpoints
from specjax.loading.compare_arrays import differences, in_words, leaf_name
from specjax.loading.dataclass_json import read_dataclass
from specjax.loading.model import Model
from specjax.methods.block.head import BlockConfig
from specjax.methods.draft_model.head import DraftModelConfig
from specjax.methods.eagle.head import EagleConfig
from specjax.methods.heads.compact import compact_arrays, float_params
from specjax.methods.medusa import head as medusa
from specjax.methods.medusa.head import MedusaConfig
from specjax.models.decoder import check_features
from specjax.models.joined_kernels import with_joined
from specjax.models.mtp import MtpConfig
from specjax.models.parameter_table import parameter_table as decoder_table

Config = DraftModelConfig | MedusaConfig | EagleConfig | MtpConfig | BlockConfig
_CONFIGS: dict[str, type] = {
    "draft_model": DraftModelConfig,
    "medusa": MedusaConfig,
    "eagle": EagleConfig,
    "eagle3": EagleConfig,
    "mtp": MtpConfig,
    "dflash": BlockConfig,
    "dspark": BlockConfig,
}
KINDS = tuple(_CONFIGS)


@dataclass(frozen=True)
class TargetMetadata:
    """Properties that identify a target; `tokenizer` is a hash of its token strings, or None."""

    name: str
    hidden_size: int
    vocab_size: int
    num_layers: int
    tokenizer: str | None

    @classmethod
    def of(cls, target: Model) -> TargetMetadata:
        """Return the metadata of a loaded model."""
        config, tokenizer = target.config, target.tokenizer
        return cls(
            target.name,
            config.hidden_size,
            config.vocab_size,
            config.num_layers,
            None if tokenizer is None else tokenizer.vocabulary_hash,
        )

    def matches(self, other: TargetMetadata) -> bool:
        """Return whether both may describe the same target; their names may differ."""
        return self.difference(other) is None

    def check(self, where: str, target: Model) -> None:
        """Raise InputError, beginning with `where`, unless `target` matches; names may differ."""
        other = TargetMetadata.of(target)
        if (name := self.difference(other)) is not None:
            mine, theirs = getattr(self, name), getattr(other, name)
            raise InputError(
                f"{where}: made for {self.name} with {name}={mine!s:.16}, and {target.name} "
                f"has {theirs!s:.16}; use one that was made for this target"
            )

    def difference(self, other: TargetMetadata) -> str | None:
        """Return the name of the first field that differs, or None.

        A tokenizer of None is unknown, and equals any other.
        """
        for name in ("hidden_size", "vocab_size", "num_layers", "tokenizer"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs and not (name == "tokenizer" and None in (mine, theirs)):
                return name
        return None


@dataclass(frozen=True)
class _Metadata:
    """The metadata saved with a head's arrays; the type of `config` depends on the kind.

    `compact` says that the arrays are those of `heads.compact`.
    """

    kind: Literal["draft_model", "medusa", "eagle", "eagle3", "mtp", "dflash", "dspark"]
    config: dict
    target: TargetMetadata
    training: dict
    compact: bool = False


@dataclass(frozen=True, eq=False)
class Head:
    """A trained drafter in the form in which it is exported and comes with specjax.

    `params` is a nested dict of float arrays, without those of the target. `draft_ids` are the
    ascending token ids of its Vd logits (None: all V). `training` is JSON metadata of the training
    run. Raises InputError for inconsistent parts.
    """

    kind: str
    config: Config
    params: dict[str, Any] = field(repr=False)
    draft_ids: np.ndarray | None = field(repr=False)
    target: TargetMetadata
    training: dict[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.kind not in _CONFIGS:
            raise InputError(f"head: kind={self.kind!r} is unknown; use {', '.join(KINDS)}")
        if not isinstance(self.config, _CONFIGS[self.kind]):
            raise InputError(f"head: {self.kind} needs a {_CONFIGS[self.kind].__name__}")
        if isinstance(self.config, EagleConfig):
            version = 3 if self.kind == "eagle3" else 1
            if self.config.version != version:
                raise InputError(f"head: {self.kind} needs version={version}")
        if isinstance(self.config, BlockConfig) and self.config.kind != self.kind:
            raise InputError(f"head: {self.kind} has the config of a {self.config.kind}")
        _compare(self.params, self.config)
        size = self.config.draft_vocab_size
        if self.draft_ids is None:
            if size != self.target.vocab_size:
                raise InputError(
                    f"draft_vocab_size={size}: its map to the target's {self.target.vocab_size} "
                    "tokens is missing"
                )
        else:
            check_draft_ids(self.draft_ids, self.target.vocab_size)
            if len(self.draft_ids) != size:
                raise InputError(
                    f"draft vocabulary: {len(self.draft_ids)} token ids for draft_vocab_size={size}"
                )

    @property
    def row_tokens(self) -> int | None:
        """The most tokens of a row of the latest training run, or None if that is unknown."""
        config = self.training.get("config")
        tokens = config.get("row_tokens") if isinstance(config, dict) else None
        return tokens if isinstance(tokens, int) and tokens > 0 else None


def own_modules(model: Model) -> Head | None:
    """Return a model's MTP modules as a head for that model, or None if it has none."""
    if model.mtp is None:
        return None
    return Head("mtp", model.mtp.config, model.mtp.params, None, TargetMetadata.of(model))


def parameter_table(config: Config) -> dict[str, Any]:
    """Return the shapes and axes of a head's parameters, as a nested dict of `Parameter`."""
    if isinstance(config, MedusaConfig):
        return medusa.parameter_table(config)
    if isinstance(config, EagleConfig | MtpConfig | BlockConfig):
        return config.parameter_table()
    whole = decoder_table(config.decoder)
    return {name: whole[name] for name in ("layers", "final_norm")}


def compacted(head: Head) -> Head:
    """Return the head that is read after `head` was saved with `compact`: rounded, in float32.

    Raises InputError as `compact_arrays` does.
    """
    table = parameter_table(head.config)
    return dataclasses.replace(
        head, params=float_params(table, compact_arrays("head", table, head.params))
    )


def save_head(
    head: Head, directory: str | Path, *, overwrite: bool = False, compact: bool = False
) -> None:
    """Write a head as an Orbax checkpoint, atomically.

    Every process must call it. `overwrite` replaces an earlier head in `directory`. With `compact`
    kernels and embeddings are rounded to 8 bits (`heads.compact`), a quarter of float32. Raises
    InputError as `checkpoints.save_drafter` does, and for numbers that do not fit.
    """
    params = dict(head.params)
    if compact:
        params = compact_arrays(str(directory), parameter_table(head.config), params)
    if head.draft_ids is not None:
        params["draft_ids"] = np.asarray(head.draft_ids, np.int32)
    config = dataclasses.asdict(head.config)
    saved = _Metadata(head.kind, config, head.target, head.training, compact)
    metadata = dataclasses.asdict(saved)
    checkpoints.save_drafter(directory, params, metadata, overwrite=overwrite)


def read_head(directory: str | Path, mesh: Mesh | None = None) -> Head:
    """Return a head that `save_head` wrote; on a mesh its arrays are replicated.

    If they were saved with `compact`, they are in float32. Kernels that an earlier version saved in
    parts are joined (`joined_kernels.with_joined`). Every process must call it. Raises InputError
    for anything that is not an intact head.
    """
    params, metadata = checkpoints.load_drafter(directory, mesh)
    try:
        saved = read_dataclass("head", _Metadata, metadata)
        config = read_dataclass("config", _CONFIGS[saved.kind], saved.config)
        ids = params.pop("draft_ids", None)
        ids = None if ids is None else np.asarray(ids)
        table = parameter_table(config)
        if saved.compact:
            where = jax.tree.leaves(params)[0].sharding
            params = jax.device_put(float_params(table, params), where)
        elif not isinstance(config, MedusaConfig):
            params = with_joined(params, table, config.decoder)
        return Head(saved.kind, config, params, ids, saved.target, saved.training)
    except InputError as error:
        raise InputError(f"{directory}: {error}") from None


def check_head(head: Head, target: Model, where: str = "drafter.path") -> None:
    """Raise InputError unless a head fits a target by shapes and tokenizer."""
    head.target.check(where, target)
    if isinstance(head.config, EagleConfig | MtpConfig | BlockConfig):
        check_features(head.config.taps, target.config.num_layers, f"{where}: taps: ")


def check_same(head: Head, again: Head, where: str) -> None:
    """Raise InputError unless two heads have equal configs, token ids and parameters."""
    (leaves, tree), (others, other_tree) = (
        jax.tree.flatten((each.params, each.draft_ids)) for each in (head, again)
    )
    same = tree == other_tree and _without_unused(head.config) == _without_unused(again.config)
    if not (same and all(map(_same_bits, leaves, others))):
        raise InputError(f"{where}: read again, it is another head; report this")


def _same_bits(first: Any, second: Any) -> bool:
    return first.dtype == second.dtype and np.array_equal(first, second)


def _without_unused(config: Config) -> Config:
    """Return the config without unused token ids, which other layouts do not state."""
    if isinstance(config, MedusaConfig):
        return config
    decoder = dataclasses.replace(config.decoder, unused_tokens=())
    return dataclasses.replace(config, decoder=decoder)


def _compare(params: dict[str, Any], config: Config) -> None:
    """Raise InputError listing parameters that are missing, unexpected or of another shape."""
    actual, wanted = (
        {leaf_name(path): np.shape(leaf) for path, leaf in jax.tree.leaves_with_path(tree)}
        for tree in (params, parameter_table(config))
    )
    if listed := in_words(differences(actual, wanted)):
        raise InputError(
            f"head: the parameters do not fit the config ({listed}); take both from one head"
        )
