"""The documentation: the site builds, its commands exist, its notebook runs."""

import re
from pathlib import Path

import pytest

from benchmarks import page
from tunediff.__main__ import COMMANDS, module_of

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
