"""The `study:` section of a search file."""

import dataclasses
import types

import pytest

from tests.search_space.files import parse
from tunediff.config import ConfigError, Metric, Workload
from tunediff.search_space import sections


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
