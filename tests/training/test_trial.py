"""The seam: what a workload may ask of a `Trial`, and what the trial owes whoever started it. On a training of numbers
that takes milliseconds."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from tests.helpers import CPU, Dies, KilledError, Told, assert_equal, toy, train, weights
from tests.toy.train import INPUTS, TARGETS, Average, begin, error
from tunediff.clock import Budget, Clock
from tunediff.training import state, strategies
from tunediff.training import trial as seam
from tunediff.training.observer import Recorder
from tunediff.training.phases import COMMON
from tunediff.training.precision import NotFiniteError

STEPS = 10
IMAGES = 8 * STEPS


def loss_of(net, batch):
    inputs, targets = batch
    return F.mse_loss(net(inputs), targets)


def plain(source, seen=None):
    """A `train` over `source`, remembering the batches of real steps."""

    def body(trial):
        net, optimizer = begin(trial)
        for batch in trial.batches(source):
            if seen is not None and not trial._warming:
                seen.append(batch)
            trial.step(loss_of(net, batch), optimizer)

    return body


class Hands:
    """A clock moved by hand."""

    def __init__(self):
        self.s = 0.0

    def __call__(self):
        return self.s


def timed(seconds, hands, **how):
    return Clock(Budget(seconds, **how), now=hands)


# ------------------------------------------------------------------------------------------------------------- batches
def test_a_tensor_several_tensors_and_a_dataset_give_the_same_batches():
    pairs, items, alone = [], [], []
    both = train(toy(), images=IMAGES, body=plain((INPUTS, TARGETS), pairs))
    dataset = train(toy(), images=IMAGES, body=plain(TensorDataset(INPUTS, TARGETS), items))

    def of_one_tensor(trial):
        net, optimizer = begin(trial)
        for inputs in trial.batches(INPUTS):
            assert isinstance(inputs, torch.Tensor)
            if not trial._warming:
                alone.append(inputs)
            trial.step(loss_of(net, (inputs, inputs.square().sum(1, keepdim=True))), optimizer)

    train(toy(), images=IMAGES, body=of_one_tensor)
    assert len(pairs) == len(items) == len(alone) == STEPS
    for pair, item, inputs in zip(pairs, items, alone, strict=True):
        assert torch.equal(pair[0], item[0])
        assert torch.equal(pair[1], item[1])
        assert torch.equal(pair[0], inputs)
        assert torch.equal(pair[1], inputs.square().sum(1, keepdim=True)), "rows stay together"
    assert_equal(weights(both), weights(dataset))


def test_prepare_makes_of_a_batch_what_the_loop_gets():
    def body(trial):
        net, optimizer = begin(trial)
        for inputs, targets in trial.batches((INPUTS, TARGETS), lambda batch, uniform: (2 * batch[0], uniform("u"))):
            assert targets.shape == (8,)
            seen.append(inputs)
            trial.step(net(inputs).mean(), optimizer)

    seen, before = [], []
    train(toy(), images=8, body=body)
    train(toy(), images=8, body=plain((INPUTS, TARGETS), before))
    assert torch.equal(seen[-1], 2 * before[0][0])


@pytest.mark.parametrize("knobs", [{}, {"loader__resident": True}, {"loader__accumulation": 2}], ids=str)
def test_whoever_trains_may_write_into_a_batch(knobs):
    """The first one comes twice, and the warm-up's is another copy."""

    def body(trial):
        net, optimizer = begin(trial)
        for inputs, targets in trial.batches((INPUTS, TARGETS)):
            trial.step(loss_of(net, (inputs.mul_(3) if in_place else inputs * 3, targets)), optimizer)

    in_place = True
    found = weights(train(toy(**knobs), images=IMAGES, body=body))
    in_place = False
    assert_equal(found, weights(train(toy(**knobs), images=IMAGES, body=body)))


def test_own_loaders_are_run_through_again_and_again():
    seen = []

    def body(trial):
        net, optimizer = begin(trial)
        for batch in trial.steps([(INPUTS[:8], TARGETS[:8], 0), (INPUTS[8:16], TARGETS[8:16], 1)]):
            if not trial._warming:
                seen.append(batch[2])
            trial.step(loss_of(net, batch[:2]), optimizer)

    outcome = train(toy(), images=IMAGES, body=body)
    assert outcome.finished
    assert outcome.steps == STEPS
    assert seen == [0, 1] * (STEPS // 2), "the batch of the warm-up comes again"


@pytest.mark.parametrize("batches", [[], iter([(INPUTS, TARGETS)])], ids=["empty", "only once"])
def test_a_loader_without_batches_is_an_error_and_not_a_wait(batches):
    def body(trial):
        net, optimizer = begin(trial)
        for batch in trial.steps(batches):
            trial.step(loss_of(net, batch), optimizer)

    with pytest.raises(RuntimeError, match=r"trial\.steps\(loader\): the loader has no batches, or cannot be run"):
        train(toy(), images=IMAGES, body=body)


# ---------------------------------------------------------------------------------------------------------- the step
def accumulates(trial):
    """Knows where the last pass is, and steps by hand."""
    net, optimizer = begin(trial)
    passes = []
    for batch in trial.batches((INPUTS, TARGETS)):
        passes.append(trial.last_pass)
        trial.backward(loss_of(net, batch))
        if trial.last_pass:
            assert all(parameter.grad is not None for parameter in net.parameters())
            trial.update(optimizer)
    count = trial.config.loader.accumulation
    assert passes == ([False] * (count - 1) + [True]) * (STEPS + 1)


@pytest.mark.parametrize("body", [None, accumulates, plain((INPUTS, TARGETS))], ids=["rng", "by hand", "step"])
def test_accumulation_learns_what_the_whole_batch_learns(body):
    told = [Told(), Told()]
    found = [
        train(toy(norm=False, loader__accumulation=count), images=IMAGES, observer=observer, body=body)
        for count, observer in zip((1, 2), told, strict=True)
    ]
    assert found[0].steps == found[1].steps == STEPS
    tolerance = {"rtol": 1e-4, "atol": 1e-5}
    if body is None:  # it draws noise in each pass, and so the same noise only for one way of dividing
        assert found[0].images == found[1].images
        return
    assert_equal(weights(found[0]), weights(found[1]), **tolerance)
    assert [point.loss for point in told[0].points] == pytest.approx([point.loss for point in told[1].points], rel=1e-4)


def test_forward_and_backward_in_one_call_is_the_same_step():
    def body(trial):
        _, optimizer = begin(trial)
        for inputs, targets in trial.batches((INPUTS, TARGETS)):
            losses = trial.forward_backward((inputs,), (targets,), lambda out, goal: (out - goal).square().mean(1))
            assert losses.shape == (8,)
            assert not losses.requires_grad
            trial.update(optimizer)

    def weighted(trial):
        _, optimizer = begin(trial)
        for inputs, targets in trial.batches((INPUTS, TARGETS)):
            factors = torch.full((8,), 2.0)
            trial.forward_backward((inputs,), (targets,), lambda out, goal: (out - goal).square().mean(1) / 2, factors)
            trial.update(optimizer)

    expected = weights(train(toy(), images=IMAGES, body=plain((INPUTS, TARGETS))))
    assert_equal(expected, weights(train(toy(), images=IMAGES, body=body)))
    assert_equal(expected, weights(train(toy(), images=IMAGES, body=weighted)), rtol=1e-5, atol=1e-6)


def test_gradients_are_clipped_to_the_norm():
    norms = []

    class Watched(torch.optim.SGD):
        def step(self, closure=None):
            grads = [p.grad for group in self.param_groups for p in group["params"]]
            norms.append(torch.cat([grad.flatten() for grad in grads]).norm().item())
            return super().step()

    def body(trial):
        net, _ = begin(trial)
        optimizer = Watched(net.parameters(), 1e-3)
        for batch in trial.batches((INPUTS, TARGETS)):
            trial.step(loss_of(net, batch), optimizer, clip_norm=0.5)

    train(toy(), images=IMAGES, body=body)
    assert norms == pytest.approx([0.5] * (STEPS + 1), rel=1e-3)


def test_progress_and_stride_follow_the_budget():
    seen = []

    def body(trial):
        net, optimizer = begin(trial)
        for batch in trial.batches((INPUTS, TARGETS)):
            before = trial.progress
            trial.step(loss_of(net, batch), optimizer)
            if not trial._warming:
                seen.append((before, trial.progress, trial.stride))

    train(toy(), images=IMAGES, body=body)
    assert [before for before, _, _ in seen] == pytest.approx([k / STEPS for k in range(STEPS)])
    assert [after for _, after, _ in seen] == pytest.approx([(k + 1) / STEPS for k in range(STEPS)])
    assert [stride for _, _, stride in seen] == pytest.approx([1 / STEPS] * STEPS)


def test_the_schedule_begins_after_charged_compile_seconds(monkeypatch):
    """4 of 10 seconds went into compiling: what is left is a whole schedule, and not the end of one."""
    monkeypatch.setattr(seam, "compiled", lambda model, *rest: model)
    hands, seen = Hands(), []

    def body(trial):
        net, optimizer = begin(trial)
        for batch in trial.batches((INPUTS, TARGETS)):
            hands.s += 4.0 if trial._warming else 0.5
            if not trial._warming:
                seen.append(trial.progress)
            trial.step(loss_of(net, batch), optimizer)

    for charged, steps in ((True, 12), (False, 20)):
        hands.s, config = 0.0, toy(compile__mode="default")
        seen.clear()
        clock = timed(10.0, hands, compile_charged=charged)
        outcome = train(config, seconds=10.0, compile_charged=charged, clock=clock, body=body)
        assert outcome.steps == steps
        assert seen == pytest.approx([k / steps for k in range(steps)])
        assert (outcome.seconds["compile"], outcome.seconds["train"]) == (4.0, 0.5 * steps)
        assert outcome.points[-1].train_s == pytest.approx(10.0)


# ------------------------------------------------------------------------------------------------------------- points
def test_what_is_found_and_described_is_in_every_point():
    told = Told()

    def body(trial):
        net, optimizer = begin(trial)
        trial.about(rows=len(INPUTS))
        trial.describe_with(lambda: {"width": 8, "at": trial.progress})
        trial.evaluate_with(lambda: error(net) | {"label": "E"})
        for batch in trial.batches((INPUTS, TARGETS)):
            trial.step(loss_of(net, batch), optimizer)
        trial.show("curve", {"x": [1.0, 2.0]})

    outcome = train(toy(), images=IMAGES, observer=told, evaluates=True, body=body)
    assert told.points == outcome.points
    assert [point["at"] for point in told.points] == pytest.approx([0.5, 1.0])
    for index, point in enumerate(told.points, 1):
        assert (point.index, point.fraction, point["width"], point["label"]) == (index, index / 2, 8, "E")
        assert (point.images, point.steps) == (IMAGES // 2 * index, STEPS // 2 * index)
        assert math.isfinite(point["error"])
        assert math.isfinite(point.loss)
        assert point.images_per_s > 0
        assert 0 <= point.data_wait_share < 1
        assert point.peak_memory_mib > 10
        assert point.worker_s == point.train_s
    assert 0 < told.points[0].train_s < told.points[1].train_s
    assert told.points[-1]["error"] == error(outcome.model)["error"]
    assert (told.facts, told.shown) == ({"rows": 44}, {"curve": {"x": [1.0, 2.0]}})
    assert told.steps == STEPS
    assert outcome.peak == {name: told.points[-1][name] for name in ("peak_memory_mib", "peak_host_memory_mib")}
    # For measurements: nothing is judged, and what costs nothing is described.
    unjudged = train(toy(), images=IMAGES, body=body).points[-1]
    assert ("error" in unjudged, unjudged["width"]) == (False, 8)


def test_a_points_loss_is_the_mean_since_the_one_before():
    told, losses = Told(), []

    def body(trial):
        net, optimizer = begin(trial)
        for batch in trial.batches((INPUTS, TARGETS)):
            loss = loss_of(net, batch)
            if not trial._warming:
                losses.append(loss.item())
            trial.step(loss, optimizer)

    train(toy(), images=IMAGES, observer=told, body=body)
    halves = (losses[: STEPS // 2], losses[STEPS // 2 :])
    assert [point.loss for point in told.points] == pytest.approx([sum(half) / len(half) for half in halves], rel=1e-5)


def test_evaluation_and_checkpoints_stop_the_clock(tmp_path):
    hands, told = Hands(), Told()

    def judge():
        hands.s += 1000.0
        return {"error": 1.0}

    def body(trial):
        net, optimizer = begin(trial)
        trial.evaluate_with(judge)
        for batch in trial.batches((INPUTS, TARGETS)):
            if not trial._warming:
                hands.s += 1.0
            trial.step(loss_of(net, batch), optimizer)

    outcome = train(
        toy(), seconds=10.0, clock=timed(10.0, hands), observer=told, evaluates=True, folder=tmp_path, body=body
    )
    assert [point.train_s for point in told.points] == [5.0, 10.0]
    assert (outcome.seconds["train"], outcome.seconds["evaluation"], outcome.steps) == (10.0, 2000.0, 10)
    assert [point.images_per_s for point in told.points] == [8.0, 8.0]
    assert [point.step_s for point in told.points] == [1.0, 1.0]
    assert told.points[0].seconds["evaluation"] == 1000.0


def test_the_result_is_the_prepared_model_unless_another_is_exported():
    averaged = torch.nn.Linear(1, 1)

    def body(trial):
        net, optimizer = begin(trial)
        nets.append(net)
        if export:
            trial.exports(averaged)
        for batch in trial.batches((INPUTS, TARGETS)):
            trial.step(loss_of(net, batch), optimizer)

    for export in (True, False):
        nets = []
        outcome = train(toy(), images=8, body=body)
        assert outcome.model is (averaged if export else nets[0])


def test_a_training_without_a_model_says_so():
    with pytest.raises(RuntimeError, match=r"toy: train\(trial\) never called trial\.prepare\(model\)"):
        train(toy(), images=8, body=lambda trial: None)


def test_initial_weights_are_where_it_begins():
    before = weights(train(toy(), images=IMAGES))
    seen = []

    def body(trial):
        net, _ = begin(trial)
        seen.append({name: tensor.clone() for name, tensor in net.state_dict().items()})

    train(toy(seed=5), images=8, initial=before, body=body)
    assert_equal(seen[0], before)


# ------------------------------------------------------------------------------------------------------------ phases
def test_own_phases_are_parts_of_the_step():
    def body(trial):
        net, optimizer = begin(trial)
        for batch in trial.batches((INPUTS, TARGETS)):
            with trial.phase("mixing"):
                inputs = batch[0].flip(0).flip(0)
            trial.step(loss_of(net, (inputs, batch[1])), optimizer)
            with trial.phase("averaging"):
                pass

    point = train(toy(), images=IMAGES, body=body).points[-1]
    parts = {name: point[f"step_{name}_s"] for name in (*COMMON, "mixing", "averaging", "other")}
    assert point.phases_s == parts
    assert all(parts[name] > 0 for name in ("forward", "backward", "optimizer", "mixing", "data_wait"))
    assert sum(parts.values()) == pytest.approx(point.step_s, rel=1e-6)


# --------------------------------------------------------------------------------------------------- the warm-up step
def everything(trial):
    """What a training can change, all of it."""
    return state.copied(trial._state.take()) | {"scaler": dict(trial._amp.scaler.state_dict())}


@pytest.mark.parametrize("amp", ["none", "fp16"])
def test_the_warm_up_leaves_everything_as_it_was(amp):
    """Weights, buffers, the optimizer, what a workload keeps of its own, what is drawn."""
    found = {}

    def body(trial):
        average = Average()
        net, optimizer = begin(trial, average=average)
        for index, batch in enumerate(trial.batches((INPUTS, TARGETS))):
            if index < 2:
                found["before" if index == 0 else "after"] = everything(trial)
            draws.append((torch.rand(1, generator=trial.rng).item(), torch.rand(1).item()))
            with trial.autocast():
                loss = loss_of(net, batch)
            average.add(loss)
            trial.step(loss * (math.inf if amp == "fp16" and index == 0 else 1.0), optimizer)
            if index == 0:
                found["warm"] = everything(trial)

    draws = []
    outcome = train(toy(dropout=0.2, precision__amp=amp), images=IMAGES, body=body)
    assert_equal(found["before"], found["after"])
    changed = {"average", "net"} | ({"optimizer"} if amp == "none" else set())  # an infinite loss is no update
    for name in changed:
        with pytest.raises(AssertionError):
            assert_equal(found["before"]["kept"][name], found["warm"]["kept"][name])
    for name in ("rng", "shared_rng", *(["scaler"] if amp == "fp16" else [])):
        with pytest.raises(AssertionError):
            assert_equal(found["before"][name], found["warm"][name])
    assert draws[0] == draws[1]
    assert (len(draws), outcome.steps) == (STEPS + 1, STEPS)
    assert outcome.model[1].num_batches_tracked == STEPS


def test_a_training_of_one_step_learns_from_one_step():
    net = weights(train(toy(lr=1e-12), images=8))
    torch.manual_seed(0)
    from tests.toy.train import network

    assert_equal(
        dict(network(toy().knobs)[0].state_dict()), {n: net[f"0.{n}"] for n in ("weight", "bias")}, rtol=0, atol=1e-6
    )


# ---------------------------------------------------------------------------------------------- checkpoints and resume
KEPT = ["plain", "dropout and noise", "accumulation", "fp16", "loader processes", "on the device"]
HOW = [
    {"norm": True}, {"dropout": 0.3}, {"loader__accumulation": 2, "dropout": 0.2}, {"precision__amp": "fp16"},
    {"loader__workers": 1}, {"loader__resident": True},
]  # fmt: skip


def final(folder):
    """The last checkpoint, without what was measured in seconds."""
    found = state.load(folder)
    points = [
        {name: point[name] for name in ("index", "steps", "images", "loss", "error")} for point in found["points"]
    ]
    return {name: value for name, value in found.items() if name not in ("clock", "points")} | {"points": points}


@pytest.mark.parametrize("knobs", HOW, ids=KEPT)
def test_a_killed_training_ends_where_an_uninterrupted_one_does(tmp_path, knobs):
    """Bit for bit, in all that it has learned and drawn."""
    config = toy(**knobs)
    whole = train(config, images=IMAGES, folder=tmp_path / "whole", evaluates=True)
    with pytest.raises(KilledError):
        train(config, images=IMAGES, folder=tmp_path / "killed", evaluates=True, observer=Dies())
    assert state.load(tmp_path / "killed")["pace"]["steps"] == STEPS // 2
    told = Told()
    again = train(config, images=IMAGES, folder=tmp_path / "killed", evaluates=True, observer=told)
    assert_equal(weights(whole), weights(again))
    assert_equal(final(tmp_path / "whole"), final(tmp_path / "killed"))
    assert told.steps == STEPS // 2
    assert [point.index for point in told.points] == [1, 2], "the point before the kill is told again, not lost"
    assert (again.steps, again.images, again.finished) == (STEPS, IMAGES, True)


def test_a_finished_training_is_not_trained_again(tmp_path):
    first = train(toy(), images=IMAGES, folder=tmp_path)
    told = Told()
    again = train(toy(), images=IMAGES, folder=tmp_path, observer=told)
    assert_equal(weights(first), weights(again))
    assert (told.steps, [point.index for point in told.points], again.finished) == (0, [1, 2], True)


def changed(folder, **parts):
    found = state.load(folder)
    state.save(found | {name: found[name] | values for name, values in parts.items()}, folder)


def test_what_a_resumed_training_restores_beside_what_is_kept(tmp_path):
    """Scale of the losses, where the schedule began, seconds of every part: each seen in what goes on from it."""
    with pytest.raises(KilledError):
        train(toy(precision__amp="fp16"), images=IMAGES, folder=tmp_path, observer=Dies())
    scaler = state.load(tmp_path)["scaler"]
    seconds = {
        "train": 50.0,
        "evaluation": 7000.0,
        "checkpoint": 300.0,
        "data_wait": 10.0,
        "setup": 0.0,
        "compile": 0.0,
    }
    changed(tmp_path, scaler={"scale": 1024.0}, pace={"start": 0.25}, clock={"seconds": seconds})
    seen = []

    def body(trial):
        net, optimizer = begin(trial)
        for inputs, targets in trial.batches((INPUTS, TARGETS)):
            if not trial._warming:
                seen.append((trial.progress, trial._amp.scaler.get_scale()))
            with trial.autocast():
                loss = F.mse_loss(net(inputs).float(), targets)
            trial.step(loss, optimizer)

    changed_kept = state.load(tmp_path)
    changed_kept["kept"].pop("average")
    state.save(changed_kept, tmp_path)
    outcome = train(toy(precision__amp="fp16"), images=IMAGES, folder=tmp_path, body=body)
    assert scaler["scale"] != 1024.0
    assert seen[0] == (pytest.approx((0.5 - 0.25) / 0.75), 1024.0)
    assert outcome.steps == STEPS
    assert outcome.points[-1].train_s >= 60.0
    assert outcome.seconds["evaluation"] >= 7000.0
    assert outcome.seconds["checkpoint"] >= 300.0


def test_checkpoints_are_written_between_evaluations(tmp_path, monkeypatch):
    """After so many training seconds: a kill costs no more than that."""
    saved, hands, save = [], Hands(), state.save
    monkeypatch.setattr(
        state, "save", lambda content, folder: saved.append(content["pace"]["steps"]) or save(content, folder)
    )

    def body(trial):
        net, optimizer = begin(trial)
        for batch in trial.batches((INPUTS, TARGETS)):
            if not trial._warming:
                hands.s += 1.0
            if trial._pace.steps == dies_at:
                raise KilledError
            trial.step(loss_of(net, batch), optimizer)

    config = toy(evaluation__points=2)
    how = {"seconds": 20.0, "folder": tmp_path, "checkpoint_every_s": 3.0, "body": body}
    dies_at = 16
    with pytest.raises(KilledError):
        train(config, clock=timed(20.0, hands), **how)
    assert saved == [4, 8, 10, 14], "that of the evaluation counts"
    saved.clear()
    dies_at, told = None, Told()
    outcome = train(config, clock=timed(20.0, hands), observer=told, **how)
    assert (told.steps, outcome.steps) == (6, 20)
    assert saved == [18, 20], "none twice at the end"


def test_without_a_folder_nothing_is_written(monkeypatch):
    monkeypatch.setattr(state, "save", lambda *_: pytest.fail("written"))
    assert train(toy(), images=IMAGES).finished


def test_a_damaged_checkpoint_is_kept_aside_and_training_starts_anew(tmp_path, capsys):
    whole = weights(train(toy(), images=IMAGES, folder=tmp_path / "whole"))
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / state.CHECKPOINT).write_bytes(b"PK\x03\x04 torn")
    assert_equal(whole, weights(train(toy(), images=IMAGES, folder=tmp_path / "x")))
    assert "damaged" in capsys.readouterr().out
    assert (tmp_path / "x" / state.CHECKPOINT).with_suffix(".damaged").read_bytes() == b"PK\x03\x04 torn"


def test_a_checkpoint_runs_no_code(tmp_path, capsys):
    class Evil:
        def __reduce__(self):
            return exec, ("raise SystemExit('ran')",)

    torch.save({"kept": Evil()}, tmp_path / state.CHECKPOINT)
    assert state.load(tmp_path) is None
    assert "damaged" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kept", "error", "message"),
    [
        ({"count": 3}, TypeError, r"keep\(count=…\): int has no state_dict and load_state_dict"),
        ({"half": torch.zeros(1)}, TypeError, r"keep\(half=…\): Tensor has no"),
        ({"net": Average()}, ValueError, r"keep\(net=…\): the name is taken"),
    ],
    ids=["a number", "a tensor", "a name twice"],
)
def test_what_cannot_be_kept_is_refused(kept, error, message):
    def body(trial):
        begin(trial)
        trial.keep(**kept)

    with pytest.raises(error, match=message):
        train(toy(), images=8, body=body)


# ----------------------------------------------------------------------------------------------------------- stopping
def test_a_point_can_end_it():
    class Enough(Told):
        def point(self, point):
            super().point(point)
            return False

    outcome = train(toy(), images=IMAGES, observer=Enough())
    assert not outcome.finished
    assert (len(outcome.points), outcome.images) == (1, IMAGES // 2)


def test_asked_to_stop_it_writes_a_checkpoint_and_goes_on_from_there(tmp_path):
    told = Told(stop=lambda told: told.steps >= 3)
    first = train(toy(), images=IMAGES, folder=tmp_path, evaluates=True, observer=told)
    assert (first.finished, first.steps, told.points) == (False, 3, [])
    assert state.load(tmp_path)["pace"]["steps"] == 3
    again = train(toy(), images=IMAGES, folder=tmp_path, evaluates=True)
    train(toy(), images=IMAGES, folder=tmp_path / "whole", evaluates=True)
    assert again.finished
    a, b = final(tmp_path), final(tmp_path / "whole")
    for found in (a, b):
        del found["points"][0]["loss"]  # the mean of the first point begins anew with the process
    assert_equal(a, b)


def test_asked_to_stop_while_evaluating_it_measures_after_the_resume(tmp_path):
    """A batch scheduler waits half a minute; an evaluation may take hours."""
    judged = []

    def body(trial):
        net, optimizer = begin(trial)

        def judge():
            judged.append(1)
            if len(judged) == 1:
                assert trial.should_stop()
                raise TimeoutError
            return error(net)

        trial.evaluate_with(judge)
        trial.describe_with(lambda: {"described": len(judged)})
        for batch in trial.batches((INPUTS, TARGETS)):
            trial.step(loss_of(net, batch), optimizer)

    told = Told()
    how = {"images": IMAGES, "folder": tmp_path, "evaluates": True, "body": body}

    class AskedLate(Told):
        """Only once the evaluation has begun."""

        def asks_to_stop(self):
            return bool(judged)

    first = train(toy(), observer=AskedLate(), **how)
    assert (first.finished, first.steps, first.points) == (False, STEPS // 2, [])
    pending = state.load(tmp_path)["pending"]
    assert (pending["steps"], pending["described"]) == (STEPS // 2, 0)
    again = train(toy(), observer=told, **how)
    assert again.finished
    assert [point.steps for point in told.points] == [STEPS // 2, STEPS]
    assert told.points[0]["described"] == 0, "as it was when the training came there"
    assert told.points[0].loss == pending["loss"] > 0
    assert told.points[0].images_per_s == pending["images_per_s"] > 0
    assert_equal(weights(again), weights(train(toy(), images=IMAGES, body=plain((INPUTS, TARGETS)))))


def test_open_ended_trains_past_its_budget_until_asked_and_goes_on(tmp_path):
    """The schedule of a budget, evaluations at its distance, and no end."""
    how = {"images": IMAGES, "open_ended": True, "evaluates": True}
    told = Told(stop=lambda told: told.steps >= 23)
    first = train(toy(), folder=tmp_path, observer=told, **how)
    assert (first.finished, first.steps) == (False, 23)
    assert [point.images for point in told.points] == [IMAGES // 2 * k for k in range(1, 5)]
    assert [point.fraction for point in told.points] == [0.5, 1.0, 1.5, 2.0]
    again = train(toy(), folder=tmp_path, observer=Told(stop=lambda told: told.steps >= 17), **how)
    whole = train(toy(), folder=tmp_path / "whole", observer=Told(stop=lambda told: told.steps >= 40), **how)
    assert again.steps == whole.steps == 40
    assert_equal(weights(whole), weights(again))
    assert [point.index for point in again.points] == list(range(1, 8))


def test_a_loss_that_is_not_finite_ends_it():
    def body(trial):
        net, optimizer = begin(trial)
        for batch in trial.batches((INPUTS, TARGETS)):
            factor = math.nan if trial._pace.steps == 3 else 1.0
            trial.step(factor * loss_of(net, batch), optimizer)

    with pytest.raises(NotFiniteError, match="the loss is not finite after 4 steps"):
        train(toy(), images=IMAGES, body=body)


def test_losses_that_the_scale_is_found_by_are_no_divergence():
    """fp16: a few infinite losses lower the scale; when none was finite up to a point, nothing can be said there."""

    def body(trial):
        net, optimizer = begin(trial)
        for batch in trial.batches((INPUTS, TARGETS)):
            factor = math.inf if trial._pace.steps in bad else 1.0
            trial.step(factor * loss_of(net, batch), optimizer)

    bad = (1, 2)
    outcome = train(toy(precision__amp="fp16"), images=IMAGES, body=body)
    assert all(math.isfinite(point.loss) for point in outcome.points)
    bad = range(STEPS)
    with pytest.raises(NotFiniteError, match=f"no loss was finite up to step {STEPS // 2}"):
        train(toy(precision__amp="fp16"), images=IMAGES, body=body)


# ---------------------------------------------------------------------------------------------------------- who listens
def test_what_is_told_while_it_trains():
    told = Told()
    train(toy(evaluation__points=1), images=IMAGES, observer=told)
    assert {"train_s", "images", "steps", "loss", "learning_rate"} == told.values[-1].keys()
    assert (told.values[-1]["images"], told.values[-1]["learning_rate"]) == (IMAGES, 0.05)


def test_a_recorder_writes_points_pictures_and_tables(tmp_path):
    from PIL import Image

    from tunediff import record

    def body(trial):
        net, optimizer = begin(trial)
        trial.about(rows=44)
        trial.describe_with(lambda: trial.show("table", {"t": [0.0, 1.0], "p": [0.25, 1 / 3]}) or {})
        trial.evaluate_with(lambda: trial.show("samples", torch.zeros(2, 1, 8, 8, dtype=torch.uint8)) or error(net))
        for batch in trial.batches((INPUTS, TARGETS)):
            trial.step(loss_of(net, batch), optimizer)

    for _ in range(2):  # a resumed training tells its points again: they are there already
        train(toy(), images=IMAGES, folder=tmp_path, evaluates=True, observer=Recorder(tmp_path), body=body)
    events = list(record.events(tmp_path))
    assert [event["index"] for event in events if event["event"] == "point"] == [1, 2]
    assert {"event": "about", "rows": 44}.items() <= events[0].items()
    assert (tmp_path / "table.csv").read_text() == "t,p\n0,0.25\n1,0.333333\n"
    with Image.open(tmp_path / "samples.png") as picture:
        assert picture.mode == "L"


def test_the_seam_of_one_process_needs_no_strategy():
    model = torch.nn.Linear(1, 1)
    single = strategies.build(toy(), dataclasses.replace(CPU, size=1))
    assert single.wrap(model) is model
