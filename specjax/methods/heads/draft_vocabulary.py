"""The draft vocabulary of a head in the forms that other tools store.

It is stored as offsets (`d2t`: target token = i + d2t[i]) with a mask over the target's tokens
(`t2d`), or as plain ids (vLLM's `token_map` for Medusa).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from specjax.errors import InputError
from specjax.loading.user_messages import note
from specjax.methods.heads.config_fields import HeadFields

Tensors = dict[str, np.ndarray]


class DraftVocabulary(NamedTuple):
    """The tokens that a head in a file drafts, out of V = `vocab_size`.

    `stated` is the number of tokens that the head was made for, which counts padding. `ids` are the
    ascending ids int32 [Vd], or None for all tokens. `rows` are their rows in tensors over the
    draft vocabulary, which have `stored` rows, or None if there is no map. With `selects`, tensors
    over all tokens may stand for them.
    """

    vocab_size: int
    stated: int
    ids: np.ndarray | None = None
    rows: np.ndarray | None = None
    stored: int = 0
    selects: bool = False

    @property
    def size(self) -> int:
        """The number of tokens that can be drafted (Vd)."""
        return self.vocab_size if self.ids is None else len(self.ids)

    def fit(self, tensor: np.ndarray, *, drafted: bool) -> np.ndarray:
        """Return a tensor with a row per token, or per token that is drafted, without padding.

        A tensor of another length is returned unchanged.
        """
        length = len(tensor) if tensor.ndim else 0
        if drafted and self.rows is not None and length == self.stored:
            return tensor[self.rows]
        if length == self.stated:
            tensor = tensor[: self.vocab_size]
        selected = drafted and self.selects and self.ids is not None
        return tensor[self.ids] if selected and len(tensor) == self.vocab_size else tensor


class VocabularyMap(NamedTuple):
    """A form in which a draft vocabulary is stored: the names of its tensors, and how to use them.

    `read` returns the vocabulary of a file, and `write` the tensors for ascending ids and the
    number of tokens that the file states.
    """

    names: tuple[str, ...]
    read: Callable[[HeadFields], DraftVocabulary]
    write: Callable[[np.ndarray, int], Tensors]


def _read_offsets(fields: HeadFields) -> DraftVocabulary:
    """Return the draft vocabulary in `d2t`, whose size `draft_vocab_size` states.

    A line is logged for a map of zeros that nothing confirms, since tools also write one that was
    never filled in. Raises InputError for a map that is missing, contradicts itself, or names other
    tokens than the target's.
    """
    where, tensors, vocab_size = fields.directory, fields.tensors, fields.target.config.vocab_size
    size = fields.count("draft_vocab_size", fields.stated)
    if (d2t := tensors.get("d2t")) is None:
        if "t2d" in tensors:
            raise InputError(f"{where}: has t2d but no d2t; download it again")
        if size not in (fields.stated, vocab_size):
            raise InputError(
                f"{where}: draft_vocab_size={size}, and the tensor d2t that maps them to the "
                f"target's {vocab_size} tokens is missing"
            )
        return DraftVocabulary(vocab_size, fields.stated)
    if d2t.shape != (size,) or d2t.dtype.kind not in "iu":
        raise InputError(
            f"{where}: d2t is {d2t.dtype}{list(d2t.shape)}, not whole numbers "
            f"[draft_vocab_size={size}]; the file contradicts itself, and cannot be used"
        )
    vocabulary = _mapped(fields, "d2t", d2t.astype(np.int64) + np.arange(size))
    ids = vocabulary.ids
    assert ids is not None
    _check_mask(fields, ids)
    if len(ids) == vocab_size:
        return vocabulary._replace(ids=None)
    if "t2d" not in tensors and not d2t.any():
        note(
            f"{where}: all offsets of d2t are 0, and there is no t2d to confirm them: the head "
            f"drafts the tokens 0..{len(ids) - 1}; if hardly any is accepted, the tool that wrote "
            "the file never filled the map in"
        )
    return vocabulary


def _write_offsets(draft_ids: np.ndarray, rows: int) -> Tensors:
    """Return the tensors `d2t` int64 [Vd] and `t2d` bool [`rows`] for ascending token ids."""
    known = np.zeros(rows, np.bool_)
    known[draft_ids] = True
    return {"d2t": draft_ids.astype(np.int64) - np.arange(len(draft_ids)), "t2d": known}


def _read_token_map(fields: HeadFields) -> DraftVocabulary:
    """Return the draft vocabulary in `token_map`, whose size `truncated_vocab_size` states.

    Raises InputError for a map that is missing, contradicts itself, or names other tokens than the
    target's.
    """
    ids = fields.tensors.get("token_map")
    size = fields.count("truncated_vocab_size", fields.stated)
    if ids is None:
        if size < fields.stated:
            raise fields.fail("truncated_vocab_size", "the tensor token_map is missing")
        return DraftVocabulary(fields.target.config.vocab_size, fields.stated)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or len(ids) != size:
        raise fields.fail(
            "truncated_vocab_size",
            f"the tensor token_map is {ids.dtype}{list(ids.shape)}, not as many token ids",
        )
    return _mapped(fields, "token_map", ids.astype(np.int64))._replace(selects=True)


def _write_token_map(draft_ids: np.ndarray, rows: int) -> Tensors:
    del rows
    return {"token_map": np.asarray(draft_ids, np.int64)}


def _read_whole(fields: HeadFields) -> DraftVocabulary:
    return DraftVocabulary(fields.target.config.vocab_size, fields.stated)


OFFSETS = VocabularyMap(("d2t", "t2d"), _read_offsets, _write_offsets)
TOKEN_MAP = VocabularyMap(("token_map",), _read_token_map, _write_token_map)
WHOLE = VocabularyMap((), _read_whole, lambda draft_ids, rows: {})
"""The form of a layout without draft vocabularies."""


def _mapped(fields: HeadFields, name: str, ids: np.ndarray) -> DraftVocabulary:
    """Return the vocabulary of the token ids in the tensor `name`.

    They may contain padding tokens, which are dropped: training data may have too few others.
    Raises InputError unless the rest are distinct tokens of the target.
    """
    where, vocab_size = fields.directory, fields.target.config.vocab_size
    kept = np.flatnonzero((ids < vocab_size) | (ids >= fields.stated))
    tokens = ids[kept]
    wrong = (tokens < 0) | (tokens >= vocab_size)
    if wrong.any():
        index = int(np.argmax(wrong))
        raise InputError(
            f"{where}: {name}[{index}] is token {tokens[index]}, out of range 0..{vocab_size - 1}; "
            "use a head that was made for this target"
        )
    unique, counts = np.unique(tokens, return_counts=True)
    if (counts > 1).any():
        raise InputError(
            f"{where}: {name} names token {unique[np.argmax(counts > 1)]} twice; the file "
            "contradicts itself, and cannot be used"
        )
    rows = kept[np.argsort(tokens)]
    return DraftVocabulary(vocab_size, fields.stated, unique.astype(np.int32), rows, len(ids))


def _check_mask(fields: HeadFields, ids: np.ndarray) -> None:
    """Raise InputError if the mask `t2d` exists and disagrees with the token ids."""
    where, t2d = fields.directory, fields.tensors.get("t2d")
    if t2d is None:
        return
    if t2d.ndim != 1 or t2d.dtype.kind not in "biu":
        raise InputError(f"{where}: t2d is {t2d.dtype}{list(t2d.shape)}, not a mask over tokens")
    if len(t2d) == fields.stated:
        t2d = t2d[: fields.target.config.vocab_size]
    differing = np.setxor1d(np.flatnonzero(t2d), ids)
    if len(differing):
        raise InputError(
            f"{where}: t2d and d2t disagree about {len(differing)} tokens, such as "
            f"{differing[0]}; the file contradicts itself, and cannot be used"
        )
