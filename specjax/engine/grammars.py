"""The grammars that requests ask for, as tables of a model's tokens."""

from __future__ import annotations

import collections
import functools
import re
import threading
import weakref
from collections.abc import Hashable, Sequence

from specjax.engine.requests import SamplingParams, schema_expression, stop_ids
from specjax.errors import InputError, shown
from specjax.grammars.regular_expressions import byte_automaton
from specjax.grammars.token_table import DEAD, TokenTable, Vocabulary, token_table
from specjax.loading.model import Model
from specjax.loading.tokenizers.tokenizer import Tokenizer

_KEPT = 32
"""The number of the latest tables that are kept without a request that uses them."""
_used: weakref.WeakValueDictionary[Hashable, TokenTable] = weakref.WeakValueDictionary()
"""All tables that some request uses, or that are kept."""
_latest: collections.OrderedDict[Hashable, TokenTable] = collections.OrderedDict()
_making = threading.Lock()


def table_of(model: Model, sampling: SamplingParams) -> TokenTable | None:
    """Return the table of a request's grammar for the tokens of a model, None without a grammar.

    A table is made once as long as a request uses it. May be called from any thread. Raises
    InputError for a grammar that is not supported, too large, or of which the model has no output
    that other parameters of the request allow.
    """
    field = sampling.grammar
    if field is None:
        return None
    if model.tokenizer is None:
        raise InputError(f"sampling.{field}: {model.name} has no tokenizer; leave it out")
    key = (
        *(model.tokenizer, model.config.vocab_size, field, getattr(sampling, field)),
        *(sampling.grammar_after, stop_ids(model, sampling)),
        *(sampling.banned_token_ids, sampling.allowed_token_ids),
    )
    table = _used.get(key)
    if table is None:
        with _making:
            table = _used.get(key) or _table(model, sampling, field)
            _used[key] = _latest[key] = table
            if len(_latest) > _KEPT:
                _latest.popitem(last=False)
    _check_limits(table, sampling, field)
    return table


def _check_limits(table: TokenTable, sampling: SamplingParams, field: str) -> None:
    """Raise InputError if no output begins with the forced tokens, or is within the limit."""
    forced = sampling.forced_token_ids
    state = table.state_after(forced)
    if state == DEAD:
        raise InputError(
            f"sampling.forced_token_ids: no output of sampling.{field} begins with them; leave "
            "one of the two out"
        )
    least = len(forced) + int(table.least[state])
    if least > sampling.max_new_tokens:
        raise InputError(
            f"sampling.max_new_tokens={sampling.max_new_tokens}: the shortest output of "
            f"sampling.{field} has {least} tokens; raise it"
        )


def _table(model: Model, sampling: SamplingParams, field: str) -> TokenTable:
    """Return the table of the grammar that is the value of a field of `sampling`."""
    name, size = f"sampling.{field}", model.config.vocab_size
    pattern = _pattern(field, getattr(sampling, field))
    what = f"{name}={shown(pattern, 80)}" if field == "regex" else name
    automaton, before = byte_automaton(pattern, what), 0
    if sampling.grammar_after:
        automaton, before = automaton.after_marker(sampling.grammar_after.encode())
    vocabulary = _vocabulary(model.tokenizer, size, name)
    left_out = set(sampling.banned_token_ids)
    if sampling.allowed_token_ids is not None:
        left_out |= set(range(size)).difference(sampling.allowed_token_ids)
    ends = [end for end in stop_ids(model, sampling) if end < size and end not in left_out]
    # The text of a token that ends an output is shown, unless it is special: it is left out of the
    # grammar's texts, and no end of them, if there is another.
    silent = [end for end in ends if end in vocabulary.special or not vocabulary.later[end]]
    if silent:
        left_out |= set(ends).difference(silent)
    return token_table(
        automaton, vocabulary.without(frozenset(left_out)), silent or ends, name, before=before
    )


def _pattern(field: str, grammar: str | Sequence[str]) -> str:
    """Return a grammar as a regular expression."""
    if field == "choice":
        return "|".join(map(re.escape, grammar))
    if field == "json_schema":
        return schema_expression(grammar, "sampling.json_schema")
    return grammar


@functools.lru_cache(maxsize=8)
def _vocabulary(tokenizer: Tokenizer, vocab_size: int, name: str) -> Vocabulary:
    """Return the texts of a model's tokens. Raises InputError if a token has none of its own."""
    detokenizer = tokenizer.detokenizer
    first, later = (detokenizer.pieces(vocab_size, first=which) for which in (True, False))
    if first is None or later is None:
        raise InputError(
            f"{name}: the texts of this tokenizer's tokens depend on one another, so that no "
            "grammar can be followed; leave it out"
        )
    special = frozenset(token for token in detokenizer.special if token < vocab_size)
    return Vocabulary(first, later, special)
