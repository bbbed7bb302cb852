"""Advice, rule by rule."""

import copy
from pathlib import Path

import pytest

from tests.helpers import tiny
from tests.profiling.conftest import PHASES
from tunediff import config as cfg
from tunediff.profiling import advice
from tunediff.profiling.advice import RULES, advise, amdahl

GPU = {"device": {"type": "cuda", "cores": 16, "gpus": 1, "memory_mib": 80000.0, "memory_limit_mib": 80000.0}}
CONFIG = tiny(loader__workers=2, precision__amp="bf16", memory__channels_last=True, precision__cudnn_benchmark=True)
UNFUSED = cfg.override(CONFIG, {"optimizer.implementation": "foreach"})
"""Nothing to be said about it on its own."""


def profile(*changes, parts=None, step_s=0.1, **values):
    """A profile in which nothing stands out, with changes on top."""
    found = {
        "device": {"type": "cpu", "cores": 8, "gpus": 0, "memory_mib": 16000.0, "memory_limit_mib": 10000.0},
        "step": {"step_s": step_s, "parts_s": dict.fromkeys((*PHASES, "other"), 0.0), "peak_memory_mib": 6000.0},
        "samples": {"mib": 100.0}, "format_gains": {}, "feed_ratio": 10.0,
        "operations": {"convolution_share": 0.0}, "unit": "images", "workers": 1, **values,
    }  # fmt: skip
    for change in changes:
        found |= copy.deepcopy(change)
    given = {name: share * step_s for name, share in (parts or {"forward": 0.3, "backward": 0.6}).items()}
    found["step"]["parts_s"] |= given
    return found


def only(found, config=CONFIG):
    (one,) = advise(found, config)
    return one


def changes(found, config=CONFIG):
    return [one.change for one in advise(found, config)]


def test_nothing_stands_out():
    assert advise(profile(), CONFIG) == []
    assert advise(profile(GPU), CONFIG) == []


def test_amdahl():
    assert amdahl(0.0) == 1.0
    assert amdahl(0.22) == pytest.approx(1.282, abs=1e-3)
    assert amdahl(0.5, 2.0) == pytest.approx(4 / 3)
    assert amdahl(1.0) == pytest.approx(1000)


def test_every_rule_is_tested_here_and_advises_only_knobs():
    text = Path(__file__).read_text(encoding="utf-8")
    source = Path(advice.__file__).read_text(encoding="utf-8")
    for rule in RULES:
        assert f"def test_{rule.__name__}" in text
    for name in CONFIG.schema.knobs:
        source = source.replace(f'"{name}"', "")
    sections = {name.split(".")[0] for name in CONFIG.schema.knobs if "." in name}
    assert not [section for section in sections if f'"{section}.' in source], "a knob that does not exist"


WAITING = {"data_wait": 0.22, "forward": 0.2, "backward": 0.5}


def test_waiting_for_data():
    resident, more = advise(profile(GPU, parts=WAITING), CONFIG)
    assert resident.change == {"loader.resident": True}
    assert resident.bound == pytest.approx(1 / 0.78)
    assert resident.reason == "waiting for images is 22 % of the step (22 ms); all images take 100 MiB"
    assert more.change == {"loader.workers": 4}
    assert changes(profile(GPU, parts=WAITING, samples={"mib": 9000.0})) == [{"loader.workers": 4}], "too many to hold"
    assert changes(profile(parts=WAITING), tiny(loader__workers=0)) == [{"loader.resident": True}]
    many = tiny(loader__workers=16, precision__amp="bf16", memory__channels_last=True, precision__cudnn_benchmark=True)
    assert changes(profile(GPU, parts=WAITING), many) == [{"loader.resident": True}], "no more cores"
    assert changes(profile(parts=WAITING), tiny(loader__resident=True)) == []
    assert changes(profile(parts={"data_wait": 0.04})) == []
    assert changes(profile(GPU, parts=WAITING, samples={"mib": 0.0})) == [{"loader.workers": 4}], "no tensors"
    assert advise(profile(GPU, parts=WAITING), CONFIG, ["loader.resident", "loader.workers"]) == [], "not followed"


def test_copying():
    config = cfg.override(CONFIG, {"loader.transfer": "float32", "loader.pin_memory": False})
    copying = {"host_to_device": 0.2, "forward": 0.7}
    found = advise(profile(GPU, parts=copying), config)
    assert [one.change for one in found] == [
        {"loader.transfer": "uint8"}, {"loader.pin_memory": True, "loader.non_blocking": True},
    ]  # fmt: skip
    assert found[0].bound == pytest.approx(1.25)
    assert changes(profile(GPU, parts=copying)) == [], "both are as they should be"
    assert changes(profile(parts=copying), config) == [], "nothing is copied to a GPU"


def test_fused_optimizer():
    found = profile(parts={"optimizer": 0.2})
    one = only(found, UNFUSED)
    assert one.change == {"optimizer.implementation": "fused"}
    assert one.reason == "the update is 20 % of the step (20 ms)"
    assert one.bound == pytest.approx(1.25)
    assert changes(found, CONFIG) == []
    scaled = cfg.override(UNFUSED, {"precision.amp": "fp16"})
    waits = only(profile(GPU), scaled)
    assert (waits.change, waits.bound) == ({"optimizer.implementation": "fused"}, None)
    assert "loss scaling waits at each step" in waits.reason
    assert changes(profile(), scaled) == [], "a CPU has nothing to wait for"
    assert changes(profile(GPU), cfg.override(scaled, {"optimizer.name": "muon"})) == [], "it waits in any case"
    assert changes(profile(GPU), cfg.override(scaled, {"optimizer.implementation": "fused"})) == []


def test_adaptive_sampler():
    config = cfg.override(CONFIG, {"timesteps.name": "beta_policy", "timesteps.scan": 10})
    one = only(profile(parts={"sampler": 0.4}), config)
    assert one.change == {"timesteps.interval": 80}
    assert one.bound == pytest.approx(1.25)
    assert changes(profile(parts={"sampler": 0.4})) == []


def test_number_formats():
    plain = tiny(loader__workers=2, precision__cudnn_benchmark=True)
    found = profile(GPU, format_gains={"bf16": 8.0, "fp16": 8.1, "tf32": 4.0})
    found["step"]["peak_share"] = 0.35
    amp, tf32 = advise(found, plain)
    assert amp.change == {"precision.amp": "bf16", "memory.channels_last": True}
    assert amp.bound == pytest.approx(1 / (0.1 + 0.9 / 8))
    assert amp.reason == (
        "forward and backward are 90 % of the step (90 ms), in float32 at 35 % of the fastest product; "
        "a product in bf16 is 8.0× as fast here"
    )
    assert tf32.change == {"precision.matmul": "high"}
    assert advise(found, cfg.override(plain, {"precision.conv_tf32": False}))[1].change == {
        "precision.matmul": "high", "precision.conv_tf32": True,
    }  # fmt: skip
    found["operations"]["convolution_share"] = 1.0
    amp = only(found, cfg.override(plain, {"precision.cudnn_benchmark": True, "memory.channels_last": True}))
    assert amp.change["precision.amp"] == "bf16", "products are all that TF32 could still make faster"
    assert amp.bound == pytest.approx(1 / (0.1 + 0.9 / 2)), "from TF32 to bfloat16"
    old = profile(GPU, format_gains={"fp16": 3.0})
    assert changes(old, plain) == [{"precision.amp": "fp16", "memory.channels_last": True}]

    cpu = only(profile(format_gains={"bf16": 1.5}), plain)
    assert cpu.change == {"precision.amp": "bf16"}
    assert cpu.bound == pytest.approx(1 / (0.1 + 0.9 / 2)), "half the bytes are worth up to a factor of 2"
    assert changes(profile(format_gains={"bf16": 0.4}), plain) == [], "no unit for it"
    assert changes(profile(format_gains={"bf16": 9.0})) == [], "it is on"
    assert changes(profile(format_gains={"bf16": 9.0}, parts={"forward": 0.4}), plain) == []


CONVOLUTIONS = {"operations": {"convolution_share": 0.8}}


def test_convolutions():
    plain = tiny(loader__workers=2)
    one = only(profile(CONVOLUTIONS), plain)
    assert one.change == {"memory.channels_last": True}
    assert one.bound == pytest.approx(1 / 0.28)
    assert one.reason == "convolutions are about 72 % of the step; NHWC is another order for them"
    assert changes(profile(CONVOLUTIONS, GPU), plain) == [{"precision.cudnn_benchmark": True}]
    assert changes(profile(CONVOLUTIONS, GPU), cfg.override(plain, {"precision.amp": "bf16"})) == [
        {"memory.channels_last": True}, {"precision.cudnn_benchmark": True},
    ]  # fmt: skip
    assert changes(profile(CONVOLUTIONS, GPU)) == []


def test_launch_bound():
    one = only(profile(GPU, device_busy_share=0.4))
    assert one.change == {"compile.mode": "reduce-overhead"}
    assert one.bound == pytest.approx(2.5)
    assert changes(profile(GPU, device_busy_share=0.9)) == []
    passes = cfg.override(CONFIG, {"loader.accumulation": 2})
    assert changes(profile(GPU, device_busy_share=0.4), passes) == [{"loader.accumulation": 1}], (
        "graphs cannot accumulate"
    )
    graphs = cfg.override(CONFIG, {"compile.mode": "max-autotune"})
    assert changes(profile(GPU, device_busy_share=0.4), graphs) == []


def test_memory():
    found = profile()
    found["step"]["peak_memory_mib"] = 9000.0
    one = only(found)
    assert one.change == {"model.checkpoint_levels": [0]}
    assert one.reason.startswith("training takes 90 % of the memory it may have")
    assert changes(found, cfg.override(CONFIG, {"model.checkpoint_levels": [1]})) == [
        {"model.checkpoint_levels": [0, 1]}
    ]
    assert changes(found, cfg.override(CONFIG, {"model.checkpoint_levels": [0]})) == []

    found["step"]["peak_memory_mib"] = 3000.0
    saving = cfg.override(CONFIG, {"model.checkpoint_levels": [0], "loader.accumulation": 2})
    assert changes(found, saving) == [{"model.checkpoint_levels": []}, {"loader.accumulation": 1}]
    found["step"]["peak_reserved_mib"] = 6000.0
    assert changes(found, saving) == [], "what the allocator holds counts"


def test_more_gpus():
    found = profile(GPU)
    found["device"] |= {"gpus": 4}
    one = only(found)
    assert (one.change, one.bound) == ({"parallel.workers": 4}, 4.0)
    found["device"]["gpus"] = 3
    assert changes(found) == [], "the batch of 16 is no multiple of 3"
    found["device"]["gpus"] = 4
    assert changes(found | {"workers": 4}) == [], "the profile is of one of them"


def test_a_part_that_this_training_does_not_have_takes_no_time():
    found = profile(parts=WAITING)
    del found["step"]["parts_s"]["sampler"]
    assert advice.share(found, "sampler", "data_wait") == pytest.approx(0.22)
