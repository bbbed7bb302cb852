"""Comparing two configurations, without a cluster: what is asked, what is refused, what pairs of runs say."""

import base64
import contextlib
import json
import math
import subprocess
import types
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import yaml

from tests import searches
from tests.helpers import point
from tests.report.pages import Elements, rows, words
from tunediff import compare, record
from tunediff import config as cfg
from tunediff.record import End
from tunediff.report import pairs as report
from tunediff.results import pairs
from tunediff.tuning import experiment, resources

PLAIN = (Path(__file__).parent / "users" / "plain.py").read_text()
CLOSE = {"A": [2.0, 2.2, 1.9, 2.1], "B": [2.05, 2.1, 1.95, 2.12]}
BETTER = {"A": [2.0, 2.2, 1.9], "B": [1.0, 1.08, 0.96]}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Two cores; what would start Ray does not."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(resources, "local", lambda: resources.Machine(2, 0))

    @contextlib.contextmanager
    def workers(*_):
        raise experiment.StoppedError("nothing runs in this test")
        yield

    monkeypatch.setattr(experiment, "workers", workers)


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


def made(values, a="digits", b=("digits", "loader.batch_size=64"), statuses=(), folder=Path("ray_results/x"), **more):
    """A comparison whose runs are made up: `values` by side; `statuses` by (side, pair)."""
    folder = folder.absolute()
    a, b = ([side] if isinstance(side, str) else list(side) for side in (a, b))
    for place, (side, given) in enumerate(zip("AB", (a, b), strict=True)):
        config = cfg.take_along(compare._side(given, folder), folder / side)
        (folder / side).mkdir(parents=True, exist_ok=True)
        (folder / side / "config.yaml").write_text(cfg.dump(config, folder=folder / side))
        metric = cfg.of(config).objective.name
        for number, value in enumerate(values[side]):
            journal = record.Journal(folder / "trials" / f"t{2 * number + place:04d}")
            seeded = cfg.override(config, {"seed": config.seed + number})
            journal.write(
                "start", name=journal.folder.name, number=2 * number + place, config=cfg.flat(seeded), budget_s=20.0,
                drawn={"side": side, "seed": seeded.seed}, fingerprint=cfg.fingerprint(seeded),
                environment={"device": "cpu", "cpu": "slow one", "cpu_cores": 2, "versions": {"torch": "2.15"}},
            )  # fmt: skip
            status = dict(statuses).get((side, number + 1), "ok")
            label = {"label": "FD (classifier)"} if metric == "frechet" else {}
            for index in range(1, 5 if status == "ok" else 2):
                on_the_way = value + (4 - index) * abs(value) / 2 * (1 if metric == "frechet" else -0.2)
                journal.write("point", index=index, train_s=5.0 * index, samples=1000 * index, steps=10 * index,
                              samples_per_s=200.0, seconds={"train": 5.0 * index}, **{metric: on_the_way}, **label)  # fmt: skip
            journal.write("end", status=status, reason="" if status == "ok" else "needs 9 GiB", seconds={"train": 20.0})
    content = {"a": " ".join(a), "b": " ".join(b), "budget_s": 20.0, "pairs": 12, "within": None, "compile": "charged"}
    (folder / pairs.FILE).write_text(yaml.safe_dump(content | more))
    return folder


def told(capsys, *options):
    """Exit code and output of the command on a comparison that needs no further run."""
    code = compare.main(["--resume", "x", *options])
    return code, capsys.readouterr().out


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
        (["digits", "seed=7", "digits", "seed=19"], {"seed": 1007}, {"seed": 1019}),
    ],
)
def test_what_is_asked(given, a, b):
    config = cfg.override(cfg.baseline("digits"), {"loader.batch_size": 64})
    Path("other.yaml").write_text(cfg.dump(config))
    found = asked(*given, "--budget", "2m", "--pairs", "5", "--resolution", "2%", "--compile", "free")
    base = cfg.override(cfg.baseline("digits"), {"seed": 1000})  # seeds that no search has used
    assert [cfg.differences(config, base) for config in found.configs] == [a, b]
    assert (found.budget_s, found.most, found.within, found.compile_charged) == (120, 5, pytest.approx(0.02), False)
    assert (found.runs, found.over) == ([], False)


def test_without_options():
    found = asked("digits", "optimizer.lr=2e-3")
    assert found.asked == ("digits", "digits optimizer.lr=2e-3")
    assert (found.budget_s, found.most, found.within, found.compile_charged) == (60, 12, None, True)


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


def test_a_preset_of_another_revision(repository):
    Path("mine.py").write_text(PLAIN.replace('{"width": 16}', '{"width": 4}'))
    found = asked("mine.py:large@HEAD", "mine.py:large", "lr=0.1")
    assert [config.knobs.width for config in found.configs] == [16, 4]
    assert found.changed == {"width": 4, "lr": 0.1}


def test_a_file_of_a_package_brings_its_package(repository):
    Path("pkg").mkdir()
    for name, text in (("__init__", ""), ("side", "SIDE = 'old'\n"), ("mine", f"from pkg.side import SIDE\n{PLAIN}")):
        Path(f"pkg/{name}.py").write_text(text)
    git("add", ".")
    git("commit", "-qm", "second")
    Path("pkg/side.py").write_text("SIDE = 'new'\n")
    found = asked("pkg/mine.py@HEAD", "pkg/mine.py")
    assert [cfg.of(config).code.SIDE for config in found.configs] == ["old", "new"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("mine.py@gone", "error: mine.py@gone: fatal: not a valid object name: gone"),
        ("new.py@HEAD", "error: new.py@HEAD: no such file in that revision"),
        ("nowhere/mine.py@HEAD", "error: nowhere/mine.py@HEAD: "),
    ],
)
def test_revisions_that_are_not_there(repository, capsys, given, message):
    Path("new.py").write_text(PLAIN)
    assert message in refused(capsys, given, "mine.py")


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
        (["nowhere.yaml", "digits"], "nowhere.yaml: cannot be read: No such file"),
        (["nowhere.py", "digits"], "nowhere.py: no such file in"),
        (["digits", "digtis"], "digtis: cannot be read"),
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
    found = asked("digits", "compile.mode=reduce-overhead", "--address", "far:10001")
    assert found.configs[1].compile.mode == "reduce-overhead"


def test_a_name_that_is_taken(capsys):
    folder = made(BETTER)
    assert compare.main(["digits", "seed=99", "--name", "x"]) == 2
    expected = f"error: --name: 'x' exists in {folder.parent}; choose another name, or --resume x\n"
    assert capsys.readouterr().err == expected


def test_a_folder_that_cannot_be_written(capsys):
    Path("occupied").write_text("")
    assert compare.main(["digits", "seed=99", "--storage", "occupied"]) == 2
    assert capsys.readouterr().err.startswith("error: --storage: ")


def test_a_damaged_folder(capsys):
    folder = made(BETTER)
    (folder / pairs.FILE).write_text("a: digits\n")
    assert compare.main(["--resume", "x"]) == 2
    assert "compare.yaml: is damaged: b, budget_s, compile, pairs, within is missing" in capsys.readouterr().err


def test_what_was_interrupted_can_be_resumed(capsys):
    assert compare.main(["digits", "seed=99", "--name", "x", "--storage", "kept"]) == 1
    error = capsys.readouterr().err
    assert "error: nothing runs in this test; everything measured is in" in error
    assert error.endswith("resume: python -m tunediff.compare --resume x --storage kept\n")
    assert not [path for path in Path("kept").iterdir() if path.name != "x"]


# ------------------------------------------------------------------------------------------------------------- verdict
UP = {"a": "digits_classifier", "b": ("digits_classifier", "loader.batch_size=64")}
CASES = {
    "falls, better": (BETTER, {}, "better", 0, "decided"),
    "falls, worse": ({"A": BETTER["B"], "B": BETTER["A"]}, {}, "worse", 11, "decided"),
    "falls, not": (CLOSE, {}, "not told apart", 10, "hopeless"),
    "falls below 0": ({"A": [0.1, -0.1, 0.0], "B": [-9.0, -9.1, -9.05]}, {}, "better", 0, "decided"),
    "rises, better": ({"A": [0.8, 0.81, 0.79], "B": [0.9, 0.915, 0.888]}, UP, "better", 0, "decided"),
    "rises, worse": ({"A": [0.9, 0.915, 0.888], "B": [0.8, 0.81, 0.79]}, UP, "worse", 11, "decided"),
    "equal": ({"A": [2.0, 2.2, 1.9], "B": [2.001, 2.202, 1.9015]}, {"within": 0.02}, "not told apart", 10, "equal"),
    "spent": (
        {"A": [2.0, 2.0, 2.0, 2.0], "B": [1.7, 2.0, 1.6, 1.9]}, {"pairs": 4}, "not told apart", 10, "spent",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("values", "options", "verdict", "code", "state"), CASES.values(), ids=CASES)
def test_the_verdict_and_its_exit_code(capsys, values, options, verdict, code, state):
    made(values, **options)
    assert told(capsys, "--json")[0] == code
    found = pairs.read(Path("ray_results/x").absolute())
    assert (found.verdict, found.look.state) == (verdict, state)
    assert found.over


@pytest.mark.parametrize(("side", "name"), [("A", "A (digits)"), ("B", "B (digits loader.batch_size=64)")])
def test_a_run_that_failed(capsys, side, name):
    made({"A": [2.0, 2.1], "B": [1.0, 1.1]}, statuses={(side, 2): "oom"})
    code, out = told(capsys)
    assert code == 12
    assert "verdict: failed" in out
    assert f"{name} failed: oom: needs 9 GiB" in out
    page = words(Path("ray_results/x/report.html").read_text())
    assert f"{name} failed: oom: needs 9 GiB" in page
    assert "oom" in page[page.index("ahead") :]  # in the place of its value


def test_a_share_of_what_falls_below_0(capsys):
    """2 % of about 5 is 0.1 there, in units."""
    values = {"A": [-5.0, -5.2, -4.9], "B": [-5.001, -5.199, -4.9005]}
    assert pairs.read(made(values, within=0.02)).look.state == "equal"
    assert pairs.read(made(values, within=2e-4)).look.state != "equal"


# -------------------------------------------------------------------------------------------------------------- output
def test_the_result_as_json(capsys):
    made(BETTER)
    code, out = told(capsys, "--json")
    said = json.loads(out)
    ratio = scipy.stats.gmean(np.array(BETTER["B"]) / np.array(BETTER["A"]))
    assert (code, said["verdict"], said["pairs"], said["runs"]) == (0, "better", 3, 6)
    assert said["ratio"] == pytest.approx(ratio)
    assert said["ratio_low"] < ratio < said["ratio_high"]
    assert (said["a"], said["b"]) == ("digits", "digits loader.batch_size=64")
    assert said["a_FD (classifier)"] == "2.03 ± 0.15"
    assert said["training_s"] == 120
    assert said["stopped"] == "decided"
    assert Path(said["report"]).is_file()
    # What one run each tells: Student's t with the deviation of a single pair.
    sd = np.log(np.array(BETTER["B"]) / np.array(BETTER["A"])).std(ddof=1)
    assert said["one_run_each_tells"] == pytest.approx(math.expm1(scipy.stats.t.ppf(0.975, 2) * sd))


def test_the_result_in_words(capsys):
    made(BETTER)
    out = told(capsys)[1].replace("\N{NO-BREAK SPACE}", " ")
    assert "verdict: better" in out
    said = out.splitlines()[-2:]
    assert said[0].startswith(
        "B (digits loader.batch_size=64) is better than A (digits) by more than the noise of 3 pairs of runs: "
        "FD (classifier) 0.499 ("
    )
    assert said[1].startswith("One run each tells only differences above ")
    assert said[1].endswith("; B was ahead in 3 of 3 pairs.")


def test_the_words_of_a_difference_that_is_not_told(capsys):
    made(CLOSE)
    said = told(capsys)[1].replace("\N{NO-BREAK SPACE}", " ").splitlines()[-3:]
    assert said[0].startswith("B (digits loader.batch_size=64) is not told apart from A (digits) by 4 pairs of runs: ")
    assert said[1].endswith("; more pairs, up to 12, would most likely not tell them apart either.")
    assert said[2].endswith("B was ahead in 1 of 4 pairs.")


def test_differences_of_an_accuracy_are_in_its_units(capsys):
    made(CASES["rises, better"][0], **UP)
    out = told(capsys)[1]
    assert "difference: 0.101" in out
    assert "accuracy +0.101 (" in out
    assert "beside A's" in out


def test_one_pair_tells_nothing():
    found = pairs.read(made({"A": [2.0], "B": [1.0]}))
    assert report.sentences(found) == ["1 pair so far: too few to tell anything."]
    assert report.so_far(found) == "after 1 pair: FD (classifier) 0.500 times A's: too few to tell"
    assert (found.over, found.one_run_tells) == (False, None)


def test_the_page(capsys):
    folder = made(BETTER)
    told(capsys)
    text = (folder / "report.html").read_text()
    page = words(text)
    assert "B (digits loader.batch_size=64) is better than A (digits)" in page
    assert "loader.batch_size 128 64" in page
    assert "20s of training per run, judged by FD (classifier); slow one" in page
    for tag, given in Elements(text).found:
        if tag == "a" and not given["href"].startswith("#"):
            assert (folder / given["href"]).is_file(), given["href"]
    table = rows(folder / "report" / "pairs.csv")
    assert [(row["pair"], row["a_seed"], row["b_seed"], float(row["b_frechet"])) for row in table] == [
        ("1", "1000", "1000", 1.0), ("2", "1001", "1001", 1.08), ("3", "1002", "1002", 0.96),
    ]  # fmt: skip


def test_the_figure_has_plain_numbers(capsys):
    folder = made(BETTER)
    told(capsys)
    image = next(given["src"] for tag, given in Elements((folder / "report.html").read_text()).found if tag == "img")
    drawn = base64.b64decode(image.partition(",")[2]).decode()
    assert "FD (classifier), lower is better" in drawn
    assert "mathdefault" not in drawn


def test_two_files_are_named_as_one_names_them(capsys):
    Path("mine.py").write_text(PLAIN)
    Path("new.py").write_text(PLAIN.replace("AdamW", "SGD"))
    folder = made({"A": [0.8, 0.81, 0.79], "B": [0.9, 0.915, 0.888]}, a="mine.py", b=("new.py", "lr=0.05"))
    told(capsys)
    assert "workload mine.py new.py lr 0.01 0.05" in words((folder / "report.html").read_text())


def test_the_page_shows_changed_lines_and_nothing_that_is_markup(capsys, repository):
    Path("mine.py").write_text((repository / "mine.py").read_text().replace("AdamW", "SGD") + "# <b>bold</b>\n")
    folder = made({"A": [0.8, 0.81, 0.79], "B": [0.9, 0.915, 0.888]}, a="mine.py@HEAD", b=("mine.py", "lr=0.05"))
    told(capsys)
    page = (folder / "report.html").read_text()
    assert "<b>bold" not in page
    said = words(page)
    assert "+ optimizer = torch.optim.SGD(" in said
    assert "lr 0.01 0.05" in said


def test_searches_and_comparisons_share_a_folder(capsys):
    searches.night(Path("ray_results/night").absolute())
    made(BETTER)
    assert compare.main(["--resume", "night"]) == 2
    assert "night: no such comparison in" in (error := capsys.readouterr().err)
    assert error.endswith("there are: x\n")


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
    from tunediff.tuning import rounds

    slot, noise = Slot(), np.random.default_rng(0)
    slot.ends = {}

    @contextlib.contextmanager
    def workers(folder, share, address, warm, greet):
        share(resources.local())
        greet(None)
        yield types.SimpleNamespace(names=("slot",), actors=[slot])

    def follow(name, config, drawn, _, plan):
        journal = record.Journal(plan.experiment / "trials" / name)
        journal.start(config, drawn, plan.budget.seconds, int(name[1:]))
        value = {"A": 2.0, "B": 1.0}[drawn["side"]] * math.exp(0.05 * noise.normal())
        journal.point(point(4, plan.budget.seconds, frechet=value, label="FD (classifier)"))
        yield {}
        if (status := slot.ends.get(name, "ok")) is KeyboardInterrupt:
            raise KeyboardInterrupt
        journal.end(End(status, "" if status == "ok" else "needs 9 GiB"))

    monkeypatch.setattr(experiment, "workers", workers)
    monkeypatch.setattr(rounds.trial, "follow", follow)
    return slot


def test_pairs_run_until_it_is_decided(slot, capsys):
    assert compare.main(["digits", "loader.batch_size=64", "--budget", "20s", "--name", "x"]) == 0
    out = capsys.readouterr().out
    assert "at most 12 pairs × 2 × 20s training" in out
    assert out.count("after 1 pair: ") == out.count("after 2 pairs: ") == out.count("after 3 pairs: ") == 1
    assert "verdict: better\n" in out
    assert slot.notes[:2] == [
        "A seed 1000",
        f"A seed 1000  FD (classifier) {slot.notes[1].split()[5]} at 20.0 s  3 images/s",
    ]
    assert [words for words in slot.notes if len(words.split()) == 3][:4] == [
        "A seed 1000", "B seed 1000", "B seed 1001", "A seed 1001",
    ]  # fmt: skip


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
    assert "A seed 1000" not in out
    for name, content in before:
        if name != "t0002":
            assert (Path("ray_results/x/trials") / name / "journal.jsonl").read_bytes() == content


def test_quiet_says_the_result_and_json_nothing_else(slot, capsys):
    assert compare.main(["digits", "loader.batch_size=64", "--name", "x", "--quiet"]) == 0
    assert capsys.readouterr().out.startswith("comparison: x\n")
    assert compare.main(["digits", "loader.batch_size=64", "--name", "y", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["comparison"] == "y"


def test_a_run_that_fails_ends_it(slot, capsys):
    slot.ends = {"t0003": "oom"}
    assert compare.main(["digits", "loader.batch_size=64", "--name", "x"]) == 12
    out = capsys.readouterr().out
    assert "B seed 1001  oom  needs 9 GiB" in out
    assert out.splitlines()[-1] == "B (digits loader.batch_size=64) failed: oom: needs 9 GiB"
