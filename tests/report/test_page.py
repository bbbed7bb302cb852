"""The report of a search: nothing in a folder can break or abuse it; its files, states and command."""

import contextlib
import json
import re

import markupsafe
import pytest
import yaml

from tests.report.pages import Elements, words, written
from tests.searches import FILE, again, make, write
from tunediff import analysis
from tunediff.report import __main__ as command
from tunediff.report import reading
from tunediff.tuning import sessions

# ------------------------------------------------------------------------------------------- a folder of somebody else
EVIL = "</td><script>alert(1)</script><img src=x onerror=alert(2)>\" onmouseover='alert(3)' $\\frac{1$"


def test_the_page_loads_nothing_runs_no_script_and_shows_content_of_files_as_text(night, rendered):
    space = analysis.read(again(night)).space
    evil = {"drawn": {"loader.batch_size": 64, "optimizer.lr": 1e-3, "precision.amp": "none"}}
    place = write(night, space, 3, curve=((20.0, 4000, 0.5),), label=EVIL, config={"weighting.name": EVIL}, **evil)
    text = (place / "journal.jsonl").read_text()
    (place / "journal.jsonl").write_text(
        text.replace('"precision.amp": "none"}', f'"precision.amp": {json.dumps(EVIL)}}}')
    )
    write(night, space, 4, {"loader.batch_size": 32}, curve=(), status="error", reason=EVIL)
    with (night / "sessions.jsonl").open("a") as file:
        file.write(
            json.dumps(
                {"event": "begin", "time": 5.0, "monotonic_s": 5.0, "command": EVIL, "environment": {"cpu": EVIL}}
            )
            + "\n"
        )
        file.write(json.dumps({"event": "end", "time": 6.0, "monotonic_s": 6.0}) + "\n")
    (night / "experiment.yaml").write_text((night / "experiment.yaml").read_text() + f"# {EVIL}\n")
    (place / "samples.png").write_text(f"<svg onload='alert(4)'>{EVIL}</svg>")
    page = written(night)
    assert re.search(r"t0003 \(.*\) is (best|ahead)", words(page))
    assert markupsafe.escape(EVIL) in page, "it is shown as it is"
    assert "<script>alert" not in page
    assert not re.search(r"https?:|//[a-z]", re.sub(r'src="data:[^"]*"', "", page))
    elements = Elements(page).found
    assert not [attrs for tag, attrs in elements if tag == "script"]
    assert not [attrs for _, attrs in elements if any(name.startswith("on") for name in attrs)]
    assert not [tag for tag, _ in elements if tag in ("link", "iframe", "object", "embed", "base", "form")]
    kinds = {attrs["src"].partition(";")[0] for tag, attrs in elements if tag == "img"}
    assert kinds == {"data:image/svg+xml", "data:image/png"}
    policy = next(attrs["content"] for tag, attrs in elements if attrs.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy
    assert "script-src" not in policy
    assert all(attrs["href"].startswith("#") for tag, attrs in elements if tag == "a")


# --------------------------------------------------------------------------------------------------------------- states
def test_a_search_that_has_just_begun(tmp_path, plain):
    space = make(tmp_path / "night")
    write(tmp_path / "night", space, 0, curve=((5.0, 1000, 8.0),), status=None)
    place = write(tmp_path / "night", space, 1, {"precision.amp": "bf16"}, curve=(), status=None)
    (place / "journal.jsonl").write_text((place / "journal.jsonl").read_text()[:-30])  # half written
    (tmp_path / "night" / "sessions.jsonl").write_text('{"event": "begin", "time": 1000, "command": "x"}\n{"even')
    text = words(written(tmp_path / "night", now=1063.0))
    assert "running, or killed · 0 of 8 trials ended · 2 under way" in text
    assert "last update 1m00s earlier" in text, "its last line was written at 1003"


@pytest.mark.parametrize(("error", "not_begun"), [(KeyboardInterrupt, 0), (None, 5)])
def test_a_search_that_ended_has_left_out_trials_and_an_interrupted_one_has_not(night, error, not_begun):
    with pytest.raises(error) if error else contextlib.nullcontext(), sessions.recorded_session(night, "search"):
        if error:
            raise error
    assert reading.of_folder(night).search.not_begun == not_begun


# --------------------------------------------------------------------------------------------------------- the command
def test_the_command_writes_into_the_given_folder(night, plain, tmp_path, capsys):
    assert command.main(["night", "--storage", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"report: {night / 'report.html'}"
    assert command.main(["night", "--storage", str(tmp_path), "--out", str(tmp_path / "other")]) == 0
    text = words((tmp_path / "other" / "report.html").read_text())
    assert f"tunediff report night --storage {tmp_path}" in text
    assert f"tunediff search {tmp_path}/night/experiment.yaml --name night-again" in text


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda folder: (folder / "experiment.yaml").unlink(), "night: no such search in "),
        (lambda folder: (folder / "experiment.yaml").write_text("search: ["), "is not valid YAML"),
        (lambda folder: (folder / "experiment.yaml").write_text("a: 1\n"), "a: no such key"),
        (lambda folder: (folder / "experiment.yaml").write_bytes(b"\xff\xfe"), "is not a text file in UTF-8"),
        (lambda folder: (folder / "experiment.yaml").write_text(yaml.safe_dump(FILE | {"objective": {"metric": [1]}})), "damaged"),
        (lambda folder: (folder / "baseline.yaml").unlink(), "baseline.yaml: cannot be read"),
    ],
)  # fmt: skip
def test_damaged_folders_are_refused_in_a_line(night, tmp_path, capsys, break_it, message):
    break_it(night)
    assert command.main(["night", "--storage", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ")
    assert not (night / "report.html").exists()


def test_unequal_workers_are_named_in_the_last_lines_and_at_each_trial(night):
    write(night, analysis.read(night).space, 3, {"loader.batch_size": 64}, threads=1)
    page = words(written(night))
    assert "Workers were unequal (slow one, 2 threads; slow one, 1 thread)" in page
    assert "MiB threads" in page
