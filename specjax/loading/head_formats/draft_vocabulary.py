"""A head's draft vocabulary as other tools store it.

As offsets (`d2t`: target token = i + d2t[i]) with a mask over the target's tokens (`t2d`), or as
plain ids (vLLM's `token_map` of Medusa).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from specjax.errors import InputError

_OVER_TOKENS = ("embed_tokens.weight", "lm_head.weight", "t2d", "d2t")
"""Tensors that may have a row for each token of the target, padding included."""


def offsets(draft_ids: np.ndarray, vocab_size: int) -> dict[str, np.ndarray]:
    """`d2t` int64 [Vd] and `t2d` bool [V] of ascending token ids."""
    known = np.zeros(vocab_size, np.bool_)
    known[draft_ids] = True
    return {"d2t": draft_ids.astype(np.int64) - np.arange(len(draft_ids)), "t2d": known}


def read_offsets(
    where: Path, tensors: dict[str, np.ndarray], size: int, vocab_size: int
) -> np.ndarray | None:
    """The token ids [Vd] of `d2t`, in its order, checked against `t2d`; None where there is none.

    Raises InputError for ids that are out of range or appear twice, and for a mask that disagrees.
    """
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if d2t is None:
        if t2d is not None:
            raise InputError(f"{where}: has t2d but no d2t; download it again")
        return None
    if d2t.shape != (size,) or d2t.dtype.kind not in "iu":
        raise InputError(
            f"{where}: d2t is {d2t.dtype}{list(d2t.shape)}, not whole numbers "
            f"[draft_vocab_size={size}]; the file contradicts itself, and cannot be used"
        )
    ids = check_ids(where, "d2t", d2t.astype(np.int64) + np.arange(size), vocab_size)
    if t2d is None:
        return ids
    if t2d.ndim != 1 or t2d.dtype.kind not in "biu":
        raise InputError(f"{where}: t2d is {t2d.dtype}{list(t2d.shape)}, not a mask over tokens")
    known = np.flatnonzero(t2d)
    if not np.array_equal(known, np.sort(ids)):
        differing = np.setxor1d(known, ids)
        raise InputError(
            f"{where}: t2d and d2t disagree about {len(differing)} tokens, such as "
            f"{differing[0]}; the file contradicts itself, and cannot be used"
        )
    return ids


def without_padding(ids: np.ndarray, stated: int, vocab_size: int) -> np.ndarray:
    """Which ids are not those of padding: rows of the target's embedding that have no token.

    A map over the `stated` rows may name some where its training data had too few tokens.
    """
    return (ids < vocab_size) | (ids >= stated)


def drop_padding(
    tensors: dict[str, np.ndarray], stated: int, vocab_size: int
) -> dict[str, np.ndarray]:
    """The tensors of a head of `stated` tokens without padding: rows, and what `d2t` maps to it."""
    tensors = {
        name: value[:vocab_size]
        if name in _OVER_TOKENS and value.ndim and len(value) == stated
        else value
        for name, value in tensors.items()
    }
    d2t, head = tensors.get("d2t"), tensors.get("lm_head.weight")
    if d2t is None or d2t.ndim != 1 or d2t.dtype.kind not in "iu":
        return tensors
    ids = d2t.astype(np.int64) + np.arange(len(d2t))
    kept = without_padding(ids, stated, vocab_size)
    if not kept.all():
        tensors["d2t"] = ids[kept] - np.arange(kept.sum())
        if head is not None and len(head) == len(kept):
            tensors["lm_head.weight"] = head[kept]
    return tensors


def check_ids(where: Path, name: str, ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """The ids as they are; raises InputError unless they are tokens of the target, each once."""
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
    """The ids in ascending order as int32, and the order of their rows."""
    if ids is None:
        return None, slice(None)
    order = np.argsort(ids)
    return ids[order].astype(np.int32), order
