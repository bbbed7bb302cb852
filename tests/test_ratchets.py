"""Ratchets: what makes the project hard to read may only fall. `python -m tests.test_ratchets` lowers the numbers.

`ratchets.json` holds lines of Python by package, pairs of packages of which one imports the other, and counts of what
CONTRIBUTING.md forbids in anything new. A commit that brings a capability may raise the lines of its package, by hand,
within `TOTALS`.
"""

import ast
import collections
import functools
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILE = Path(__file__).with_name("ratchets.json")
TOTALS = {"tunediff": 38_000, "tests": 30_000}
"""Lines that the two folders may have once the numbers in `ratchets.json` have fallen that far."""
SLACK = 0.01
"""Share by which a number may lie above what is counted, so that not every commit has to lower it."""


@functools.cache
def sources(folder):
    """Return the text of every Python file below a folder of the repository, by path."""
    return {path.relative_to(ROOT): path.read_text() for path in sorted((ROOT / folder).rglob("*.py"))}


def package_of(path):
    """Return the package of a file of `tunediff/`: its folder, or the module itself at the top level."""
    return path.parts[1].removesuffix(".py") if path.parts[0] == "tunediff" else path.parts[0]


@functools.cache
def lines_by_package():
    lines = collections.Counter()
    for folder in ("tunediff", "tests"):
        for path, text in sources(folder).items():
            lines[package_of(path)] += text.count("\n")
    return lines


@functools.cache
def edges():
    """Return `importing -> imported` for all packages of `tunediff/`, imports inside functions included."""
    found = set()
    for path, text in sources("tunediff").items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.module == "tunediff":
                names = [f"tunediff.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            else:
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            imported = {name.split(".")[1] for name in names if name.startswith("tunediff.")}
            found |= {f"{package_of(path)} -> {name}" for name in imported - {package_of(path)}}
    return found


def functions(text):
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]


@functools.cache
def counts():
    """Return what CONTRIBUTING.md forbids in anything new, counted."""
    code, tests = sources("tunediff"), "\n".join(sources("tests").values())
    classes = collections.Counter(
        node.name for text in code.values() for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)
    )
    sizes = [node.end_lineno - node.lineno + 1 for text in code.values() for node in functions(text)]
    return {
        "lines over 100 characters": sum(len(line) > 100 for text in code.values() for line in text.splitlines()),
        "files over 300 lines": sum(text.count("\n") > 300 for text in code.values()),
        "functions over 40 lines": sum(size > 40 for size in sizes),
        "class names used twice": sum(count > 1 for count in classes.values()),
        "monkeypatch.setattr in tests": tests.count("monkeypatch.setattr("),
        "private attributes in tests": len(re.findall(r"(?<!self)\b\w+\._[a-z]\w*", tests)),
    }


def measured():
    return {"lines": dict(sorted(lines_by_package().items())), "edges": sorted(edges()), "counts": counts()}


RECORDED = json.loads(FILE.read_text()) if FILE.exists() else measured()


def check(name, found, allowed):
    assert found <= allowed, f"{name}: {found}, and it may only fall from {allowed}"
    lowest = allowed - max(20, round(SLACK * allowed))
    assert found >= lowest, f"{name} fell from {allowed} to {found}: python -m tests.test_ratchets keeps it there"


@pytest.mark.parametrize("package", sorted(RECORDED["lines"] | lines_by_package()))
def test_lines_of_a_package_only_fall(package):
    check(package, lines_by_package()[package], RECORDED["lines"].get(package, 0))


def test_no_package_imports_one_that_it_did_not_import_before():
    assert edges() <= set(RECORDED["edges"])


@pytest.mark.parametrize("name", sorted(RECORDED["counts"]))
def test_what_is_forbidden_in_new_code_only_falls(name):
    check(name, counts()[name], RECORDED["counts"][name])


def test_totals_fall_to_what_is_allowed():
    lines = RECORDED["lines"]
    totals = {"tunediff": sum(lines.values()) - lines["tests"], "tests": lines["tests"]}
    before = RECORDED["totals"]
    assert all(totals[name] <= max(before[name], TOTALS[name]) for name in TOTALS), (totals, before)


def main():
    """Write the numbers as they are now; a number that has grown stays, for a person to decide."""
    now, before = measured(), RECORDED
    for part in ("lines", "counts"):
        now[part] = {name: min(number, before[part].get(name, number)) for name, number in now[part].items()}
    tests = now["lines"]["tests"]
    now["totals"] = {"tunediff": sum(now["lines"].values()) - tests, "tests": tests}
    now["edges"] = sorted(set(now["edges"]) & set(before["edges"]))
    FILE.write_text(json.dumps(now, indent=1) + "\n")


if __name__ == "__main__":
    main()
