"""Rules that hold for all configurations, search spaces, journals and comparisons, by drawn examples."""

import itertools
import json
import tempfile
from pathlib import Path

import numpy as np
import optuna
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.trial import FixedTrial

from tests.helpers import point, toy
from tunediff import config as cfg
from tunediff import search_space
from tunediff.analysis.sequential import Rules, analyse
from tunediff.config import ConfigError
from tunediff.core.journal import Journal, to_json
from tunediff.core.trial_record import End, events, read_trial
from tunediff.search_space.dimension import Dimension, Draw, combinations, to_params

optuna.logging.set_verbosity(optuna.logging.ERROR)
examples = settings(derandomize=True, deadline=None, max_examples=40, database=None)


# ---- configurations
BASELINE = cfg.baseline("digits")


def values_of(knob):
    """Draws values that a knob allows; most are in its range, whatever the other knobs say."""
    if knob.choices is not None:
        return st.sampled_from(knob.choices)
    if knob.kind == "bool":
        return st.booleans()
    low, high = (end if end is not None else other for end, other in ((knob.low, 1), (knob.high, 64)))
    if knob.kind == "int":
        return st.integers(int(low), int(min(high, low + 1000)))
    return st.floats(low, min(high, low + 1000), exclude_min=knob.low_open, exclude_max=knob.high_open)


KNOBS = [knob for knob in BASELINE.schema.knobs.values() if knob.searchable and knob.kind in ("int", "float", "bool")]
CHOSEN = st.lists(st.sampled_from(KNOBS), max_size=4, unique_by=lambda knob: knob.name).flatmap(
    lambda knobs: st.fixed_dictionaries({knob.name: values_of(knob) for knob in knobs})
)


@examples
@given(CHOSEN, st.sampled_from(sorted(BASELINE.schema.members["timesteps.name"])), st.integers(0, 2**31 - 1))
def test_a_configuration_survives_yaml_and_journal(values, sampler, seed):
    try:
        config = cfg.override(BASELINE, {"timesteps.name": sampler, **values, "seed": seed})
    except ConfigError:  # the knobs contradict each other, or are of another sampler
        config = cfg.override(BASELINE, {"timesteps.name": sampler, "seed": seed})
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(cfg.dump(config))
        assert cfg.load(file) == config
        Journal(Path(folder) / "t0000").start(*cfg.identity(config), values, 1.0, role="repeat")
        record = read_trial(Path(folder) / "t0000")
    assert cfg.configuration_of(record) == config
    assert (record.seed, record.role, record.fingerprint) == (seed, "repeat", cfg.fingerprint(config))
    changed = cfg.differences(config, BASELINE)
    assert cfg.override(BASELINE, changed) == config


# ---- search spaces
@st.composite
def spaces(draw):
    """Draw dimensions whose values are choices, lists or ranges, under conditions on those above them; and the same
    with the values of ranges as choices."""
    dimensions, listed = [], []
    for number in range(draw(st.integers(1, 5))):
        above = draw(st.lists(st.sampled_from(listed), max_size=2, unique_by=lambda d: d.name)) if listed else []
        when = tuple((d.name, tuple(draw(st.lists(st.sampled_from(d.choices), min_size=1, unique_by=str))))
                     for d in above)  # fmt: skip
        name, values = f"knob{number}", tuple(range(draw(st.integers(1, 4))))
        kind = draw(st.sampled_from(["choice", "list", "range"]))
        choices = tuple([value] for value in values) if kind == "list" else values
        listed.append(Dimension(name, choices, when=when))
        ranged = Dimension(name, low=0, high=values[-1], integer=True, when=when)
        dimensions.append(ranged if kind == "range" else listed[-1])
    return dimensions, listed


@examples
@given(spaces())
def test_points_of_a_grid_are_all_that_can_be_drawn(space):
    _, listed = space
    points = [json.dumps(values) for values in combinations(listed, {})]
    names, draw = [dimension.name for dimension in listed], Draw(tuple(listed))
    fixed = (dict(zip(names, values, strict=True)) for values in itertools.product(*(d.choices for d in listed)))
    assert set(points) == {json.dumps(draw(FixedTrial(to_params(values)))) for values in fixed}
    assert len(set(points)) == len(points)


@examples
@given(spaces(), st.integers(0, 100))
def test_a_draw_is_inside_and_comes_back_from_what_optuna_stores(space, seed):
    dimensions, listed = space
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
    draw = Draw(tuple(dimensions))
    values = draw(trial := study.ask())
    assert values in combinations(listed, {})
    assert draw(FixedTrial(trial.params)) == draw(FixedTrial(to_params(values))) == values
    study.enqueue_trial(to_params(values))
    assert draw(study.ask()) == values


@examples
@given(st.sampled_from(["grid", "search"]), st.integers(1, 3), st.lists(st.sampled_from([8, 16, 32, 64]), min_size=1,
                                                                       unique=True))  # fmt: skip
def test_candidates_begin_with_the_baseline_and_name_every_run_once(form, runs, sizes):
    budget = {"per_trial": "20s"} | ({"trials": 20} if form == "search" else {})
    repeats = {"noise": runs} if form == "search" else {"seeds": runs} if runs > 1 else {}
    content = {"workload": "digits", "budget": budget, form: {"loader.batch_size": [128, *sizes]}, **repeats}
    space = search_space.parse(content, "x.yaml")
    configs = [cfg.fingerprint(space.config(drawn)) for drawn in space.candidates]
    assert configs[0] == cfg.fingerprint(space.baseline)
    assert len(set(configs)) == len(configs) == (runs if form == "search" else runs * (1 + len(sizes)))


# ---- journals
POINTS = st.lists(st.floats(-1e6, 1e6), max_size=4)


@examples
@given(POINTS, st.sampled_from([None, "ok", "oom"]), st.booleans(), st.floats(0, 1))
def test_a_journal_cut_at_any_byte_reads_as_a_prefix(values, status, restarted, share):
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder) / "t0000")
        journal.start(*cfg.identity(toy()), {}, 20.0)
        for index, value in enumerate(values, 1):
            journal.point(point(index, float(index), error=value))
        if restarted:
            journal.restarted("why")
        if status is not None:
            journal.end(End(status))
        content, whole = journal.path.read_bytes(), list(events(journal.folder))
        cut = round(share * len(content))
        journal.path.write_bytes(content[:cut])
        lines = list(events(journal.folder))
        assert lines == whole[: len(lines)]
        assert len(lines) >= content[:cut].count(b"\n")
        record = read_trial(journal.folder)
        assert (record is None) == (not lines)
        if record is not None:
            known = [line["error"] for line in lines if line["event"] == "point"]
            assert [p["error"] for p in record.points] == ([] if record.restarts else known)
            assert record.finished == (lines[-1]["event"] == "end")
        journal.end(End("error"))  # what is written after a kill is not lost
        assert list(events(journal.folder))[-1]["status"] == "error"


NUMBERS = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)


@examples
@given(st.recursive(NUMBERS | st.text(), lambda inside: st.lists(inside) | st.dictionaries(st.text(), inside)))
def test_what_a_journal_takes_comes_back(value):
    assert json.loads(to_json(value)) == value


# ---- comparisons
@st.composite
def comparisons(draw):
    """Draw values [configurations, seeds] of noise and gains that may be decided, undecided, or missing at the end."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rivals, rounds = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    gains = np.array([0.0, *draw(st.lists(st.sampled_from([-0.5, 0.0, 0.5]), min_size=rivals, max_size=rivals))])
    values = np.exp(rng.normal(0, draw(st.sampled_from([0.01, 0.1])), (1 + rivals, rounds)) - gains[:, None])
    for row in range(1, 1 + rivals):
        if draw(st.booleans()) and rounds > 2:
            values[row, draw(st.integers(1, rounds)) :] = np.nan
    return values


def verdicts(test):
    return [difference.verdict for difference in test.differences], test.rounds, test.state


@examples
@given(comparisons(), st.randoms(use_true_random=False))
def test_the_order_of_rivals_decides_nothing(values, random):
    order = [*range(1, len(values))]
    random.shuffle(order)
    named, *rest = verdicts(analyse(values, Rules(8)))
    shuffled, *others = verdicts(analyse(values[[0, *order]], Rules(8)))
    assert (shuffled, others) == ([named[row - 1] for row in order], rest)


@examples
@given(comparisons(), st.sampled_from([1e-6, 0.25, 3.0, 1e6]), st.booleans())
def test_units_decide_nothing(values, unit, ratios):
    assert verdicts(analyse(values * unit, Rules(8), ratios=ratios)) == verdicts(
        analyse(values, Rules(8), ratios=ratios)
    )


@examples
@given(comparisons(), st.sampled_from([0.0, -3.0, 10.0]))
def test_sign_and_offset_decide_nothing_about_differences(values, offset):
    test = analyse(values, Rules(8), ratios=False)
    turned = analyse(offset - values, Rules(8), lower_is_better=False, ratios=False)
    assert verdicts(turned) == verdicts(test)
    for a, b in zip(test.differences, turned.differences, strict=True):
        assert (a.estimate is None) == (b.estimate is None)
        assert a.estimate is None or abs(a.estimate + b.estimate) < 1e-9


@examples
@given(comparisons())
def test_the_inverse_of_a_ratio_decides_as_the_ratio(values):
    """A time and a rate: lower is better of one, higher of the other."""
    assert verdicts(analyse(1 / values, Rules(8), lower_is_better=False)) == verdicts(analyse(values, Rules(8)))


@examples
@given(comparisons())
def test_an_interval_holds_its_estimate_and_excludes_the_baseline_only_with_a_verdict(values):
    for difference in analyse(values, Rules(8)).differences:
        if difference.low is not None:
            assert difference.low <= difference.estimate <= difference.high
            outside = not difference.low <= 1 <= difference.high
            assert outside == (difference.verdict in ("better", "worse"))
