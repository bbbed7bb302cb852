"""The `study:` section of a search file."""

import pytest

from tests.space.files import changed, parse, rungs, studied
from tunediff import space, study
from tunediff.config import ConfigError


def test_a_study_names_knobs_and_quantities():
    loaded = parse(
        study={"columns": ["loader.batch_size", "epoch_s"], "figure": {"x": "loader.batch_size", "y": "epoch_s"}}
    )
    assert loaded.study.columns == ("loader.batch_size", "epoch_s")
    assert loaded.study.figure == study.Figure("lines", ("epoch_s",), "loader.batch_size")
    assert parse(study={"columns": ["status"]}).study.figure is None
    assert parse().study is None


def test_every_quantity_is_explained():
    for name, quantity in {**study.QUANTITIES, **study.OPERATIONS}.items():
        assert quantity.meaning, name
        assert quantity.label, name


REFUSED = [
    (changed(study=["epoch_s"]), "x.yaml: study: needs `key: value` lines, found ['epoch_s']"),
    (changed(study={"column": ["epoch_s"]}), "x.yaml: study: column: no such key; allowed: title, columns, figure"),
    (changed(study={"title": 3, "columns": ["epoch_s"]}), "x.yaml: study: title: 3 is not allowed; allowed: words"),
    (studied(None), "x.yaml: study: columns: needs a list of knobs and quantities, found None"),
    (studied([]), "x.yaml: study: columns: needs a list of knobs and quantities, found []"),
    (studied(["epochs_s"]), "x.yaml: study: columns[0]: 'epochs_s': no such knob or quantity; did you mean epoch_s"),
    (studied(["epoch_s", "zzz"]), "x.yaml: study: columns[1]: 'zzz': no such knob or quantity; allowed: a knob, or configuration"),
    (studied([7]), "x.yaml: study: columns[0]: 7: no such knob or quantity"),
    (studied(["epoch_s", "epoch_s"]), "x.yaml: study: columns: 'epoch_s' is given twice"),
    (studied(["operation"]), "x.yaml: study: columns[0]: 'operation' needs operations: in the search file"),
    (studied(["operation", "epoch_s"], operations=3), "x.yaml: study: columns: 'epoch_s' is a quantity of a whole step"),
    (studied(figure="bars"), "x.yaml: study: figure: needs `key: value` lines, found 'bars'"),
    (studied(figure={"kind": "pie"}), "x.yaml: study: figure: kind: 'pie' is not allowed; allowed: lines, bars, stacked"),
    (studied(figure={"kind": "ladder", "y": "epoch_s"}), "x.yaml: study: figure: kind: 'ladder' needs ladder: in the search file"),
    (studied(figure={"kind": "operations"}), "x.yaml: study: figure: kind: 'operations' needs operations: in the search file"),
    (studied(figure={"kind": "bars", "y": "epoch_s", "log": "x"}), "x.yaml: study: figure: log: does not belong to a figure of kind bars"),
    (studied(figure={"kind": "bars"}), "x.yaml: study: figure: y: is missing"),
    (studied(figure={"kind": "bars", "y": []}), "x.yaml: study: figure: y: names no quantity"),
    (studied(figure={"y": "epoch_s"}), "x.yaml: study: figure: x: is missing"),
    (studied(figure={"x": "loader.batch_size", "y": "epoc_s"}), "x.yaml: study: figure: y: 'epoc_s': no such knob or quantity; did you mean epoch_s"),
    (studied(figure={"x": "loader.batch_size", "y": "optimizer.lr"}), "x.yaml: study: figure: y: 'optimizer.lr' is not measured"),
    (studied(figure={"x": "loader.batch_size", "y": "status"}), "x.yaml: study: figure: y: 'status' is not measured"),
    (studied(figure={"x": "batch", "y": "epoch_s"}), "x.yaml: study: figure: x: 'batch': no such knob or quantity"),
    (studied(figure={"x": "loader.batch_size", "y": "epoch_s", "lines": "workers"}), "x.yaml: study: figure: lines: workers: no such knob; did you mean"),
    (studied(figure={"x": "loader.batch_size", "y": "epoch_s", "labels": ["a", "b"]}), "x.yaml: study: figure: labels: a: no such knob"),
    (studied(figure={"x": "loader.batch_size", "y": "epoch_s", "labels": ["loader.workers"]}), "labels: ['loader.workers'] is not allowed; allowed: one knob"),
    (studied(figure={"x": "loader.batch_size", "y": "epoch_s", "log": "z"}), "x.yaml: study: figure: log: 'z' is not an axis; allowed: x, y"),
    (rungs(("a", {"precision.amp": "bf16"}), study={"columns": ["status"], "figure": {"kind": "ladder", "y": ["epoch_s", "step_s"]}}),
     "x.yaml: study: figure: y: a ladder has one quantity, found epoch_s, step_s"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "message"), REFUSED, ids=[message[-45:] for _, message in REFUSED])
def test_mistakes_are_refused(content, message):
    with pytest.raises(ConfigError) as error:
        space.parse(content, "x.yaml")
    assert message in str(error.value)
