"""`python -m tunediff`: the commands there are."""

import re
from pathlib import Path

import tunediff
from tunediff import __main__ as overview

PACKAGE = Path(tunediff.__file__).parent


def test_overview_lists_every_command(capsys):
    assert overview.main([]) == 0
    listed = set(re.findall(r"^tunediff (\w+) ", capsys.readouterr().out, re.MULTILINE)) - {"finds"}
    files = [*PACKAGE.glob("*.py"), *PACKAGE.glob("*/__main__.py")]
    runs = {path.parent.name if path.name == "__main__.py" else path.stem for path in files
            if re.search(r"^if __name__ == .__main__.:", path.read_text(), re.MULTILINE)}  # fmt: skip
    assert listed == runs - {"tunediff", "__main__", "judging"} | {"judge"}


def test_overview_says_the_version(capsys):
    assert overview.main(["--version"]) == 0
    assert capsys.readouterr().out == f"tunediff {tunediff.__version__}\n"


def test_command_after_the_name_of_the_program_runs_with_its_own_words(capsys):
    assert overview.main(["knobs", "loader.workers"]) == 0
    assert capsys.readouterr().out.startswith("loader.workers: a whole number")
    assert overview.main(["doctor", "--nosuch"]) == 2
    assert "unrecognized arguments: --nosuch" in capsys.readouterr().err


def test_unknown_command_is_refused_with_what_is_near(capsys):
    assert overview.main(["serch"]) == 2
    assert "'serch' is not allowed; did you mean search" in capsys.readouterr().err
