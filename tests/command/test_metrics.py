"""Values in what programs print."""

import json
import math

import pytest

from tunediff.command.metrics import MetricFile, MetricPattern, Reduction, declared, value_in
from tunediff.config import ConfigError

PRINTED = [
    ("METRIC val_loss=0.25", 0.25),
    ("epoch 3: val_loss: 0.25, acc: 0.9", 0.25),
    ("val_loss=2.5e-1.", 0.25),
    ('{"step": 3, "val_loss": 0.25}', 0.25),
    ("{'val_loss': '0.25', 'epoch': '1.0'}", 0.25),
    ("│         val_loss          │    0.25000000953674316    │", 0.25000000953674316),
    ("Epoch 0: 100%|██| 3/3 [00:00<00:00, val_loss=0.250]", 0.25),
    ("val_loss: 25%", 25.0),
    ("val_loss=1_000", 1000.0),
    ("val_loss=-3", -3.0),
    ("val_loss: inf", math.inf),
    ("train_val_loss=1 val_loss_ema=2 my-val_loss: 3", None),
    ("val_loss\t0.25", 0.25),
    ("step 9: train_loss 0.3, val_loss 0.25, 20 ms", 0.25),
    ("val_loss 0.25", 0.25),
    ("val_loss 10 batches ago", None),
    ("val_loss: none", None),
    ("val_loss: 1,234.5 tokens", 1234.5),
    ("val_loss=12,345,678", 12345678.0),
    ("val_loss: 1'234.5", 1234.5),
    ("val_loss=0.25,acc=1", 0.25),
    ("METRIC val_loss=-1,234", -1234.0),
    ("val_loss went down", None),
]


@pytest.mark.parametrize(("line", "value"), PRINTED)
def test_finds_a_value_as_trainers_print_it(line, value):
    assert MetricPattern("val_loss", None, "x").find(line) == value


def test_nan_is_a_value_and_the_last_of_a_line_counts():
    assert math.isnan(MetricPattern("loss", None, "x").find("loss: nan"))
    assert MetricPattern("loss", None, "x").find("loss: 3 ... loss: 2") == 2.0


@pytest.mark.parametrize("printed", ["0,31", "1.234,5", "1,2345", "1 234.5", "12'34"])
@pytest.mark.parametrize("pattern", [None, r"loss: ([\d.]+)", r"loss: ([\d.,']+)"])
def test_a_number_that_can_be_read_in_two_ways_has_no_value(printed, pattern):
    reading = MetricPattern("loss", pattern, "x").read(f"loss: {printed}")
    assert math.isnan(reading.value)
    assert reading.unclear == printed


def test_a_pattern_that_goes_on_behind_its_group_reads_a_column():
    assert MetricPattern("loss", r"^\d+,([\d.]+),", "x").find("3,0.31,0.9") == 0.31


@pytest.mark.parametrize(("line", "unit"), [("1.2 GB", "GB"), ("95.2%", "%"), ("3 ms.", "ms"), ("3 samples", ""),
                                            ("3 h: 4", ""), ("3 it/s", "it/s")])  # fmt: skip
def test_the_unit_of_a_value_is_the_word_behind_it(line, unit):
    assert MetricPattern("x", None, "x").read(f"x: {line}").unit == unit


def test_a_pattern_has_one_group():
    assert MetricPattern("loss", r"Train Loss: ([0-9.]+)", "x").find("(step=5) Train Loss: 0.5, x") == 0.5
    assert MetricPattern("acc", None, "x").find("epoch 3 | loss 0.74 | acc 81.61%") == 81.61
    assert math.isnan(MetricPattern("loss", r"loss (\S+)", "x").find("loss unknown"))
    for pattern in ("loss", "(a)(b)", "("):
        with pytest.raises(ConfigError, match="--pattern"):
            MetricPattern("loss", pattern, "--pattern")


def test_reads_further_metrics_of_a_declared_line():
    assert declared("METRIC loss=1 tokens/s=2e3 name=x") == {"loss": 1.0, "tokens/s": 2000.0}
    assert declared("the METRIC loss=1") == {}


@pytest.mark.parametrize(
    ("reduce", "values"), [("last", [3, 1, 2]), ("mean:2", [3, 2, 1.5]), ("min", [3, 1, 1]), ("max", [3, 3, 3])]
)
def test_reduces_the_values_so_far(reduce, values):
    reduction = Reduction(reduce, "x")
    assert [reduction.add(value) for value in (3.0, 1.0, 2.0)] == values
    with pytest.raises(ConfigError, match="reduce"):
        Reduction(f"{reduce}:", "reduce")


def test_a_diverged_run_has_no_best_value():
    reduction = Reduction("min", "x")
    assert [reduction.add(1.0), math.isnan(reduction.add(math.nan)), math.isnan(reduction.add(0.5))] == [
        1.0,
        True,
        True,
    ]


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "json"])
def test_reads_each_record_of_a_file_once(tmp_path, suffix):
    file = MetricFile(tmp_path / f"results.{suffix}")
    assert list(file.rows()) == []
    texts = {
        "jsonl": ['{"eval": {"loss": 3}}\n{"eval"', ': {"loss": 2}}\n'],
        "csv": ["step,eval.loss\n1,3\n2,", "2\n"],
        "json": [json.dumps({"eval": {"loss": 3}}), json.dumps({"eval": {"loss": 2}, "step": 2})],
    }[suffix]
    found, content = [], ""
    for text in texts:
        content = text if suffix == "json" else content + text
        file.path.write_text(content)
        found += [value_in(row, "eval.loss") for row in file.rows()]
        found += [value_in(row, "eval.loss") for row in file.rows()]
    assert found == [3.0, 2.0]


def test_what_a_file_held_before_the_program_began_is_no_news(tmp_path):
    for suffix, old, new in (("json", '{"loss": 9}', '{"loss": 9} '), ("jsonl", '{"loss": 9}\n' * 2, '{"loss": 9}\n')):
        path = tmp_path / f"results.{suffix}"
        path.write_text(old)
        file = MetricFile(path)
        assert list(file.rows()) == []
        path.write_text(new)  # the program begins it anew
        assert [row["loss"] for row in file.rows()] == [9]
        assert list(file.rows()) == []
    file = MetricFile(path)
    path.write_text(new + '{"loss": 8}\n')  # or appends to it
    assert [row["loss"] for row in file.rows()] == [8]
