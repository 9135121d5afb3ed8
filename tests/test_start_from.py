"""What a run starts from: a head, or the modules inside a model; all others are refused."""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest
from tiny_models import SOME, medusa_config, medusa_head, mtp_config, mtp_head, with_modules

from specjax.errors import InputError
from specjax.loading.checkpoints import save_checkpoint
from specjax.loading.load import random_model
from specjax.methods.saved_heads import save_head
from train.methods.distill import DistillLoss, distill_method
from train.methods.medusa import MedusaLoss
from train.methods.medusa2 import JointLoss, medusa2_method
from train.methods.mtp import mtp_method
from train.methods.mtp_loss import MtpLoss
from train.run.start_from import open_earlier

KEY = jax.random.key(3)
OTHERS = np.arange(len(SOME), dtype=np.int32)
"""As many tokens as `SOME`."""


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    """Heads, and models with modules inside."""
    root = tmp_path_factory.mktemp("heads")
    save_head(mtp_head(tiny, 2), root / "mtp")
    save_head(mtp_head(tiny, 1, len(SOME)), root / "reduced")
    save_head(medusa_head(tiny, heads=2), root / "medusa")
    save_checkpoint(with_modules(tiny, 2, seed=5), root / "model")
    save_checkpoint(tiny, root / "bare")
    other = random_model(dataclasses.replace(tiny.config, num_layers=2), 1, dtype="float32")
    save_checkpoint(with_modules(other, 2), root / "another")
    mlp = mtp_config(tiny, 2).decoder
    mlp = dataclasses.replace(mlp, intermediate_size=48)
    save_head(mtp_head(tiny, 2, decoder=mlp), root / "wider")
    return root


def modules(target, count=2, trains="modules", steps=None, **conventions):
    config = mtp_config(target, count, **conventions) if count else None
    return mtp_method(target, config, None, MtpLoss(steps=steps or count), trains=trains)


def medusa2(target, heads=2):
    config = medusa_config(target, heads=heads)
    return medusa2_method(target, config, None, MedusaLoss(), JointLoss())


def first_params(path, target, make):
    """What a run of a method, with all of the vocabulary, starts from."""
    earlier = open_earlier(str(path), target)
    assert earlier.vocabulary(None) is None
    return earlier.continued(make(target)).init(KEY)


def assert_same(mine, theirs):
    jax.tree.map(np.testing.assert_array_equal, mine, theirs)


@pytest.mark.parametrize("trains", ["modules", "all"])
@pytest.mark.parametrize(("name", "seed"), [("mtp", 0), ("model", 5)])
def test_modules_of_a_head_or_inside_a_model(name, seed, trains, tiny, folder):
    wanted = mtp_head(tiny, 2, seed=seed)
    # Those that a target has of its own are then not what it starts from.
    for target in (tiny, with_modules(tiny, 2, seed=9)):
        make = functools.partial(modules, trains=trains)
        params = first_params(folder / name, target, make)
        if trains == "all":
            assert_same(params["target"], tiny.params)
            params = params["mtp"]
        assert_same(params, wanted.params)


def test_recursion_goes_on_from_modules_that_were_trained_without(tiny, folder):
    params = first_params(folder / "model", tiny, functools.partial(modules, steps=4))
    assert_same(params, mtp_head(tiny, 2, seed=5).params)


def test_a_target_is_trained_along_with_earlier_heads(tiny, folder):
    params = first_params(folder / "medusa", tiny, medusa2)
    assert_same(params["target"], tiny.params)
    assert_same(params["heads"], medusa_head(tiny, heads=2).params)


@pytest.mark.parametrize(
    ("name", "method", "said"),
    [
        ("mtp", lambda tiny: modules(tiny, 0, "all"), "nothing that drafts is trained"),
        ("mtp", lambda tiny: modules(tiny, 1), "has num_modules=2, the config 1; give"),
        ("model", lambda tiny: modules(tiny, 3, "all"), "has num_modules=2, the config 3"),
        ("model", lambda tiny: modules(tiny, hidden="pre_norm"), "has hidden=final_norm, the"),
        ("wider", modules, "has decoder.intermediate_size=48, the config 40"),
        ("mtp", medusa2, "of the kind mtp; .* or start from one of the kind medusa"),
        ("medusa", lambda tiny: modules(tiny, 2, "all"), "kind medusa; .* of the kind mtp"),
        ("medusa", lambda tiny: medusa2(tiny, 3), "has num_heads=2, the config 3"),
        ("bare", modules, "a model without MTP modules; give a head"),
        ("another", modules, "made for .*another with num_layers=2, and random-0 has 3"),
        ("reduced", modules, "drafts from 40 tokens, not 61; set draft_vocab_size=40"),
    ],
)
def test_others_are_refused(name, method, said, tiny, folder):
    where = f"start_from='{folder / name}': "
    with pytest.raises(InputError, match=said) as caught:
        first_params(folder / name, tiny, method)
    assert re.match(re.escape(where), str(caught.value))
    assert "\n" not in str(caught.value)


def test_own_modules_of_another_shape_are_refused_by_their_field(tiny):
    wider = dataclasses.replace(mtp_config(tiny).decoder, intermediate_size=48)
    target = with_modules(tiny, decoder=wider)
    with pytest.raises(InputError, match=r"^mtp\.decoder\.intermediate_size=40: .* have 48; give"):
        modules(target, 1)


def test_a_draft_model_of_the_targets_layers_goes_on(tiny, tmp_path):
    """Its config is that of a decoder which was written down, with one entry for equal layers."""
    method = distill_method(tiny, (0, 2), SOME, DistillLoss())
    head = method.head(method.init(KEY), {})
    assert (head.config.decoder.mixers, head.config.decoder.mlps) == (("attention",), (True,))
    written = dataclasses.replace(tiny.config, num_layers=2)
    head = dataclasses.replace(head, config=dataclasses.replace(head.config, decoder=written))
    save_head(head, tmp_path / "head")
    earlier = open_earlier(str(tmp_path / "head"), tiny)
    assert_same(earlier.continued(method).init(KEY), head.params)
    with pytest.raises(InputError, match="drafts other tokens than the method; give the head's"):
        earlier.continued(distill_method(tiny, (0, 2), OTHERS, DistillLoss()))
