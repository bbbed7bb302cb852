"""Comparing two configurations, without a cluster: what is asked, what is refused, when it ends."""

import contextlib
import json
import math
import os
import re
import subprocess
import types
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from tests.comparisons import BETTER, PLAIN, made
from tests.helpers import point
from tests.json_schemas import validate
from tunediff import compare, run_comparison
from tunediff import config as cfg
from tunediff.analysis import pairs
from tunediff.api import compare_run, compare_setup
from tunediff.core import text
from tunediff.core.journal import Journal
from tunediff.core.trial_record import End
from tunediff.report import pair_plan
from tunediff.report import pairs as report
from tunediff.report.heartbeat import Heartbeat
from tunediff.training import check, probe
from tunediff.tuning import experiment, resources, sessions
from tunediff.tuning.pool import Pool


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Two cores; what would start Ray does not."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(resources, "local", lambda: resources.Machine(2, 0))

    @contextlib.contextmanager
    def workers(*_):
        raise sessions.StoppedError("nothing runs in this test")
        yield

    monkeypatch.setattr(experiment, "one_slot", workers)


def asked(*given):
    """The folder that these words make, with the sides in it."""
    assert compare.main([*given, "--name", "x", "--no-check", "--quiet"]) == 1  # where Ray would start
    return pairs.read(Path("ray_results/x").absolute())


def refused(capsys, *given):
    assert compare.main([*given, "--no-check"]) == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert not Path("ray_results").exists(), "a refused comparison leaves nothing behind"
    return error


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
    found = asked(
        *given, "--budget", "2m", "--pairs", "5", "--resolution", "2%", "--compile", "free", "--setup", "charged"
    )
    base = cfg.override(cfg.baseline("digits"), {"seed": 500})  # seeds that no search has used
    assert [cfg.differences(config, base) for config in found.configs] == [a, b]
    assert (found.budget_s, found.max_pairs, found.within, found.compile_charged) == (
        120,
        5,
        pytest.approx(0.02),
        False,
    )
    assert found.limits.of(1).setup_charged
    assert (found.runs, found.over) == ([], False)


def test_without_options():
    found = asked("digits", "optimizer.lr=2e-3")
    assert found.names == ("digits", "digits optimizer.lr=2e-3")
    assert (found.budget_s, found.max_pairs, found.within, found.compile_charged) == (60, 12, None, True)
    assert not found.limits.of(1).setup_charged


def test_compare_takes_images_mirrored_by_one_side_only(monkeypatch):
    monkeypatch.setattr(compare_setup, "_check_sides", lambda *_: {})  # which would look for the images
    found = asked("cifar10", "data.horizontal_flip=false")
    assert [config.data.horizontal_flip for config in found.configs] == [True, False]


def test_an_accuracy_is_compared_in_its_units():
    assert asked("digits_classifier", "loader.batch_size=64", "--resolution", "0.01").within == 0.01


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
    assert found.changed == {}
    assert "files that it imports differ" in report._changes(found)


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


def test_another_revision_may_have_a_link_to_data_that_git_does_not_hold(repository):
    Path("mine.py").write_text(f"FILE = __file__\n{PLAIN}")
    Path("images").symlink_to("store/images")
    git("add", ".")
    git("commit", "-qm", "second")
    folder = asked("mine.py@HEAD", "mine.py", "lr=0.1").folder
    assert [(folder / side / "workload" / "images").exists() for side in "AB"] == [False, False]


def test_a_side_that_is_refused_is_named_by_its_revision(repository, capsys):
    broken = PLAIN.replace("trial.prepare(", "trial.prepared(", 1)
    assert broken != PLAIN
    Path("mine.py").write_text(broken)
    git("commit", "-qam", "third")
    Path("mine.py").write_text(PLAIN)
    assert compare.main(["mine.py@HEAD", "mine.py"]) == 2
    out, error = capsys.readouterr()
    assert "error: A, mine.py@HEAD: mine.py: " in error
    assert "A, mine.py@HEAD: checking mine.py" in out
    assert "B, mine.py:" not in out


def test_a_preset_of_another_revision(repository):
    Path("mine.py").write_text(PLAIN.replace('{"width": 16}', '{"width": 4}'))
    found = asked("mine.py:large@HEAD", "mine.py:large", "lr=0.1")
    assert [config.knobs.width for config in found.configs] == [16, 4]
    assert found.changed == {"width": 4, "lr": 0.1}


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
    ("given", "message"),
    [
        ("mine.py@gone", "error: mine.py@gone: fatal: Needed a single revision"),
        ("mine.py@", "error: mine.py@: fatal: Needed a single revision"),
        ("mine.py@-owritten", "error: mine.py@-owritten: fatal: Needed a single revision"),
        ("new.py@HEAD", "error: new.py@HEAD: no such file in that revision"),
        ("nowhere/mine.py@HEAD", "error: nowhere/mine.py@HEAD: "),
    ],
)
def test_revisions_that_are_not_there(repository, capsys, given, message):
    Path("new.py").write_text(PLAIN)
    assert message in refused(capsys, given, "mine.py")
    assert not Path("written").exists()


def test_a_revision_is_taken_without_links_out_of_the_repository(repository, tmp_path):
    """Whoever wrote the revision must not choose what is read outside of it."""
    compare_setup._at_revision(Path("mine.py"), "HEAD", tmp_path / "old")
    assert sorted(path.name for path in (tmp_path / "old").iterdir()) == ["helper.py", "mine.py"]


def test_no_repository(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    Path("mine.py").write_text(PLAIN)
    assert "error: mine.py@HEAD: fatal: not a git repository" in refused(capsys, "mine.py@HEAD", "mine.py")


# ------------------------------------------------------------------------------------------------------------ refusals
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "command line: nothing: needs A and B, or A and knob=value for what B changes"),
        (["digits"], "command line: digits: needs A and B"),
        (["digits", "cifar10", "digits"], "command line: digits cifar10 digits: needs A and B"),
        (["optimizer.lr=0.1", "digits"], "command line: optimizer.lr=0.1: on top of what?"),
        (["nowhere.yaml", "digits"], "nowhere.yaml: no such file, and no baseline of that name"),
        (["nowhere.py", "digits"], "error: command line: workload: nowhere.py: no such file in"),
        (["digits", "digtis"], "digtis: no such file, and no baseline of that name; did you mean digits"),
        (["digits", "loader.wrkers=2"], "command line: loader.wrkers: no such knob; did you mean loader.workers"),
        (
            ["digits", "digits"],
            "digits: is what A is here, on the same seeds; change a knob, or its seed by at least 12",
        ),
        (["digits", "loader.batch_size=128"], "digits loader.batch_size=128: is what A is here, on the same seeds; "),
        (
            ["digits", "loader.resident=true", "digits", "loader.resident=true", "loader.workers=1"],
            "on the same seeds (loader.workers: loader.resident keeps all samples on the device); change a knob",
        ),
        (
            ["digits", "process.variance=fixed_small"],
            "(process.variance: evaluation.sampler = ddim adds no noise of that variance); change",
        ),
        (["digits", "precision.matmul=high"], "same seeds (precision.matmul: TF32 is a format of NVIDIA GPUs); change"),
        (
            ["digits", "seed=11"],
            "seed: 11 is not allowed: with 12 pairs both sides would use some seeds; allowed: A's, or",
        ),
        (["digits", "seed=9", "digits", "seed=5"], "seed: 5 is not allowed: with 12 pairs both sides would use some"),
        (["digits", "seed=2", "--pairs", "3"], "at least 3 away from it"),
        (["digits", "digits_classifier"], "digits_classifier: is judged by accuracy (max), digits by frechet (min)"),
        (["digits", "evaluation.images=64"], "evaluation.images: 64 is not allowed; allowed: 1000, as A has it"),
        (
            ["digits", "data.max_images=200"],
            "data.max_images: 200 is not allowed; allowed: None, as A has it: both are",
        ),
        (["digits_classifier", "data.max_images=200"], "data.max_images: 200 is not allowed; allowed: None, as A has"),
        (["cifar10", "data.split=test"], "data.split: 'test' is not allowed; allowed: 'train', as A has it"),
        (["cifar10", "data.image_size=16"], "data.image_size: 16 is not allowed; allowed: 32, as A has it"),
        (
            ["digits", "parallel.workers=64"],
            "parallel.workers: 64 is not allowed on this machine; each worker needs one",
        ),
        (["digits", "compile.mode=reduce-overhead"], "compile.mode: 'reduce-overhead' needs a GPU"),
        (["digits", "seed=99", "--pairs", "2"], "--pairs: 2 is not allowed; allowed: a whole number from 3 to 100"),
        (["digits", "seed=99", "--pairs", "101"], "--pairs: 101 is not allowed"),
        (["digits", "seed=99", "--budget", "20"], "--budget: '20' is not a duration"),
        (["digits", "seed=99", "--budget", ""], "--budget: '' is not a duration"),
        (["digits", "seed=99", "--budget", "0s"], "--budget: '0s' is empty"),
        (
            ["digits", "seed=99", "--resolution", "small"],
            "--resolution: 'small' is not allowed; allowed: a share of A's",
        ),
        (["digits", "seed=99", "--resolution", "0%"], "--resolution: '0%' is not allowed"),
        (["digits", "seed=99", "--resolution", "inf%"], "--resolution: 'inf%' is not allowed"),
        (
            ["digits", "seed=99", "--resolution", "0.5"],
            "'0.5' is not allowed; allowed: a share of A's frechet such as 2%",
        ),
        (
            ["digits_classifier", "seed=99", "--resolution", "2%"],
            "'2%' is not allowed; allowed: a number above 0, in units",
        ),
        (["digits_classifier", "seed=99", "--resolution", "nan"], "--resolution: 'nan' is not allowed"),
        (["digits", "seed=99", "--name", "../x"], "--name: '../x' is not allowed; allowed: a plain folder name"),
        (["digits", "seed=99", "--name", ""], "--name: '' is not allowed"),
        (["digits", "seed=99", "--name", ".x"], "--name: '.x' is not allowed"),
        (["--resume", "gone"], "gone: no such comparison in"),
        (
            ["--resume", "gone", "--pairs", "20"],
            "--resume: takes both sides, budget, pairs and resolution from the folder",
        ),
        (["--resume", "gone", "--pairs", "0"], "--resume: takes both sides"),
        (["--resume", "gone", "--resolution", "1%"], "--resume: takes both sides"),
        (["--resume", "gone", "digits"], "--resume: takes both sides"),
    ],
)
def test_mistakes_are_refused(capsys, given, message):
    assert message in refused(capsys, *given)


def test_what_is_elsewhere_is_not_judged_by_this_machine():
    found = asked("digits", "compile.mode=reduce-overhead", "--address", "auto")
    assert found.configs[1].compile.mode == "reduce-overhead"


def test_what_would_take_months_is_refused_unless_insisted_on(capsys):
    words = ["digits", "optimizer.lr=2e-3", "--budget", "100h"]
    assert compare.main([*words, "--resolution", "2"]) == 2
    allowed = "at most 30 days for 12 pairs; --force starts it all the same"
    assert capsys.readouterr().err == f"error: --budget: '100h' is not allowed; allowed: {allowed}\n"
    assert compare.main([*words, "--resolution", "2", "--force"]) == 2
    assert "--resolution" in capsys.readouterr().err


def test_a_name_that_is_taken(capsys):
    folder = made(BETTER)
    assert compare.main(["digits", "seed=99", "--name", "x"]) == 2
    expected = f"error: --name: 'x' exists in {folder.parent}; choose another name, or --resume x\n"
    assert capsys.readouterr().err == expected


def test_a_folder_that_cannot_be_written(capsys):
    Path("occupied").write_text("")
    assert compare.main(["digits", "seed=99", "--storage", "occupied", "--no-check"]) == 2
    assert capsys.readouterr().err.startswith("error: --storage: ")


def test_a_damaged_folder(capsys):
    folder = made(BETTER)
    (folder / pairs.FILE).write_text("a: digits\n")
    assert compare.main(["--resume", "x"]) == 2
    said = "compare.yaml: is damaged: b, budget_s, compile, pairs, within is missing"
    assert said in capsys.readouterr().err
    assert compare.main(["--resume", str(folder), "--storage", "elsewhere"]) == 2, "as a path, which a shell completes"
    assert said in capsys.readouterr().err


def test_heartbeat_sees_the_lost_runs_that_a_resume_repeats(monkeypatch):
    """It reads a run that has ended only once, and would say all the while that workers start."""
    folder, hearts = made({"A": [2.0], "B": [1.0]}, statuses=[(("B", 1), "error")]), []
    Journal(folder / "trials" / "t0001").end(End("error", "the workers died 2 times", process_died=True))
    monkeypatch.setattr(compare_run, "Heartbeat", lambda *given: hearts.append(Heartbeat(*given)) or hearts[-1])
    said = []

    def run(*_):
        Journal(folder / "trials" / "t0001").write("worker", device="cpu", threads=1)
        said.append(hearts[-1].doing())

    monkeypatch.setattr(compare_run, "_run", run)
    compare.main(["--resume", "x"])
    assert [line[:27] for line in said] == ["t0001 waits for its workers"]


def test_what_was_interrupted_can_be_resumed(capsys):
    with mock.patch.dict(os.environ):  # --cpus is for all that this process starts
        assert compare.main(["digits", "seed=99", "--name", "x", "--storage", "kept", "--cpus", "1"]) == 1
    error = capsys.readouterr().err
    assert "error: nothing runs in this test; everything measured is in" in error
    assert error.endswith("resume: python -m tunediff.compare --resume x --cpus 1 --storage kept\n")
    assert not [path for path in Path("kept").iterdir() if path.name != "x"]


# ------------------------------------------------------------------------------------------------------ from end to end
class Slot:
    """Takes notes, and that is all."""

    def __init__(self):
        self.notes = []
        self.note = self

    def options(self, name):
        return self

    def remote(self, words):
        self.notes.append(words)


@pytest.fixture
def slot(monkeypatch):
    """Runs end at once: A at about 2, B at about 1, or as `ends` says by trial."""
    from tunediff.tuning import trial

    slot, noise = Slot(), np.random.default_rng(0)
    slot.ends = {}

    @contextlib.contextmanager
    def one_slot(folder, share, address, greet, configs):
        asked = share(resources.local())
        greet(None)
        yield types.SimpleNamespace(prefix="slot-", actors=[slot], pool=Pool(asked), tell=lambda say: None)

    def run_trial_on_slot(spec):
        journal = spec.begin()
        value = {"A": 2.0, "B": 1.0}[spec.drawn["side"]] * math.exp(0.05 * noise.normal())
        journal.point(point(4, spec.budget.seconds, frechet=value, label="FD (classifier)"))
        yield {}
        if (status := slot.ends.get(spec.name, "ok")) is KeyboardInterrupt:
            raise KeyboardInterrupt
        journal.end(status if isinstance(status, End) else End(status, "" if status == "ok" else "needs 9 GiB"))

    monkeypatch.setattr(experiment, "one_slot", one_slot)
    monkeypatch.setattr(trial, "run_trial_on_slot", run_trial_on_slot)
    return slot


def test_pairs_run_until_it_is_decided(slot, capsys):
    assert compare.main(["digits", "loader.batch_size=64", "--budget", "20s", "--name", "x"]) == 0
    out = capsys.readouterr().out
    assert "runs: at most 12 pairs × 2 × 20s training" in out
    assert "data: 1,797 images at 8×8 (digits)" in out
    assert re.search(r"\] cost: at most 8m00s of training, .* of evaluation \(.* per run\)\n", out)
    assert re.search(r"\] wall-clock: about \S+ with 12 pairs, about \S+ with 3\n", out)
    assert out.count("after 1 pair: ") == out.count("after 2 pairs: ") == out.count("after 3 pairs: ") == 1
    assert "verdict: better\n" in out
    assert slot.notes[:2] == [
        "A seed 500",
        f"A seed 500  FD (classifier) {slot.notes[1].split()[5]} at 20.0 s  3 images/s",
    ]
    assert [words for words in slot.notes if len(words.split()) == 3][:4] == [
        "A seed 500", "B seed 500", "B seed 501", "A seed 501",
    ]  # fmt: skip


def test_compare_warns_once_of_runs_on_different_hardware(slot, capsys, monkeypatch):
    from tunediff.core.journal import Journal

    point_of = Journal.point

    def with_worker(journal, *given):
        gpu = "A100" if journal.folder.name == "t0000" else "H100"
        journal.write("worker", device=gpu, threads=1, environment={"gpus": [f"{gpu}, 400.00 W"]})
        return point_of(journal, *given)

    monkeypatch.setattr(Journal, "point", with_worker)
    assert compare.main(["digits", "loader.batch_size=64", "--budget", "20s", "--name", "x"]) == 0
    (warning,) = (line for line in capsys.readouterr().out.splitlines() if "runs on" in line)
    assert "WARNING: A seed 500 ran on A100 (400 W), B seed 500 runs on H100 (400 W): what they" in warning


def test_an_interrupted_one_goes_on_where_it_was(slot, capsys):
    slot.ends = {"t0002": KeyboardInterrupt}
    assert compare.main(["digits", "loader.batch_size=64", "--name", "x"]) == 130
    error = capsys.readouterr().err
    assert error.endswith("resume: python -m tunediff.compare --resume x\n")
    before = [
        (folder.name, (folder / "journal.jsonl").read_bytes()) for folder in Path("ray_results/x/trials").iterdir()
    ]
    slot.ends = {}
    assert compare.main(["--resume", "x"]) == 0
    out = capsys.readouterr().out
    assert out.count("after 1 pair: ") == 1
    assert "A seed 500" not in out
    for name, content in before:
        if name != "t0002":
            assert (Path("ray_results/x/trials") / name / "journal.jsonl").read_bytes() == content


def test_quiet_says_the_result_and_json_nothing_else(slot, capsys):
    assert compare.main(["digits", "loader.batch_size=64", "--name", "x", "--quiet"]) == 0
    assert capsys.readouterr().out.startswith("comparison: x\n")
    four = ["digits", "loader.batch_size=64", "parallel.workers=2", "--unit", "device", "--name", "y", "--json"]
    assert compare.main(four) == 0
    out = capsys.readouterr().out
    assert json.loads(out)["comparison"] == "y"
    told = pairs.read(Path("ray_results/y"))
    assert [run.budget_s for run in told.runs[0]] == [60.0, 30.0], "two workers share the device-seconds"
    assert told.clock.along == told.runs[0][1].along == "device_s"


def test_a_run_that_fails_ends_it(slot, capsys):
    slot.ends = {"t0003": "oom"}
    assert compare.main(["digits", "loader.batch_size=64", "--name", "x"]) == 12
    out = capsys.readouterr().out
    assert "B seed 501  oom  needs 9 GiB" in out
    assert out.splitlines()[-1] == "B (digits loader.batch_size=64) failed: oom: needs 9 GiB"


def test_a_run_whose_workers_died_runs_again_on_resume(slot, capsys):
    slot.ends = {"t0003": End("error", "the workers died 2 times: killed", process_died=True)}
    assert compare.main(["digits", "loader.batch_size=64", "--name", "x"]) == 12
    slot.ends = {}
    assert compare.main(["--resume", "x"]) == 0
    assert "verdict: better\n" in capsys.readouterr().out


# --------------------------------------------------------------------------------------------------- cost and progress
@pytest.fixture
def one_second(monkeypatch):
    """An evaluation is taken to last a second."""
    monkeypatch.setattr(
        compare_setup, "_evaluation", lambda config, dry_run, say: {"evaluation_s": 1.0, "data": ["data: made up"]}
    )


def test_compare_dry_run_says_the_cost_and_leaves_nothing(one_second, capsys):
    """12 pairs × 2 × (20 s of training + 4 evaluations of 1 s + 2 s) + 15 s, whatever is measured here."""
    points = cfg.baseline("digits").evaluation.points
    words = ["digits", "loader.batch_size=64", "--budget", "20s", "--dry-run"]
    assert compare.main([*words, "--json"]) == 0
    out, error = capsys.readouterr()
    plan = json.loads(out)
    assert error == ""
    validate(plan, "compare-dry-run-output")
    assert (plan["pairs_at_least"], plan["pairs_at_most"], plan["runs_at_most"]) == (3, 12, 24)
    assert plan["training_s_at_most"] == 480
    assert plan["evaluation_s_at_most"] == 24 * points
    assert plan["wall_s_at_most"] == 15 + 24 * (20 + points + 2)
    assert plan["wall_s_at_least"] == 15 + 6 * (20 + points + 2)
    assert plan["changed"] == {"loader.batch_size": 64}
    assert compare.main(words) == 0
    out = capsys.readouterr().out
    assert "cost: at most 8m00s of training, " in out
    last, first = (text.seconds(plan[f"wall_s_at_{end}"]) for end in ("most", "least"))
    assert f"\nwall-clock: about {last} with 12 pairs, about {first} with 3\n" in out, "start-up is assumed"
    assert "WARNING" not in out
    assert not Path("ray_results").exists()


def test_compare_warns_of_load_beside_which_it_timed(monkeypatch, capsys):
    """A shipped workload is timed, a file of one's own is checked before its first run."""
    load = {"other_load_share": 0.63, "disturbed": True}
    warning = (
        "WARNING: other processes use 63% of the cores: "
        "evaluation may be timed too long, and all may take longer while they do"
    )
    monkeypatch.setattr(probe, "before_search", lambda *_, **__: {"data": [], **load})
    words = ["digits", "loader.batch_size=64", "--budget", "20s", "--dry-run"]
    assert compare.main(words) == 0
    assert f"\n{warning}\n" in capsys.readouterr().out
    assert compare.main([*words, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    validate(plan, "compare-dry-run-output")
    assert {key: plan[key] for key in load} == load
    report = {"warnings": [], "unread": [], "evaluation_s": 0.5, "step_s": 0.1, **load}
    monkeypatch.setattr(check, "before_search", lambda *_: report)
    measured = compare_setup._check(cfg.baseline("digits"), "A, digits", print)
    assert measured == {"evaluation_s": 0.5, **load}
    said = []
    report["unread"] = ["loader.batch_size", "width"]
    compare_setup._check(cfg.baseline("digits"), "A, digits", said.append)
    (line,) = said
    assert line.endswith(": train(trial) never reads loader.batch_size, width"), "one line for all of them"
    sides = [cfg.baseline("digits")] * 2
    plan = pair_plan.values(["a", "b"], sides, 12, 20.0, "wall", measured)
    assert warning in pair_plan.lines(plan)
    quiet = pair_plan.values(["a", "b"], sides, 12, 20.0, "wall", {**measured, "disturbed": False})
    assert not any("WARNING" in line for line in pair_plan.lines(quiet))


def test_compare_dry_run_of_a_file_says_that_evaluation_is_not_known(capsys):
    Path("mine.py").write_text(PLAIN)
    assert compare.main(["mine.py", "lr=0.1", "--budget", "1s", "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    validate(plan, "compare-dry-run-output")
    assert (plan["evaluation_s"], plan["evaluation_is_known"]) == (None, False)
    assert compare.main(["mine.py", "lr=0.1", "--budget", "1s", "--dry-run"]) == 0
    assert "of training, evaluation is not known\n" in capsys.readouterr().out


def test_compare_dry_run_refuses_what_a_run_would(capsys):
    assert "is what A is here" in refused(capsys, "digits", "digits", "--dry-run")
    assert "--resume: takes both sides" in refused(capsys, "--resume", "gone", "--dry-run")


def test_compare_json_tells_progress_and_cost_on_stderr(slot, one_second, capsys):
    assert compare.main(["digits", "loader.batch_size=64", "--budget", "20s", "--name", "x", "--json"]) == 0
    out, error = capsys.readouterr()
    assert json.loads(out)["verdict"] == "better"
    assert re.search(r"^\[ +\d+s\] cost: at most 8m00s of training", error, re.M)
    assert re.search(r"^\[ +\d+s\] A seed 500  FD \(classifier\) [\d.]+ at 20.0 s", error, re.M)
    assert "after 3 pairs: " in error
    assert compare.main(["digits", "loader.batch_size=64", "--name", "y", "--json", "--quiet"]) == 0
    assert capsys.readouterr().err == ""


def test_compare_progress_jsonl_is_an_object_per_line_on_stderr(slot, one_second, capsys):
    words = ["digits", "loader.batch_size=64", "--budget", "20s", "--name", "x", "--progress", "jsonl"]
    assert compare.main(words) == 0
    out, error = capsys.readouterr()
    assert out.startswith("comparison: x\n")
    events = [json.loads(line) for line in error.splitlines()]
    assert all({"event", "elapsed_s", "phase", "text"} <= event.keys() for event in events)
    starts, ends, looks = ([one for one in events if one["event"] == kind] for kind in ("start", "end", "pair"))
    assert [(one["trial"], one["side"], one["seed"]) for one in starts[:2]] == [
        ("t0000", "A", 500),
        ("t0001", "B", 500),
    ]
    assert len(starts) == len(ends) == 6
    assert {one["status"] for one in ends} == {"ok"}
    assert all(0.5 < one["value"] < 3 for one in ends)
    assert [(one["pairs"], one["verdict"]) for one in looks] == [(1, None), (2, None), (3, "better")]
    assert looks[-1]["ratio_low"] < looks[-1]["ratio"] < looks[-1]["ratio_high"]


def test_changes_of_side_b_replace_knobs_of_a(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(compare_run, "run", lambda options, lines: asked.append(options) or tmp_path)
    run_comparison(("digits", {"optimizer.lr": 1e-3, "seed": 3}, "loader.workers=0"), {"optimizer.lr": 3e-3})
    assert asked[0].words == [
        "digits", "optimizer.lr=0.001", "seed=3", "loader.workers=0", "digits", "seed=3", "loader.workers=0",
        "optimizer.lr=0.003",
    ]  # fmt: skip


def test_words_may_stand_on_both_sides_of_options():
    assert compare.arguments(["a.yaml", "--budget", "5s", "b.yaml", "optimizer.lr=0.1"]).words == [
        "a.yaml", "b.yaml", "optimizer.lr=0.1",
    ]  # fmt: skip
