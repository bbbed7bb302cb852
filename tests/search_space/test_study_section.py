"""The `study:` section of a search file."""

import dataclasses
import types

import pytest

from tests.search_space.files import changed, parse, rungs, studied
from tunediff import search_space
from tunediff.config import ConfigError, Metric, Workload
from tunediff.search_space import study


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
    assert study.parse({"columns": ["width", "step_s"]}, "x.yaml", mine).columns == ("width", "step_s")
    for section in ({"columns": ["samples"]}, {"columns": ["width"], "x": "width", "y": "samples"}):
        with pytest.raises(ConfigError, match="'samples' is a quantity and a knob of mine; rename the knob"):
            study.parse(section, "x.yaml", mine)


def test_every_quantity_is_explained():
    known = parse(study={"columns": ["status"]}).study
    for name, quantity in {**known.numbers, **study.WORDS, **study.OPERATIONS}.items():
        assert quantity.meaning, name
        assert quantity.label, name


REFUSED = [
    (changed(study=["epoch_s"]), "x.yaml: study: needs `key: value` lines, found ['epoch_s']"),
    (changed(study={"column": ["epoch_s"]}), "x.yaml: study: column: no such key; did you mean columns?"),
    (changed(study={"columns": ["epoch_s"], 3: 4}), "x.yaml: study: 3: no such key; allowed: title, columns, x, y"),
    (studied(axes={"figure": {"kind": "bars", "y": "epoch_s"}}), "x.yaml: study: figure: no such key; allowed: title, columns, x, y"),
    (changed(study={"title": 3, "columns": ["epoch_s"]}), "x.yaml: study: title: 3 is not allowed; allowed: words"),
    (studied(None), "x.yaml: study: columns: None is not allowed; allowed: a list of knobs and quantities"),
    (studied([]), "x.yaml: study: columns: [] is not allowed; allowed: a list of knobs and quantities"),
    (changed(study={"columns": "epoch_s"}), "x.yaml: study: columns: 'epoch_s' is not allowed; allowed: a list of knobs and quantities"),
    (studied([7]), "x.yaml: study: columns: [7] is not allowed; allowed: a list of knobs and quantities"),
    (studied(["epochs_s"]), "x.yaml: study: columns: 'epochs_s': no such knob or quantity; did you mean epoch_s"),
    (studied(["epoch_s", "zzz"]), "x.yaml: study: columns: 'zzz': no such knob or quantity; allowed: configuration, trial, status"),
    (studied(["epoch_s", "epoch_s"]), "x.yaml: study: columns: 'epoch_s' is given twice"),
    (studied(["operation"]), "x.yaml: study: columns: 'operation' needs operations: in the search file"),
    (studied(["operation", "epoch_s"], operations=3), "x.yaml: study: columns: 'epoch_s' is a quantity of a whole step"),
    (studied(["operation"], {"y": "epoch_s"}, operations=3), "x.yaml: study: y: 'epoch_s' is a quantity of a whole step"),
    (studied(axes={"y": {"epoch_s": 1}}), "x.yaml: study: y: {'epoch_s': 1} is not allowed; allowed: a name, or several"),
    (studied(axes={"y": 3}), "x.yaml: study: y: 3 is not allowed; allowed: a name, or several"),
    (studied(axes={"y": "epoc_s"}), "x.yaml: study: y: 'epoc_s': no such measured number; did you mean epoch_s"),
    (studied(axes={"y": ["epoch_s", "epoch_s"]}), "x.yaml: study: y: 'epoch_s' is given twice"),
    (studied(axes={"y": "optimizer.lr"}), "x.yaml: study: y: 'optimizer.lr': no such measured number; did you mean step_optimizer_s"),
    (studied(axes={"y": "status"}), "x.yaml: study: y: 'status': no such measured number"),
    (studied(axes={"x": ["a", "b"], "y": "epoch_s"}), "x.yaml: study: x: ['a', 'b'] is not allowed; allowed: one name"),
    (studied(axes={"x": "batch", "y": "epoch_s"}), "x.yaml: study: x: 'batch': no such knob or measured number"),
    (studied(axes={"x": "loader.batch_siz", "y": "epoch_s"}), "measured number; did you mean loader.batch_size"),
    (studied(axes={"x": "precision.amp", "y": "epoch_s"}), "x.yaml: study: x: 'precision.amp' holds no numbers; without x: there is a bar for each"),
    (studied(axes={"x": "loader.batch_size"}), "x.yaml: study: x: 'loader.batch_size' needs y: as well, e.g. y: samples_per_s"),
    (rungs(("a", {"precision.amp": "bf16"}), study={"columns": ["status"], "y": ["epoch_s", "step_s"]}),
     "x.yaml: study: y: epoch_s, step_s: the figure of a ladder needs one name under y:, and no x:"),
    (rungs(("a", {"precision.amp": "bf16"}), study={"columns": ["status"], "y": "epoch_s", "x": "step_s"}),
     "x.yaml: study: x: step_s: the figure of a ladder needs one name under y:, and no x:"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "message"), REFUSED, ids=[message[-45:] for _, message in REFUSED])
def test_mistakes_are_refused(content, message):
    with pytest.raises(ConfigError) as error:
        search_space.parse(content, "x.yaml")
    assert message in str(error.value)
