"""The house: floors are kept, what is shipped is packed, the README's commands exist."""

import ast
import re
import runpy
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = sorted((ROOT / "tunediff").rglob("*.py"))

LAYERS = {
    "tunediff": 7, "tunediff.core": 0, "tunediff.config": 0, "tunediff.search_space": 0,
    "tunediff.data": 1, "tunediff.distributed": 1,
    "tunediff.evaluation": 2, "tunediff.training": 2,
    "tunediff.workloads": 3,
    "tunediff.analysis": 4,
    "tunediff.integrations": 5, "tunediff.models": 5, "tunediff.profiling": 5, "tunediff.tuning": 5,
    "tunediff.report": 6,
    "tunediff.api": 7, "tunediff.cli": 0, "tunediff.compare": 7, "tunediff.doctor": 7, "tunediff.evaluate": 7,
    "tunediff.export": 7, "tunediff.knobs": 7, "tunediff.mcp": 7, "tunediff.profile": 7, "tunediff.sample": 7, "tunediff.search": 7,
    "tunediff.train": 7, "tunediff.__main__": 7,
}  # fmt: skip


def name_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def layer_of(name):
    parts = name.split(".")
    return LAYERS[".".join(parts[:2])]


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_file_imports_only_from_its_own_layer_and_below(path):
    mine = layer_of(name_of(path))
    for name in imports(path):
        if name.startswith("tunediff."):
            known = next((n for n in (name, name.rpartition(".")[0]) if ".".join(n.split(".")[:2]) in LAYERS), None)
            assert known is not None, name
            assert layer_of(known) <= mine, f"{name_of(path)} imports {name}"
        if mine == 0:
            assert name.split(".")[0] not in ("torch", "ray", "optuna"), f"{name_of(path)} imports {name}"
        if mine < 4:
            assert name.split(".")[0] != "ray", f"{name_of(path)} imports {name}"


def test_tables_are_written_where_spreadsheets_find_no_formula():
    """By `core.files.write_csv`, which prefixes text that they would execute."""
    assert [name_of(path) for path in MODULES if re.search(r"to_csv|\bcsv\.(writer|DictWriter)", path.read_text())] == [
        "tunediff.core.files"
    ]


def test_every_package_is_packed():
    packed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {name_of(path) for path in MODULES if path.name == "__init__.py"}
    assert set(packed) == found | {"tunediff.search_spaces"}


def test_every_file_beside_the_code_is_packed():
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    packed = {path for name, of in patterns.items() for one in of for path in ROOT.joinpath(*name.split(".")).glob(one)}
    found = {path for path in (ROOT / "tunediff").rglob("*.*") if path.suffix not in (".py", ".pyc")}
    assert found == packed & found
    assert {path.suffix for path in found} == {".css", ".js", ".json", ".safetensors", ".typed"}


def test_every_dependency_says_what_needs_it():
    text = (ROOT / "pyproject.toml").read_text()
    block = text[text.index("dependencies = [") : text.index("]\n", text.index("ray[default")) + 2]
    for line in block.splitlines()[1:-1]:
        assert re.search(r'",\s+# \S', line), line


def readme_commands():
    return re.findall(r"python -m (tunediff\.\w+)(.*)", (ROOT / "README.md").read_text())


def test_commands_in_the_readme_exist_and_take_their_options(capsys, monkeypatch):
    commands = readme_commands()
    assert {"tunediff.search", "tunediff.train", "tunediff.evaluate", "tunediff.sample", "tunediff.export"} <= {
        name for name, _ in commands
    }
    for name in {name for name, _ in commands}:
        monkeypatch.setattr(sys, "argv", [name, "--help"])
        for module in (name, f"{name}.__main__"):
            monkeypatch.delitem(sys.modules, module, raising=False)
        with pytest.raises(SystemExit, match="^0$"):
            runpy.run_module(name, run_name="__main__")
        text = capsys.readouterr().out
        for option in {o for n, rest in commands if n == name for o in re.findall(r"(?<!\S)(--[a-z-]+)", rest)}:
            assert option in text, f"{name} {option}"


PAGES = [
    ROOT / "README.md",
    ROOT / "examples" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "ray_results").rglob("README.md")),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_points_to_exist(page):
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target
