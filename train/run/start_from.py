"""A trained head with which a run starts: its draft vocabulary and parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, Key

from specjax.errors import InputError
from specjax.fields import first_difference
from specjax.files.path_checks import input_folder
from specjax.loading.model import Model
from specjax.methods.find_head import read_any_head, shipped_head
from specjax.methods.heads.head import Head, check_head
from specjax.methods.registry import HEADS
from train.methods.method import Method


@dataclass(frozen=True)
class HeadFolder:
    """The field type of a trained head: a directory, or the kind of a bundled head."""

    def check(self, name: str, value: Any) -> str:
        """Return `value`: a directory, or the kind of a head that comes with specjax.

        A kind is, for example, "eagle3". Raises InputError, which names the field `name`, for
        neither.
        """
        if not isinstance(value, str) or value not in HEADS:
            input_folder(name, value)
        return str(value)


@dataclass(frozen=True)
class Earlier:
    """The head that the field `start_from` of a config names."""

    name: str
    head: Head

    def vocabulary(self, size: int | None) -> Int32[np.ndarray, "Vd"] | None:
        """Return the ids of the tokens that the head drafts, None for all.

        `size` is the draft vocabulary's size in the config, None for all tokens. Raises InputError
        if the head's size is another.
        """
        ids = self.head.draft_ids
        every = self.head.target.vocab_size
        there, wanted = every if ids is None else len(ids), every if size is None else size
        if there != wanted:
            raise InputError(
                f"start_from={self.name!r}: drafts from {there} tokens, not {wanted}; set "
                f"draft_vocab_size={there}"
            )
        return ids

    def continued(self, method: Method) -> Method:
        """Return the method with the head's parameters as initial parameters.

        Raises InputError if they do not match the method's. A jointly trained target starts from
        itself.
        """
        where = f"start_from={self.name!r}"
        if method.head is None:
            raise InputError(f"{where}: nothing that drafts is trained; leave start_from out")
        wanted = method.head(method.init(jax.random.key(0)), {})
        return started_from(method, wanted, self.head, where)


def started_from(method: Method, wanted: Head, head: Head, where: str) -> Method:
    """Return a method with a head's parameters as initial parameters.

    `wanted` is a head that the method makes. Raises InputError, beginning with `where`, unless the
    other one is like it. A jointly trained target starts from itself.
    """
    if wanted.kind != head.kind:
        raise InputError(
            f"{where}: a head of the kind {head.kind}; train it with that method, or start from "
            f"one of the kind {wanted.kind}"
        )
    if (different := first_difference(wanted.config, head.config)) is not None:
        name, mine, theirs = different
        raise InputError(
            f"{where}: has {name}={theirs!s:.60}, the config {mine!s:.60}; give the head's own"
        )
    if not np.array_equal(wanted.draft_ids, head.draft_ids):
        raise InputError(f"{where}: drafts other tokens than the method; give the head's draft_ids")
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), head.params)

    def init(key: Key[Array, ""]) -> Any:
        if method.drafter is None:
            return params
        return {**method.init(key), method.drafter: params}

    return method._replace(init=init)


def open_earlier(name: str, target: Model) -> Earlier:
    """Return the head in a directory, or the bundled head of a kind, after checking its target.

    Raises InputError if the head cannot be read or belongs to another target.
    """
    shipped = name in HEADS
    head = shipped_head(name, target) if shipped else read_any_head(name, target, "start_from")
    if head is None:
        raise InputError(
            f"start_from={name!r}: no {name} comes with specjax for {target.name}; give the "
            "directory of one"
        )
    check_head(head, target, f"start_from={name!r}")
    return Earlier(name, head)
