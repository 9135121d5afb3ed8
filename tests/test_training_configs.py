"""Every training config at its debug size, from the data to decoding with what was exported."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import slow

from specjax import make_drafter
from specjax.apps.run import decode
from specjax.loading.load import load_model, save_model
from specjax.methods.saved_heads import read_head
from train import block, corpus, distill, eagle, layerskip, medusa, mtp, peagle
from train.data.examples import Example, target_metadata
from train.data.write_responses import write_responses
from train.run import run

CONV = "--config.block.conv_group_size=2"
RUNS = {
    "train_eagle1": (eagle, "eagle", ["--config.eagle.draft_vocab_size=40"]),
    "train_eagle3": (eagle, "eagle3", ["--config.eagle.draft_vocab_size=40"]),
    "train_peagle": (
        peagle,
        "peagle",
        ["--config.eagle.draft_vocab_size=40", "--config.eagle.num_layers=2"],
    ),
    "train_distill": (
        distill,
        "draft_model",
        ["--config.distill.draft_vocab_size=40", "--config.distill.layers=(0,1)"],
    ),
    "train_dflash": (block, "dflash", ["--config.block.draft_vocab_size=40"]),
    "train_dspark": (block, "dspark", ["--config.block.draft_vocab_size=40"]),
    "train_dflash2": (block, "dflash", ["--config.block.draft_vocab_size=40", CONV]),
    "train_medusa": (medusa, "medusa", ["--config.medusa.draft_vocab_size=40"]),
    "train_medusa2": (medusa, "medusa", ["--config.medusa.draft_vocab_size=40"]),
    "train_layerskip": (layerskip, "early_exit", ["--config.layerskip.rotation=2"]),
    "train_mtp": (mtp, "mtp", ["--config.mtp.steps=2"]),
    "train_mtp all": (
        mtp,
        "mtp",
        [
            "--config.mtp.trains=all",
            "--config.mtp.num_modules=2",
            "--config.mtp.late_loss_weight=0.1",
        ],
    ),
}

SHORT = ["--config.steps=1", "--config.eval.batches=0"]
MTP_HEAD = ["--config.mtp.export=head", "--config.mtp.draft_vocab_size=40"]


def write_text_tokens(folder):
    """The directory of the dataset: 60 texts of 150 letters, in pieces of up to 32 tokens."""
    own = Path("docs/training.md").read_text()
    texts = [{"text": own[start : start + 150]} for start in range(0, 60 * 150, 150)]
    (folder / "own.jsonl").write_text("".join(json.dumps(one) + "\n" for one in texts))
    options = [f"--config.files={folder / 'own.jsonl'}", f"--config.workdir={folder / 'w'}"]
    options += ["--config=configs/corpus.py:debug", "--config.max_tokens=32"]
    assert corpus.main(options) == 0
    return folder / "w" / "tokens"


@pytest.fixture(scope="module")
def folders(chatty, tmp_path_factory):
    """A saved model and conversations of it, 8 tokens of prompt and 24 of answer."""
    folder = tmp_path_factory.mktemp("training")
    save_model(chatty, folder / "model")
    rng = np.random.default_rng(0)
    examples = [
        Example(
            rng.integers(0, chatty.config.vocab_size, 32).astype(np.int32),
            np.arange(32) >= 8,
            id=number,
        )
        for number in range(60)
    ]
    target = load_model(str(folder / "model"), dtype="float32")
    write_responses(folder / "data", examples, target_metadata(target))
    return folder


@pytest.mark.parametrize(
    ("name", "decoded"),
    # The others share their code: Medusa's is part of its second stage, EAGLE's of EAGLE-3's. A new
    # model and its modules have a test of their own. One run decodes after it has trained, is
    # resumed, and decodes with what it exported; what the others export is read.
    [
        *(("train_eagle3", 0), ("train_distill", 1), ("train_medusa2", 0), ("train_layerskip", 1)),
        ("train_dspark", 0),
        *slow(*((name, 1) for name in RUNS if name not in ("train_distill", "train_layerskip"))),
    ],
)
def test_debug_size(name, decoded, folders, tmp_path, capsys):
    module, kind, options = RUNS[name]
    command = [
        f"--config=configs/{name.split()[0]}.py:debug",
        f"--config.target={folders / 'model'}",
        f"--config.data={folders / 'data'}",
        f"--config.workdir={tmp_path / 'run'}",
        f"--config.eval.prompts={decoded}",
        "--config.eval.temperatures=(0.0,)",
        "--config.eval.num_speculative_tokens=2",
        *options,
    ]
    assert module.main(command) == 0
    export, target = tmp_path / "run" / "export", folders / "model"
    if name == "train_medusa2":
        export, target = export / "head", export / "target"
    drafter = [f"--config.drafter.path={export}"]
    if module in (layerskip, mtp):
        drafter, target = [], export
    if decoded:
        assert module.main(command) == 0
        assert "this run was finished before" in capsys.readouterr().out
    record = json.loads((tmp_path / "run" / "config.json").read_text())
    assert module in (layerskip, mtp) or len(record["draft_vocabulary"]) == 16
    if not decoded:
        loaded = make_drafter(kind, load_model(str(target), dtype="float32"), export)
        assert loaded.drafter.name == kind
        return
    decoding = [
        "--config=configs/decode_smollm2.py",
        f"--config.target={target}",
        "--config.prompt=one two",
        f"--config.drafter.name={kind}",
        *drafter,
        "--config.num_speculative_tokens=2",  # as above: the same programs
        "--config.sampling.max_new_tokens=6",
        "--config.compare=true",
    ]
    assert decode.main(decoding) == 0


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A folder of tokens of this repository's documentation."""
    return write_text_tokens(tmp_path_factory.mktemp("text"))


def from_scratch(text, workdir, *options):
    return mtp.main(
        [
            "--config=configs/train_mtp_scratch.py:debug",
            f"--config.data={text}",
            f"--config.workdir={workdir}",
            *options,
        ]
    )


def test_a_new_model_with_experts(text, tmp_path, capsys):
    """GLM-4.5's, with a module that has them too."""
    options = ["--config=configs/train_mtp_scratch.py:glm_debug", f"--config.data={text}"]
    options += [f"--config.workdir={tmp_path / 'w'}", "--config.steps=4", "--config.log_every=1"]
    assert mtp.main([*options, "--config.eval.batches=0", "--config.eval.prompts=0"]) == 0
    said = capsys.readouterr().out
    for words in ("mtp for new (", "trained along)", "  lm ", "lambda 0.3", "imbalance "):
        assert words in said, words
    model = load_model(str(tmp_path / "w" / "export"))
    for router in (
        model.params["layers"]["mlp"]["router"],
        model.mtp.params["modules"]["0"]["layer"]["mlp"]["router"],
    ):
        # Four updates of 0.01, each up or down.
        ups = np.asarray(router["selection_bias"]) / 0.01
        assert np.abs(ups).max() > 1
        np.testing.assert_allclose(ups, np.round(ups), atol=1e-4)


def test_a_new_model_without_modules(text, tmp_path, capsys):
    options = ["--config.mtp.num_modules=0", "--config.eval.prompts=0", "--config.steps=2"]
    assert from_scratch(text, tmp_path / "w", *options) == 0
    said = capsys.readouterr().out
    assert f"python -m specjax.decode --config.target={tmp_path / 'w' / 'export'}\n" in said
    target = load_model(str(tmp_path / "w" / "export"))
    assert target.mtp is None
    assert "lambda" not in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--config.row_tokens=4", "--config.mtp.num_modules=3"], "row_tokens=4 tokens: the last"),
        (["--config.mtp.num_modules=31"], "data: sequences of up to 32 tokens: the last draft"),
    ],
)
def test_sequences_that_are_too_short(options, said, text, tmp_path, capsys):
    assert from_scratch(text, tmp_path / "w", *options) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "w").exists()


def test_the_shipped_set_is_called_small_only_where_it_is_alone():
    assert run._shipped_alone("shipped")
    assert not run._shipped_alone("folder,shipped")


@pytest.mark.parametrize(
    "shorter",
    [
        ["--config.steps=1", "--config.eval.batches=0", "--config.eval.prompts=0"],
        *slow(([],)),
    ],
    ids=["one step", "debug"],
)
def test_training_needs_no_flags(shorter, tmp_path, monkeypatch, capsys):
    """Only the size is given: target, data and folder are the config's own."""
    (tmp_path / "configs").symlink_to(Path("configs").absolute())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert medusa.main(["--config=configs/train_medusa.py:debug", *shorter]) == 0
    said = capsys.readouterr().out
    assert "data=shipped is small" in said
    assert "More data: python -m train.generate, then --config.data=" in said
    export = "build/train_medusa_debug/export"
    command = f"--config.drafter.name=medusa --config.drafter.path={export}"
    command += " --config.compare=true"
    assert f"decode with it: python -m specjax.decode {command}" in said
    assert read_head(tmp_path / export).kind == "medusa"


def started_from(folders, workdir, name, *options):
    module, _, usual = RUNS[name]
    return module.main(
        [
            f"--config=configs/{name.split()[0]}.py:debug",
            f"--config.target={folders / 'model'}",
            f"--config.data={folders / 'data'}",
            f"--config.workdir={workdir}",
            "--config.eval.prompts=0",
            "--config.eval.batches=0",
            "--config.steps=3",
            *usual,
            *options,
        ]
    )


@pytest.fixture(scope="module")
def medusa_export(folders):
    """Medusa heads that were trained for three steps."""
    workdir = folders / "medusa"
    assert started_from(folders, workdir, "train_medusa") == 0
    return workdir / "export"


def test_a_run_starts_from_a_trained_head(folders, medusa_export, tmp_path):
    rng = np.random.default_rng(5)
    # Other tokens are common in this data: the draft vocabulary is the head's all the same.
    others = [
        Example(rng.integers(0, 30, 32).astype(np.int32), np.arange(32) >= 8, id=number)
        for number in range(60)
    ]
    target = load_model(str(folders / "model"), dtype="float32")
    write_responses(tmp_path / "data", others, target_metadata(target))
    options = [f"--config.start_from={medusa_export}", f"--config.data={tmp_path / 'data'}"]
    still = [*options, "--config.learning_rate=1e-12"]
    assert started_from(folders, tmp_path / "still", "train_medusa", *still) == 0
    assert started_from(folders, tmp_path / "moved", "train_medusa", *options) == 0
    first, same, moved = (
        read_head(path)
        for path in (medusa_export, tmp_path / "still" / "export", tmp_path / "moved" / "export")
    )
    np.testing.assert_array_equal(same.draft_ids, first.draft_ids)
    for mine, theirs in zip(*map(jax.tree.leaves, (same.params, first.params)), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-9)
    assert any(
        np.abs(np.asarray(mine) - np.asarray(theirs)).max() > 1e-5
        for mine, theirs in zip(*map(jax.tree.leaves, (moved.params, first.params)), strict=True)
    )
    assert same.training["earlier"] == first.training
    assert str(folders) not in str(same.training)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("train_distill", [], "a head of the kind medusa"),
        ("train_medusa", ["--config.medusa.draft_vocab_size=39"], "set draft_vocab_size=40"),
        ("train_medusa", ["--config.medusa.num_heads=1"], "has num_heads=2, the config 1"),
        (
            "train_medusa",
            ["--config.start_from=nowhere"],
            "start_from='nowhere': no such",
        ),
        (
            "train_eagle3",
            ["--config.start_from=eagle3"],
            "start_from='eagle3': no eagle3 comes",
        ),
        (
            "train_mtp",
            MTP_HEAD,
            "a head of the kind medusa",
        ),
    ],
)
def test_an_earlier_head_of_another_kind(name, options, said, folders, medusa_export, capsys):
    options = [f"--config.start_from={medusa_export}", *options]
    assert started_from(folders, folders / "refused", name, *options) == 2
    assert said in capsys.readouterr().err


def losses_of(workdir):
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return [line["train/loss"] for line in lines if "train/loss" in line]


# As of the toy in test_train_resume, whose runs are resumed on other meshes.
@pytest.mark.parametrize("name", slow(*RUNS))
def test_the_curve_is_the_same_on_other_meshes(name, folders, tmp_path):
    """On one device, and begun on 8 x 1 and resumed on 4 x 2 (data x model), all split."""

    def losses(workdir, *runs):
        always = ["--config.dtype=float32", "--config.batch_size=8", "--config.decay_steps=3"]
        for steps, data, model, fsdp in runs:
            options = [f"--config.steps={steps}", f"--config.mesh.data={data}"]
            options += [f"--config.mesh.model={model}", f"--config.fsdp={fsdp}", *always]
            assert started_from(folders, workdir, name, *options) == 0
        return losses_of(workdir)

    alone = losses(tmp_path / "alone", (3, 1, 1, "false"))
    assert len(set(alone)) == 3
    moved = losses(tmp_path / "moved", (2, 8, 1, "true"), (3, 4, 2, "true"))
    np.testing.assert_allclose(moved, alone, rtol=1e-5)
