"""Set up a run from its config: target, data, method, batches."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int32

from specjax.apps.command_line.mesh_config import open_mesh
from specjax.distributed import processes
from specjax.errors import InputError, Problems
from specjax.loading.load import load_model
from specjax.loading.model import Model
from specjax.models.config import DecoderConfig
from specjax.models.decoder import Decoder
from specjax.models.form import Form
from train.data.combined_datasets import Sources, open_sources, split_names
from train.data.examples import check_target, target_metadata
from train.data.packing import Packing, Shape
from train.data.vocabulary import Vocabulary, draft_vocabulary
from train.methods.method import Method
from train.pretraining.new_model import new_model
from train.run.config import EvalConfig, OwnConfig, TrainingConfig
from train.run.loop import Feed
from train.run.precision import as_multiplied, multiply_dtype
from train.run.sharding import placement_of
from train.run.start_from import Earlier, open_earlier
from train.run.step import Program, make_program

MakeMethod = Callable[[Model, Vocabulary, OwnConfig], Method]
"""A function that returns a method for a target, a choice of draft vocabulary, and a config."""


@dataclass(frozen=True)
class Setup:
    """Everything that a run needs, made from its config.

    `decoder` and `target_params` are the target as a frozen teacher. `feed` has the training
    conversations, and `held_out` the validation ones, None if there are none. `record` identifies
    the run, and must be unchanged when it is resumed. `earlier` is the head that it starts from, if
    any.
    """

    config: TrainingConfig
    mesh: Mesh | None
    target: Model
    decoder: Decoder
    target_params: Any
    method: Method
    feed: Feed
    held_out: Feed | None
    record: dict[str, Any]
    earlier: Earlier | None

    @property
    def products(self) -> str:
        """The dtype of matrix products, as a word for messages."""
        return str(self.decoder.multiply or "float32")

    def program(self) -> Program:
        """Return the compiled functions of the run, and its initial state."""
        config = self.config
        return make_program(
            self.method,
            self.decoder,
            config.optimization,
            self.mesh,
            seed=config.seed,
            remat=config.remat,
            fsdp=config.fsdp,
        )

    def metadata(self, step: int, tokens: int) -> dict[str, Any]:
        """Return what an export records about its training, without local paths."""
        here = ("data", "target", "workdir", "start_from", "distributed", "mesh")
        config = {name: value for name, value in self.record["config"].items() if name not in here}
        earlier = {} if self.earlier is None else {"earlier": self.earlier.head.training}
        return {
            **earlier,
            "method": self.method.name,
            "data": self.record["data"],
            "config": config,
            "step": step,
            "tokens": tokens,
        }


def check_logits(config: DecoderConfig, name: str) -> None:
    """Raise InputError for a target whose logits are not just a product with its output layer.

    `config` is the target's, and `name` its name.
    """
    for does, field, neutral in (
        ("limits", "logit_softcap", None),
        ("divides", "logit_divisor", 1.0),
    ):
        if (value := getattr(config, field)) != neutral:
            raise InputError(
                f"target: {name} {does} its logits ({field}={value}), and training scores "
                "drafts by features and head alone; use a target whose logits are their product"
            )


def set_up(
    config: OwnConfig,
    make_method: MakeMethod[OwnConfig],
    tell: Callable[[str], Any] = lambda line: None,
) -> Setup:
    """Read and check everything that a run needs, and return it.

    `make_method(target, vocabulary, config)` returns the training method. On the first process
    `tell` is called with a line before the target is loaded. Raises InputError, on all processes,
    for inconsistencies.
    """
    mesh = open_mesh(config.mesh, config.distributed, config.written)
    if processes.is_first():
        tell(f"loading {config.target or 'a new model'} and data={config.data} ...")
    multiply = multiply_dtype(config.dtype)
    directories = split_names(config.data)

    def load() -> tuple[Model, Sources, Method, Earlier | None, str | None]:
        problems = Problems()
        with problems.collect():
            data = open_sources(directories)
        if config.model is not None:
            problems.check()  # a new model takes its tokenizer from the data
        with problems.collect():
            if config.model is None:
                model = load_model(
                    config.target,
                    mesh=mesh,
                    form=Form.for_training(jax.default_backend()),
                    weights="float",
                    field="target",
                )
            else:
                tokenizer = data.tokenizer()
                shape = config.model.config(tokenizer.vocab_size)
                model = new_model(shape, tokenizer, config.seed, mesh)
        problems.check()
        metadata = target_metadata(model)
        for part in data.parts:
            with problems.collect():
                check_target(f"data={str(part.directory)!r}", part.target, metadata)
        with problems.collect():
            _check_positions(config.eval, model)
        with problems.collect():
            check_logits(model.config, model.name)
        with problems.collect():
            earlier = None
            choose = functools.partial(draft_vocabulary, data, vocab_size=model.config.vocab_size)
            if config.start_from is not None:
                earlier = open_earlier(config.start_from, model)
                choose = earlier.vocabulary
            vocabulary = _Noted(choose)
            method = make_method(model, vocabulary, config)
            method = method if earlier is None else earlier.continued(method)
        problems.check()
        _check_lengths(config.batches.row_tokens, data, method)
        return model, data, method, earlier, vocabulary.digest

    target, data, method, earlier, vocabulary = processes.together(load)
    names = _features_read(method, data, config.features)
    shape = Shape(
        rows=config.batches.batch_size,
        tokens=config.batches.row_tokens,
        labels=config.batches.row_labels,
        features=names,
        width=target.config.hidden_size,
    )
    training = Packing(data, np.flatnonzero(~data.validation), shape, config.seed)
    placement = placement_of(config.batches, mesh)
    held_out = _held_out(data, shape)
    about = {
        "sources": [Path(path).name for path in directories],
        "conversations": len(data),
        "tokens": int(data.lengths.sum()),
        "labels": int(data.num_labels.sum()),
        "features": list(names),
    }
    record = {
        "config": config.record,
        "method": method.name,
        "data": about,
        "target": target_metadata(target),
        "draft_vocabulary": vocabulary,
    }
    processes.agree({"data": about})
    return Setup(
        config=config,
        mesh=mesh,
        target=target,
        decoder=dataclasses.replace(target.architecture, multiply=multiply),
        target_params=as_multiplied(target.params, multiply),
        method=method,
        feed=Feed(data, training, shape, placement),
        held_out=None if held_out is None else Feed(data, held_out, shape, placement),
        record=record,
        earlier=earlier,
    )


@dataclass
class _Noted:
    """A choice of draft vocabulary, with a hash of the ids that it returned."""

    choose: Vocabulary
    digest: str | None = None

    def __call__(self, size: int | None) -> Int32[np.ndarray, "Vd"] | None:
        """Return the ids of a draft vocabulary of a size, and note their hash."""
        ids = self.choose(size)
        if ids is not None:
            self.digest = hashlib.sha256(np.asarray(ids, "<i4").tobytes()).hexdigest()[:16]
        return ids


def _check_positions(config: EvalConfig, target: Model) -> None:
    """Raise InputError if prompts to decode would leave no room for new tokens."""
    positions = target.config.max_positions
    if config.prompts and config.new_tokens >= positions:
        raise InputError(
            f"eval.new_tokens={config.new_tokens}: {target.name} has {positions} "
            f"positions, and a prompt needs some; use at most {positions - 1}"
        )


def _check_lengths(row_tokens: int, data: Sources, method: Method) -> None:
    """Raise InputError if no row of `row_tokens` tokens has a label for each draft."""
    least = method.least_tokens
    longest = int(data.lengths.max())
    for field, value in (("row_tokens", row_tokens), ("data", longest)):
        if value < least:
            what = f"{field}={value}" if field != "data" else f"data: sequences of up to {value}"
            raise InputError(
                f"{what} tokens: the last draft of {method.name} has no label in fewer than "
                f"{least}; use longer ones, or fewer modules and steps"
            )


def _features_read(method: Method, data: Sources, wanted: str) -> tuple[str, ...]:
    """Return the features to read from the dataset: all that the method needs, or none."""
    missing = [name for name in method.features if name not in data.feature_names]
    if wanted == "stored" and missing:
        there = ", ".join(data.feature_names) or "none"
        raise InputError(
            f"features='stored': {data.parts[0].directory} has no {missing[0]} (there are "
            f"{there}); use features=online, or store them with train.features"
        )
    return () if wanted == "online" or missing else method.features


def _held_out(data: Sources, shape: Shape) -> Packing | None:
    chosen = np.flatnonzero(data.validation)
    try:
        return Packing(data, chosen, shape, 0)
    except InputError:
        return None
