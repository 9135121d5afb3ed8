"""The record of drafting from a corpus."""

from __future__ import annotations

from specjax.methods.corpus.drafter import Corpus
from specjax.methods.method import Method, Needs

CORPUS = Method(
    name="corpus",
    paper="2311.08252",
    drafter=Corpus,
    needs=Needs.CORPUS,
    of_target=Corpus.of_target,
    check=Corpus.check_texts,
    in_all=False,
)
