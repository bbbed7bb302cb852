"""The documentation: the site builds, its commands exist, its notebook runs."""

import json
import re
from pathlib import Path

import pytest

from benchmarks import page
from tests.json_schemas import OUTPUTS
from tunediff import config as cfg
from tunediff import knobs
from tunediff.__main__ import COMMANDS, module_of
from tunediff.core import text

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMAND = re.compile(r"^(?:uv run )?(?:python -m tunediff\.|tunediff )([a-z]+)\b(.*?)(?:  +#.*)?$", re.M)


def commands():
    """Commands in blocks of shell, as (page, command, its words)."""
    for file in PAGES:
        for block in re.findall(r"^```sh\n(.*?)^```", file.read_text(), re.M | re.S):
            for name, rest in COMMAND.findall(block.replace("\\\n", " ")):
                yield file.relative_to(ROOT), name, rest


def test_options_in_the_documentation_exist(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    helps, found = {}, list(commands())
    assert len({name for _, name, _ in found}) > 6
    for file, name, rest in found:
        assert name in COMMANDS, f"{file}: {name}"
        variant = ["--run", "x"] if "--run" in rest else []  # compares commands, with options of its own
        if (name, *variant) not in helps:
            module = module_of(name)
            with pytest.raises(SystemExit):
                module.main([*variant, "--help"])
            helps[name, *variant] = capsys.readouterr().out
        for option in re.findall(r"(?<!\S)--[a-z-]+", re.sub(r"'[^']*'", "", rest)):
            assert re.search(rf"{option}\b", helps[name, *variant]), f"{file}: {name} {option}"


@pytest.mark.nightly
def test_site_builds_without_a_warning(tmp_path, monkeypatch, caplog):
    pytest.importorskip("mkdocs")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    monkeypatch.setenv("COLUMNS", "110")
    build(load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(tmp_path)))
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == []
    assert "optimizer.lr" in (tmp_path / "reference" / "knobs-diffusion.html").read_text()
    assert "value_when_chosen" in (tmp_path / "reference" / "outputs.md").read_text()
    assert "--dry-run" in (tmp_path / "reference" / "commands.html").read_text()
    assert "run_search" in (tmp_path / "reference" / "api.html").read_text()


def test_llms_txt_has_its_form_and_names_pages_that_exist():
    lines = (ROOT / "docs" / "llms.txt").read_text().splitlines()
    assert lines[0] == "# tunediff"
    assert lines[2].startswith("> tunediff finds the training configuration")
    links = [re.fullmatch(r"- \[[^\]]+\]\(([^)]+)\)(: .+)?", line)[1] for line in lines if line.startswith("- ")]
    assert len(links) > 10
    assert [link for link in links if not (ROOT / "docs" / link).is_file()] == []


# ---------------------------------------------------------------------- the page of benchmarks holds what its rows give
def test_tables_of_the_page_are_made_of_the_kept_rows():
    text = page.PAGE.read_text()
    assert text.count("<!-- end -->") == 4
    assert page.filled(text) == text


# --------------------------------- the reference of knobs: what is listed, and in which words a wrong prefix is refused
def listed(capsys, *words):
    assert knobs.main([*words, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["schema"] == text.SCHEMA
    return content["knobs"]


@pytest.mark.parametrize("workload", ["digits", "cifar10", "digits_classifier"])
def test_every_knob_of_a_workload_is_listed_with_help(capsys, workload):
    entries = listed(capsys, "--workload", workload)
    assert list(dict.fromkeys(entry["name"] for entry in entries)) == list(cfg.baseline(workload).schema.knobs)
    assert [entry["name"] for entry in entries if not entry["help"]] == []


def test_a_prefix_lists_one_section_or_one_knob(capsys):
    names = {entry["name"] for entry in listed(capsys, "loader")}
    assert {"loader.batch_size", "loader.workers"} <= names
    assert all(name.startswith("loader.") for name in names)
    rate = listed(capsys, "optimizer.lr")[0]
    assert (rate["low"], rate["low_is_allowed"], rate["high"], rate["high_is_allowed"]) == (0.0, False, 10.0, True)
    assert (rate["default"], rate["baseline"]) == (2e-4, 1e-3)


def test_a_knob_that_union_members_share_is_listed_for_each_default(capsys):
    shares = listed(capsys, "timesteps.uniform_share")
    assert len({entry["default"] for entry in shares}) == len(shares) > 1
    members = [member for entry in shares for member in entry["belongs_to"]["values"]]
    having = cfg.baseline("digits").schema.members["timesteps.name"].items()
    assert sorted(members) == sorted(name for name, names in having if "timesteps.uniform_share" in names)


def test_knobs_of_a_users_file_have_its_bounds_and_search(capsys, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\n"
        "from typing import Annotated\n"
        "from tunediff import Metric, Range\n"
        "OBJECTIVE = Metric('accuracy', 'max')\n"
        "@dataclass(frozen=True)\n"
        "class Knobs:\n"
        "    lr: Annotated[float, Range(1e-4, 1e-2, log=True)] = 1e-3\n"
        '    """Learning rate."""\n'
        "def train(trial): ...\n"
    )
    (entry,) = listed(capsys, "lr", "--workload", str(tmp_path / "mine.py"))
    assert entry["help"] == "Learning rate."
    assert entry["search"] == {"low": 1e-4, "high": 1e-2, "log": True}


def test_text_names_bounds_defaults_and_the_member_that_a_knob_belongs_to(capsys):
    assert knobs.main(["timesteps.history"]) == 0
    line = capsys.readouterr().out.splitlines()[0]
    assert line == (
        "timesteps.history: a whole number of at least 1 and at most 100; default 10; "
        "only with timesteps.name = loss_second_moment"
    )


def test_every_command_with_json_has_a_schema():
    printing = {*COMMANDS, "result", "search-dry-run", "compare-dry-run"}
    printing -= {"search", "compare", "judge", "mcp"}  # the tools of mcp return what the others print
    assert {f"{name}-output" for name in printing} == {path.stem for path in OUTPUTS.glob("*.json")}
