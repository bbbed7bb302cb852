"""The seam: what a workload may ask of a `Trial`, and what the trial owes whoever started it. On a training of numbers
that takes milliseconds."""

import contextlib
import errno
import math
import operator
import os
import types

import pytest
import torch

from tests.helpers import Dies, Hands, KilledError, Told, assert_equal, timed, toy, train, weights
from tests.toy.train import IMAGES, INPUTS, STEPS, TARGETS, begin, error, loss_of, plain
from tunediff import steps
from tunediff.config.code import WorkloadError
from tunediff.config.systems import Precision
from tunediff.core.journal import Journal
from tunediff.core.trial_record import NotFiniteError
from tunediff.distributed import alone
from tunediff.training import state
from tunediff.training.meter import COMMON
from tunediff.training.observer import Recorder
from tunediff.training.outcome import end_of, run_trial
from tunediff.training.precision import set_backends
from tunediff.training.weights import digest


@pytest.mark.parametrize("knobs", [{}, {"loader__resident": True}, {"loader__accumulation": 2}], ids=str)
def test_whoever_trains_may_write_into_a_batch(knobs):
    """The first one comes twice, and the warm-up's is another copy."""

    def body(trial):
        net, optimizer = begin(trial)
        for inputs, targets in trial.batches((INPUTS, TARGETS)):
            trial.step(loss_of(net, (inputs.mul_(3) if in_place else inputs * 3, targets)), optimizer)

    in_place = True
    found = weights(train(toy(**knobs), samples=IMAGES, body=body))
    in_place = False
    assert_equal(found, weights(train(toy(**knobs), samples=IMAGES, body=body)))


@pytest.mark.parametrize("batches", [[], iter([(INPUTS, TARGETS)])], ids=["empty", "only once"])
def test_a_loader_without_batches_is_an_error_and_not_a_wait(batches):
    def body(trial):
        net, optimizer = begin(trial)
        for batch in steps(trial, batches):
            trial.step(loss_of(net, batch), optimizer)

    with pytest.raises(RuntimeError, match="the loader has no batches"):
        train(toy(), samples=IMAGES, body=body)


# ---------------------------------------------------------------------------------------------------------- the step
def accumulates(trial):
    """Knows where the last pass is, and steps by hand."""
    net, optimizer = begin(trial)
    passes = []
    for batch in trial.batches((INPUTS, TARGETS)):
        passes.append(trial.sync_gradients)
        trial.backward(loss_of(net, batch))
        if trial.sync_gradients:
            assert all(parameter.grad is not None for parameter in net.parameters())
            trial.update(optimizer)
    count = trial.config.loader.accumulation
    assert passes == ([False] * (count - 1) + [True]) * (STEPS + 1)


@pytest.mark.parametrize("body", [None, accumulates, plain()], ids=["rng", "by hand", "step"])
def test_accumulation_learns_what_the_whole_batch_learns(body):
    told = [Told(), Told()]
    found = [
        train(
            toy(norm=False, loader__accumulation=count),
            samples=IMAGES,
            observer=observer,
            body=body,
        )
        for count, observer in zip((1, 2), told, strict=True)
    ]
    assert found[0].steps == found[1].steps == STEPS
    tolerance = {"rtol": 1e-4, "atol": 1e-5}
    if body is None:  # it draws noise in each pass, and so the same noise only for one way of dividing
        assert found[0].samples == found[1].samples
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

    expected = weights(train(toy(), samples=IMAGES, body=plain()))
    assert_equal(expected, weights(train(toy(), samples=IMAGES, body=body)))
    assert_equal(expected, weights(train(toy(), samples=IMAGES, body=weighted)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("call", ["step", "update", "record_step"])
def test_second_step_for_one_batch_is_refused(call):
    def body(trial):
        net, optimizer = begin(trial)
        for batch in trial.batches((INPUTS, TARGETS)):
            for _ in range(2):
                loss = loss_of(net, batch)
                if call == "update":
                    trial.backward(loss)
                getattr(trial, call)(
                    *([] if call == "update" else [loss]), *([] if call == "record_step" else [optimizer])
                )

    with pytest.raises(WorkloadError, match=f"toy: trial.{call} was called twice for one batch"):
        train(toy(), samples=IMAGES, body=body)


@pytest.mark.parametrize("amp", ["none", "fp16"])
def test_gradients_are_clipped_to_the_norm(amp):
    """Those of the loss: what `fp16` scales it by is taken out before."""
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

    train(toy(precision__amp=amp), samples=IMAGES, body=body)
    assert norms == pytest.approx([0.5] * (STEPS + 1), rel=1e-3)


def test_progress_and_stride_follow_the_budget():
    seen = []

    def body(trial):
        net, optimizer = begin(trial)
        for batch in trial.batches((INPUTS, TARGETS)):
            before = trial.progress
            trial.step(loss_of(net, batch), optimizer)
            if not trial.warming_up:
                seen.append((before, trial.progress, trial.stride))

    train(toy(), samples=IMAGES, body=body)
    assert [before for before, _, _ in seen] == pytest.approx([k / STEPS for k in range(STEPS)])
    assert [after for _, after, _ in seen] == pytest.approx([(k + 1) / STEPS for k in range(STEPS)])
    assert [stride for _, _, stride in seen] == pytest.approx([1 / STEPS] * STEPS)


# ------------------------------------------------------------------------------------------------------------- points


def test_what_is_found_and_described_is_in_every_point():
    told = Told()

    def begun(trial, net):
        trial.about(rows=len(INPUTS))
        trial.describe_with(lambda: {"width": 8, "at": trial.progress})
        trial.evaluate_with(lambda: error(net) | {"label": "E"})

    body = plain(begun, done=lambda trial, net: trial.show("curve", {"x": [1.0, 2.0]}))
    outcome = train(toy(), samples=IMAGES, observer=told, evaluates=True, body=body)
    assert told.points == outcome.points
    assert [point["at"] for point in told.points] == pytest.approx([0.5, 1.0])
    for index, point in enumerate(told.points, 1):
        assert (point.index, point.fraction, point["width"], point["label"]) == (index, index / 2, 8, "E")
        assert (point.samples, point.steps) == (IMAGES // 2 * index, STEPS // 2 * index)
        assert math.isfinite(point["error"])
        assert math.isfinite(point.loss)
        assert point.samples_per_s > 0
        assert 0 <= point.data_wait_share < 1
        assert point.peak_memory_mib > 10
        assert point.device_s == point.train_s
    assert 0 < told.points[0].train_s < told.points[1].train_s
    assert told.points[-1].weights_digest == digest(outcome.weights)
    assert (told.facts, told.shown) == ({"rows": 44}, {"curve": {"x": [1.0, 2.0]}})
    assert told.steps == STEPS
    first_s = told.points[0]["first_step_s"]
    assert 0 < first_s < outcome.seconds["setup"], "the warm-up's, which is a part of the setup"
    assert outcome.peak == {name: told.points[-1][name] for name in ("peak_memory_mib", "peak_host_memory_mib")}
    # For measurements: nothing is judged, and what costs nothing is described.
    unjudged = train(toy(), samples=IMAGES, body=body).points[-1]
    assert ("error" in unjudged, unjudged["width"]) == (False, 8)


def test_a_points_loss_is_the_mean_since_the_one_before():
    told, losses = Told(), []

    def body(trial):
        net, optimizer = begin(trial)
        for batch in trial.batches((INPUTS, TARGETS)):
            loss = loss_of(net, batch)
            if not trial.warming_up:
                losses.append(loss.item())
            trial.step(loss, optimizer)

    train(toy(), samples=IMAGES, observer=told, body=body)
    halves = (losses[: STEPS // 2], losses[STEPS // 2 :])
    assert [point.loss for point in told.points] == pytest.approx([sum(half) / len(half) for half in halves], rel=1e-5)


def test_points_without_a_step_repeat_what_is_known_of_speed_and_loss():
    """A step of 6 s ends two segments of 2.5 s at once."""
    hands = Hands()

    def each(trial, net):
        hands.s += 6.0 * (not trial.warming_up)

    points = train(toy(evaluation__points=4), seconds=10.0, clock=timed(10.0, hands), body=plain(each=each)).points
    assert [(point.index, point.steps) for point in points] == [(1, 1), (2, 1), (3, 2), (4, 2)]
    for point, before in ((points[1], points[0]), (points[3], points[2])):
        assert point.samples_per_s == before.samples_per_s == pytest.approx(8 / 6.0)
        assert point.loss == before.loss > 0
        assert point.step_s == before.step_s == pytest.approx(6.0)
        assert point.phases_s == before.phases_s


def test_evaluation_and_checkpoints_stop_the_clock(tmp_path):
    hands, told = Hands(), Told()

    def judge():
        hands.s += 1000.0
        return {"error": 1.0}

    def each(trial, net):
        if not trial.warming_up:
            hands.s += 1.0 if hands.s < 1000.0 else 2.5  # slower after the first evaluation

    body = plain(lambda trial, net: trial.evaluate_with(judge), each)
    outcome = train(
        toy(), seconds=10.0, clock=timed(10.0, hands), observer=told, evaluates=True, folder=tmp_path, body=body
    )
    assert [point.train_s for point in told.points] == [5.0, 10.0]
    assert (outcome.seconds["train"], outcome.seconds["evaluation"], outcome.steps) == (10.0, 2000.0, 7)
    assert [point.samples_per_s for point in told.points] == [8.0, 3.2], "since the point before"
    assert [point.step_s for point in told.points] == [1.0, 2.5]
    assert told.points[0].seconds["evaluation"] == 1000.0


@pytest.mark.parametrize(("charged", "steps"), [(True, 6), (False, 10)])
def test_setup_before_the_first_batch_shortens_the_training_where_it_is_charged(tmp_path, charged, steps):
    """4 of 10 seconds; after a resume they are not charged again."""

    def begun(trial, net):
        hands.s += 4.0
        trial.evaluate_with(lambda: error(net))

    def each(trial, net):
        hands.s += 1.0

    for observer in (Dies(), Told()):
        hands = Hands()
        clock = timed(10.0, hands, setup_charged=charged)
        how = {"seconds": 10.0, "setup_charged": charged, "clock": clock, "folder": tmp_path, "evaluates": True}
        with contextlib.suppress(KilledError):
            outcome = train(toy(), observer=observer, body=plain(begun, each), **how)
    assert outcome.steps == steps
    assert outcome.points[-1].train_s == pytest.approx(10.0)
    assert outcome.points[-1].before_first_batch_s == pytest.approx(4.0)


def test_the_result_is_the_prepared_model_unless_another_is_exported():
    averaged = torch.nn.Linear(1, 1)

    def begun(trial, net):
        nets.append(net)
        if export:
            trial.export_model(averaged)

    for export in (True, False):
        nets = []
        outcome = train(toy(), samples=8, body=plain(begun))
        assert_equal(outcome.weights, (averaged if export else nets[0]).state_dict())


def test_weights_that_change_behind_the_loop_are_not_exported(tmp_path):
    """Also after a resume, when nothing is left to train: the checkpoint has what was judged."""
    finished = []

    def done(trial, net):
        finished.append({name: one.clone() for name, one in net.state_dict().items()})
        with torch.no_grad():
            net[0].weight.mul_(0.5)

    body = plain(lambda trial, net: trial.evaluate_with(lambda: error(net)), done=done)
    for _ in range(2):
        outcome = train(toy(), samples=IMAGES, evaluates=True, body=body, folder=tmp_path)
        assert_equal(dict(outcome.weights), finished[0])
        assert outcome.points[-1].weights_digest == digest(outcome.weights)
        assert "(0.weight)" in outcome.reason
    assert len(finished) == 2


def test_initial_weights_are_where_it_begins():
    before = weights(train(toy(), samples=IMAGES))
    seen = []

    def body(trial):
        net, _ = begin(trial)
        seen.append({name: tensor.clone() for name, tensor in net.state_dict().items()})

    with pytest.raises(WorkloadError, match="never asked for a batch"):
        train(toy(seed=5), samples=8, initial=before, body=body)
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

    point = train(toy(), samples=IMAGES, body=body).points[-1]
    parts = {name: point[f"step_{name}_s"] for name in (*COMMON, "mixing", "averaging", "other")}
    assert point.phases_s == parts
    assert all(parts[name] > 0 for name in ("forward", "backward", "optimizer", "mixing", "data_wait"))
    assert sum(parts.values()) == pytest.approx(point.step_s, rel=1e-6)


# ---------------------------------------------------------------------------------------------------------- who listens


def test_a_recorder_writes_points_pictures_and_tables(tmp_path):
    from PIL import Image

    from tunediff.core import trial_record as record

    def begun(trial, net):
        trial.about(rows=44)
        trial.describe_with(lambda: trial.show("table", {"t": [0.0, 1.0], "p": [0.25, 1 / 3]}) or {})
        trial.evaluate_with(lambda: trial.show("samples", torch.zeros(2, 1, 8, 8, dtype=torch.uint8)) or error(net))

    for _ in range(2):  # a resumed training tells its points again: they are there already
        train(toy(), samples=IMAGES, folder=tmp_path, evaluates=True, observer=Recorder(tmp_path), body=plain(begun))
    events = list(record.events(tmp_path))
    assert [event["index"] for event in events if event["event"] == "point"] == [1, 2]
    assert {"event": "about", "rows": 44}.items() <= events[0].items()
    assert (tmp_path / "table.csv").read_text() == "t,p\n0,0.25\n1,0.333333\n"
    with Image.open(tmp_path / "samples.png") as picture:
        assert picture.mode == "L"


# ------------------------------------------------------------------------------------------------------------- judging
def test_exported_average_is_judged_in_evaluation_mode():
    """Dropout is off, batch statistics learn nothing of the evaluation's data, and both models train on as they were."""

    def body(trial):
        net, optimizer = begin(trial)
        average = torch.optim.swa_utils.AveragedModel(net)
        trial.keep(average=average)
        trial.export_model(average)

        def judge():
            looks.append((average(INPUTS), average(INPUTS)))
            batches.append(average.module[1].num_batches_tracked.item())
            judged_modes.append({module.training for one in (net, average) for module in one.modules()})
            return {"error": 1.0}

        trial.evaluate_with(judge)
        average.module[3].eval()
        for batch in trial.batches((INPUTS, TARGETS)):
            trial.step(loss_of(net, batch), optimizer)
            average.update_parameters(net)
            modes.append((net.training, average.training, average.module[3].training))

    looks, batches, judged_modes, modes = [], [], [], []
    train(toy(dropout=0.5, norm=True), samples=IMAGES, evaluates=True, body=body)
    for first, second in looks:
        assert torch.equal(first, second)
    assert batches == [STEPS // 2, STEPS]
    assert judged_modes == [{False}, {False}]
    assert set(modes) == {(True, True, False)}


@pytest.mark.parametrize("matmul", ["highest", "high", "medium"])
@pytest.mark.parametrize("amp", ["none", "bf16"])
def test_evaluation_sees_ieee_float32_whatever_the_knobs(amp, matmul, monkeypatch):
    """Also where the workload enters `trial.autocast` around its loop, or in its evaluation."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    seen = []

    def switches():
        autocast = torch.is_autocast_enabled("cpu")
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32, autocast

    def body(trial):
        net, optimizer = begin(trial)

        def judge():
            with trial.autocast():
                inside = switches()
            format, tf32, autocast = switches()
            assert inside == switches()
            return {"error": 1.0, "format": format, "tf32": tf32, "autocast": autocast}

        trial.evaluate_with(judge)
        with trial.autocast():
            for batch in trial.batches((INPUTS, TARGETS)):
                trial.step(loss_of(net, batch), optimizer)
                seen.append(switches())

    config = toy(precision__amp=amp, precision__matmul=matmul)
    try:
        points = train(config, samples=IMAGES, evaluates=True, body=body).points
    finally:
        torch.set_float32_matmul_precision("highest")
    assert {(point["format"], point["tf32"], point["autocast"]) for point in points} == {("highest", False, False)}
    assert set(seen) == {(matmul, True, amp == "bf16")}, "the training goes on in its own format"


def float32_formats():
    """What torch computes float32 in, by all that has an `fp32_precision`."""
    backends = torch.backends
    cuda = (backends.cuda.matmul, backends.cudnn, backends.cudnn.conv, backends.cudnn.rnn)
    cpu = (backends.mkldnn, backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn)
    return [scope.fp32_precision for scope in (backends, *cuda, *cpu)]


@pytest.mark.parametrize("scope", ["", "cuda.matmul", "cudnn", "cudnn.conv", "mkldnn", "mkldnn.matmul"])
def test_evaluation_sees_ieee_float32_whatever_format_the_workload_sets(scope):
    """By torch's newer interface, which its older one refuses to be read beside."""
    set_backends(Precision(), "cpu")
    before, seen, judged = float32_formats(), [], []

    def begun(trial, net):
        (operator.attrgetter(scope)(torch.backends) if scope else torch.backends).fp32_precision = "tf32"
        trial.evaluate_with(lambda: judged.append(float32_formats()) or {"error": 1.0})
        seen.append(float32_formats())

    body = plain(begun, done=lambda trial, net: seen.append(float32_formats()))
    try:
        train(toy(), samples=IMAGES, evaluates=True, body=body)
    finally:
        set_backends(Precision(), "cpu")
    assert "tf32" in seen[0]
    assert seen[0] == seen[1], "the training goes on in its own format"
    assert {value for formats in judged for value in formats} == {"ieee", "none"}
    assert float32_formats() == before, "the next training begins without it"


# ---------------------------------- what an exception of a training means: a status, or nothing about the configuration
DEAD_LOADER = RuntimeError("DataLoader worker (pid 1) is killed by signal: Killed.")


WRITERS = {
    "checkpoint": lambda folder: state.save({"step": 1}, folder),
    "journal": lambda folder: Journal(folder).write("about"),
}


class NotOfTrialError(RuntimeError):
    pass


def raising(error):
    def train():
        raise error

    return train


@pytest.mark.parametrize(("finished", "status"), [(True, "ok"), (False, "pruned")])
def test_a_training_that_returns_is_ok_or_pruned(tmp_path, finished, status):
    outcome = types.SimpleNamespace(
        finished=finished, seconds={"train": 2.0}, steps=3, peak={"peak_memory_mib": 4.0}, reason=""
    )
    result = run_trial(lambda: outcome, alone(), tmp_path)
    assert (result.end.status, result.end.steps, result.end.seconds, result.end.peak) == (
        status, 3, {"train": 2.0}, {"peak_memory_mib": 4.0},
    )  # fmt: skip
    assert result.outcome is outcome
    assert result.error is None


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (NotFiniteError("the loss is not finite"), "nan", "the loss is not finite"),
        (MemoryError("no"), "oom", "MemoryError: no"),
        (torch.OutOfMemoryError("CUDA out of memory"), "oom", "OutOfMemoryError: CUDA out of memory"),
        (ZeroDivisionError("why"), "error", "ZeroDivisionError: why"),
    ],
)
@pytest.mark.usefixtures("no_users_code")
def test_an_exception_becomes_a_status(tmp_path, error, status, reason):
    result = run_trial(raising(error), alone(), tmp_path)
    assert (result.end.status, result.end.reason, result.outcome) == (status, reason, None)
    assert result.error is (None if status == "nan" else error), "what is not finite harms no process"
    assert result.end.peak["peak_memory_mib"] > 0
    assert (end_of(error).status, end_of(error).peak) == (status, {})


@pytest.mark.parametrize("error", [DEAD_LOADER, NotOfTrialError("the slot is gone")])
def test_what_says_nothing_about_the_configuration_has_no_end(tmp_path, error):
    result = run_trial(raising(error), alone(), tmp_path, not_of_trial=(NotOfTrialError,))
    assert (result.end, result.outcome, result.error) == (None, None, error)


def test_a_disk_fault_behind_another_error_is_found(tmp_path, disk_probe):
    disk_probe(full := OSError(errno.ENOSPC, "full"))
    error = ValueError("could not be written")
    result = run_trial(raising(error), alone(), tmp_path)
    assert (result.end, result.error, result.error.__cause__) == (None, full, error)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
@pytest.mark.usefixtures("no_users_code")
def test_an_error_of_another_disk_is_the_trials_own(tmp_path, code):
    """Such as that of a cache which `train(trial)` writes: the search's folder can be written."""
    elsewhere = "/dev/no-such-folder/tokens.bin"  # a file system of its own
    result = run_trial(raising(OSError(code, "no", elsewhere)), alone(), tmp_path)
    assert (result.end.status, result.end.reason) == ("error", f"OSError: [Errno {code}] no: '{elsewhere}'")
    own = OSError(code, "no", str(tmp_path / "sub" / "cache.bin"))
    assert run_trial(raising(own), alone(), tmp_path).end is None


def test_a_full_disk_of_a_file_without_a_name_is_the_trials_own(tmp_path, disk_probe):
    """Writing to a file on a full disk names no file; only opening one does."""

    def train():
        with open("/dev/full", "wb") as cache:
            cache.write(b"tokens")

    result = run_trial(train, alone(), tmp_path)
    assert (result.end.status, result.error.filename) == ("error", None)
    assert "No space left on device" in result.end.reason
    disk_probe(OSError(errno.ENOSPC, "full"))
    assert run_trial(train, alone(), tmp_path).end is None, "the results' disk is full as well"


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_a_full_disk_of_the_trials_own_files_has_no_end(tmp_path, disk_fault, disk_probe, write):
    """The probe may find room: it is smaller than a checkpoint."""
    disk_fault(errno.ENOSPC)
    disk_probe(None)
    result = run_trial(lambda: write(tmp_path), alone(), tmp_path)
    assert result.end is None
    assert str(tmp_path) in str(result.error)


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
def test_a_passing_fault_of_the_trials_own_files_has_no_end(tmp_path, disk_fault, disk_probe, code):
    """As of NFS: when the folder is probed, it is over."""
    disk_fault(code)
    disk_probe(None)
    result = run_trial(lambda: Journal(tmp_path).write("about"), alone(), tmp_path)
    assert (result.end, result.error.errno) == (None, code)
    images = OSError(code, os.strerror(code), "/data/images/1.png")
    assert run_trial(raising(images), alone(), tmp_path).end.status == "error", "the user's own files"


def test_an_interrupt_passes(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run_trial(raising(KeyboardInterrupt()), alone(), tmp_path)
