"""The grammars that requests ask for, as tables of a model's tokens."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

from specjax.engine.requests import SamplingParams, stop_ids
from specjax.errors import InputError
from specjax.files.json_files import parse_json
from specjax.grammars.json_schema import schema_pattern
from specjax.grammars.regular_expressions import byte_automaton
from specjax.grammars.token_table import DEAD, TokenTable, Vocabulary, token_table
from specjax.loading.model import Model
from specjax.loading.tokenizers.tokenizer import Tokenizer


def table_of(model: Model, sampling: SamplingParams) -> TokenTable | None:
    """Return the table of a request's grammar for the tokens of a model, None without a grammar.

    Tables are kept for later requests. May be called from any thread. Raises InputError for a
    grammar that is not supported, too large, or of which the model has no output that other
    parameters of the request allow.
    """
    field = sampling.grammar
    if field is None:
        return None
    if model.tokenizer is None:
        raise InputError(f"sampling.{field}: {model.name} has no tokenizer; leave it out")
    left_out = frozenset(sampling.banned_token_ids)
    if sampling.allowed_token_ids is not None:
        left_out |= frozenset(range(model.config.vocab_size)).difference(sampling.allowed_token_ids)
    table = _table(
        model.tokenizer,
        model.config.vocab_size,
        field,
        getattr(sampling, field),
        sampling.grammar_after,
        stop_ids(model, sampling),
        left_out,
    )
    if table.least[0] > sampling.max_new_tokens:
        raise InputError(
            f"sampling.max_new_tokens={sampling.max_new_tokens}: the shortest output of "
            f"sampling.{field} has {table.least[0]} tokens; raise it"
        )
    if table.state_after(sampling.forced_token_ids) == DEAD:
        raise InputError(
            f"sampling.forced_token_ids: no output of sampling.{field} begins with them; leave "
            "one of the two out"
        )
    return table


@functools.lru_cache(maxsize=64)
def _table(
    tokenizer: Tokenizer,
    vocab_size: int,
    field: str,
    grammar: str | tuple[str, ...],
    after: str,
    ends: tuple[int, ...],
    left_out: frozenset[int],
) -> TokenTable:
    """Return the table of `grammar`, the value of a field of SamplingParams."""
    name = f"sampling.{field}"
    automaton, before = byte_automaton(_pattern(field, grammar), name), 0
    if after:
        automaton, before = automaton.after_marker(after.encode())
    vocabulary = _vocabulary(tokenizer, vocab_size, name).without(left_out)
    ends = tuple(end for end in ends if end < vocab_size and end not in left_out)
    return token_table(automaton, vocabulary, ends, name, before=before)


def _pattern(field: str, grammar: str | Sequence[str]) -> str:
    """Return a grammar as a regular expression."""
    if field == "choice":
        return "|".join(map(re.escape, grammar))
    if field == "json_schema":
        return schema_pattern(parse_json(grammar, "sampling.json_schema", "use a JSON schema"))
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
    return Vocabulary(first, later, frozenset(detokenizer.special))
