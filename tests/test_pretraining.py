"""Text to tokens to a new model: what goes in comes out, and what is wrong is said so."""

import gzip
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
import pytest
import toy_training
from bad_input import refused_command
from conftest import tiny_config

from specjax.apps.command_line.config_file import read_config
from specjax.distributed.sharding import make_mesh
from specjax.errors import InputError
from specjax.fields import PathOrName, check_values, fields_of, optional
from specjax.files.folder_checksums import MARKER
from specjax.loading.checkpoints import save_checkpoint
from specjax.loading.load import load_model, save_model
from specjax.loading.texts.documents import Documents, document_files
from specjax.loading.texts.text_tokens import encode_document
from specjax.loading.texts.tfds_texts import import_tfds
from train import corpus, eagle
from train.data.combined_datasets import open_sources
from train.data.examples import target_metadata, text_metadata
from train.data.responses import open_responses
from train.data.tfds_files import write_records
from train.pretraining.new_model import ExpertSizes, ModelSizes, new_model
from train.pretraining.tokenizers import END, train_tokenizer
from train.run import run
from train.run.config import TrainingConfig, read_training_config
from train.run.evaluate import held_out_prompts

ROOT = Path(__file__).parent.parent
OWN = sorted((ROOT / "docs").glob("*.md"))
V = 320
SIZES = dict(
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    max_positions=200,
    rope_theta=10000.0,
    tie_word_embeddings=False,
)


def write_documents(folder, documents):
    """A TFDS dataset of texts, with their source and licence."""
    folder.mkdir(parents=True)
    features = dict.fromkeys(("text", "source", "licence"), import_tfds().features.Text())
    write_records(folder, "texts", "train", features, documents, description="", where=folder)


@pytest.fixture(scope="module")
def documents():
    """120 texts of this repository's own documentation."""
    text = "".join(file.read_text() for file in OWN)
    starts = range(0, 120 * 240, 240)
    notes = {"source": "docs", "licence": "Apache-2.0"}
    return [{"text": text[start : start + 240], **notes} for start in starts]


@pytest.fixture(scope="module")
def tokenizer(documents):
    return train_tokenizer([one["text"] for one in documents], V)


@pytest.fixture(scope="module")
def text(documents, tmp_path_factory):
    """A TFDS dataset of them."""
    folder = tmp_path_factory.mktemp("text") / "text"
    write_documents(folder, documents)
    return folder


def tokenize(text, workdir, *more):
    """Run the command on a TFDS dataset."""
    options = {"dataset": text, "workdir": workdir, "vocab_size": V, "max_tokens": 48}
    flags = [f"--config.{name}={value}" for name, value in options.items()]
    return corpus.main([*flags, "--config.documents_per_part=50", *more])


@pytest.fixture(scope="module")
def tokens(text, tmp_path_factory):
    """The datasets of tokens that the command makes of them."""
    workdir = tmp_path_factory.mktemp("corpus") / "w"
    assert tokenize(text, workdir) == 0
    return workdir / "tokens"


def test_every_byte_comes_back(tokenizer):
    every = bytes(range(256)).decode("latin-1") + "\U0001f600 e\u0301 \u4f60\u597d\r\n\t\0"
    for text in (every, f"a{END}b<|im_end|>", "", " leading", "trailing \n"):
        ids = encode_document(tokenizer, text)
        assert ids[-1] == tokenizer.eos_ids[0]
        assert tokenizer.eos_ids[0] not in ids[:-1]
        assert tokenizer.decode(ids) == text
    assert tokenizer.vocab_size == V
    assert tokenizer.token(tokenizer.eos_ids[0]) == END
    # In a prompt it is the special token, as for every other model.
    assert tokenizer.encode(END) == list(tokenizer.eos_ids)


def test_too_few_words_for_a_vocabulary():
    with pytest.raises(InputError, match="vocab_size=5000: the corpus gives only 2[0-9]+ tokens"):
        train_tokenizer(["a few words"], 5000)


def test_tokens_are_the_documents(tokens, documents):
    data = open_sources([tokens])
    assert [path.name for path in sorted(tokens.iterdir())] == [f"part-0000{n}" for n in range(3)]
    tokenizer = data.tokenizer()
    pieces = [data[index] for index in range(len(data))]
    assert max(len(one.tokens) for one in pieces) == 48
    assert all(one.loss_mask.all() for one in pieces)
    assert {(one.source, one.licence) for one in pieces} == {("docs", "Apache-2.0")}
    end, texts, held_out = tokenizer.eos_ids[0], [], []
    ids = []
    for piece, aside in zip(pieces, data.validation, strict=True):
        ids += piece.tokens.tolist()
        if ids[-1] == end:
            texts.append(tokenizer.decode(ids))
            held_out.append(bool(aside))
            ids = []
    assert texts == [one["text"] for one in documents]
    # Whole documents: no piece of one that is held out is trained on.
    assert np.flatnonzero(held_out).tolist() == [0, 50, 100]
    for part in data.parts:
        assert len(set(part.ids.tolist())) == len(part)
    several = data.lengths[data.validation]
    assert len(several) > 3


def test_the_tokenizer_learns_nothing_of_what_is_held_out(tmp_path, documents):
    odd = "zyx" * 400
    texts = [{**one, "text": odd} if not i % 50 else one for i, one in enumerate(documents)]
    write_documents(tmp_path / "text", texts)
    assert tokenize(tmp_path / "text", tmp_path / "w") == 0
    tokenizer = open_sources([tmp_path / "w" / "tokens"]).tokenizer()
    strings = {tokenizer.token(index) for index in range(V)}
    assert not any("zy" in one or "yx" in one for one in strings)


def files(folder):
    """The content of each file but the lock."""
    found = (path for path in folder.rglob("*") if path.is_file() and "lock" not in path.name)
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def test_resumed_to_the_same_datasets(tmp_path, text, monkeypatch, capsys):
    assert tokenize(text, tmp_path / "whole") == 0
    written = []

    def dies(path, pieces, *arguments, **options):
        if written:
            next(iter(pieces))
            raise KeyboardInterrupt
        written.append(path)
        return write(path, pieces, *arguments, **options)

    write = corpus.write_responses
    monkeypatch.setattr(corpus, "write_responses", dies)
    assert tokenize(text, tmp_path / "w") == 130
    assert [path.name for path in (tmp_path / "w" / "tokens").iterdir()] == ["part-00000"]
    monkeypatch.undo()
    # The tokenizer that is there is used, not trained again.
    monkeypatch.setattr(corpus, "train_tokenizer", None)
    capsys.readouterr()
    assert tokenize(text, tmp_path / "w") == 0
    assert "resuming: 1 of 3 parts are written" in capsys.readouterr().out
    whole, resumed = files(tmp_path / "whole" / "tokens"), files(tmp_path / "w" / "tokens")
    assert whole == resumed
    assert tokenize(text, tmp_path / "w") == 0
    assert files(tmp_path / "w" / "tokens") == resumed
    capsys.readouterr()
    assert tokenize(text, tmp_path / "w", "--config.max_tokens=32") == 2
    assert "max_tokens=48 then, 32 now" in capsys.readouterr().err
    assert files(tmp_path / "w" / "tokens") == resumed


def test_files_of_ones_own(tmp_path, capsys):
    folder = tmp_path / "texts"
    (folder / "more").mkdir(parents=True)
    (folder / ".hidden").write_bytes(b"\xff")
    (folder / "b.txt").write_text("\ufeffsecond", encoding="utf-8")
    (folder / "more" / "c.md").write_text("third")
    rows = [{"text": "one", "source": "me", "licence": "CC0-1.0"}, {"text": "two"}]
    lines = "\n".join(map(json.dumps, rows))
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    assert list(Documents(tuple(document_files([folder, folder / "b.txt"])))) == [
        ("one", {"source": "me", "licence": "CC0-1.0"}),
        ("two", {"source": "a.jsonl.gz"}),
        ("second", {"source": "b.txt"}),
        ("third", {"source": "c.md"}),
        ("second", {"source": "b.txt"}),
    ]
    arguments = [f"--config.workdir={tmp_path / 'w'}", "--config.vocab_size=258"]
    assert corpus.main([*arguments, f"--config.files={folder}"]) == 0
    data = open_sources([tmp_path / "w" / "tokens"])
    tokenizer = data.tokenizer()
    assert [tokenizer.decode(data[index].tokens.tolist()) for index in range(4)] == [
        "one",
        "two",
        "second",
        "third",
    ]
    (folder / "b.txt").write_text("changed")
    capsys.readouterr()
    assert "text.files=" in refused_command(
        corpus.main, [*arguments, f"--config.files={folder}"], capsys
    )


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", b"caf\xe9", r"a.txt: not text in UTF-8 \(byte 3 is 0xe9\)"),
        ("a.jsonl", b'{"text": "x"}\n{"txt": "y"}', "line 2: text=None: use a text"),
        ("a.jsonl", b'{"text": "x", "licence": 3}', "line 1: licence=3: use a text"),
        ("a.jsonl", b'{"text": "\\ud800"}', "line 1: text: character 0"),
        ("a.jsonl", b"[]", "line 1 is \\[\\]; put one JSON object in a line"),
    ],
)
def test_files_that_are_no_documents(tmp_path, capsys, name, content, said):
    (tmp_path / name).write_bytes(content)
    file, workdir = tmp_path / name, tmp_path / "w"
    assert corpus.main([f"--config.files={file}", f"--config.workdir={workdir}"]) == 2
    assert re.search(said, capsys.readouterr().err)
    assert not (workdir / "tokens").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "files, dataset: missing"),
        (("files={text}", "dataset={text}"), "files, dataset: both given"),
        (
            ("files=nosuch,none",),
            "files='nosuch': no such file or folder; files='none': no such file or folder",
        ),
        (("files={empty}",), "files='.*': an empty folder"),
        (("dataset=nosuch",), "dataset='nosuch': no file, and TFDS says"),
        (("dataset={text}", "tfds.split=test"), "dataset='.*': no file, and TFDS says"),
        (("dataset={text}", "tfds.text_field=body"), "tfds.text_field='body': .* no such field"),
        (("dataset={text}", "vocab_size=256"), "vocab_size=256: use a whole number from 257"),
        (("dataset={text}", "vocab_size=100000"), "vocab_size=100000: the corpus gives only"),
        (("dataset={text}", "tokenizer=nosuch"), "tokenizer='nosuch': no such file"),
        (("dataset={text}", "limit=1"), "limit=1: use a whole number of at least 2"),
    ],
)
def test_refused(tmp_path, text, capsys, options, said):
    (tmp_path / "empty").mkdir()
    names = {"text": text, "empty": tmp_path / "empty"}
    flags = [f"--config.{one.format(**names)}" for one in options]
    error = refused_command(corpus.main, [*flags, f"--config.workdir={tmp_path / 'w'}"], capsys)
    assert re.search(said, error)
    assert not (tmp_path / "w" / "tokens").exists()


def test_one_document_leaves_none_to_train_on(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("alone")
    flags = [f"--config.files={tmp_path / 'text.txt'}", f"--config.workdir={tmp_path / 'w'}"]
    assert "files, dataset: 1 documents, and the first is held out" in refused_command(
        corpus.main, flags, capsys
    )


def test_a_folder_of_somebody_else_is_not_written(tmp_path, text, capsys):
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "letter.txt").write_text("keep me")
    assert tokenize(text, tmp_path / "w") == 2
    assert "holds 'letter.txt'" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "w").iterdir()] == ["letter.txt"]


def test_damaged_datasets_are_found(tmp_path, text, documents):
    assert tokenize(text, tmp_path / "w") == 0
    part = tmp_path / "w" / "tokens" / "part-00001"
    kept = part / "tokenizer" / "tokenizer.json"
    content = kept.read_bytes()
    kept.unlink()
    with pytest.raises(InputError, match="damaged dataset .*tokenizer.json"):
        open_responses(part)
    kept.write_bytes(content.replace(b"<|endoftext|>", b"<|endofbook|>"))
    # Of the same size: the tokens' hash of the tokenizer finds it.
    settings = part / "tokenizer" / "tokenizer_config.json"
    settings.write_bytes(settings.read_bytes().replace(b"<|endoftext|>", b"<|endofbook|>"))
    with pytest.raises(InputError, match="tokenizer is missing, or another one"):
        open_sources([tmp_path / "w" / "tokens"]).tokenizer()
    assert json.loads((part / MARKER).read_text())["kind"] == "dataset"


def test_a_models_tokenizer(tmp_path, text, chatty):
    """Of a checkpoint and of a directory; a model of that tokenizer can be trained on the data."""
    save_checkpoint(chatty, tmp_path / "model")
    assert tokenize(text, tmp_path / "a", f"--config.tokenizer={tmp_path / 'model'}") == 0
    data = open_sources([tmp_path / "a" / "tokens"], target_metadata(chatty))
    kept = data.tokenizer()
    assert kept.first_difference(chatty.tokenizer) is None
    for name in ("bos_id", "eos_ids", "chat_template", "special_tokens"):
        assert getattr(kept, name) == getattr(chatty.tokenizer, name)
    inside = data.parts[0].directory / "tokenizer"
    assert tokenize(text, tmp_path / "b", f"--config.tokenizer={inside}") == 0
    assert files(tmp_path / "a" / "tokens").keys() == files(tmp_path / "b" / "tokens").keys()
    for name in ("hidden_size", "num_layers"):
        open_responses(data.parts[0].directory, {**target_metadata(chatty), name: 3})
    with pytest.raises(InputError, match="another target.* with tokenizer="):
        open_responses(data.parts[0].directory, {**target_metadata(chatty), "tokenizer": "0"})


@dataclass(frozen=True, kw_only=True)
class ScratchConfig(TrainingConfig):
    """The config of a method that trains its target, with no section of its own."""

    target: Annotated[str | None, optional(PathOrName())]


def trained(config, make):
    """Reads a config and trains what it says; returns the exit code."""
    return run.run(read_training_config(ScratchConfig, config.to_dict()), make)


def scratch_config(tokens, workdir, **model):
    """A training config of a new model."""
    config = toy_training.get_config()
    config.target = None
    config.model = {**SIZES, **model}
    config.data, config.workdir = str(tokens), str(workdir)
    config.row_tokens, config.row_labels = 64, 60
    return config


def test_a_new_model(tokens, tokenizer):
    sizes = ModelSizes(**SIZES)
    data = open_sources([tokens])
    one = new_model(sizes.config(V), tokenizer, 0)
    assert one.config.vocab_size == V
    assert target_metadata(one)["tokenizer"] == text_metadata("", tokenizer)["tokenizer"]
    again = new_model(sizes.config(V), data.tokenizer(), 0)
    open_sources([tokens], target_metadata(again))
    other = new_model(sizes.config(V), tokenizer, 1)
    on_mesh = new_model(sizes.config(V), tokenizer, 0, make_mesh(4, 2))
    assert on_mesh.shards == 2
    for path, leaf in jax.tree_util.tree_leaves_with_path(one.params):
        name = jax.tree_util.keystr(path)
        wanted = np.asarray(leaf)
        take = lambda model: np.asarray(  # noqa: E731
            dict(jax.tree_util.tree_leaves_with_path(model.params))[path]  # noqa: B023
        )
        np.testing.assert_array_equal(take(again), wanted)
        np.testing.assert_allclose(take(on_mesh), wanted, rtol=1e-6)
        if "norm" in name:
            assert (wanted == 1).all()
            continue
        assert not np.array_equal(take(other), wanted)
        added = "'output'" in name or "'down'" in name
        assert wanted.std() == pytest.approx(0.02 / (2 if added else 1), rel=0.1), name
    tied = new_model(ModelSizes(**{**SIZES, "tie_word_embeddings": True}).config(V), tokenizer, 0)
    assert tied.num_params == one.num_params - V * SIZES["hidden_size"]


EXPERTS = dict(
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=6,
    n_shared_experts=1,
    first_k_dense_replace=1,
    n_group=2,
    topk_group=1,
    scoring_func="sigmoid",
    norm_topk_prob=True,
    routed_scaling_factor=1.5,
)
SOFTMAX = dict(
    n_shared_experts=0,
    first_k_dense_replace=0,
    n_group=1,
    scoring_func="softmax",
    routed_scaling_factor=1.0,
)


@pytest.mark.parametrize(("change", "family"), [({}, "glm4_moe"), (SOFTMAX, "qwen3_moe")])
def test_a_new_model_with_experts_is_one_of_a_family(change, family, tokenizer, tmp_path):
    """It is written as that family's checkpoints are; only a sigmoid router has a bias."""
    sizes = ModelSizes(**SIZES, experts=ExpertSizes(**{**EXPERTS, **change}))
    model = new_model(sizes.config(V), tokenizer, 0)
    assert model.config.family == family
    mlp = model.params["layers"]["mlp"]
    assert ("selection_bias" in mlp["router"]) == (family == "glm4_moe")
    assert ("shared" in mlp, "dense_layers" in model.params) == (not change, not change)
    for part, spread in (("gate_up", 0.02), ("down", 0.01)):
        kernel = np.asarray(mlp["experts"][part]["kernel"])
        assert kernel.std() == pytest.approx(spread, rel=0.1)
    save_model(model, tmp_path / "m")
    loaded = load_model(str(tmp_path / "m"), dtype="float32")
    assert loaded.config == model.config
    jax.tree.map(np.testing.assert_array_equal, loaded.params, model.params)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (dict(n_group=3), "n_group=3: num_experts=8 cannot be split"),
        (dict(n_group=8), "n_group=8: num_experts=8 cannot be split"),
        (dict(topk_group=3), "topk_group=3: there are n_group=2 groups"),
        (dict(num_experts_per_tok=5), "num_experts_per_tok=5: a token chooses from 4 experts"),
        (dict(first_k_dense_replace=2), "first_k_dense_replace=2: none of num_layers=2 layers"),
        (dict(scoring_func="tanh"), "scoring_func='tanh' is unknown: use sigmoid, softmax"),
        (dict(num_experts=0), "num_experts=0: use a whole number"),
    ],
)
def test_experts_that_do_not_fit_are_refused(tokens, tmp_path, change, said):
    config = scratch_config(tokens, tmp_path / "w", experts={**EXPERTS, **change})
    with pytest.raises(InputError, match=f"model.experts.{said}") as error:
        trained(config, lambda *_: None)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "w").exists()


def test_a_run_without_a_target(tokens, tmp_path, capsys):
    """The toy's target is frozen, but it is a new model that the run works with."""
    config = scratch_config(tokens, tmp_path / "w")
    config.steps, config.checkpoint_every = 2, 2
    made = []

    def make(target, vocabulary, config):
        made.append(target)
        return toy_training.toy_method(target)

    assert trained(config, make) == 0
    said = capsys.readouterr().out
    assert "for new (" in said
    assert "eval" in (tmp_path / "w" / "metrics.jsonl").read_text()
    assert trained(config, make) == 0
    first, second = (jax.tree.leaves(model.params) for model in made)
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    assert target_metadata(made[0])["name"] == "new"


def test_a_texts_first_half_is_a_prompt(tokens):
    data = open_sources([tokens])
    held_out = np.flatnonzero(data.validation)
    prompts = held_out_prompts(data, held_out, 3, 20)
    assert len(prompts) == 3
    assert prompts[0] == data[int(held_out[0])].tokens[:20].tolist()
    halves = held_out_prompts(data, held_out, len(held_out), 500)
    assert max(map(len, halves)) == 24


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (dict(target="x"), "target='x': the section model has the sizes of a new one"),
        (dict(model=None), "target is missing: pass --config.target=NAME"),
        (dict(num_heads=3), "model.num_heads=3: must be a multiple of num_kv_heads=2"),
        (dict(head_dim=5), "model.head_dim=5: must be even"),
        (dict(data="shipped"), "data='.*': keeps no tokenizer for a new model"),
    ],
)
def test_a_new_model_that_cannot_be(tokens, tmp_path, change, said, monkeypatch):
    config = scratch_config(tokens, tmp_path / "w")
    for name, value in change.items():
        if name in SIZES:
            config.model[name] = value
        elif name == "model":
            del config.model
        else:
            config.unlock()
            config[name] = value
    with pytest.raises(InputError, match=said):
        trained(config, lambda *_: None)
    assert not (tmp_path / "w").exists()


def test_methods_for_a_frozen_target_refuse_none(tmp_path):
    config = read_config(["--config=train_eagle3"], "train_eagle3").to_dict()
    with pytest.raises(InputError, match="target is missing: a drafter is trained for a model"):
        check_values(fields_of(eagle.Config), {**config, "target": None})
    fields = fields_of(ScratchConfig)
    scratch = scratch_config("shipped", tmp_path / "w").to_dict()
    assert check_values(fields, scratch)["target"] is None
    with pytest.raises(InputError, match="model.num_layers=0: use a whole number"):
        check_values(fields, {**scratch, "model": {**scratch["model"], "num_layers": 0}})
    sizes = {name: size for name, size in SIZES.items() if name != "head_dim"}
    with pytest.raises(InputError, match="model.head_dim is missing"):
        check_values(fields, {**scratch, "model": sizes})


def test_datasets_of_other_tokenizers(tokens, text, tmp_path, chatty):
    save_checkpoint(chatty, tmp_path / "model")
    assert tokenize(text, tmp_path / "a", f"--config.tokenizer={tmp_path / 'model'}") == 0
    with pytest.raises(InputError, match="has another tokenizer than .* \\(token "):
        open_sources([tokens, tmp_path / "a" / "tokens"]).tokenizer()
    assert tiny_config().vocab_size != V
