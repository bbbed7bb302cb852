"""Every search file that is shipped loads, and is what it says."""

import contextlib
import json

import optuna
import pytest

from tunediff import config as cfg
from tunediff import search_space
from tunediff.config import ConfigError
from tunediff.workloads.diffusion.knobs import Model

SHIPPED = sorted(search_space.SHIPPED.rglob("*.yaml"))
MEMBERS = cfg.find("diffusion").schema.members


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.name)
def test_shipped_files_load_and_their_baseline_lies_inside(path):
    loaded = search_space.load(path, ["data.path=photos"] if path.stem.startswith("images") else [])
    assert loaded.candidates[0] == loaded.expand({}, "here")
    assert loaded.config(loaded.candidates[0]) == loaded.baseline


STUDIES = ["amp_by_gpus", "batch_by_gpus", "checkpointing", "classifier_by_gpus", "classifier_checkpointing",
           "classifier_ladder", "classifier_loader_workers", "classifier_mixed_precision", "classifier_parallelism",
           "compile_by_gpus", "ladder", "loader_workers", "mixed_precision", "parallelism", "top_operations"]  # fmt: skip


@pytest.mark.parametrize("name", STUDIES)
def test_shipped_studies_are_probes_with_a_table_and_a_figure(name):
    path = search_space.find(f"studies/{name}")
    loaded = search_space.parse(search_space.read(path, world_sizes=(1, 2, 4)), str(path), path.parent)
    assert (loaded.metric, loaded.study.has_figure, loaded.skipped) == ("samples_per_s", True, ())
    assert loaded.baseline.evaluation.points == 1
    assert loaded.config(loaded.candidates[0]) == loaded.baseline
    if name.endswith(("_by_gpus", "parallelism")):
        assert {loaded.config(point).parallel.workers for point in loaded.candidates} == {1, 2, 4}
    if name.endswith("parallelism"):
        content = search_space.read(path, world_sizes=(1, 2, 4), gpu=True)
        both = [
            search_space.parse(one, str(path), path.parent)
            for one in (search_space.read(path, world_sizes=(1, 2)), content)
        ]
        found = [{one.config(point).parallel.strategy for point in one.candidates} for one in both]
        assert found == [{"ddp", "fsdp", "pipeline"}, {"ddp", "dp", "fsdp", "pipeline"}]


def test_all_shipped_studies_are_tested():
    assert sorted(path.stem for path in (search_space.SHIPPED / "studies").glob("*.yaml")) == STUDIES


def test_the_full_network_is_a_matter_of_overrides():
    default = cfg.flat(cfg.find("diffusion").schema.default())
    network = [f"{name}={json.dumps(value)}" for name, value in default.items() if name.startswith("model.")]
    assert search_space.load(search_space.find("studies/ladder"), network).baseline.model == Model()


def test_flagship_mixes_systems_sampler_and_weighting():
    names = {dimension.name.split(".")[0] for dimension in search_space.load(search_space.find("cifar10")).dimensions}
    assert {"loader", "precision", "compile", "timesteps", "weighting", "optimizer"} <= names


def test_files_that_compare_samplers_list_all_once_and_first_with_what_applies_to_each():
    loaded = search_space.load(search_space.find("digits_samplers"))
    for union, members in MEMBERS.items():
        if union in {dimension.name for dimension in loaded.dimensions}:
            assert {point[union] for point in loaded.candidates} == set(members)
    shares = {point["timesteps.name"]: point.get("timesteps.uniform_share") for point in loaded.candidates}
    assert (shares["log_normal"], shares["wiener"], shares["speed"]) == (0.001, None, None)


def test_most_draws_of_the_samplers_can_run():
    loaded, possible = search_space.load(search_space.find("digits_samplers")), 0
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    drawn = [search_space.Draw(loaded.dimensions)(study.ask()) for _ in range(80)]
    for values in drawn:
        with contextlib.suppress(ConfigError):
            possible += loaded.config(values) is not None
    assert possible > 0.9 * len(drawn)
    assert {name for values in drawn for name in values} == {dimension.name for dimension in loaded.dimensions}
