"""The draft vocabulary of a head in the forms that other tools store.

It is stored as offsets (`d2t`: target token = i + d2t[i]) with a mask over the target's tokens
(`t2d`), or as plain ids (vLLM's `token_map` for Medusa).
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import numpy as np

from specjax.errors import InputError
from specjax.loading.model import Model
from specjax.loading.user_messages import note
from specjax.methods.heads.checkpoint import Checkpoint

Tensors = dict[str, np.ndarray]


def offsets(draft_ids: np.ndarray, vocab_size: int) -> dict[str, np.ndarray]:
    """Return the tensors `d2t` int64 [Vd] and `t2d` bool [V] for ascending token ids."""
    known = np.zeros(vocab_size, np.bool_)
    known[draft_ids] = True
    return {"d2t": draft_ids.astype(np.int64) - np.arange(len(draft_ids)), "t2d": known}


def read(
    checkpoint: Checkpoint, target: Model, heads: Collection[str], size: int, stated: int
) -> tuple[Tensors, np.ndarray | None]:
    """Return the tensors without rows of padding, and the token ids of a draft vocabulary, if any.

    `heads` are the tensors with a row for each token that can be drafted, `size` the draft
    vocabulary's size by the config, and `stated` the target's, padding included. A line is logged
    for a map of zeros that nothing confirms, since tools also write one that was never filled in.
    Raises InputError for a map that is missing, contradicts itself, or names other tokens than the
    target's.
    """
    where, vocab_size = checkpoint.directory, target.config.vocab_size
    ids = read_offsets(where, checkpoint.tensors, size)
    tensors, ids = drop_padding(checkpoint.tensors, ids, heads, stated, vocab_size)
    if ids is None:
        if size not in (stated, vocab_size):
            raise InputError(
                f"{where}: draft_vocab_size={size}, and the tensor d2t that maps them to the "
                f"target's {vocab_size} tokens is missing"
            )
        return tensors, None
    check_ids(where, "d2t", ids, vocab_size)
    check_mask(where, tensors, ids)
    if np.array_equal(ids, np.arange(vocab_size)):
        return tensors, None
    if "t2d" not in tensors and not tensors["d2t"].any():
        note(
            f"{where}: all offsets of d2t are 0, and there is no t2d to confirm them: the head "
            f"drafts the tokens 0..{len(ids) - 1}; if hardly any is accepted, the tool that wrote "
            "the file never filled the map in"
        )
    return tensors, ids


def read_offsets(where: Path, tensors: Tensors, size: int) -> np.ndarray | None:
    """Return the token ids [Vd] that `d2t` stands for, or None if there is no such tensor.

    They are neither sorted nor checked. Raises InputError unless there are `size` (Vd) of them.
    """
    d2t = tensors.get("d2t")
    if d2t is None:
        if "t2d" in tensors:
            raise InputError(f"{where}: has t2d but no d2t; download it again")
        return None
    if d2t.shape != (size,) or d2t.dtype.kind not in "iu":
        raise InputError(
            f"{where}: d2t is {d2t.dtype}{list(d2t.shape)}, not whole numbers "
            f"[draft_vocab_size={size}]; the file contradicts itself, and cannot be used"
        )
    return d2t.astype(np.int64) + np.arange(size)


def drop_padding(
    tensors: Tensors,
    ids: np.ndarray | None,
    heads: Collection[str],
    stated: int,
    vocab_size: int,
) -> tuple[Tensors, np.ndarray | None]:
    """Return a head's tensors and token ids without the rows of padding tokens.

    The target has `vocab_size` tokens, and the head's config states `stated`, which counts padding.
    The tensors named in `heads` have a row for each of `ids`, or for each token. `ids` may contain
    padding tokens if the training data had too few others.
    """
    kept = None if ids is None else (ids < vocab_size) | (ids >= stated)

    def fitted(name: str, rows: np.ndarray) -> np.ndarray:
        if kept is not None and name in heads and len(rows) == len(kept):
            return rows[kept]
        return rows[:vocab_size] if len(rows) == stated else rows

    over_tokens = {*heads, "embed_tokens.weight", "t2d"}
    fitting = {
        name: fitted(name, value) if name in over_tokens and value.ndim else value
        for name, value in tensors.items()
    }
    return fitting, None if ids is None else ids[kept]


def check_mask(where: Path, tensors: Tensors, ids: np.ndarray) -> None:
    """Raise InputError if the mask `t2d` exists and disagrees with the token ids."""
    t2d = tensors.get("t2d")
    if t2d is None:
        return
    if t2d.ndim != 1 or t2d.dtype.kind not in "biu":
        raise InputError(f"{where}: t2d is {t2d.dtype}{list(t2d.shape)}, not a mask over tokens")
    differing = np.setxor1d(np.flatnonzero(t2d), ids)
    if len(differing):
        raise InputError(
            f"{where}: t2d and d2t disagree about {len(differing)} tokens, such as "
            f"{differing[0]}; the file contradicts itself, and cannot be used"
        )


def check_ids(where: Path, name: str, ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """Return `ids`; raise InputError unless they are distinct tokens of the target.

    `name` is the name of the tensor in messages.
    """
    wrong = (ids < 0) | (ids >= vocab_size)
    if wrong.any():
        index = int(np.argmax(wrong))
        raise InputError(
            f"{where}: {name}[{index}] is token {ids[index]}, out of range 0..{vocab_size - 1}; "
            "use a head that was made for this target"
        )
    unique, counts = np.unique(ids, return_counts=True)
    if (counts > 1).any():
        raise InputError(
            f"{where}: {name} names token {unique[np.argmax(counts > 1)]} twice; the file "
            "contradicts itself, and cannot be used"
        )
    return ids


def ascending(ids: np.ndarray | None) -> tuple[np.ndarray | None, np.ndarray | slice]:
    """Return the ids in ascending order as int32, and the permutation that sorts their rows.

    For None, all tokens, these are None and a slice of all rows.
    """
    if ids is None:
        return None, slice(None)
    order = np.argsort(ids)
    return ids[order].astype(np.int32), order
