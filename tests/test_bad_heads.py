"""Heads in other tools' layouts that do not fit: errors list what is off."""

import dataclasses

import numpy as np
import pytest
from model_files import edit_head, written_head
from safetensors import safe_open
from safetensors.numpy import save_file
from tiny_models import VOCABULARY, block_head, eagle_head, noisy_medusa_head

from specjax.errors import InputError
from specjax.files import folder_checksums
from specjax.loading.load import random_model
from specjax.methods.find_head import open_head
from specjax.methods.heads.published_layout import PublishedLayout
from specjax.methods.published_layouts import read_foreign, write_foreign

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
EAGLE3 = [
    (dict(drop=["fc.weight"]), "missing: fc.weight"),
    (dict(tensors={"fc.bias": np.zeros(24, np.float32)}), "unexpected: fc.bias"),
    (dict(tensors={"norm.weight": np.ones(23, np.float32)}), r"norm.weight \[23\], not \[24\]"),
    (dict(tensors={"norm.weight": np.ones(24, np.int32)}), "than floats: norm.weight .int32"),
    (dict(tensors={"norm.weight": np.full(24, np.nan, np.float32)}), "norm.weight.*finite"),
    (dict(tensors={"d2t": np.full(VOCABULARY, 30)}), r"d2t\[31\] is token 61, out of range"),
    (dict(tensors={"d2t": np.full(VOCABULARY, -1)}), r"d2t\[0\] is token -1, out of range"),
    (dict(tensors={"d2t": -np.arange(VOCABULARY)}), "names token 0 twice"),
    (dict(tensors={"d2t": np.zeros(7, np.int64)}), "draft_vocab_size=40"),
    (dict(tensors={"t2d": np.ones(61, np.bool_)}), "t2d and d2t disagree about 21 tokens"),
    (dict(drop=["d2t", "t2d"]), "d2t that maps them .* is missing"),
    (dict(drop=["d2t"]), "t2d but no d2t"),
    (dict(config={"draft_vocab_size": 39}), "d2t is int64"),
    (dict(config={"norm_before_fc": True}), "missing: input_norm.weight"),
    (dict(config={"norm_before_fc": True, "fc_norm": True}), "both true"),
    (dict(config={"hidden_act": "gelu"}), "hidden_act='gelu'"),
    (dict(config={"num_hidden_layers": "1"}), "num_hidden_layers='1': must be a whole number"),
    (dict(tensors={"layers.1.mlp.up_proj.weight": np.ones((2, 2))}), "the file has 2 layers"),
    (dict(config={"parallel_draft_step": 2}), "parallel_draft_step=2: is unknown"),
    (dict(config={"eagle_config": {"use_mtp_layernorm": True}}), "use_mtp_layernorm=True"),
    (dict(config={"quantization_config": {"bits": 4}}), "quantised weights"),
    (dict(config={"norm_twice": True}), "norm_twice=True: is unknown"),
    (dict(config={"norm_output": "yes"}), "norm_output='yes': must be true or false"),
    (dict(config={"vocab_size": 60}), "vocab_size=60: random-0 has 61 tokens"),
    (dict(config={"target_hidden_size": 32}), "target_hidden_size=32"),
    (dict(config={"eagle_config": {"use_aux_hidden_state": False}}), "use_aux_hidden_state"),
    (
        dict(config={"eagle_config": {LAYER_IDS: [0, 2, 1]}}),
        "must ascend",
    ),
    (
        dict(config={"eagle_config": {LAYER_IDS: [0, 1, 9]}}),
        "out of range: random-0 has 3 layers",
    ),
]
DFLASH = [
    (dict(drop=["fc.weight"]), "in no known layout"),
    (dict(drop=["norm.weight"]), "missing: norm.weight"),
    (dict(config={"vocab_size": 60}), "vocab_size=60: random-0 has 61 tokens"),
    (dict(config={"model_type": "llama"}), "model_type='llama': use a head whose layers are Qwen3"),
    (dict(config={"block_size": None}), "block_size=None: must be a whole number of at least 1"),
    (dict(config={"block_size": 1}), "block_size=1: the anchor alone drafts nothing"),
    (dict(config={"markov_rank": 4}), "markov_rank=4: the tensors say 0"),
    (dict(config={"norm_twice": True}), "norm_twice=True: is unknown"),
    (
        dict(
            config={
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"],
            }
        ),
        "sliding_window=8: block drafters have full attention in all layers here; use a head",
    ),
    (dict(config={"num_target_layers": 36}), "num_target_layers=36: random-0 has 3; use a head"),
    (dict(config={"target_hidden_size": 32}), "target_hidden_size=32: random-0 has 24; use a head"),
    (
        dict(config={"dflash_config": {"mask_token_id": 61, "target_layer_ids": [0, 1]}}),
        r"mask_token_id=61: the target has the tokens 0\.\.60",
    ),
    (
        dict(config={"dflash_config": {"mask_token_id": 60, "target_layer_ids": [0, 2]}}),
        r"target_layer_ids=\[0, 2\]: must name outputs of layers 0\.\.1 of random-0",
    ),
    (dict(config={"dflash_config": {"mask_token_id": 60}}), "target_layer_ids=None: must name"),
    (
        dict(tensors={"lm_head.weight": np.ones((61, 24), np.float32)}),
        "lm_head.weight differs from that of random-0",
    ),
]
MEDUSA = [
    (dict(drop=["1.0.linear.weight"]), "missing: 1.0.linear.weight"),
    (
        dict(tensors={"999999999.0.linear.bias": np.ones(24, np.float32)}),
        "1000000000 heads of 1 blocks, and only 7 tensors are there",
    ),
    (dict(config={"residual": "none"}), "residual='none': is unknown"),
    (dict(config={"medusa_fc_bias": False}), "medusa_fc_bias=False: the file has biases"),
    (dict(drop=["token_map"]), "token_map is missing"),
    (dict(tensors={"token_map": np.arange(22, 62)}), r"token_map\[39\] is token 61"),
    (dict(tensors={"token_map": np.zeros(40, np.int64)}), "names token 0 twice"),
    (
        dict(tensors={"lm_head.weight": np.ones((40, 24), np.float32)}),
        "differs from that of random-0",
    ),
    (dict(config={"original_lm_head": False}), "missing: 0.1.weight.*unexpected: lm_head"),
    (dict(config={"hidden_size": 32}), "random-0 has 24"),
    (dict(config={"logit_scale": 0.5}), "logit_scale"),
]
SPECULATORS = [
    (dict(config={"norm_before_residual": None}), "vLLM for true"),
    (dict(config={"speculators_model_type": "mtp"}), "only 'eagle3' is"),
    (dict(config={"new_flag": 1}), "new_flag=1: is unknown"),
    (dict(config={"transformer_layer_config": {"model_type": "qwen3"}}), "model_type='qwen3'"),
]


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        *(("eagle3", *case) for case in EAGLE3),
        *(("medusa", *case) for case in MEDUSA),
        *(("dflash", *case) for case in DFLASH),
        *(("speculators", *case) for case in SPECULATORS),
    ],
)
def test_heads_that_do_not_fit(form, change, message, tiny, tmp_path):
    head = {
        "eagle3": lambda: eagle_head(tiny, vocabulary=VOCABULARY),
        "medusa": lambda: noisy_medusa_head(tiny, VOCABULARY, original=True),
        "speculators": lambda: eagle_head(tiny),
        "dflash": lambda: block_head(tiny),
    }[form]()
    path = written_head(tmp_path, head, form, tiny)
    edit_head(path, **change)
    with pytest.raises(InputError, match=message) as caught:
        read_foreign(path, tiny)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_head_of_another_target(tiny, chatty, tmp_path):
    path = written_head(tmp_path, eagle_head(tiny), "eagle3", tiny)
    with pytest.raises(InputError, match="vocab_size"):
        read_foreign(path, chatty)
    other = random_model(dataclasses.replace(tiny.config, hidden_size=32), 0, dtype="float32")
    with pytest.raises(InputError, match="hidden_size=24"):
        read_foreign(path, other)
    # Without notes the tensors themselves tell.
    edit_head(path)
    with pytest.raises(InputError, match="target_hidden_size=24.*random-0 has 32"):
        read_foreign(path, other)
    head = eagle_head(chatty)
    stranger = dataclasses.replace(head.target, tokenizer="0" * 64)
    with pytest.raises(InputError, match="tokenizer=000"):
        write_foreign(dataclasses.replace(head, target=stranger), path, "eagle3", chatty)


@pytest.mark.parametrize("notes", ["", "5", "{", "[" * 100_000, '{"target": 1, "target": 2}'])
def test_notes_in_a_header_may_be_anything(notes, tiny, tmp_path):
    folder = tmp_path / "head"
    write_foreign(eagle_head(tiny), folder, "eagle3", tiny)
    with safe_open(folder / "model.safetensors", framework="numpy") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        header = file.metadata() | {"specjax": notes}
    save_file(tensors, folder / "model.safetensors", metadata=header)
    folder_checksums.seal(folder, "head")
    with pytest.raises(InputError, match=r"head: its notes cannot be read \(") as raised:
        read_foreign(folder, tiny)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("path", ["~nosuchuser/x", "a" * 300, "", "a\0b"])
def test_texts_that_are_no_paths(path, tiny):
    head = eagle_head(tiny)
    for field, use in (
        ("directory", lambda: read_foreign(path, tiny)),
        ("directory", lambda: write_foreign(head, path, "eagle3", tiny)),
        ("drafter.path", lambda: open_head("eagle3", path, tiny)),
    ):
        with pytest.raises(InputError, match=f"^{field}='"):
            use()


def test_directories_that_are_no_heads(tiny, tmp_path):
    with pytest.raises(InputError, match="no such directory"):
        read_foreign(tmp_path / "none", tiny)
    with pytest.raises(InputError, match="no weights"):
        read_foreign(tmp_path, tiny)
    for name in ("medusa_lm_head.pt", "pytorch_model.bin"):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        (folder / name).write_bytes(b"")
        with pytest.raises(InputError, match=r"a pickle can run.*save_file.*weights_only=True"):
            read_foreign(folder, tiny)
    save_file({"weight": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match="no config.json"):
        read_foreign(tmp_path, tiny)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(InputError, match=r"its tensors \(weight, ...\) are in no known layout"):
        read_foreign(tmp_path, tiny)
    (tmp_path / "model.safetensors").write_bytes(b"garbage")
    with pytest.raises(InputError, match="not a safetensors file"):
        read_foreign(tmp_path, tiny)


def other_weights(layout, head, target, layer_ids, write=PublishedLayout.write):
    config, tensors = write(layout, head, target, layer_ids)
    return config, {**tensors, "fc.weight": 2 * tensors["fc.weight"]}


def test_an_export_is_whole_or_not_at_all(tiny, tmp_path, monkeypatch):
    head = eagle_head(tiny)
    path = written_head(tmp_path, head, "eagle3", tiny)
    before = (path / "model.safetensors").read_bytes()

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("specjax.loading.formats.safetensors_files.save_file", full)
        with pytest.raises(InputError, match="cannot be written.*No space left"):
            write_foreign(head, path, "speculators", tiny)
    with monkeypatch.context() as patch:
        # What was written is not what should have been: the earlier export stays.
        patch.setattr(PublishedLayout, "write", other_weights)
        with pytest.raises(InputError, match="head: read again, it is another head"):
            write_foreign(head, path, "eagle3", tiny)
    assert (path / "model.safetensors").read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["head"]
    # An earlier export is replaced; anything else stays.
    write_foreign(head, path, "speculators", tiny)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    with pytest.raises(InputError, match="mine: holds 'file', which specjax has no record"):
        write_foreign(head, tmp_path / "mine", "eagle3", tiny)


def test_formats_and_kinds(tiny, tmp_path):
    with pytest.raises(InputError, match="format='eagle': this head is eagle3; use eagle3 or spec"):
        write_foreign(eagle_head(tiny), tmp_path / "head", "eagle", tiny)
    with pytest.raises(InputError, match="no fc.bias"):
        write_foreign(eagle_head(tiny, fc_bias=True), tmp_path / "head", "eagle3", tiny)
    both = eagle_head(tiny, norm_before_fc=True, fc_norm=True)
    with pytest.raises(InputError, match="both true"):
        write_foreign(both, tmp_path / "head", "eagle3", tiny)
    assert not (tmp_path / "head").exists()
