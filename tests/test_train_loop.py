"""The training step and loop on a toy: meshes, accumulation, gradients, limits, bad losses."""

import itertools
import math
import shutil
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import slow
from jax.flatten_util import ravel_pytree
from rich.console import Console
from tiny_models import mtp_config
from toy_training import (
    LABELS,
    SHAPE,
    TOKENS,
    Listed,
    config_of,
    conversations,
    toy_method,
    toy_target,
)

from specjax.distributed import sharding
from specjax.errors import InputError
from specjax.methods.saved_heads import read_head
from train.data.batches import build
from train.data.packing import Packing, Position, Shape
from train.methods.mtp import mtp_method
from train.methods.mtp_loss import MtpLoss
from train.run import checkpoints, loop, run
from train.run import workdir as files
from train.run.metrics import MetricsWriter, add, scalars, sums_of
from train.run.sharding import placement_of
from train.run.step import loss_function, make_program


@pytest.fixture(scope="module")
def target():
    return toy_target()


def feed_of(config, source=None, features=(), mesh=None):
    source = Listed(conversations(features=features)) if source is None else source
    width = SHAPE["hidden_size"] if features else 0
    shape = Shape(config.batches.batch_size, TOKENS, LABELS, features, width)
    packing = Packing(source, np.arange(len(source)), shape, config.seed)
    return loop.Feed(source, packing, shape, placement_of(config.batches, mesh))


def program_of(config, target, method=None, mesh=None):
    """The program of a config; the toy's without a method."""
    return make_program(
        method or toy_method(target),
        target.architecture,
        config.optimization,
        mesh,
        seed=config.seed,
        remat=config.remat,
        fsdp=config.fsdp,
    )


def run_steps(target, config, mesh=None, steps=5, method=None):
    """The mean loss of each step, and the state after the last."""
    program = program_of(config, target, method, mesh)
    params = sharding.spread(target.params, mesh)
    state, losses, compiled = program.state, [], None
    feed = feed_of(config, mesh=mesh)
    for batch, _ in itertools.islice(feed.batches(Position(0, 0)), steps):
        compiled = compiled or program.compile(params, batch)
        state, report = compiled(state, params, batch)
        losses.append(float(report.loss) / float(report.measures.weight))
    return losses, state


def mesh_of(data, model=1):
    return sharding.make_mesh(data, model, jax.devices()[: data * model])


@pytest.fixture(scope="module")
def alone(target):
    """What one device gives."""
    return run_steps(target, config_of())


def test_the_toy_learns(alone):
    losses, _ = alone
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize(
    ("data", "model", "fsdp"),
    [(2, 2, True), *slow((1, 1, False), (2, 1, False), (4, 1, True))],
)
def test_a_mesh_gives_the_losses_of_one_device(data, model, fsdp, target, alone):
    losses, state = run_steps(target, config_of(fsdp=fsdp), mesh_of(data, model))
    np.testing.assert_allclose(losses, alone[0], rtol=1e-5)
    for mine, other in zip(
        jax.tree.leaves(state.params), jax.tree.leaves(alone[1].params), strict=True
    ):
        np.testing.assert_allclose(mine, other, atol=1e-5)


def test_another_seed_gives_other_losses(target, alone):
    """The comparison of meshes is not vacuous."""
    losses, _ = run_steps(target, config_of(seed=1))
    assert np.abs(np.array(losses) - alone[0]).max() > 1e-2


def test_the_average_of_the_parameters(target):
    """It is the result of the run, and the steps are those without it."""
    wanted = jax.tree.map(np.asarray, run_steps(target, config_of(), steps=0)[1].params)
    for step in range(3):
        losses, state = run_steps(target, config_of(average=0.15), steps=step + 1)
        decay = min(0.15, (1 + step) / (10 + step))
        wanted = jax.tree.map(
            lambda old, new, decay=decay: decay * old + (1 - decay) * np.asarray(new),
            wanted,
            state.params,
        )
        jax.tree.map(
            lambda mine, own: np.testing.assert_allclose(mine, own, rtol=1e-5, atol=1e-7),
            state.result,
            wanted,
        )
    plain, without = run_steps(target, config_of(), steps=3)
    assert losses == plain
    assert without.result is without.params


@pytest.mark.parametrize("fsdp", [False, True])
def test_the_optimizers_state_is_split(fsdp, target):
    """Each device holds a quarter of it, of the parameters where that is asked for."""
    _, state = run_steps(target, config_of(fsdp=fsdp), mesh_of(4), steps=1)

    def share(leaf):
        return leaf.addressable_shards[0].data.size / leaf.size

    adam = optax.tree.get(state.optimizer, "mu")
    assert all(share(leaf) == 1 / 4 for leaf in jax.tree.leaves(adam))
    expected = 1 / 4 if fsdp else 1
    assert all(share(leaf) == expected for leaf in jax.tree.leaves(state.params))


def mtp(target, trains, modules=2, steps=None, labels="tokens"):
    """Modules of the toy's target, perhaps trained along with it."""
    loss = MtpLoss(labels, steps=steps or modules, decay=0.7, loss_weight=0.5)
    return mtp_method(target, mtp_config(target, modules), None, loss, trains=trains)


METHODS = {
    "toy": toy_method,
    "mtp modules": lambda target: mtp(target, "modules"),
    "mtp all": lambda target: mtp(target, "all"),
    "mtp recursion": lambda target: mtp(target, "all", 1, steps=3),
    "mtp self": lambda target: mtp(target, "all", labels="distributions"),
}


@pytest.fixture(
    scope="module",
    params=["toy", *slow("mtp all", "mtp modules", "mtp recursion", "mtp self")],
)
def method(request, target):
    """What accumulates; the second drafts of MTP have fewer labels than the first ones."""
    return METHODS[request.param](target)


@pytest.fixture(scope="module")
def whole(method, target):
    """What the method learns from whole batches."""
    return run_steps(target, config_of(), method=method)


@pytest.mark.parametrize("accumulate", [4, *slow(2)])
def test_accumulating_equals_one_big_batch(accumulate, method, target, whole):
    losses, state = run_steps(target, config_of(accumulate=accumulate), method=method)
    np.testing.assert_allclose(losses, whole[0], rtol=1e-5)
    for mine, other in zip(
        jax.tree.leaves(state.params), jax.tree.leaves(whole[1].params), strict=True
    ):
        np.testing.assert_allclose(mine, other, atol=2e-6)


@pytest.mark.parametrize(
    "method", ["toy", *slow(*(name for name in METHODS if name != "toy"))], indirect=True
)
def test_the_mean_of_means_is_another_gradient(method, target):
    """What accumulation must not do shows on these batches: their label counts differ."""
    config = config_of()
    loss = loss_function(method, target.architecture, False)
    feed = feed_of(config)
    batch = build(feed.source, feed.packing.rows(0)[:4], feed.shape)
    params, key = method.init(jax.random.key(0)), jax.random.key(0)

    gradients = jax.jit(jax.grad(loss, has_aux=True))

    def gradient(rows):
        part = jax.tree.map(lambda leaf: jnp.asarray(leaf[rows]), batch)
        grads, measures = gradients(params, target.params, part, key)
        return ravel_pytree(grads)[0], measures.weight

    whole, weight = gradient(slice(0, 4))
    halves = [gradient(rows) for rows in (slice(0, 2), slice(2, 4))]
    exact = sum(grads for grads, _ in halves) / weight
    naive = sum(grads / count for grads, count in halves) / 2
    np.testing.assert_allclose(exact, whole / weight, atol=1e-6)
    assert float(jnp.abs(naive - whole / weight).max()) > 1e-4


def test_masked_tokens_have_no_gradient(target):
    """A feature gets one where a label is predicted from it; padding and prompts get none."""
    config = config_of()
    method = toy_method(target)
    feed = feed_of(config, features=("final_norm",))
    batch = build(feed.source, feed.packing.rows(0)[:4], feed.shape)
    params, key = method.init(jax.random.key(0)), jax.random.key(0)
    params["head"]["kernel"] += 0.1 * jax.random.normal(key, params["head"]["kernel"].shape)
    batch = jax.tree.map(jnp.asarray, batch)
    loss = loss_function(method, target.architecture, False)

    def of_features(values):
        filled = batch.replace(features={"final_norm": values})
        return loss(params, target.params, filled, key)[0]

    grads = jax.jit(jax.grad(of_features))(batch.features["final_norm"].astype(jnp.float32))
    reached = np.asarray(jnp.abs(grads).sum(-1) > 0)
    expected = np.zeros_like(reached)
    for row, labels in enumerate(np.asarray(batch.labels)):
        expected[row, labels[labels >= 0] - 2] = True
    assert (reached == expected).all()
    assert 0 < expected.sum() < expected.size
    # The features were read from the data, not computed: another target gives the same.
    other = jax.tree.map(jnp.zeros_like, target.params)
    values = [jax.jit(loss)(params, one, batch, key)[0] for one in (target.params, other)]
    assert float(values[0]) == float(values[1])


def test_remat_gives_the_same_and_keeps_less(target, alone):
    losses, _ = run_steps(target, config_of(remat=True))
    np.testing.assert_allclose(losses, alone[0], rtol=1e-6)
    config = config_of(remat=True)
    program = program_of(config, target)
    batch, _ = next(feed_of(config).batches(Position(0, 0)))
    assert "remat" in str(jax.make_jaxpr(program.step)(program.state, target.params, batch))


def test_the_state_is_donated_and_the_target_kept(target):
    config = config_of()
    method = toy_method(target)

    def init(key):
        # As a draft model begins: with arrays of the target.
        return {**method.init(key), "norm": {"scale": target.params["final_norm"]["scale"]}}

    borrowing = method._replace(init=init)
    program = program_of(config, target, borrowing)
    batch, _ = next(feed_of(config).batches(Position(0, 0)))
    compiled = program.compile(target.params, batch)
    before = program.state
    compiled(before, target.params, batch)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before.params))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(target.params))


class Run:
    """A run in a directory, with a silent writer."""

    def __init__(self, directory, target, config, source=None, method=None, mesh=None):
        self.workdir = files.open_workdir(directory, {"config": {"seed": config.seed}})
        self.params, self.config = sharding.spread(target.params, mesh), config
        self.feed = feed_of(config, source, mesh=mesh)
        self.program = program_of(config, target, method, mesh)
        self.progress = loop.Progress()
        if saved := checkpoints.last_checkpoint(self.workdir):
            self.program, self.progress = loop.resumed(self.program, saved)
        files.truncate_metrics(self.workdir, self.progress.step)

    def train(self, evaluate=None):
        console = Console(quiet=True)
        steps, done = self.config.loop.steps, self.progress.step
        with MetricsWriter(self.workdir, console, steps, done) as writer:
            return loop.train(
                self.program,
                self.params,
                self.feed,
                self.config.loop,
                self.config.eval,
                self.workdir,
                writer,
                self.progress,
                evaluate,
            )

    def steps(self):
        return sorted(int(path.name[5:]) for path in self.workdir.checkpoints.glob("step-*"))


def poisoned(step, rows=4):
    """Conversations that have token 31, as a label, in the batch of that step only."""
    source = Listed(conversations())
    for example in source:
        example.tokens[:] %= 29
    packing = feed_of(config_of(), source).packing
    example = source[packing.rows(0)[rows * (step - 1)][0]]
    example.tokens[-1] = 31
    return source


def test_a_loss_that_is_not_finite_stops_and_keeps_the_checkpoint(target, tmp_path):
    method = toy_method(target, poison=31)
    run = Run(tmp_path / "w", target, config_of(), poisoned(step=8), method)
    with pytest.raises(InputError, match=r"step 8: the loss is nan, .*step 5 in .* is good"):
        run.train()
    assert run.steps() == [5]
    rows = files.read_metrics(run.workdir)
    assert [row["step"] for row in rows] == [4]
    assert all(math.isfinite(value) for value in rows[0].values())
    saved = checkpoints.last_checkpoint(run.workdir)
    state = checkpoints.restore(saved, Run(tmp_path / "other", target, config_of()).program.state)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(state.params))


def test_a_gradient_that_is_not_finite_stops_too(target, tmp_path):
    method = toy_method(target)

    def loss(params, target_params, batch, key):
        total, measures = method.loss(params, target_params, batch, key)
        # The square root's slope at zero is infinite.
        return total + jnp.sqrt(0.0 * jnp.sum(params["blocks"]["bias"])), measures

    run = Run(tmp_path / "w", target, config_of(), method=method._replace(loss=loss))
    with pytest.raises(InputError, match="step 1: .* norm nan; there is no checkpoint yet"):
        run.train()
    assert run.steps() == []


def test_minutes_end_a_run_with_a_checkpoint_and_it_resumes(target, tmp_path, monkeypatch):
    whole = Run(tmp_path / "whole", target, config_of())
    assert whole.train().reason == loop.DONE
    seconds = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: next(seconds), perf_counter=time.perf_counter)
    monkeypatch.setattr(loop, "time", clock)
    config = config_of(minutes=7 / 60)
    first = Run(tmp_path / "w", target, config).train()
    assert (first.step, first.reason) == (7, loop.TIME)
    shutil.copytree(tmp_path / "w", tmp_path / "forgetful")
    for name in ("w", "forgetful"):
        run = Run(tmp_path / name, target, config)
        if name == "forgetful":
            # Without the sums since the last line, the next one is another.
            run.progress.sums = None
        second = run.train()
        assert (second.step, second.reason) == (12, loop.DONE)
        assert (timeless(run.workdir) == timeless(whole.workdir)) == (name == "w")


def test_however_short_the_time_a_run_gets_on(target, tmp_path):
    config = config_of(minutes=1e-9)
    for step in (1, 2):
        run = Run(tmp_path / "w", target, config)
        result = run.train()
        assert (result.step, result.reason) == (step, loop.TIME)
        assert run.steps()[-1] == step


def timeless(workdir):
    """What is logged, without what differs between two runs of one command."""
    times = ("train/tokens_per_second", "train/seconds_left", "train/data_wait")
    return [
        {name: value for name, value in row.items() if name not in times}
        for row in files.read_metrics(workdir)
    ]


def test_a_line_that_is_written_during_a_pause_begins_a_window_then(monkeypatch):
    now = iter([0.0, 4.0, 9.0, 9.0, 10.0, 12.0, 12.0])
    monkeypatch.setattr(loop.time, "perf_counter", lambda: next(now))
    window = loop._Window()
    window.tokens = 36
    with window.paused():  # from 4 to 10
        assert window.speeds()[0] == 36 / 9
    window.tokens = 8
    assert window.speeds()[0] == (36 + 8) / (9 + 2)


def test_the_last_two_checkpoints_are_kept(target, tmp_path):
    run = Run(tmp_path / "w", target, config_of(steps=17))
    run.train()
    assert run.steps() == [15, 17]


def test_evaluations_are_logged_once(target, tmp_path):
    config = config_of(**{"eval.every": 4})
    seen = []

    def evaluate(params, step, last):
        seen.append((step, last))
        return {"eval/tau": float(step)}

    run = Run(tmp_path / "w", target, config)
    run.train(evaluate)
    assert seen == [(4, False), (8, False), (12, True)]
    Run(tmp_path / "w", target, config).train(evaluate)
    assert len(seen) == 3
    evaluated = [row for row in files.read_metrics(run.workdir) if "eval/tau" in row]
    assert [row["eval/tau"] for row in evaluated] == [4, 8, 12]


def test_an_evaluation_before_the_first_step(target, tmp_path):
    config = config_of(**{"steps": 3, "eval.at_start": True})
    seen = []

    def evaluate(params, step, last):
        seen.append((step, last))
        return {"eval/tau": 1.0 + step}

    run = Run(tmp_path / "w", target, config)
    run.train(evaluate)
    assert seen == [(0, False), (3, True)]
    # A run that was stopped before its first checkpoint begins again, and has been evaluated.
    shutil.rmtree(run.workdir.checkpoints)
    files.truncate_metrics(run.workdir, 0)
    Run(tmp_path / "w", target, config).train(evaluate)
    assert seen[2:] == [(3, True)]
    assert [row["tau"] for row in files.learning_curve(run.workdir)] == [1.0, 4.0]


@pytest.mark.parametrize(("name", "exports"), [("tau", "head"), ("tau_t0.7", "model")])
def test_the_head_with_the_largest_tau_is_kept(target, tmp_path, name, exports):
    """An evaluation before the first step, or of a smaller tau, keeps what is there."""
    method = toy_method(target)._replace(exports=exports)
    params = method.init(jax.random.key(0))
    workdir = files.Workdir(tmp_path)
    kept = []
    for step, tau in ((0, 3.0), (5, 1.5), (10, 1.25), (15, None), (20, 1.75)):
        run._keep_best(method, params, None, {"step": step}, workdir, tau, name)
        kept.append(read_head(workdir.best).training["tau"] if workdir.best.exists() else None)
        if tau is not None:
            files.append_metrics(workdir, {"step": step, f"eval/{name}": tau})
    assert kept == [None, 1.5, 1.5, 1.5, 1.75]
    both = method._replace(trains_target=True)
    run._keep_best(both, params, None, {"step": 25}, workdir, 9.0, name)
    assert read_head(workdir.best).training["tau"] == 1.75


def test_scalars_follow_their_definitions():
    sums = {
        "loss": 30.0,
        "weight": 10.0,
        "losses": {"ce": 20.0},
        "correct": [6.0, 5.0],
        "prefix_correct": [6.0, 3.0],
        "counts": [10.0, 8.0],
        "loads": {"a": [[1.0, 3.0], [2.0, 2.0]], "b": [5.0, 5.0]},
    }
    found = scalars(sums, "train")
    assert found["train/loss"] == 3.0
    assert found["train/loss_ce"] == 2.0
    assert (found["train/acc_pos_0"], found["train/acc_pos_1"]) == (0.6, 0.625)
    assert (found["train/full_acc_0"], found["train/full_acc_1"]) == (0.6, 0.375)
    assert found["train/cond_acc_1"] == pytest.approx(0.625)
    assert found["train/tau_sim"] == pytest.approx(1 + 0.6 + 0.375)
    assert add(sums, sums)["prefix_correct"] == [12.0, 6.0]
    assert add(None, sums) == sums
    assert scalars(add(sums, sums), "train") == found


def test_sums_are_plain_numbers(target):
    method = toy_method(target)
    feed = feed_of(config_of())
    batch = jax.tree.map(jnp.asarray, build(feed.source, feed.packing.rows(0)[:4], feed.shape))
    loss = loss_function(method, target.architecture, False)
    key = jax.random.key(0)
    value, measures = jax.jit(loss)(method.init(key), target.params, batch, key)
    sums = sums_of(value, measures)
    assert sums["loss"] == float(value)
    assert sums["counts"][0] == sums["weight"] == float((batch.labels >= 0).sum())
    assert len(sums["correct"]) == 2
