"""Regular expressions as automata, and automata as tables of a vocabulary's tokens."""

import itertools
import re

import numpy as np
import pytest
from bad_input import examples, refused
from hypothesis import given
from hypothesis import strategies as st

from specjax.grammars import byte_automaton as byte_automata
from specjax.grammars import regular_expressions
from specjax.grammars import token_table as token_tables
from specjax.grammars.byte_automaton import DEAD
from specjax.grammars.regular_expressions import byte_automaton
from specjax.grammars.token_table import Vocabulary, token_table

CHARACTERS = "ab1_ \né€😀"
"""Characters of one to four bytes, in and out of classes."""


def patterns(depth=3):
    """Expressions over few characters, with everything that the syntax has."""
    classes = ["[ab]", "[^a]", "[^é-€]", "[a-c😀]", r"\d", r"\W", r"\s", "."]
    single = st.sampled_from(["a", "b", "é", "€", "😀", "", *classes])
    if not depth:
        return single
    inner = patterns(depth - 1)
    counts = st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{,2}", "{2,}", "*?", "+?"])
    return st.one_of(
        single,
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
        st.tuples(inner, counts).map(lambda pair: f"({pair[0]}){pair[1]}"),
        inner.map(lambda one: f"(?i:{one})"),
        inner.map(lambda one: f"(?s:{one})"),
    )


@examples(150)
@given(patterns(), st.lists(st.text(CHARACTERS + "A", max_size=6), max_size=20))
def test_automata_accept_what_python_matches(pattern, texts):
    """Of ASCII classes, as in JSON Schema; alternatives in any order."""
    compiled = re.compile(pattern, re.ASCII)
    automaton = byte_automaton(pattern)
    for text in [*texts, "", *CHARACTERS]:
        assert automaton.accepts(text.encode()) == bool(compiled.fullmatch(text)), text


@pytest.mark.parametrize(
    ("pattern", "states"),
    [("a|ab", 3), ("(a|b)*", 1), ("aa|ba|ab|bb", 3), ("a{0,9}", 10), ("(ab)*|(abab)*", 2)],
)
def test_automata_are_minimal(pattern, states):
    assert len(byte_automaton(pattern).accepting) == states


def test_an_automaton_reads_bytes_that_are_characters():
    automaton = byte_automaton(".")
    assert automaton.accepts("é".encode())
    assert not automaton.accepts(b"\xc3")
    assert not automaton.accepts(b"\xed\xa0\x80")  # half of a surrogate pair
    assert not automaton.accepts(b"\xc0\x80")  # a zero in two bytes
    assert not automaton.accepts(b"\xf4\x90\x80\x80")  # beyond Unicode


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("(a", "not a regular expression (missing )"),
        ("a(?=b)", "it has look-around, which is not supported; leave it out"),
        (r"(a)\1", "it has a reference to a group"),
        (r"a\b", "it has an anchor or a word boundary inside"),
        ("a$b", "it has an anchor or a word boundary inside"),
        ("(?>a*)", "it has an atomic group"),
        ("a*+", "it has a possessive quantifier"),
        (r"[^\s\S]", "no text matches it; allow some"),
        ("((a{100}){100}){100}", "more than 200000 parts with its repetitions written out"),
        ("(a|b)*a(a|b){15}", "its automaton has more than 12000 states; simplify it"),
        ("(x{0,100}){0,100}", "its automaton takes too much work to make"),
        ("(x?){5000}", "its automaton takes too much work to make"),
        ("(" * 2000 + ")" * 2000, "not a regular expression (maximum recursion depth"),
    ],
)
def test_expressions_that_are_refused(pattern, says):
    message = refused(lambda: byte_automaton(pattern), re.escape(says))
    assert message.startswith("regex=")


@pytest.mark.parametrize(
    "pattern", ["[^k]", "[^s]", "[a-z]", "µ", "[^µ]", "\\u017f", "i", "ß", "[^é-ü]"]
)
def test_cases_are_those_of_python(pattern):
    automaton = byte_automaton(f"(?i){pattern}")
    compiled = re.compile(f"(?i){pattern}")
    for character in map(chr, [*range(0x600), *range(0x1E00, 0x2200)]):
        assert automaton.accepts(character.encode()) == bool(compiled.fullmatch(character))


def test_what_repeats_for_long_may_have_equal_states(monkeypatch):
    """Finding all of them would take the longest; the language is the same."""
    monkeypatch.setattr(byte_automata, "_MOST_WORK", 100)
    automaton = byte_automaton("(a|b){0,40}c|(aa|bb)*d")
    compiled = re.compile("(a|b){0,40}c|(aa|bb)*d")
    for text in ("c", "d", "abc", "aabbd", "ad", "a" * 40 + "c", "a" * 41 + "c", "b" * 80 + "d"):
        assert automaton.accepts(text.encode()) == bool(compiled.fullmatch(text))


def test_anchors_around_an_expression_change_nothing():
    automaton = byte_automaton(r"^\Aab$\Z")
    assert automaton.accepts(b"ab")
    assert not automaton.accepts(b"abb")


TEXTS = (b"a", b"b", b"ab", b"ba", b"aab", None, b"\xc3", b"\xa9", "é".encode(), b"</t", b">a", b"")
SPECIAL, END = 12, 13
VOCABULARY = Vocabulary(
    (*TEXTS, b"</t>", b"<end>"), (*TEXTS, b"</t>", b"<end>"), frozenset({SPECIAL, END})
)


def table_of(pattern, ends=(END,), vocabulary=VOCABULARY, after=b""):
    automaton, before = byte_automaton(pattern), 0
    if after:
        automaton, before = automaton.after_marker(after)
    return token_table(automaton, vocabulary, ends, "sampling.regex", before=before)


def outputs(most, ends, allowed):
    """All lists of up to `most` tokens that a test allows, the last of which may be an end."""
    found, grown = [()], [()]
    for _ in range(most):
        grown = [(*one, token) for one in grown for token in range(14) if token != END]
        grown = [one for one in grown if allowed(one)]
        found += grown
    return [*found, *((*one, END) for one in found if ends)]


@pytest.mark.parametrize("ends", [(END,), ()])
@pytest.mark.parametrize(
    "pattern", ["a*b", "(ab|é)+", "aab|aba?", "é?", "(a|ab)(b[ab]|b)?", "([abé][abé])*"]
)
def test_tables_allow_what_can_be_completed(pattern, ends):
    """Compared with all texts of a few characters, by the definition."""
    table = table_of(pattern, ends)
    matches = re.compile(pattern)

    def text_of(tokens):
        return b"".join(VOCABULARY.later[token] or b"" for token in tokens)

    texts = map("".join, itertools.chain(*(itertools.product("abé", repeat=n) for n in range(7))))
    complete = {text.encode() for text in texts if matches.fullmatch(text)}
    begins = {text[:at] for text in complete for at in range(len(text) + 1)}
    for output in outputs(3, ends, lambda one: len(text_of(one)) < 5):
        ended = output[-1:] == (END,)
        body = output[:-1] if ended else output
        has_texts = all(token != SPECIAL and VOCABULARY.later[token] for token in body)
        text = text_of(body)
        wanted = has_texts and (text in complete if ended else text in begins)
        assert (table.state_after(output) != DEAD) == wanted, (output, text)
        if wanted and (ended or not ends):
            assert table.completed_by(output) == (text in complete)
    assert table.state_after([END, 0]) == DEAD


def test_the_least_number_of_tokens_is_that_of_the_shortest_way():
    table = table_of("aabaabb")
    assert table.least[0] == 4  # aab, aab, b and the end
    assert table.least[table.state_after([4])] == 3
    assert table_of("aabaabb", ()).least[0] == 3
    assert table_of("a*").least[0] == 1


def test_drafts_are_the_longest_tokens_of_what_has_to_follow():
    table = table_of("a(aabb|aabé)")
    following = []
    while (token := table.drafts[table.state_after(following)]) != DEAD:
        following.append(int(token))
    # `aab` before the last `a` of `aaab` is a choice of the expression's, not of the text.
    assert [TEXTS[token] for token in following] == [b"a", b"aab"]
    state = table.state_after([*following, 1])
    assert table.drafts[state] == END
    assert table.drafts[table.state_after([*following, 6])] == 7  # the only token that is allowed


def test_a_grammar_begins_after_a_marker():
    """Also where the marker is split among tokens, or a token has the beginning of the answer."""
    table = table_of("a+b", after=b"</t>")
    for before in ([], [0, 1], [9], [9, 9], [5 + 4]):
        for marker in ([SPECIAL], [9, 10]):
            said = [*before, *marker]
            rest = [] if marker[-1] == 10 else [0]
            assert table.state_after([*said, *rest]) != DEAD
            assert table.state_after([*said, *rest, 1]) != DEAD
            assert table.completed_by([*said, *rest, 1, END])
            assert table.state_after([*said, *rest, SPECIAL]) == DEAD
    assert table.state_after([0, END]) == DEAD  # nothing ends before the answer
    assert table.state_after([9, 1, 10, 1]) != DEAD  # `</tb>a` is no marker
    assert table.state_after([9, 1, 10, END]) == DEAD


def test_first_tokens_may_have_other_texts():
    """As in SentencePiece vocabularies, where the first token loses its space."""
    later = (b" a", b"a", b" ")
    table = token_table(
        byte_automaton("a a"), Vocabulary((b"a", b"a", b""), later), (), "sampling.regex"
    )
    assert table.completed_by([0, 0])
    assert table.completed_by([1, 2, 1])
    assert table.state_after([2]) == DEAD
    assert table.state_after([0, 1]) == DEAD


def test_texts_that_no_tokens_make_are_refused():
    refused(lambda: table_of("abc"), "sampling.regex: no tokens of the vocabulary make such")
    table = table_of("ab|abc")
    assert table.state_after([2]) != DEAD
    vocabulary = VOCABULARY.without(frozenset({2, 1}))
    refused(lambda: table_of("ab", vocabulary=vocabulary), "no tokens of the vocabulary")
    assert table_of("aab", vocabulary=vocabulary).state_after([4, END]) != DEAD


def test_tables_that_are_too_large_are_refused(monkeypatch):
    refused(
        lambda: table_of("a{9000}b*"),
        "its automaton has 9001 states, more than 8192; simplify it",
    )
    monkeypatch.setattr(token_tables, "MOST_ENTRIES", 20)
    refused(lambda: table_of("a{9}b"), "its table has 12 states and 6 classes of tokens .0 MiB.")
    monkeypatch.setattr(regular_expressions, "MOST_STATES", 3)
    refused(lambda: byte_automaton("abcd"), "more than 3 states")


def test_tokens_that_are_alike_share_a_class():
    table = table_of("[ab]*")
    sizes = np.bincount(table.classes)
    assert table.successors.shape[1] == 3  # letters, the end, all others
    assert sorted(sizes) == [1, 5, 8]
