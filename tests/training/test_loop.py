"""The loop: budget, resume, ranks, divergence."""

import gc
import math
import os
import shutil
import socket

import pytest
import torch
from tunediff.training.loop import Pace, learning_rate, train

from tests.training.conftest import tiny
from tunediff.clock import Budget, Clock
from tunediff.data import images as data
from tunediff.distributed import World, alone
from tunediff.training import checkpoint, loop
from tunediff.training.precision import NotFiniteError

CPU = World(0, 1, torch.device("cpu"))


class KilledError(Exception):
    pass


def run(folder, images, budget=None, report=lambda point: True, world=CPU, config=None, **kwargs):
    config = config or tiny()
    return train(config, budget or Budget(images=16 * 20), images, None, world, folder, report, **kwargs)


def weights(outcome):
    return {name: tensor.clone() for name, tensor in outcome.ema.state_dict().items()}


def assert_equal(a, b, **tolerance):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], **(tolerance or {"rtol": 0, "atol": 0}), msg=name)


def test_points_carry_seconds_images_and_rates(tmp_path, images):
    points = []
    outcome = run(tmp_path, images, report=lambda point: points.append(point) or True)
    assert outcome.finished
    assert [point["index"] for point in points] == [1, 2]
    assert [point["images"] for point in points] == [160, 320] == [16 * point["steps"] for point in points]
    assert 0 < points[0]["train_s"] < points[1]["train_s"]
    for point in points:
        assert point["images_per_s"] > 0
        assert 0 <= point["data_wait_share"] < 1
        assert math.isfinite(point["loss"])
        assert point["peak_memory_mib"] > 10


def test_seconds_are_kept_and_evaluation_is_not_charged(tmp_path, images):
    config, clock_points = tiny(), []

    def slow_evaluation(predict, diffusion):
        import time

        time.sleep(0.5)
        return {"frechet": 1.0}

    outcome = train(
        config, Budget(seconds=1.0), images, slow_evaluation, CPU, tmp_path, lambda p: clock_points.append(p) or True
    )
    assert outcome.seconds["evaluation"] >= 1.0
    for point, target in zip(clock_points, (0.5, 1.0), strict=True):
        assert target <= point["train_s"] < target + 0.4


def test_same_seed_same_weights_other_seed_other_weights(tmp_path, images):
    first = weights(run(tmp_path / "a", images))
    assert_equal(first, weights(run(tmp_path / "b", images)))
    other = weights(run(tmp_path / "c", images, config=tiny(seed=1)))
    assert any(not torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"timesteps__name": "loss_second_moment", "timesteps__history": 1, "process__steps": 5},
        {"model__dropout": 0.3, "loader__accumulation": 2, "precision__amp": "bf16"},
        {"loader__resident": True, "optimizer__decay": "cosine", "ema__half_life": 0.3},
        {"timesteps__name": "gradient_norm", "weighting__name": "uncertainty"},
        {"timesteps__name": "beta_policy", "timesteps__interval": 3, "timesteps__scan": 7, "model__dropout": 0.2},
        {"timesteps__name": "speed", "timesteps__dual": True, "weighting__name": "change_aware"},
    ],
    ids=[
        "plain",
        "adaptive sampler",
        "dropout, accumulation, bf16",
        "resident, cosine",
        "bins, uncertainty",
        "policy",
        "speed",
    ],
)
def test_a_killed_training_ends_where_an_uninterrupted_one_does(tmp_path, images, knobs):
    if knobs.get("process__steps"):
        knobs = knobs | {"evaluation__steps": 5}
    config = tiny(**knobs)
    whole = weights(run(tmp_path / "whole", images, config=config))

    def die(point):
        raise KilledError

    with pytest.raises(KilledError):
        run(tmp_path / "killed", images, config=config, report=die)
    told = []
    again = run(tmp_path / "killed", images, config=config, report=lambda point: told.append(point["index"]) or True)
    assert_equal(whole, weights(again))
    assert told == [1, 2]  # the point that was measured before the kill is told again, not lost


def test_seconds_of_an_interrupted_training_are_not_given_back(tmp_path, images):
    def die(point):
        raise KilledError

    budget = Budget(seconds=0.6)
    with pytest.raises(KilledError):
        run(tmp_path, images, budget, report=die)
    points = []
    run(tmp_path, images, budget, report=lambda point: points.append(point) or True)
    assert points[0]["train_s"] >= 0.3
    assert 0.6 <= points[1]["train_s"] < 1.2


def test_a_damaged_checkpoint_is_kept_aside_and_training_starts_anew(tmp_path, images, capsys):
    whole = weights(run(tmp_path / "whole", images))
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / checkpoint.NAME).write_bytes(b"PK\x03\x04 torn")
    assert_equal(whole, weights(run(tmp_path / "x", images)))
    assert "damaged" in capsys.readouterr().out


def test_report_can_stop_it(tmp_path, images):
    outcome = run(tmp_path, images, report=lambda point: False)
    assert not outcome.finished
    assert (len(outcome.points), outcome.images) == (1, 160)


def test_accumulation_learns_what_the_whole_batch_learns(tmp_path, images):
    whole = weights(run(tmp_path / "1", images, config=tiny(timesteps__name="uniform"), budget=Budget(images=16 * 6)))
    # Noise is drawn per pass, so two passes see other noise; the shapes and counts must still agree.
    parts = run(tmp_path / "2", images, config=tiny(loader__accumulation=4), budget=Budget(images=16 * 6))
    assert (parts.steps, parts.images) == (6, 96)
    assert weights(parts).keys() == whole.keys()


def test_the_effective_weight_is_recorded(tmp_path, images):
    points = []
    config = tiny(timesteps__name="speed", weighting__name="min_snr", process__steps=1000)
    run(tmp_path, images, config=config, report=lambda point: points.append(point) or True)
    weight = torch.tensor(points[-1]["effective_weight"])
    assert len(weight) == 20
    assert weight.mean().item() == pytest.approx(1.0, abs=1e-4)
    assert (weight[13] / weight[14]).item() == pytest.approx(5.0, rel=1e-3)  # k = 5 at τ = 0.7
    lines = (tmp_path / "timesteps.csv").read_text().splitlines()
    assert lines[0] == "t,log_snr,probability,weight,effective_weight"
    row = [float(value) for value in lines[1].split(",")]
    assert row[:4] == pytest.approx([0, 9.2102, 0.00131579, 0.0005], rel=1e-3)
    assert len(lines) == 1001
    assert weight[0] < 0.1 * weight[10]  # min-SNR where the noise is low


def test_look_ahead_leaves_the_training_as_it_is(tmp_path, images):
    """A policy that is rewarded with nothing stays uniform: only its draws and its noise are others."""
    modes = []
    config = tiny(timesteps__name="beta_policy", timesteps__interval=1, timesteps__scan=4, model__dropout=0.5)
    outcome = run(tmp_path, images, config=config, report=lambda point: modes.append(point["loss"]) or True)
    assert outcome.steps == 20
    assert modes[-1] < 1.2


def test_open_ended_trains_past_its_budget_until_asked_and_goes_on(tmp_path, images):
    """The schedule of a budget, evaluations at its distance, and no end."""
    budget, points, traced = Budget(images=16 * 10, open_ended=True), [], []

    def until(steps):
        return lambda: bool(traced) and traced[-1]["steps"] >= steps

    first = run(
        tmp_path, images, budget, lambda point: points.append(point) or True, trace=traced.append, should_stop=until(23)
    )
    assert not first.finished
    assert [point["images"] for point in points] == [80, 160, 240, 320]
    assert 23 <= first.steps <= 24
    assert {"train_s", "images", "steps", "loss", "learning_rate"} == traced[-1].keys()
    assert traced[-1]["learning_rate"] == pytest.approx(1e-3)
    points.clear()
    whole = run(
        tmp_path / "whole", images, budget, trace=traced.append, should_stop=until(40), report=lambda point: True
    )
    traced.clear()
    again = run(
        tmp_path, images, budget, lambda p: points.append(p) or True, trace=traced.append, should_stop=until(40)
    )
    assert again.steps == whole.steps
    assert_equal(weights(whole), weights(again))
    assert [point["index"] for point in points][:5] == [1, 2, 3, 4, 5]


def test_asked_to_stop_while_evaluating_it_measures_after_the_resume(tmp_path, images):
    """A batch scheduler waits half a minute; an evaluation may take hours."""
    asked, judged, points = [], [], []

    def evaluate(predict, diffusion, *, should_stop=None):
        judged.append(1)
        if len(judged) == 1:
            asked.append(1)
            assert should_stop is not None
            assert should_stop()
            raise TimeoutError
        return {"frechet": 1.0}

    def go(stop):
        return train(
            tiny(), Budget(images=16 * 20), images, evaluate, CPU, tmp_path, lambda p: points.append(p) or True,
            should_stop=stop,
        )  # fmt: skip

    first = go(lambda: bool(asked))
    assert (first.finished, first.steps, points) == (False, 10, [])
    again = go(lambda: False)
    assert again.finished
    assert [point["steps"] for point in points] == [10, 20]
    assert all(point["images_per_s"] > 0 and point["loss"] > 0 for point in points)
    assert_equal(weights(run(tmp_path / "whole", images)), weights(again))


def test_divergence_is_noticed(tmp_path, images):
    config = tiny(optimizer__lr=1.0, optimizer__clip_norm=1000.0, optimizer__warmup=0.0)
    weights_out_of_range = {n: torch.full_like(t, 1e30) for n, t in weights(run(tmp_path / "a", images)).items()}
    with pytest.raises(NotFiniteError, match="not finite after"):
        run(tmp_path / "b", images, config=config, initial=weights_out_of_range)


def test_warm_up_leaves_nothing_behind(tmp_path, images):
    """The warm-up step compiles and allocates; a training of no steps must return the initial weights."""
    seen = {}

    def keep(predict, diffusion):
        seen.update({name: tensor.clone() for name, tensor in predict.state_dict().items()})
        return {"frechet": 1.0}

    config = tiny(evaluation__points=1, optimizer__lr=1e-12)
    train(config, Budget(images=16), images, keep, CPU, tmp_path, lambda point: True)
    torch.manual_seed(config.seed)
    from tunediff.workloads.diffusion.unet import UNet

    assert_equal(UNet(config.model, 1, 8).state_dict(), seen, rtol=0, atol=1e-6)


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_half_precision_trains(tmp_path, images, amp):
    losses = []
    run(
        tmp_path, images, Budget(images=16 * 120), lambda point: losses.append(point["loss"]) or True,
        config=tiny(precision__amp=amp, optimizer__lr=3e-3),
    )  # fmt: skip
    assert losses[-1] < losses[0] < 1.5


def test_it_learns(tmp_path, images):
    losses = []
    run(
        tmp_path,
        images,
        Budget(images=16 * 200),
        lambda p: losses.append(p["loss"]) or True,
        config=tiny(optimizer__lr=3e-3),
    )
    assert losses[-1] < 0.8 * losses[0]


# ------------------------------------------------------------------------------------------------------------- ranks
def _free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _rank(rank, port, folder, trainings):
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    world, found = World(rank, 2, torch.device("cpu")), []
    for number, (config, budget) in enumerate(trainings):
        told, own = [], folder / str(number)
        outcome = train(
            config, budget, data.load(config.data), None, world, own, lambda p, told=told: told.append(p) or True
        )
        found.append({"ema": outcome.ema.state_dict(), "steps": outcome.steps, "told": told})
        del outcome  # wrapped models are freed before their process group
    torch.save(found, folder / f"{rank}.pt")
    gc.collect()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


SHARED = [
    {"timesteps__name": "stratified"},
    {"timesteps__name": "loss_second_moment", "timesteps__history": 2},
    {"timesteps__name": "gradient_norm", "weighting__name": "uncertainty"},
    {"timesteps__name": "beta_policy", "timesteps__interval": 3, "timesteps__scan": 5},
    {"timesteps__name": "uniform", "parallel__static_graph": True, "parallel__bucket_mib": 0.01},
]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """What two processes make of each of `SHARED`, and of a budget in seconds; one start for all."""
    folder = tmp_path_factory.mktemp("ranks")
    short = {"process__steps": 10, "evaluation__steps": 5, "parallel__workers": 2}
    trainings = [(tiny(**knobs, **short), Budget(images=16 * 20)) for knobs in SHARED]
    trainings.append((tiny(parallel__workers=2), Budget(seconds=1.0)))
    torch.multiprocessing.spawn(_rank, (_free_port(), folder, trainings), nprocs=2)
    first, second = (torch.load(folder / f"{rank}.pt") for rank in (0, 1))
    return list(zip(first, second, strict=True))


@pytest.mark.parametrize("number", range(len(SHARED)), ids=lambda number: SHARED[number]["timesteps__name"])
def test_two_ranks_learn_what_one_rank_learns(tmp_path, images, two_ranks, number):
    config = tiny(**SHARED[number], process__steps=10, evaluation__steps=5)
    one, ranks = weights(run(tmp_path, images, config=config)), two_ranks[number]
    assert [len(rank["told"]) for rank in ranks] == [2, 0]
    assert_equal(ranks[0]["ema"], ranks[1]["ema"])
    assert_equal(one, ranks[0]["ema"], rtol=1e-3, atol=2e-5)


def test_all_ranks_stop_at_the_same_step(two_ranks):
    first, second = two_ranks[-1]
    assert first["steps"] == second["steps"] > 0


def test_a_point_of_two_ranks_speaks_for_both(two_ranks):
    point = two_ranks[-1][0]["told"][-1]
    assert point["images"] == 16 * point["steps"]
    assert point["step_s"] * point["images_per_s"] == pytest.approx(16)


# ------------------------------------------------------------------------------------------------------- the schedules
def test_learning_rate_follows_the_budget():
    config = tiny(optimizer__lr=1e-3, optimizer__warmup=0.2)
    assert learning_rate(config, 0.1) == pytest.approx(5e-4)
    assert learning_rate(config, 0.2) == learning_rate(config, 1.0) == pytest.approx(1e-3)
    cosine = tiny(optimizer__lr=1e-3, optimizer__warmup=0.2, optimizer__decay="cosine")
    assert learning_rate(cosine, 0.6) == pytest.approx(5e-4)
    assert learning_rate(cosine, 1.0) == pytest.approx(0.0, abs=1e-12)
    linear = tiny(optimizer__lr=1e-3, optimizer__warmup=0.0, optimizer__decay="linear")
    assert learning_rate(linear, 0.25) == pytest.approx(7.5e-4)


@pytest.mark.parametrize(("scaling", "factor"), [("none", 1.0), ("linear", 2.0), ("sqrt", math.sqrt(2))])
def test_learning_rate_scales_with_the_batch(scaling, factor):
    config = tiny(loader__batch_size=256, optimizer__lr=1e-3, optimizer__lr_scaling=scaling, optimizer__warmup=0.0)
    assert learning_rate(config, 0.5) == pytest.approx(1e-3 * factor)


def test_pace_reads_the_clock_rarely_and_stops_on_a_reading():
    now = [0.0]
    reads = [0]

    def synchronize():
        reads[0] += 1

    clock = Clock(Budget(seconds=100.0), synchronize, lambda: now[0])
    pace = Pace(clock.budget, clock, CPU)
    with clock.part("train"):
        for stop in (0.5, 1.0):
            pace.aim(stop)
            while not pace.reached:
                now[0] += 0.01
                before = pace.progress
                pace.step(8)
                assert pace.progress >= before
    assert pace.steps == pytest.approx(10_000, abs=5)
    assert 100.0 <= clock.train_s < 100.1
    assert reads[0] < 400


def test_alone_uses_a_gpu_if_there_is_one():
    assert alone().device.type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_optimizer_implementations_agree(tmp_path, images):
    found = [
        weights(run(tmp_path / kind, images, config=tiny(optimizer__implementation=kind)))
        for kind in ("foreach", "fused", "for_loop")
    ]
    assert_equal(found[0], found[1], rtol=1e-3, atol=1e-5)
    assert_equal(found[0], found[2], rtol=1e-3, atol=1e-5)


def test_channels_last_learns_the_same(tmp_path, images):
    plain = weights(run(tmp_path / "a", images))
    last = weights(run(tmp_path / "b", images, config=tiny(model__channels_last=True)))
    assert_equal(plain, last, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("levels", [[0], [1], [0, 1]])
def test_checkpointed_activations_learn_exactly_the_same(tmp_path, images, levels):
    knobs = {"model__dropout": 0.3}  # the same units are dropped when activations are computed again
    plain = weights(run(tmp_path / "a", images, config=tiny(**knobs)))
    assert_equal(plain, weights(run(tmp_path / "b", images, config=tiny(**knobs, model__checkpoint_levels=levels))))


def test_checkpointed_levels_keep_less():
    """Bytes that the backward pass holds on to, beyond parameters and buffers."""
    from tunediff.workloads.diffusion.unet import UNet

    def kept(levels):
        network = UNet(tiny(model__checkpoint_levels=levels).model, 1, 8).train()
        own = {parameter.data_ptr() for parameter in [*network.parameters(), *network.buffers()]}
        held = {}

        def pack(tensor):
            if tensor.data_ptr() not in own:
                held[tensor.data_ptr()] = tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = network(torch.zeros(64, 1, 8, 8), torch.zeros(64, dtype=torch.int64))
            kept_now = sum(held.values())
            output.sum().backward()
        return kept_now

    none, first, second, every = kept([]), kept([0]), kept([1]), kept([0, 1])
    assert every < first < none
    assert every < second < none
    assert first < second  # full resolution holds most


@pytest.mark.parametrize(
    "knobs",
    [
        {"loader__workers": 1, "loader__persistent_workers": False, "loader__transfer": "float32"},
        {"loader__pin_memory": False, "loader__non_blocking": False, "precision__cudnn_benchmark": True},
        {"memory__keep_freed": False},
    ],
    ids=["loader processes", "copies", "memory given back"],
)
def test_systems_knobs_change_no_weight(tmp_path, images, knobs):
    plain = weights(run(tmp_path / "a", images))
    assert_equal(plain, weights(run(tmp_path / "b", images, config=tiny(**knobs))))


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.parametrize("scope", ["blocks", pytest.param("model", marks=pytest.mark.slow)])
def test_compiled_training_learns_the_same_and_its_seconds_are_apart(tmp_path, images, scope):
    plain = run(tmp_path / "a", images)
    compiled = run(tmp_path / "b", images, config=tiny(compile__mode="default", compile__scope=scope))
    assert 1 <= compiled.points[-1]["compiled_graphs"] <= 20
    assert compiled.points[0]["compiled_graphs"] == compiled.points[-1]["compiled_graphs"]  # none after the warm-up
    assert_equal(weights(plain), weights(compiled), rtol=1e-3, atol=1e-4)
    assert plain.seconds["compile"] == 0.0
    assert compiled.seconds["compile"] > 1.0
    assert compiled.seconds["train"] < compiled.seconds["compile"]


def test_loop_module_knows_no_ray():
    assert "ray" not in vars(loop)
