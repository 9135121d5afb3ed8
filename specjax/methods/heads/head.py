"""A trained drafter: its parameters, config, draft vocabulary and target."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from specjax.core.draft_vocabulary import check_draft_ids
from specjax.errors import InputError
from specjax.loading.compare_arrays import differences, in_words, leaf_name
from specjax.loading.model import Model
from specjax.models.features import check_features
from specjax.models.head_config import HeadConfig


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


@dataclass(frozen=True, eq=False)
class Head:
    """A trained drafter in the form in which it is exported and comes with specjax.

    `params` is a nested dict of float arrays, without those of the target. `draft_ids` are the
    ascending token ids of its Vd logits (None: all V). `training` is JSON metadata of the training
    run. Raises InputError for inconsistent parts.
    """

    kind: str
    config: HeadConfig
    params: dict[str, Any] = field(repr=False)
    draft_ids: np.ndarray | None = field(repr=False)
    target: TargetMetadata
    training: dict[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.config.check_kind(self.kind)
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


def whole_vocabulary(head: Head) -> Head:
    """Return a head that uses the target's output head for all tokens, not a draft vocabulary.

    Logits of the draft vocabulary are unchanged. Raises InputError for a head whose own output head
    covers only a draft vocabulary.
    """
    if head.draft_ids is None:
        return head
    if not head.config.shares_output:
        raise InputError(
            f"whole_vocabulary: this {head.kind} head has its own output head for "
            f"{head.config.draft_vocab_size} tokens"
        )
    config, params = head.config.whole(head.params, head.draft_ids)
    return dataclasses.replace(head, config=config, params=params, draft_ids=None)


def check_head(head: Head, target: Model, where: str = "drafter.path") -> None:
    """Raise InputError unless a head fits a target by shapes and tokenizer."""
    head.target.check(where, target)
    check_features(head.config.features, target.config.num_layers, f"{where}: taps: ")


def check_same(head: Head, again: Head, where: str) -> None:
    """Raise InputError unless two heads have equal configs, token ids and parameters."""
    (leaves, tree), (others, other_tree) = (
        jax.tree.flatten((each.params, each.draft_ids)) for each in (head, again)
    )
    same = tree == other_tree and head.config.without_unused() == again.config.without_unused()
    if not (same and all(map(_same_bits, leaves, others))):
        raise InputError(f"{where}: read again, it is another head; report this")


def _same_bits(first: Any, second: Any) -> bool:
    return first.dtype == second.dtype and np.array_equal(first, second)


def _compare(params: dict[str, Any], config: HeadConfig) -> None:
    """Raise InputError listing parameters that are missing, unexpected or of another shape."""
    actual, wanted = (
        {leaf_name(path): np.shape(leaf) for path, leaf in jax.tree.leaves_with_path(tree)}
        for tree in (params, config.parameter_table())
    )
    if listed := in_words(differences(actual, wanted)):
        raise InputError(
            f"head: the parameters do not fit the config ({listed}); take both from one head"
        )
