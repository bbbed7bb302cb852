"""The knobs of our own workloads: names, words, rules that join them, and what changes nothing here."""

import re

import pytest

from tunediff import config as cfg
from tunediff.config import ConfigError

DIFFUSION = cfg.find("diffusion").schema
DEFAULT = DIFFUSION.default()


KNOBS = """
data.name data.path data.split data.image_size data.channels data.horizontal_flip data.max_images
model.channels model.multipliers model.blocks model.attention model.dropout model.norm_groups model.checkpoint_levels
process.schedule process.steps process.prediction process.variance process.path process.sigma_data
timesteps.name timesteps.history timesteps.uniform_share timesteps.importance_correction timesteps.stratified timesteps.until
timesteps.suppression timesteps.tau timesteps.dual timesteps.mean timesteps.std timesteps.log_snr timesteps.scale
timesteps.interval timesteps.selected timesteps.scan timesteps.queue timesteps.entropy timesteps.policy_lr
timesteps.bins timesteps.half_life timesteps.width timesteps.gate timesteps.compensation
weighting.name weighting.gamma weighting.exponent weighting.offset weighting.cap weighting.contrast weighting.tau
weighting.channels weighting.bound
optimizer.lr optimizer.lr_scaling optimizer.beta2 optimizer.weight_decay optimizer.warmup optimizer.decay
optimizer.clip_norm optimizer.implementation optimizer.name optimizer.momentum optimizer.nesterov
ema.half_life ema.max_decay
loader.batch_size loader.accumulation loader.resident loader.workers loader.prefetch_factor
loader.persistent_workers loader.pin_memory loader.non_blocking loader.transfer
precision.amp precision.matmul precision.conv_tf32 precision.cudnn_benchmark memory.channels_last memory.checkpoint
memory.keep_freed compile.mode compile.dynamic compile.scope compile.capture
parallel.workers parallel.strategy parallel.gradients parallel.bucket_mib parallel.static_graph parallel.reshard
parallel.microbatches parallel.schedule
evaluation.extractor evaluation.weights_path evaluation.images evaluation.points evaluation.sampler evaluation.steps
evaluation.skip evaluation.eta evaluation.batch_size evaluation.seed evaluation.precision evaluation.validation_images
seed
""".split()


def test_knob_names_are_kept():
    """Names are what users wrote into their files: changing one breaks them."""
    assert set(KNOBS) <= set(DIFFUSION.knobs)


def test_every_knob_is_documented_and_has_a_range():
    for knob in DIFFUSION.knobs.values():
        assert len(knob.description) > 20, knob.name
        if knob.kind in ("int", "float"):
            assert knob.low is not None, knob.name


def test_task_and_evaluation_protocol_are_not_searchable():
    fixed = {name for name, knob in DIFFUSION.knobs.items() if not knob.searchable}
    assert {"data.name", "data.path", "seed", "evaluation.images", "evaluation.extractor"} <= fixed
    assert "data.horizontal_flip" not in fixed
    assert "loader.batch_size" not in fixed


def test_digits_workload_is_small_and_grey():
    digits = cfg.baseline("digits")
    assert (digits.data.image_size, digits.data.channels, digits.model.multipliers) == (8, 1, (1, 2))
    assert digits.evaluation.extractor == "classifier"
    with pytest.raises(ConfigError, match=r"imagenet.*allowed: cifar10, images, digits"):
        cfg.baseline("imagenet")


REFUSED = [
    ({"precision.amp": False}, "precision.amp: False is not allowed; allowed: one of none, bf16, fp16"),
    ({"timesteps.name": "wienr"}, "timesteps.name: 'wienr' is not allowed; allowed: one of uniform, "),
    ({"compile.dynamic": True}, "compile.dynamic: True is not allowed: it needs a compile.mode other than none"),
    ({"loader.batch_size": 100, "parallel.workers": 3}, "loader.batch_size: 100 is not allowed: must be a multiple"),
    ({"data.image_size": 30}, "data.image_size: 30 is not allowed: model.multipliers halves it 3 times"),
    ({"model.channels": 100}, "model.channels: 100 is not allowed: must be a multiple of model.norm_groups = 32"),
    ({"model.multipliers": []}, "model.multipliers: [] is not allowed"),
    ({"evaluation.steps": 2000}, "evaluation.steps: 2000 is not allowed: at most process.steps = 1000"),
    (
        {"process.path": "flow", "process.schedule": "cosine"},
        "process.schedule: 'cosine' is not allowed: process.path = flow has levels of its own, s uniform",
    ),
    (
        {"process.path": "flow", "process.prediction": "v", "process.sigma_data": 0.5},
        "process.sigma_data: 0.5 is not allowed: it belongs to process.prediction = v along process.path = vp",
    ),
    ({"process.sigma_data": 0.5}, "process.sigma_data: 0.5 is not allowed: it belongs to process.prediction = v"),
    ({"process.sigma_data": 0.0}, "process.sigma_data: 0.0 is not allowed; allowed: a number above 0"),
    ({"process.prediction": "velocity"}, "process.prediction: 'velocity' is not allowed; allowed: one of epsilon"),
    (
        {"process.path": "flow", "evaluation.sampler": "euler"},
        "evaluation.sampler: 'euler' is not allowed: it begins at pure noise, where process.prediction = epsilon",
    ),
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
        cfg.override(DEFAULT, values, where="my.yaml")
    assert str(error.value).startswith("my.yaml: ")


def test_steps_of_the_evaluation_are_not_bounded_where_the_sampler_takes_all():
    cfg.override(DEFAULT, {"evaluation.sampler": "ddpm", "process.steps": 10})
    with pytest.raises(ConfigError, match="evaluation.steps: 50 is not allowed: at most process.steps = 10"):
        cfg.override(DEFAULT, {"evaluation.sampler": "heun", "process.steps": 10})


def test_every_knob_refuses_a_wrong_type():
    for name, knob in DIFFUSION.knobs.items():
        values = {name: {"a": 1}}
        if knob.member is not None:
            values = {knob.member[0]: knob.member[1], **values}
        with pytest.raises(ConfigError):
            cfg.override(DEFAULT, values)


def test_choosing_a_union_member_drops_the_others_knobs():
    adaptive = cfg.override(DEFAULT, {"timesteps.history": 5, "timesteps.name": "loss_second_moment"})
    assert adaptive.timesteps.history == 5
    assert cfg.override(adaptive, {"timesteps.name": "uniform"}) == DEFAULT


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
        ({}, "cpu", "precision.conv_tf32"),
        ({"precision.cudnn_benchmark": True}, "cpu", "precision.cudnn_benchmark"),
        ({"compile.mode": "reduce-overhead"}, "cpu", "compile.mode"),
        ({"compile.capture": "step"}, "cpu", "compile.capture"),
        ({"parallel.static_graph": True}, "cuda", "parallel.static_graph"),
        ({"memory.keep_freed": True}, "cuda", "memory.keep_freed"),
        ({"parallel.bucket_mib": 5.0}, "cuda", "parallel.bucket_mib"),
        ({"parallel.strategy": "fsdp"}, "cuda", "parallel.strategy"),
        ({"parallel.gradients": "bf16"}, "cuda", "parallel.gradients"),
        ({"parallel.workers": 2, "parallel.reshard": False}, "cuda", "parallel.reshard"),
        ({"parallel.workers": 2, "parallel.schedule": "gpipe"}, "cpu", "parallel.schedule"),
        (
            {"parallel.workers": 2, "parallel.strategy": "pipeline", "parallel.gradients": "bf16"},
            "cpu",
            "parallel.gradients",
        ),
        (
            {"parallel.workers": 2, "parallel.strategy": "fsdp", "parallel.bucket_mib": 5.0},
            "cpu",
            "parallel.bucket_mib",
        ),
    ],
)
def test_a_knob_that_changes_nothing_is_said_to(knobs, device, name):
    found = cfg.not_effective(cfg.override(DEFAULT, knobs), device)
    assert len(found[name]) > 10


@pytest.mark.parametrize(
    ("sampler", "knobs"),
    [
        ("ddim", {"process.variance": "fixed_small"}),
        ("ddpm", {"evaluation.steps": 20, "evaluation.skip": "quadratic", "evaluation.eta": 1.0}),
        ("dpmpp_2m", {"evaluation.skip": "quadratic", "evaluation.eta": 1.0}),
    ],
)
def test_what_the_sampler_of_the_evaluation_does_not_follow_is_said_to_change_nothing(sampler, knobs):
    before = cfg.not_effective(DEFAULT, "cuda").keys()
    found = cfg.not_effective(cfg.override(DEFAULT, knobs | {"evaluation.sampler": sampler}), "cuda")
    assert found.keys() - before == knobs.keys()
    other = cfg.override(DEFAULT, knobs | {"evaluation.sampler": "ddpm" if sampler == "ddim" else "ddim"})
    assert not cfg.not_effective(other, "cuda").keys() & knobs.keys()


def test_what_has_an_effect_is_not_said_to_have_none():
    assert cfg.not_effective(cfg.override(DEFAULT, {"memory.keep_freed": False}), "cuda") == {}
    effective = {"precision.matmul": "high", "precision.cudnn_benchmark": True, "compile.mode": "reduce-overhead"}
    effective |= {"parallel.workers": 2, "parallel.static_graph": True, "parallel.bucket_mib": 5.0}
    effective |= {"memory.keep_freed": False, "parallel.gradients": "bf16"}
    assert cfg.not_effective(cfg.override(DEFAULT, effective), "cuda") == {}
    assert cfg.not_effective(cfg.override(DEFAULT, {"precision.matmul": "medium"}), "cpu").keys() == {
        "loader.pin_memory", "loader.non_blocking", "precision.conv_tf32",
    }  # fmt: skip


FSDP = {"parallel.strategy": "fsdp", "parallel.workers": 2}
CAPTURED = {"compile.capture": "step"}
PIPELINE = {"parallel.strategy": "pipeline", "parallel.workers": 2}
DP = {"parallel.strategy": "dp", "parallel.workers": 2}


@pytest.mark.parametrize(
    ("knobs", "reason"),
    [
        ({"model.checkpoint_levels": [4]}, "there is no level 4; levels here: 0 … 3"),
        ({"compile.mode": "max-autotune", "loader.accumulation": 2}, "uses CUDA graphs, which cannot accumulate"),
        ({"compile.scope": "blocks"}, "it needs a compile.mode other than none"),
        (CAPTURED | {"compile.mode": "max-autotune"}, "compile.capture: 'step' is not allowed"),
        (CAPTURED | {"parallel.workers": 2}, "a step of one GPU is captured, and parallel.workers = 2"),
        (CAPTURED | {"memory.checkpoint": 0.5}, "memory.checkpoint puts generators back in every step"),
        (CAPTURED | {"model.checkpoint_levels": [0]}, "model.checkpoint_levels is set"),
        (CAPTURED | {"timesteps.name": "beta_policy"}, "looks ahead and learns on the host in its steps"),
        ({"parallel.static_graph": True, "loader.accumulation": 2}, "another graph"),
        ({"parallel.bucket_mib": 0.0}, "above 0"),
        ({"parallel.strategy": "single", "parallel.workers": 2}, "single is one process, and parallel.workers = 2"),
        (
            FSDP | {"weighting.name": "uncertainty", "precision.amp": "fp16"},
            "precision.amp: 'fp16' is not allowed: par",
        ),
        (DP | {"memory.checkpoint": 0.5}, "memory.checkpoint: 0.5 is not allowed: parallel.strategy = dp copies the"),
        (DP | {"loader.batch_size": 7}, "a multiple of parallel.workers × loader.accumulation = 2"),
        (PIPELINE | {"parallel.microbatches": 1}, "parallel.microbatches: 1 is not allowed: parallel.schedule = 1f1b"),
        (FSDP | {"memory.channels_last": True}, "memory.channels_last: True is not allowed: parallel.strategy = fsdp"),
        (PIPELINE | {"loader.batch_size": 6}, "a multiple of parallel.microbatches × loader.accumulation = 4"),
        (PIPELINE | {"precision.amp": "fp16"}, "use bf16"),
        (PIPELINE | {"compile.mode": "default"}, "compile.scope: 'model' is not allowed"),
        (PIPELINE | {"compile.mode": "max-autotune", "compile.scope": "blocks"}, "compile.mode: 'max-autotune' is not"),
        (
            PIPELINE | {"timesteps.name": "beta_policy"},
            "parallel.strategy: 'pipeline' is not allowed: timesteps.name =",
        ),
    ],
)
def test_systems_knobs_that_contradict_each_other_are_refused(knobs, reason):
    with pytest.raises(ConfigError, match=reason):
        cfg.override(DEFAULT, knobs)


@pytest.mark.parametrize(
    "knobs",
    [
        CAPTURED | {"compile.mode": "default", "loader.accumulation": 2, "precision.amp": "fp16"},
        {"compile.mode": "reduce-overhead"},
        {"compile.mode": "max-autotune-no-cudagraphs", "loader.accumulation": 2},
        {"compile.mode": "default", "parallel.bucket_mib": 0.5},
        {"compile.mode": "default", "compile.scope": "blocks", "parallel.workers": 2, "parallel.bucket_mib": 0.5},
        {"parallel.workers": 2, "parallel.bucket_mib": 0.5},
    ],
)
def test_what_does_not_meet_is_not_refused(knobs):
    cfg.override(DEFAULT, knobs)


def alike(one, other, device):
    configs = [cfg.override(DEFAULT, knobs) for knobs in (one, other)]
    assert cfg.fingerprint(configs[0]) != cfg.fingerprint(configs[1])
    return len({cfg.fingerprint(cfg.effective(config, device)) for config in configs}) == 1


RESIDENT = {"loader.resident": True}


@pytest.mark.parametrize(
    ("one", "other", "on_cpu", "on_cuda"),
    [
        (RESIDENT | {"loader.workers": 1}, RESIDENT | {"loader.workers": 8, "loader.pin_memory": False}, True, True),
        ({"loader.pin_memory": True}, {"loader.pin_memory": False}, True, False),
        ({"precision.matmul": "high"}, {"precision.matmul": "highest"}, True, False),
        ({"precision.matmul": "medium"}, {"precision.matmul": "highest"}, False, False),
        ({"precision.conv_tf32": True}, {"precision.conv_tf32": False}, True, False),
        ({"memory.keep_freed": True}, {"memory.keep_freed": False}, False, True),
        ({"compile.mode": "reduce-overhead"}, {"compile.mode": "default"}, True, False),
        ({"compile.mode": "reduce-overhead"}, {"compile.mode": "none"}, False, False),
        ({"parallel.bucket_mib": 5.0}, {"parallel.static_graph": True}, True, True),
        ({"parallel.strategy": "fsdp"}, {"parallel.strategy": "single"}, True, True),
        (FSDP | {"parallel.bucket_mib": 5.0}, FSDP | {"parallel.static_graph": True}, True, True),
        (FSDP, {"parallel.workers": 2}, False, False),
        (DP | {"parallel.static_graph": True}, DP | {"parallel.microbatches": 2}, True, True),
        ({"seed": 1}, {"seed": 2}, False, False),
        (RESIDENT, {"loader.resident": False}, False, False),
    ],
)  # fmt: skip
def test_configurations_that_train_alike_come_to_the_same(one, other, on_cpu, on_cuda):
    assert (alike(one, other, "cpu"), alike(one, other, "cuda")) == (on_cpu, on_cuda)


def test_the_stages_of_a_pipeline_share_no_batch():
    piped = cfg.override(DEFAULT, PIPELINE | {"loader.batch_size": 20, "parallel.workers": 3})
    assert piped.loader.batch_size == 20, "4 micro-batches of 5, whatever the number of stages"
