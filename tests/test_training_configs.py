"""Every training config at its debug size, from the data to decoding with what was exported."""

import numpy as np
import pytest

from specjax import decode
from specjax.models.loading import load_model, save_model
from train import distill, eagle, medusa
from train.data.examples import Example, target_facts
from train.data.responses import write_responses

pytestmark = pytest.mark.usefixtures("quick_compile")

RUNS = {
    "train_eagle1": (eagle, "eagle", ["--config.eagle.draft_vocab_size=40"]),
    "train_eagle3": (eagle, "eagle3", ["--config.eagle.draft_vocab_size=40"]),
    "train_distill": (
        distill,
        "draft_model",
        ["--config.distill.draft_vocab_size=40", "--config.distill.layers=(0,1)"],
    ),
    "train_medusa": (medusa, "medusa", ["--config.medusa.draft_vocab_size=40"]),
    "train_medusa2": (medusa, "medusa", ["--config.medusa.draft_vocab_size=40"]),
}


@pytest.fixture(scope="module")
def places(chatty, tmp_path_factory):
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
    write_responses(folder / "data", examples, target_facts(target))
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_debug_size(name, places, tmp_path, capsys):
    module, kind, options = RUNS[name]
    command = [
        f"--config=configs/{name}.py:debug",
        f"--config.target={places / 'model'}",
        f"--config.data={places / 'data'}",
        f"--config.workdir={tmp_path / 'run'}",
        *options,
    ]
    assert module.main(command) == 0
    export, target = tmp_path / "run" / "export", places / "model"
    if name == "train_medusa2":
        export, target = export / "head", export / "target"
    assert module.main(command) == 0
    assert "going on behind step" in capsys.readouterr().out
    decoding = [
        "--config=configs/decode_smollm2.py",
        f"--config.target={target}",
        "--config.prompt=one two",
        f"--config.drafter.name={kind}",
        f"--config.drafter.path={export}",
        "--config.sampling.max_new_tokens=6",
        "--config.compare=true",
    ]
    assert decode.main(decoding) == 0
