"""Files are found, read and refused."""

import dataclasses
import re
import types

import pytest
import yaml

from tests.search_space.files import changed, listed, parse
from tunediff import config as cfg
from tunediff import search_space
from tunediff.config import ConfigError, Metric, Workload
from tunediff.experiment.model import seconds_of
from tunediff.search_space import sections


def test_all_is_what_fits_here(tmp_path):
    file = tmp_path / "s.yaml"
    grid = {"parallel.workers": "all", "loader.batch_size": [64, 128]}
    file.write_text(yaml.safe_dump({"workload": "digits", "budget": {"per_trial": "5s"}, "grid": grid}))
    content = search_space.read(file, world_sizes=(1, 2, 4))
    assert content["grid"]["parallel.workers"] == [1, 2, 4]
    assert len(search_space.parse(content, "x.yaml").candidates) == 6
    assert len(search_space.load(file).candidates) == 2, "one worker where nobody says what there is"
    with pytest.raises(ConfigError, match="parallel.workers: 'all' is not allowed with --address"):
        search_space.read(file, world_sizes=())
    nested = {"parallel": {"workers": "all"}, "loader": {"batch_size": [64, 128]}}
    file.write_text(yaml.safe_dump({"workload": "digits", "budget": {"per_trial": "5s"}, "grid": nested}))
    assert search_space.read(file, world_sizes=(1, 2, 4)) == content
    file.write_text(yaml.safe_dump({"workload": "digits", "grid": {"parallel.strategy": "all"}}))
    assert search_space.read(file)["grid"]["parallel.strategy"] == ["ddp", "fsdp", "pipeline"]
    assert search_space.read(file, gpu=True)["grid"]["parallel.strategy"] == ["ddp", "dp", "fsdp", "pipeline"]
    with pytest.raises(ConfigError, match="parallel.strategy: 'all' is not allowed with --address"):
        search_space.read(file, world_sizes=())


def test_a_search_may_start_from_a_configuration_file(tmp_path):
    best = cfg.override(cfg.baseline("digits"), {"optimizer.lr": 2e-3})
    (tmp_path / "best.yaml").write_text(cfg.dump(best))
    content = changed(workload="best.yaml")
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    assert search_space.load(tmp_path / "s.yaml").baseline == best


def test_overrides_from_the_command_line():
    loaded = search_space.parse(changed(), "x.yaml", words=["ema.half_life=1e-1"], budget={"trials": 3})
    assert loaded.baseline.ema.half_life == 0.1
    assert loaded.budget.trials == 3
    with pytest.raises(ConfigError, match=r"command line: optimizer.lr: is searched in this file as well"):
        search_space.parse(changed(), "x.yaml", words=["optimizer.lr=0.1"])
    with pytest.raises(ConfigError, match=r"command line: optimizer.lrr: no such knob; did you mean optimizer.lr"):
        search_space.parse(changed(), "x.yaml", words=["optimizer.lrr=0.1"])


def test_rules_that_join_knobs_wait_for_the_command_line(tmp_path):
    content = changed(fixed={"compile.dynamic": True})
    assert search_space.parse(content, "x.yaml", words=["compile.mode=default"]).baseline.compile.dynamic
    with pytest.raises(ConfigError, match=r"x.yaml: fixed: compile.dynamic: True is not allowed: it needs"):
        search_space.parse(content, "x.yaml")
    content = changed(fixed={"compile.dynamic": True}, search={"compile.mode": ["default", "max-autotune"]}, first=[])
    assert search_space.parse(content | {"baseline": {"compile.mode": "default"}}, "x.yaml").candidates[0]


def test_what_a_search_may_spend():
    limits = parse(budget={"per_trial": "1m", "trials": 8, "total": "60s"}).budget
    assert (limits.per_trial_s, limits.total_s, limits.trial_deadline_s) == (60, 60, 4 * 60 + 3600)
    assert parse(budget={"per_trial": "1m", "trials": 8, "deadline": "61s"}).budget.trial_deadline_s == 61


def test_setup_is_charged_where_the_file_says_so():
    budget = {"per_trial": "1m", "trials": 8}
    assert not parse(budget=budget).budget.of(1).setup_charged
    charged = parse(budget=budget | {"setup": "charged"}).budget
    assert charged.of(1).setup_charged
    assert parse(budget=charged.lines).budget == charged


def test_throughput_searches_do_not_charge_compilation():
    loaded = parse(objective="samples_per_s")
    assert (loaded.metric, loaded.mode, loaded.budget.compile_charged) == ("samples_per_s", "max", False)


@pytest.mark.parametrize(
    ("text", "expected"), [("90s", 90), ("10m", 600), ("1h30m", 5400), ("1.5h", 5400), ("2h0m5s", 7205)]
)
def test_durations(text, expected):
    assert seconds_of(text) == expected


def test_find_lists_what_is_shipped(tmp_path):
    assert search_space.find(None).name == "digits.yaml"
    assert search_space.find("cifar10_systems") == search_space.SHIPPED / "cifar10_systems.yaml"
    with pytest.raises(ConfigError, match=re.escape("nowhere.yaml: no such search file; shipped: cifar10, ")):
        search_space.find("nowhere.yaml")


def test_a_grid_takes_no_range_and_no_first():
    grid = {"loader.batch_size": {"low": 64, "high": 128}}
    with pytest.raises(ConfigError, match="a grid needs a list of choices, not a range"):
        listed(grid=grid)
    with pytest.raises(ConfigError, match="first: belongs to search:"):
        parse(search=None, grid={"loader.batch_size": [64, 128]})


# -------------------------------------------------------------------------------- the `study:` section of a search file
def test_a_study_names_knobs_and_quantities():
    loaded = parse(study={"columns": ["loader.batch_size", "epoch_s"], "x": "loader.batch_size", "y": "epoch_s"})
    assert loaded.study.columns == ("loader.batch_size", "epoch_s")
    assert (loaded.study.x, loaded.study.y, loaded.study.has_figure) == ("loader.batch_size", ("epoch_s",), True)
    assert not parse(study={"columns": ["status"]}).study.has_figure
    assert parse(study={"columns": ["operation"]}, operations=3).study.has_figure, "that of the operations"
    assert parse(study={"columns": ["status"], "y": ["step_s", "epoch_s"]}).study.y == ("step_s", "epoch_s")
    assert parse().study is None


def test_column_that_is_a_knob_and_a_quantity_is_refused():
    @dataclasses.dataclass(frozen=True)
    class Knobs:
        samples: int = 5
        width: int = 64

    mine = Workload("mine", types.SimpleNamespace(Knobs=Knobs, OBJECTIVE=Metric("accuracy", "max")))
    assert sections.parse_study({"columns": ["width", "step_s"]}, "x.yaml", mine).columns == ("width", "step_s")
    for section in ({"columns": ["samples"]}, {"columns": ["width"], "x": "width", "y": "samples"}):
        with pytest.raises(ConfigError, match="'samples' is a quantity and a knob of mine; rename the knob"):
            sections.parse_study(section, "x.yaml", mine)


def test_every_quantity_is_explained():
    known = parse(study={"columns": ["status"]}).study
    for name, quantity in {**known.numbers, **sections.WORDS, **sections.OPERATIONS}.items():
        assert quantity.meaning, name
        assert quantity.label, name
