"""Ratchets: what makes the project hard to read may only fall. `python -m tests.test_ratchets` lowers the numbers.

`ratchets.json` holds statements of Python by package (docstrings are none: a formatter changes lines, not statements), pairs
of packages of which one imports the other, and counts of what CONTRIBUTING.md forbids in anything new. A commit that brings
a capability may raise the statements of its package, by hand, within `TOTALS`. `seconds_of_tests` is what the README's test
command took on the machine named there: recorded for the reader and never asserted, since it depends on the machine.
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
TOTALS = {"tunediff": 22_500, "tests": 18_000}
"""Statements that the two folders may have once the numbers in `ratchets.json` have fallen that far."""
SLACK = 0.01
"""Share by which a number may lie above what is counted, so that not every commit has to lower it."""


@functools.cache
def sources(folder):
    """Return the text of every Python file below a folder of the repository, by path."""
    return {path.relative_to(ROOT): path.read_text() for path in sorted((ROOT / folder).rglob("*.py"))}


def package_of(path):
    """Return the package of a file of `tunediff/`: its folder, or the module itself at the top level."""
    return path.parts[1].removesuffix(".py") if path.parts[0] == "tunediff" else path.parts[0]


def is_statement(node):
    """Return whether a node of a syntax tree is a statement other than a docstring or a text behind an attribute."""
    return isinstance(node, ast.stmt) and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))


@functools.cache
def statements_by_package():
    statements = collections.Counter()
    for folder in ("tunediff", "tests"):
        for path, text in sources(folder).items():
            statements[package_of(path)] += sum(map(is_statement, ast.walk(ast.parse(text))))
    return statements


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
        "files over 500 lines": sum(text.count("\n") > 500 for text in code.values()),
        "functions over 60 lines": sum(size > 60 for size in sizes),
        "class names used twice": sum(count > 1 for count in classes.values()),
        "monkeypatch.setattr in tests": tests.count("monkeypatch.setattr("),
        "private attributes in tests": len(re.findall(r"(?<!self)\b\w+\._[a-z]\w*", tests)),
    }


def measured():
    return {"statements": dict(sorted(statements_by_package().items())), "edges": sorted(edges()), "counts": counts()}


RECORDED = json.loads(FILE.read_text())


def check(name, found, allowed):
    assert found <= allowed, f"{name}: {found}, and it may only fall from {allowed}"
    lowest = allowed - max(20, round(SLACK * allowed))
    assert found >= lowest, f"{name} fell from {allowed} to {found}: python -m tests.test_ratchets keeps it there"


@pytest.mark.parametrize("package", sorted(RECORDED["statements"] | statements_by_package()))
def test_statements_of_a_package_only_fall(package):
    check(package, statements_by_package()[package], RECORDED["statements"].get(package, 0))


def test_no_package_imports_one_that_it_did_not_import_before():
    assert edges() <= set(RECORDED["edges"])


@pytest.mark.parametrize("name", sorted(RECORDED["counts"]))
def test_what_is_forbidden_in_new_code_only_falls(name):
    check(name, counts()[name], RECORDED["counts"][name])


def test_totals_fall_to_what_is_allowed():
    statements = RECORDED["statements"]
    totals = {"tunediff": sum(statements.values()) - statements["tests"], "tests": statements["tests"]}
    before = RECORDED["totals"]
    assert all(totals[name] <= max(before[name], TOTALS[name]) for name in TOTALS), (totals, before)


def main():
    """Write the numbers as they are now; a number that has grown stays, for a person to decide."""
    now, before = measured(), RECORDED
    for part in ("statements", "counts"):
        now[part] = {name: min(number, before[part].get(name, number)) for name, number in now[part].items()}
    tests = now["statements"]["tests"]
    now["totals"] = {"tunediff": sum(now["statements"].values()) - tests, "tests": tests}
    now["edges"] = sorted(set(now["edges"]) & set(before["edges"]))
    now["seconds_of_tests"] = before["seconds_of_tests"]
    FILE.write_text(json.dumps(now, indent=1) + "\n")


if __name__ == "__main__":
    main()
