"""Comparing two configurations, without a cluster: what is asked, what is refused, when it ends."""

import contextlib
import json
import math
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.comparisons import BETTER, CLOSE, PLAIN, made, told
from tests.helpers import point
from tests.json_schemas import validate
from tests.tuning.asked import AskedBackend
from tunediff import ConfigError, TunediffError, compare, run_comparison
from tunediff import config as cfg
from tunediff.analysis import sides
from tunediff.analysis.comparison import Comparison
from tunediff.analysis.sequential import Rules
from tunediff.core.journal import Journal
from tunediff.core.trial_record import End, read_begun
from tunediff.proof import frozen_code
from tunediff.ray_backend import connection
from tunediff.report import reading, tables
from tunediff.tuning import resources, sessions
from tunediff.tuning.resources import Pool


@pytest.fixture
def backend_is(monkeypatch):
    """Puts a function in the place of what would start processes for the runs."""
    return lambda one_by_one: monkeypatch.setattr(connection, "one_by_one", one_by_one)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch, this_machine, backend_is, at_tmp_path):
    """Two cores; what would start Ray does not."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    this_machine(2)

    @contextlib.contextmanager
    def workers(*_, **__):
        raise sessions.StoppedError("nothing runs in this test")
        yield

    backend_is(workers)


def asked(*given, name="x"):
    """The folder that these words make, with the sides in it."""
    assert compare.main([*given, "--name", name, "--no-check", "--quiet"]) == 1  # where Ray would start
    return Comparison.read(Path("ray_results", name).absolute())


# ------------------------------------------------------------------------------------------------------------- parsing
@pytest.mark.parametrize(
    ("given", "a", "b"),
    [
        (["digits", "other.yaml"], {}, {"loader.batch_size": 64}),
        (["digits", "loader.batch_size=64"], {}, {"loader.batch_size": 64}),
        (["digits", "digits", "loader.batch_size=64"], {}, {"loader.batch_size": 64}),
        (
            ["digits", "optimizer.lr=3e-3", "other.yaml", "optimizer.lr=0.002", "loader.workers=1"],
            {"optimizer.lr": 3e-3},
            {"loader.batch_size": 64, "optimizer.lr": 2e-3, "loader.workers": 1},
        ),
        (["digits", "seed=7", "digits", "seed=19"], {"seed": 507}, {"seed": 519}),
    ],
)
def test_what_is_asked(given, a, b):
    config = cfg.override(cfg.baseline("digits"), {"loader.batch_size": 64})
    Path("other.yaml").write_text(cfg.dump(config))
    rules = ["--pairs", "5", "--within", "2%", "--level", "0.01", "--one-sided", "--fixed"]
    rules += [] if "seed=7" in given else ["--seed", "500"]
    found = asked(*given, "--budget", "2m", *rules, "--compile", "free")
    assert found.rules == Rules(5, 0.01, one_sided=True, fixed=True, within=0.02)
    base = cfg.override(cfg.baseline("digits"), {"seed": 500})
    assert [cfg.differences(config, base) for config in found.configs] == [a, b]
    limits = sides.limits(found)
    assert (limits.per_trial_s, limits.compile_charged) == (120, False)
    assert (found.runs, found.ended) == ([], False)


def test_without_options():
    found = asked("digits", "optimizer.lr=2e-3")
    assert found.names == ("digits", "digits optimizer.lr=2e-3")
    assert (found.rules, sides.limits(found).per_trial_s) == (Rules(12), 60)
    assert asked("digits_classifier", "seed=99", "--within", "0.01", name="y").rules.within == 0.01, "in its units"


def git(*given):
    who = ("-c", "user.name=me", "-c", "user.email=me@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *who, *given], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path):
    """mine.py and a module that it imports, both changed since the last commit."""
    git("init", "-q")
    Path("mine.py").write_text(f"from helper import SIDE\n{PLAIN}")
    Path("helper.py").write_text("SIDE = 'old'\n")
    Path("data").symlink_to("/usr/share")  # as many a repository has it
    git("add", ".")
    git("commit", "-qm", "first")
    Path("helper.py").write_text("SIDE = 'new'\n")
    return tmp_path


def test_another_revision_brings_what_it_imports(repository):
    found = asked("mine.py@HEAD", "mine.py")
    modules = [cfg.of(config).code for config in found.configs]
    assert [module.SIDE for module in modules] == ["old", "new"]
    assert [Path(module.__file__).parent.parts[-3:] for module in modules] != [repository.parts[-3:]] * 2
    texts = [(found.folder / side / "workload" / "helper.py").read_text() for side in "AB"]
    assert texts == ["SIDE = 'old'\n", "SIDE = 'new'\n"]
    assert sides.changed(found) == {}
    assert "files that it imports differ" in str(tables.of_sides(found, reading.of_sides(found)))


def test_another_revision_has_the_data_beside_its_file(repository):
    Path("images").mkdir()
    for path, source in (("mine.py", f"FILE = __file__\n{PLAIN}"), ("numbers.txt", "old"), ("images/one.txt", "old")):
        Path(path).write_text(source)
    git("add", ".")
    git("commit", "-qm", "second")
    Path("numbers.txt").write_text("new")
    folder = asked("mine.py@HEAD", "mine.py", "lr=0.1").folder
    assert [(folder / side / "workload" / "numbers.txt").read_text() for side in "AB"] == ["old", "new"]
    assert (folder / "A/workload/images/one.txt").read_text() == "old"


def test_a_preset_of_another_revision(repository):
    Path("mine.py").write_text(PLAIN.replace('{"width": 16}', '{"width": 4}'))
    found = asked("mine.py:large@HEAD", "mine.py:large", "lr=0.1")
    assert [config.knobs.width for config in found.configs] == [16, 4]
    assert sides.changed(found) == {"width": 4, "lr": 0.1}


def test_a_file_of_a_package_brings_its_package(repository):
    Path("pkg").mkdir()
    for name, source in (("__init__", ""), ("side", "SIDE = 'old'\n"), ("mine", f"from pkg.side import SIDE\n{PLAIN}")):
        Path(f"pkg/{name}.py").write_text(source)
    git("add", ".")
    git("commit", "-qm", "second")
    Path("pkg/side.py").write_text("SIDE = 'new'\n")
    found = asked("pkg/mine.py@HEAD", "pkg/mine.py")
    assert [cfg.of(config).code.SIDE for config in found.configs] == ["old", "new"]


@pytest.mark.parametrize(
    "side", ["mine.py@gone", "mine.py@", "mine.py@-owritten", "new.py@HEAD", "nowhere/mine.py@HEAD"]
)
def test_a_revision_that_does_not_exist_is_refused(repository, capsys, side):
    Path("new.py").write_text(PLAIN)
    assert compare.main([side, "mine.py", "--no-check"]) == 2
    assert capsys.readouterr().err.startswith(f"error: {side}: ")
    assert not {"written", "ray_results"} & {path.name for path in Path.cwd().iterdir()}


def test_a_side_that_is_refused_is_named_by_its_revision(repository, capsys, check_says):
    check_says(ConfigError("mine.py: no step"))
    assert compare.main(["mine.py@HEAD", "mine.py"]) == 2
    assert capsys.readouterr().err == "error: A, mine.py@HEAD: mine.py: no step\n"


# ------------------------------------------------------------------------------------------------------------- resume
def test_what_is_elsewhere_is_not_judged_by_this_machine():
    found = asked("digits", "compile.mode=reduce-overhead", "--address", "auto")
    assert found.configs[1].compile.mode == "reduce-overhead"


# ------------------------------------------------------------------------------------------------------ from end to end
@pytest.fixture
def backend(backend_is):
    """Runs end at once: A at about 2, B at about 1, or as `ends` says by trial."""
    noise = np.random.default_rng(0)

    def events_of(spec):
        journal = Journal(spec.folder)
        value = {"A": 2.0, "B": 1.0}[read_begun(spec.folder).drawn["side"]] * math.exp(0.05 * noise.normal())
        journal.point(measured := point(4, spec.budget.seconds, frechet=value, label="FD (classifier)"))
        yield measured
        if (status := backend.ends.get(spec.name, "ok")) is KeyboardInterrupt:
            raise KeyboardInterrupt
        end = status if isinstance(status, End) else End(status, "" if status == "ok" else "needs 9 GiB")
        journal.end(end)
        yield end

    backend = AskedBackend(None, events_of)
    backend.ends = {}

    @contextlib.contextmanager
    def one_by_one(folder, share, address, greet, workloads, run_devices):
        backend.devices = Pool(share(resources.local()))
        greet(None)
        yield backend

    backend_is(one_by_one)
    return backend


def test_pairs_run_until_it_is_decided(backend, capsys):
    assert compare.main(["digits", "loader.batch_size=64", "--budget", "20s", "--name", "x", "--seed", "500"]) == 0
    out = capsys.readouterr().out
    assert "runs: at most 12 pairs × 2 × 20s training" in out
    assert "data: 1,797 images at 8×8 (digits)" in out
    assert re.search(r"\] wall-clock: about \S+ at most, \S+ with 3 pairs\n", out)
    assert out.count("after 1 pair: ") == out.count("after 2 pairs: ") == out.count("after 3 pairs: ") == 1
    assert "verdict: better\n" in out
    assert backend.shown[:2] == [
        "A seed 500",
        f"A seed 500  FD (classifier) {backend.shown[1].split()[5]} at 20.0 s  3.2 images/s",
    ]
    assert [words for words in backend.shown if len(words.split()) == 3][:4] == [
        "A seed 500", "B seed 500", "B seed 501", "A seed 501",
    ]  # fmt: skip


def test_an_interrupted_one_goes_on_where_it_was(backend, capsys):
    backend.ends = {"t0002": KeyboardInterrupt}
    assert compare.main(["digits", "loader.batch_size=64", "--name", "x"]) == 130
    error = capsys.readouterr().err
    assert error.endswith("resume: tunediff compare --resume x\n")
    before = [
        (folder.name, (folder / "journal.jsonl").read_bytes()) for folder in Path("ray_results/x/trials").iterdir()
    ]
    backend.ends = {}
    assert compare.main(["--resume", "x"]) == 0
    out = capsys.readouterr().out
    assert out.count("after 1 pair: ") == 1
    assert "A seed 500" not in out
    for name, content in before:
        if name != "t0002":
            assert (Path("ray_results/x/trials") / name / "journal.jsonl").read_bytes() == content


def test_quiet_says_the_result_and_json_nothing_else(backend, capsys):
    assert compare.main(["digits", "loader.batch_size=64", "--name", "x", "--quiet"]) == 0
    assert capsys.readouterr().out.startswith("comparison: x\n")
    four = ["digits", "loader.batch_size=64", "parallel.workers=2", "--unit", "device", "--name", "y", "--json"]
    assert compare.main(four) == 0
    out = capsys.readouterr().out
    assert json.loads(out)["name"] == "y"
    told = Comparison.read(Path("ray_results/y"))
    assert [run.budget_s for run in told.rounds[0]] == [60.0, 30.0], "two workers share the device-seconds"
    assert sides.clock(told).along == told.rounds[0][1].along == "device_s"


# --------------------------------------------------------------------------------------------------- cost and progress
@pytest.fixture
def measured(probe_says):
    """What was measured: an evaluation of a second."""
    probe_says(values := {"evaluation_s": 1.0, "data": ["data: made up"]})
    return values


def plan_of(capsys, *words):
    """The plan of a dry run, as text and as JSON."""
    assert compare.main([*words, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert compare.main([*words, "--dry-run", "--json"]) == 0
    out, error = capsys.readouterr()
    assert error == ""
    validate(plan := json.loads(out), "compare-dry-run-output")
    return printed, plan


def test_compare_dry_run_says_the_cost_and_leaves_nothing(measured, capsys):
    """12 pairs × 2 × (20 s of training + 4 evaluations of 1 s + 2 s) + 15 s, whatever is measured here."""
    points = cfg.baseline("digits").evaluation.points
    printed, plan = plan_of(capsys, "digits", "loader.batch_size=64", "--budget", "20s")
    assert (plan["pairs_at_least"], plan["pairs_at_most"], plan["runs_at_most"]) == (3, 12, 24)
    seconds = {"training": 480, "evaluation": 24 * points, "wall_clock": 15 + 24 * (20 + points + 2)}
    assert plan["seconds"] == seconds
    assert plan["wall_s_at_least"] == 15 + 6 * (20 + points + 2)
    assert plan["changed"] == {"loader.batch_size": 64}
    assert "training: about 8m00s\n" in printed
    assert "WARNING" not in printed
    assert not Path("ray_results").exists()
    Path("mine.py").write_text(PLAIN)
    _, plan = plan_of(capsys, "--run", "true {seed} {x}", "x=1", "x=2", "--objective", "loss", "--outcome", "final")
    assert (plan["seconds"]["wall_clock"], plan["wall_clock_lacks"]) == (None, ["training"]), "to its own end"
    _, plan = plan_of(capsys, "mine.py", "lr=0.1", "--budget", "1s")
    assert (plan["evaluation_s"], plan["wall_clock_lacks"]) == (None, ["evaluation"]), "a file is not run for a plan"


def test_changes_of_side_b_replace_knobs_of_a():
    with pytest.raises(TunediffError, match="nothing runs in this test"):
        run_comparison(("digits", {"optimizer.lr": 1e-3}, "loader.workers=0"), {"optimizer.lr": 3e-3}, name="x")
    a, b = (config.optimizer.lr for config in Comparison.read(Path("ray_results/x")).configs)
    assert (a, b) == (1e-3, 3e-3)


# ---------------------------------------------------------------------------------------------------------- equal sides
def test_a_configuration_is_compared_with_itself_on_other_seeds(capsys):
    found = asked("digits", "loader.batch_size=64", "--equal")
    assert found.names == ("digits loader.batch_size=64", "digits loader.batch_size=64 on other seeds")
    a, b = found.configs
    assert b.seed - a.seed == frozen_code.TWIN_DISTANCE
    code = sides.content(found.folder, sides.CODE)
    assert (sides.changed(found), code["drawn"]) == ({}, True)
    assert code["A"]["digest"] == code["B"]["digest"]


@pytest.mark.parametrize(
    ("b", "said"), [(CLOSE["B"], "no difference is the right result"), (BETTER["B"], "the difference is false")]
)
def test_equal_sides_say_what_was_tested(capsys, b, said):
    made({"A": CLOSE["A"], "B": b}, a="digits", b=("digits", f"seed={frozen_code.TWIN_DISTANCE}"), equal=True)
    code, text = told(capsys, "--json")
    assert json.loads(text)["rule"]["equal_sides"]
    assert said in told(capsys)[1]
    assert code == (0 if b is BETTER["B"] else 10)
