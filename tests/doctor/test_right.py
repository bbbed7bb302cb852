"""Part A: every check is wrong where what it looks at is; a few trainings of milliseconds show that it really looks."""

import types

import pytest
import torch

from tests.helpers import CPU
from tunediff.doctor import apart, right, trainings
from tunediff.doctor.finding import Site
from tunediff.doctor.trainings import small, trained
from tunediff.record import NotFiniteError
from tunediff.training import hardware

CHECKS = {check.name: check for check in right.CHECKS}
WAY = torch.tensor([3.0, 4.0])


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.setattr(right, "alone", lambda: CPU)
    monkeypatch.setattr(hardware, "peak_flops_per_s", lambda *of: 1e9)
    right.reference.cache_clear()
    yield Site(tmp_path, "cpu")
    right.reference.cache_clear()


@pytest.fixture
def quick(site, monkeypatch):
    """Trainings that have come as far as they are told, by a function of their configuration."""

    def use(says, graphs=(2, 2)):
        def stub(config, world, steps=10, kind=None):
            return types.SimpleNamespace(says=says(config), graphs=list(graphs))

        monkeypatch.setattr(right, "trained", stub)
        return site

    return use


@pytest.mark.slow
def test_two_trainings_that_differ_are_told_apart(site):
    """Really trained: the same twice is the same; what a user would call a bug is over every bound but rounding."""
    base = trained(small(), CPU)
    assert trainings.apart(trained(small(), CPU).says, base.says) == 0.0
    again = trained(small(memory__channels_last=True, loader__resident=True, optimizer__implementation="fused"), CPU)
    assert trainings.apart(again.says, base.says) < right.BOUNDS["float32"]
    rounded = trained(small(precision__amp="bf16"), CPU)
    assert right.BOUNDS["float32"] < trainings.apart(rounded.says, base.says) < right.BOUNDS["bf16"]
    wrong = trained(small(optimizer__beta2=0.9), CPU)
    assert trainings.apart(wrong.says, base.says) > max(right.BOUNDS.values())
    assert base.graphs == [base.graphs[0]] * 10


def test_distances_by_hand():
    assert trainings.apart(WAY, WAY) == 0.0
    assert trainings.apart(2 * WAY, WAY) == 1.0
    assert trainings.apart(torch.tensor([3.0, 4.5]), WAY) == pytest.approx(0.1)


@pytest.mark.parametrize("name", ["float32, ten steps", "bf16, ten steps", "fp16, ten steps"])
def test_one_form_that_is_wrong_or_not_finite_is_named(quick, name):
    def wrong(config):
        return WAY * (1.5 if config.knobs.optimizer.implementation == "fused" and config.loader.resident else 1.0)

    def raises(config):
        if config.knobs.optimizer.implementation == "fused":
            raise NotFiniteError("the loss is not finite")
        return WAY

    assert CHECKS[name](quick(lambda config: WAY)).state == "ok"
    for broken in (wrong, raises):
        found = CHECKS[name](quick(broken))
        assert (found.state, found.stops) == ("wrong", True)
        assert "fused resident" in found.found.partition("too far")[2]
        assert "foreach" not in found.found.partition("too far")[2]


def test_every_form_is_tried(site):
    assert len(dict(right.forms("bf16", site))) == 12
    assert len(dict(right.forms("fp16", site))) == 3
    gpu = dict(right.forms("fp16", Site(site.storage, "cuda")))
    assert len(gpu) == 24, "a GPU has a compiled form and a norm of its own as well"
    assert gpu["compiled channels_last triton resident"]["model__norm"] == "triton"
    ways = list(right.modes(Site(site.storage, "cuda")))
    assert len({small(**changes).compile for changes in ways}) == 5, "each may be searched"
    assert {"uniform", "wiener", "beta_policy", "speed"} <= set(right.samplers())


def test_the_update_with_the_average_is_one_of_its_own(site, monkeypatch):
    """The compiled form waits for the average only where there is one."""
    assert CHECKS["one update"](site).state == "skipped"
    forms = {"fused": WAY, "compiled": WAY}
    monkeypatch.setattr(right, "diffusion", lambda config, *_: forms[config.knobs.optimizer.implementation])
    gpu = Site(site.storage, "cuda")
    assert CHECKS["one update"](gpu).state == "ok"
    forms["compiled"] = 1.01 * WAY
    assert CHECKS["one update"](gpu).state == "wrong"


def test_numbers_that_are_none_are_wrong():
    assert right.bounded({"a": 0.1, "b": float("nan")}, 1.0, "x").state == "wrong"
    assert right.bounded({"a": 0.1, "b": float("inf")}, 1.0, "x").state == "wrong"
    assert right.bounded({"a": 0.1}, 1.0, "x").state == "ok"


@pytest.mark.slow
def test_a_resume_is_as_without_and_one_that_forgets_is_noticed(site, monkeypatch):
    monkeypatch.setattr(right, "samplers", lambda: ["wiener"])
    assert right.resume(site).state == "ok"
    from tunediff.training import state

    put = state.State.put

    def forgets(self, content):
        kept = dict(content["kept"])
        kept["optimizer"] = {**kept["optimizer"], "state": {}}
        put(self, {**content, "kept": kept})

    monkeypatch.setattr(state.State, "put", forgets)
    assert right.resume(site).state == "wrong"


def test_what_compiles_again_or_computes_otherwise_is_wrong(quick):
    assert CHECKS["compiled"](quick(lambda config: WAY)).state == "ok"
    again = CHECKS["compiled"](quick(lambda config: WAY, graphs=(2, 3)))
    assert again.state == "wrong"
    assert "3 after the last" in again.found
    right.reference.cache_clear()
    other = CHECKS["compiled"](quick(lambda config: WAY * (1.1 if config.compile.scope == "blocks" else 1.0)))
    assert other.state == "wrong"
    assert "blocks" in other.found


def test_without_a_compiler_no_graph_is_no_success(quick):
    assert CHECKS["compiled"](quick(lambda config: WAY, graphs=(0, 0))).state == "wrong"


def test_memory_that_runs_out_is_told_and_given_back(site, monkeypatch):
    check = CHECKS["out of memory"]
    assert check(site).state == "ok"  # really asks for too much
    held = iter([0.0, 300.0])
    monkeypatch.setattr(right, "held_mib", lambda device: next(held))
    assert "300 MiB are not given back" in check(site).found
    monkeypatch.undo()
    monkeypatch.setattr(right, "alone", lambda: CPU)
    monkeypatch.setattr(right.memory, "is_oom", lambda error: False)
    assert check(site).state == "wrong"


@pytest.mark.parametrize(
    ("device", "mib", "state"),
    [
        ("cpu", (500.0, 510.0), "ok"), ("cpu", (500.0, 1000.0), "wrong"), ("cuda", (20.0, 20.0), "ok"),
        ("cuda", (788.0, 788.0), "wrong"), ("cuda", (20.0, 100.0), "wrong"),
    ],
)  # fmt: skip
def test_a_peak_that_is_not_the_trainings_own_is_wrong(quick, monkeypatch, device, mib, state):
    monkeypatch.setattr(right, "peaks", lambda world: mib)
    site = quick(lambda config: WAY)
    assert CHECKS["peak memory"](Site(site.storage, device)).state == state


def test_a_group_of_one(site, monkeypatch, capsys):
    """Really one; then one that is wrong, and one that does not start."""
    check = CHECKS["one-rank group"]
    assert check(site).state == "ok"
    monkeypatch.setattr(apart, "ask", lambda *of, **how: {"right": False, "backend": "nccl"})
    assert check(site).state == "wrong"
    monkeypatch.setattr(apart, "ask", lambda *of, **how: 1 / 0)
    assert check(site).state == "missing"


def test_steps_that_wait_for_the_gpu_are_told(site, monkeypatch):
    """The mode is on in the workload's part of the step and nowhere else; what raises in it is told by sampler."""
    modes = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(right, "samplers", lambda: ["uniform"])
    monkeypatch.setattr(right, "SYNC_STEPS", 2)
    gpu = Site(site.storage, "cuda")
    assert right.waiting(site).state == "skipped"
    assert right.waiting(gpu).state == "ok"
    assert modes == ["error", "default"] * 3 + ["default"]  # the first step, which is undone, and two

    def raises(config, *of, **how):
        raise RuntimeError("called a synchronizing CUDA operation\nmore")

    monkeypatch.setattr(right, "diffusion", raises)
    found = right.waiting(gpu)
    assert (found.state, found.found) == ("weak", "uniform: called a synchronizing CUDA operation")
