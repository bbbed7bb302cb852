"""Config: names, defaults, refusals, round trips."""

import dataclasses
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tunediff import config as cfg
from tunediff.config import Config, ConfigError


def test_import_is_light():
    code = "import sys, tunediff.config, tunediff.space, tunediff.record, tunediff.clock; print([m for m in ('torch', 'ray', 'optuna') if m in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


KNOBS = """
data.name data.path data.split data.image_size data.channels data.horizontal_flip data.max_images
model.channels model.multipliers model.blocks model.attention model.dropout model.norm_groups model.channels_last
model.checkpoint_levels
process.schedule process.steps process.prediction process.variance
timesteps.name timesteps.history timesteps.uniform_share timesteps.importance_correction timesteps.stratified
timesteps.suppression timesteps.tau timesteps.dual timesteps.mean timesteps.std timesteps.log_snr timesteps.scale
timesteps.interval timesteps.selected timesteps.scan timesteps.queue timesteps.entropy timesteps.policy_lr
timesteps.temperature timesteps.bins timesteps.half_life timesteps.concentration
weighting.name weighting.gamma weighting.exponent weighting.offset weighting.cap weighting.contrast weighting.tau
weighting.channels weighting.bound
optimizer.lr optimizer.lr_scaling optimizer.beta2 optimizer.weight_decay optimizer.warmup optimizer.decay
optimizer.clip_norm optimizer.implementation ema.half_life ema.max_decay
loader.batch_size loader.accumulation loader.resident loader.workers loader.prefetch_factor
loader.persistent_workers loader.pin_memory loader.non_blocking loader.transfer
precision.amp precision.matmul precision.cudnn_benchmark memory.keep_freed compile.mode compile.dynamic compile.scope
parallel.workers parallel.bucket_mib parallel.static_graph
evaluation.extractor evaluation.weights_path evaluation.images evaluation.points evaluation.sampler evaluation.steps
evaluation.skip evaluation.eta evaluation.batch_size evaluation.seed evaluation.validation_images
seed
""".split()


def test_knob_names_are_kept():
    """Names are what users wrote into their files: changing one breaks them."""
    assert list(cfg.knobs()) == KNOBS


def test_every_knob_is_documented_and_has_a_range():
    for knob in cfg.knobs().values():
        assert len(knob.description) > 20, knob.name
        if knob.kind in ("int", "float"):
            assert knob.low is not None, knob.name


def test_task_and_ruler_are_not_searchable():
    fixed = {name for name, knob in cfg.knobs().items() if not knob.searchable}
    assert {"data.name", "data.path", "seed", "evaluation.images", "evaluation.extractor"} <= fixed
    assert "data.horizontal_flip" not in fixed
    assert "loader.batch_size" not in fixed


def test_digits_workload_is_small_and_grey():
    digits = cfg.workload("digits")
    assert (digits.data.image_size, digits.data.channels, digits.model.multipliers) == (8, 1, (1, 2))
    assert digits.evaluation.extractor == "classifier"
    with pytest.raises(ConfigError, match=r"imagenet.*allowed: cifar10, images, digits"):
        cfg.workload("imagenet")


def test_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().loader.batch_size = 1  # type: ignore[misc]


REFUSED = [
    ({"loader.batch": 64}, "loader.batch: no such knob; did you mean loader.batch_size"),
    ({"loader.batch_size": 0}, "loader.batch_size: 0 is not allowed; allowed: a whole number of at least 1"),
    ({"loader.batch_size": 1.5}, "loader.batch_size: 1.5 is not allowed; allowed: a whole number"),
    ({"loader.batch_size": True}, "loader.batch_size: True is not allowed"),
    ({"loader.batch_size": "128"}, "loader.batch_size: '128' is not allowed"),
    ({"optimizer.lr": "1e-3"}, "(YAML 1.1 reads '1e-3' as text; write 1.0e-3)"),
    ({"optimizer.lr": float("nan")}, "optimizer.lr: nan is not allowed"),
    ({"optimizer.lr": 0.0}, "optimizer.lr: 0.0 is not allowed; allowed: a number above 0"),
    ({"precision.amp": False}, "precision.amp: False is not allowed; allowed: one of none, bf16, fp16 (YAML 1.1"),
    ({"precision.amp": "fp8"}, "precision.amp: 'fp8' is not allowed; allowed: one of none, bf16, fp16"),
    ({"model.multipliers": [1, "a"]}, "model.multipliers: 'a' is not allowed; allowed: a list of whole numbers"),
    ({"timesteps.name": "adaptive"}, "timesteps.name: 'adaptive' is not allowed; allowed: one of uniform, stratified"),
    ({"timesteps.history": 5}, "timesteps.history: belongs to timesteps.name = loss_second_moment"),
    ({"compile.dynamic": True}, "compile.dynamic: True is not allowed: it needs a compile.mode other than none"),
    ({"loader.batch_size": 100, "parallel.workers": 3}, "loader.batch_size: 100 is not allowed: must be a multiple"),
    ({"data.image_size": 30}, "data.image_size: 30 is not allowed: model.multipliers halves it 3 times"),
    ({"model.channels": 100}, "model.channels: 100 is not allowed: must be a multiple of model.norm_groups = 32"),
    ({"model.multipliers": []}, "model.multipliers: [] is not allowed"),
    ({"evaluation.steps": 2000}, "evaluation.steps: 2000 is not allowed: at most process.steps = 1000"),
    (
        {"model.attention": [7]},
        "model.attention: [7] is not allowed: no feature map has side 7; sides here: 32, 16, 8, 4",
    ),
    ({"loader.accumulation": 2, "compile.mode": "max-autotune"}, "loader.accumulation: 2 is not allowed: compile.mode"),
    ({"data.name": "images"}, "data.path: None is not allowed: data.name = images needs a folder or .zip"),
    ({"data.name": "digits"}, "data.channels: 3 is not allowed"),
]


@pytest.mark.parametrize(("values", "message"), REFUSED, ids=lambda x: str(x)[:40])
def test_refusals_name_place_key_value_and_what_is_allowed(values, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        cfg.override(Config(), values, where="my.yaml")
    assert str(error.value).startswith("my.yaml: ")


def test_every_knob_refuses_a_wrong_type():
    for name, knob in cfg.knobs().items():
        values = {name: {"a": 1}}
        if knob.member is not None:
            values = {knob.member[0]: knob.member[1], **values}
        with pytest.raises(ConfigError):
            cfg.override(Config(), values)


def test_choosing_a_union_member_drops_the_others_knobs():
    adaptive = cfg.override(Config(), {"timesteps.history": 5, "timesteps.name": "loss_second_moment"})
    assert adaptive.timesteps.history == 5
    assert cfg.override(adaptive, {"timesteps.name": "uniform"}) == Config()


def test_dump_and_load_give_the_same(tmp_path):
    config = cfg.override(
        cfg.workload("digits"),
        {"timesteps.name": "loss_second_moment", "timesteps.uniform_share": 0.013, "model.multipliers": [1, 2, 4]},
    )
    (tmp_path / "c.yaml").write_text(cfg.dump(config, ["a comment", "another: one"]))
    again = cfg.load(tmp_path / "c.yaml")
    assert again == config
    assert cfg.fingerprint(again) == cfg.fingerprint(config) != cfg.fingerprint(Config())


def test_flat_and_nest_are_inverse():
    config = cfg.workload("digits")
    assert cfg.from_dict(cfg.nest(cfg.flat(config)), "here") == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("loader: [1, 2", "is not valid YAML"),
        ("- a\n- b", "must hold `key: value` lines, found list"),
        ("loader.workers: 1\nloader.workers: 2", "'loader.workers' is given twice"),
        ("loader: {wrkers: 2}", "loader.wrkers: no such knob; did you mean loader.workers"),
        ("data: !!python/object/apply:os.system [ls]", "is not valid YAML"),
    ],
)
def test_bad_files(tmp_path, text, message):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        cfg.load(path)
    assert str(path) in str(error.value)


def test_missing_file_and_binary_file(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        cfg.load(tmp_path / "none.yaml")
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not a text file"):
        cfg.load(tmp_path / "b.yaml")


def test_command_line_overrides():
    words = ["optimizer.lr=1e-3", "loader.batch_size=64", "model.multipliers=[1, 2]", "data.path=null"]
    assert cfg.parse_overrides(words) == {
        "optimizer.lr": 1e-3, "loader.batch_size": 64, "model.multipliers": [1, 2], "data.path": None,
    }  # fmt: skip
    with pytest.raises(ConfigError, match="write knob=value"):
        cfg.parse_overrides(["loader.batch_size"])
    with pytest.raises(ConfigError, match="did you mean optimizer.lr"):
        cfg.parse_overrides(["lr=1"])


def test_relative_paths_become_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text("data: {name: images, path: pictures}")
    assert cfg.load(tmp_path / "c.yaml").data.path == str(tmp_path / "pictures")


# ---------------------------------------------------------------------------------------- knobs that change nothing here
@pytest.mark.parametrize(
    ("knobs", "device", "name"),
    [
        ({}, "cpu", "loader.pin_memory"),
        ({"loader.workers": 0}, "cuda", "loader.prefetch_factor"),
        ({"loader.resident": True}, "cuda", "loader.workers"),
        ({"loader.resident": True}, "cuda", "loader.transfer"),
        ({"loader.pin_memory": False}, "cuda", "loader.non_blocking"),
        ({"precision.matmul": "high"}, "cpu", "precision.matmul"),
        ({"precision.cudnn_benchmark": True}, "cpu", "precision.cudnn_benchmark"),
        ({"compile.mode": "reduce-overhead"}, "cpu", "compile.mode"),
        ({"parallel.static_graph": True}, "cuda", "parallel.static_graph"),
        ({"memory.keep_freed": True}, "cuda", "memory.keep_freed"),
        ({"parallel.bucket_mib": 5.0}, "cuda", "parallel.bucket_mib"),
    ],
)
def test_a_knob_that_changes_nothing_is_said_to(knobs, device, name):
    found = cfg.not_effective(cfg.override(Config(), knobs), device)
    assert len(found[name]) > 10


def test_keeping_memory_is_an_order_to_glibc(monkeypatch):
    assert ("memory.keep_freed" in cfg.not_effective(Config(), "cpu")) == (platform.libc_ver()[0] != "glibc")
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert "glibc" in cfg.not_effective(Config(), "cpu")["memory.keep_freed"]


def test_what_has_an_effect_is_not_said_to_have_none():
    assert cfg.not_effective(cfg.override(Config(), {"memory.keep_freed": False}), "cuda") == {}
    effective = {"precision.matmul": "high", "precision.cudnn_benchmark": True, "compile.mode": "reduce-overhead"}
    effective |= {"parallel.workers": 2, "parallel.static_graph": True, "parallel.bucket_mib": 5.0}
    effective |= {"memory.keep_freed": False}
    assert cfg.not_effective(cfg.override(Config(), effective), "cuda") == {}
    assert cfg.not_effective(cfg.override(Config(), {"precision.matmul": "medium"}), "cpu").keys() == {
        "loader.pin_memory", "loader.non_blocking",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("knobs", "reason"),
    [
        ({"model.checkpoint_levels": [4]}, "there is no level 4; levels here: 0 … 3"),
        ({"compile.scope": "blocks"}, "it needs a compile.mode other than none"),
        ({"parallel.static_graph": True, "loader.accumulation": 2}, "another graph"),
        ({"parallel.bucket_mib": 0.0}, "above 0"),
    ],
)
def test_systems_knobs_that_contradict_each_other_are_refused(knobs, reason):
    with pytest.raises(ConfigError, match=reason):
        cfg.override(Config(), knobs)


def test_the_workload_of_own_images_takes_its_path_from_the_command_line(tmp_path):
    assert cfg.named(Path("images"), {"data.path": str(tmp_path)}).data.path == str(tmp_path)
    with pytest.raises(ConfigError, match=r"data\.path: None is not allowed"):
        cfg.named(Path("images"), {})
