"""Every command that is printed runs when it is pasted, from folders and for names that a shell would take apart."""

import html
import json
import re
import shlex
from pathlib import Path

import optuna
import pytest

from tests import searches
from tests.report.conftest import plain  # noqa: F401
from tests.test_models import search_folder
from tunediff import compare, evaluate, export, search, search_space
from tunediff.__main__ import main
from tunediff.api import train_run
from tunediff.core import text
from tunediff.core.files import study_url
from tunediff.experiment.model import seconds_of
from tunediff.report import reading
from tunediff.tuning import optuna_proposer

NAME, STORAGE = "grün & 'blau' [50%]", "meine Nächte #1?"


@pytest.fixture
def storage(tmp_path, monkeypatch, probe_says):
    """Of searches; commands are typed in the folder above it."""
    here = tmp_path / "Jürgens Ordner"
    (here / STORAGE).mkdir(parents=True)
    monkeypatch.chdir(here)
    for name, result in (
        ("run", ""),
        ("result", {"metric": "loss", "value": 0.5}),
    ):  # what comes before may not understand
        monkeypatch.setattr(train_run, name, lambda *_, result=result: result)
    probe_says({})
    return here / STORAGE


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.9995, "0.9995"), (0.9999, "0.9999"), (0.999999, "0.999999"), (0.1, "0.1"), (1e-5, "1e-05"), (256.0, "256"),
        (0.0015625, "0.0015625"), (0.002289851460477038, "0.00229"), (0.9998123456789012, "0.999812"),
        (51234.56789012345, "51235"), (0.30000000000000004, "0.3"), (float("nan"), "nan"), (0.0, "0"), (True, "True"),
        ([0.9, 0.9999], "[0.9, 0.9999]"),
    ],
)  # fmt: skip
def test_knob_values_are_short_and_mean_what_was_chosen(value, words):
    """A `beta2` of 0.9999 is not printed as 1, which the knob refuses."""
    assert text.knobs({"optimizer.beta2": value}) == f"optimizer.beta2={words}"


def interrupted(*_):
    raise KeyboardInterrupt


def pasted(line):
    """The exit code of a printed line."""
    program, *words = shlex.split(line)
    assert program == "tunediff"
    return main(words)


def commands(text):
    return re.findall(r"^.*?(tunediff [a-z]+ .*)$", text, re.M)


def test_what_a_search_ends_with(storage, capsys):
    searches.night(storage / NAME)
    files = reading.of_folder(storage / NAME).files
    assert pasted(files["report"]) == 0
    assert pasted(files["export"]) == 0
    told = commands(capsys.readouterr().out) + commands((storage / NAME / "best.yaml").read_text())
    assert len(told) == 2
    assert [pasted(line) for line in told] == [0, 0]


def test_what_a_report_holds(storage, instead_of_trials, plain):  # noqa: F811
    instead_of_trials(interrupted)
    searches.night(storage / NAME)
    assert pasted(text.command("report", NAME, storage=storage)) == 0
    page = html.unescape((storage / NAME / "report.html").read_text())
    told = [line for part in re.findall(r"<(pre|code)[^>]*>(.*?)</\1>", page, re.S) for line in commands(part[1])]
    codes = {line.split()[1]: pasted(line) for line in told}
    assert codes == {"search": 130, "export": 0, "train": 0, "report": 0}
    assert (storage / f"{NAME}-again").is_dir(), "beside the first"


@pytest.mark.parametrize("command", [search, compare])
def test_what_an_interruption_says(storage, instead_of_trials, capsys, command):
    instead_of_trials(interrupted)
    asked = ["digits"] if command is search else ["digits", "seed=99"]
    assert command.main([*asked, "--name", NAME, "--storage", STORAGE]) == 130
    (line,) = commands(capsys.readouterr().err)
    assert pasted(line) == 130
    assert commands(capsys.readouterr().err) == [line]


def test_the_default_storage_goes_without_saying(storage):
    assert text.command("report", "night", storage=Path("ray_results")) == "tunediff report night"
    assert text.command("report", "night", storage=Path.cwd() / "ray_results") == "tunediff report night"
    assert text.command("report", "night", storage=storage) == f"tunediff report night --storage '{STORAGE}'"


def test_the_study_is_where_it_is_said_to_be(storage):
    path = storage / "study.db"
    optuna_proposer.SearchStudy(search_space.parse(searches.FILE, "x.yaml"), 0).write(path)
    assert path.is_file()
    assert optuna.get_all_study_names(study_url(path)) == ["tunediff"]


@pytest.mark.nightly
def test_what_a_measurement_was_made_with(storage):
    search_folder(storage / NAME)
    words = [NAME, "--storage", STORAGE, *"--images 8 --sampler ddim --steps 2 --metrics fd --out ü.json".split()]
    assert evaluate.main([*words]) == 0
    said = json.loads((written := Path("ü.json")).read_text())["command"]
    written.unlink()
    assert pasted(said) == 0
    assert written.is_file()


def test_a_pipeline_is_loaded_from_where_it_lies(storage, capsys):
    search_folder(storage / NAME)
    assert export.main([NAME, "--storage", STORAGE, "--diffusers", "--out", "mein 'Modell'"]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert eval(re.search(r"from_pretrained\((.*?)\)\(", line)[1]) == "mein 'Modell'"


@pytest.mark.parametrize("command", [search, compare])
@pytest.mark.parametrize("name", ["x" * 300, "ü" * 101, "a\nb", "-x", "", ".", "..", "a/b", "\udcff", "tab\t"])
def test_names_that_are_refused(storage, capsys, command, name):
    asked = ["digits"] if command is search else ["digits", "seed=99"]
    assert command.main([*asked, f"--name={name}"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: --name: '")
    assert said.endswith(
        "is not allowed; allowed: a plain folder name of at most 200 bytes, without / and \\, that begins with neither . nor -\n"
    )
    assert (said.count("\n"), len(said) < 250) == (1, True)


@pytest.mark.parametrize("name", ["ü.yaml", "-x.yaml", ".yaml", f"{'x' * 240}.yaml"])
def test_a_search_is_named_after_its_file(storage, instead_of_trials, capsys, name):
    instead_of_trials(interrupted)
    Path(name).write_text((search_space.SHIPPED / "digits.yaml").read_text())
    assert search.main([f"./{name}"]) == 130
    assert pasted(commands(capsys.readouterr().err)[0]) == 130


def test_durations_are_read_again():
    for value in (0.25, 20.0, 1 / 3, 3.6e12):
        assert seconds_of(text.format_exact(value)) == pytest.approx(value)
