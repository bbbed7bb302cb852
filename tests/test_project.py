"""Packages import in one direction, what is shipped is packed, the README's commands exist."""

import ast
import functools
import re
import runpy
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = sorted((ROOT / "tunediff").rglob("*.py"))

PACKAGES = (
    "core", "config", "experiment", "search_space", "analysis", "distributed", "data", "training", "evaluation", "workloads",
    "profiling", "models", "tuning", "inspector", "ray_backend", "integrations", "report", "command", "proof", "finished", "api", "", "cli", "doctor", "mcp",
    "compare", "evaluate", "export", "knobs", "profile", "sample", "judging", "search", "train", "verify", "__main__",
)  # fmt: skip
"""Packages and single modules of `tunediff` in order: each imports only those before it. "" is `tunediff` itself."""
KERNEL = {
    "core", "config", "experiment", "search_space", "analysis", "distributed", "data", "training", "profiling", "tuning",
}  # fmt: skip
"""What trains, decides and starts runs; the other packages stand on it, and what it needs of them is handed to it."""
LOGGERS = {"tunediff.api"}
"""Strings that are names of loggers."""
SHIPPED = {"tunediff.workloads.diffusion", "tunediff.workloads.classification"}
"""Workloads, which are imported by the names that users give."""
UPWARD = {
    "tunediff.api.search -> export",
    "tunediff.report.__main__ -> cli",
    "tunediff.ray_backend.cluster -> ",
}
"""Imports against the order that are left, to be removed; also those inside functions or for types only."""


def name_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


NAMES = {name_of(path): path for path in MODULES}


@functools.cache
def imports(module):
    """Return the names of the modules that a module imports or names in a string, from packages of others too."""
    found = set()
    tree = ast.parse(NAMES[module].read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value.partition(":")[0]  # `package.module:function`
            found |= {name} & NAMES.keys() - {"tunediff", *LOGGERS, *SHIPPED}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in NAMES else node.module for name in full}
    return found


def package_of(module):
    return module.partition(".")[2].partition(".")[0]


def upward():
    for module in NAMES:
        mine = PACKAGES.index(package_of(module))
        for name in sorted(imports(module)):
            if name.partition(".")[0] == "tunediff" and PACKAGES.index(package_of(name)) > mine:
                yield f"{module} -> {package_of(name)}"


def circles():
    """Return the sets of modules that can be reached from each other, as sorted tuples."""
    reachable = {module: imports(module) & NAMES.keys() - {module, "tunediff"} for module in NAMES}
    for middle in NAMES:  # Warshall's transitive closure
        for module, reached in reachable.items():
            if middle in reached:
                reachable[module] = reached | reachable[middle]
    return {
        tuple(sorted({module} | {other for other in reached if module in reachable[other]}))
        for module, reached in reachable.items()
        if module in reached
    }


def test_packages_import_only_those_before_them():
    assert set(upward()) <= UPWARD


def test_the_kernel_imports_nothing_that_hangs_on_it():
    found = {(module, name) for module in NAMES if package_of(module) in KERNEL for name in imports(module)}
    ours = {(module, name) for module, name in found if name.startswith("tunediff.")}
    assert {f"{module} -> {name}" for module, name in ours if package_of(name) not in KERNEL} == set()


def test_no_modules_import_each_other():
    assert circles() == set()


@pytest.mark.parametrize(
    ("package", "before"), [("torch", "distributed"), ("optuna", "analysis"), ("ray", "ray_backend")]
)
def test_low_packages_are_imported_without_torch_optuna_and_ray(package, before):
    low = [module for module in NAMES if PACKAGES.index(package_of(module)) < PACKAGES.index(before)]
    assert [module for module in low if package in {name.partition(".")[0] for name in imports(module)}] == []


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
    assert {path.suffix for path in found} == {".css", ".html", ".json", ".safetensors", ".typed"}


def test_every_dependency_says_what_needs_it():
    text = (ROOT / "pyproject.toml").read_text()
    block = text[text.index("dependencies = [") : text.index("]\n", text.index("ray[default")) + 2]
    for line in block.splitlines()[1:-1]:
        assert re.search(r'",\s+# \S', line), line


def readme_commands():
    """Yield the words that ask each command in the README for its help, and the options that it is given there."""
    for name, rest in re.findall(
        rf"tunediff[. ]({'|'.join(filter(None, PACKAGES))})\b(.*)", (ROOT / "README.md").read_text()
    ):
        options = re.findall(r"(?<!\S)(--[a-z-]+)", re.sub(r"'.*?'|#.*", "", rest))
        yield (f"tunediff.{name}", *["--run="] * ("--run" in options), "--help"), options


def test_commands_in_the_readme_exist_and_take_their_options(capsys, monkeypatch, called_as):
    given = {}
    for words, options in readme_commands():
        given.setdefault(words, set()).update(options)
    assert {"search", "train", "evaluate", "sample", "export"} <= {name.partition(".")[2] for name, *_ in given}
    assert ("tunediff.compare", "--run=", "--help") in given
    for (name, *words), options in given.items():
        called_as(name, *words)
        for module in (name, f"{name}.__main__"):
            monkeypatch.delitem(sys.modules, module, raising=False)
        with pytest.raises(SystemExit, match="^0$"):
            runpy.run_module(name, run_name="__main__")
        text = capsys.readouterr().out
        for option in options:
            assert re.search(rf"{option}\b", text), f"{name} {option}"


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
