"""Processors that change logits given the tokens before them: penalties, biases, constraints.

    Penalties()         repetition, presence and frequency penalties
    TokenBias()         biases, banned and allowed tokens
    MinTokens()         no end before a number of tokens
    NoRepeatNgrams()    no n-gram twice
    Grammar()           only texts of a regular expression, a JSON schema or a list
    ForcedTokens()      the first tokens of the output

    specjax.generate(model, prompts, drafter=drafter, repetition_penalty=1.2, min_tokens=20)

Sampling parameters ask for them by row. For one of your own subclass `Processor`, check it by
`specjax.testing.check_processor`, and pass it as the option `processors`. More: docs/processors.md.
"""

from specjax.core.processor import NewRows, Processor, one_by_one
from specjax.processors.grammar import Grammar
from specjax.processors.penalties import Penalties
from specjax.processors.tokens import ForcedTokens, MinTokens, NoRepeatNgrams, TokenBias

__all__ = [
    "ForcedTokens",
    "Grammar",
    "MinTokens",
    "NewRows",
    "NoRepeatNgrams",
    "Penalties",
    "Processor",
    "TokenBias",
    "one_by_one",
]
