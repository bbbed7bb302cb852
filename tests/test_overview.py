"""`python -m tunediff`: the commands there are."""

import re
from pathlib import Path

import tunediff
from tunediff import __main__ as overview

PACKAGE = Path(tunediff.__file__).parent


def test_overview_lists_every_command(capsys):
    assert overview.main([]) == 0
    listed = set(re.findall(r"python -m tunediff\.(\w+)", capsys.readouterr().out)) - {"COMMAND"}
    files = [*PACKAGE.glob("*.py"), *PACKAGE.glob("*/__main__.py")]
    runs = {path.parent.name if path.name == "__main__.py" else path.stem for path in files
            if re.search(r"^if __name__ == .__main__.:", path.read_text(), re.MULTILINE)}  # fmt: skip
    assert listed == runs - {"tunediff", "__main__"}


def test_overview_says_the_version(capsys):
    assert overview.main(["--version"]) == 0
    assert capsys.readouterr().out == f"tunediff {tunediff.__version__}\n"


def test_overview_names_the_module_of_a_command(capsys):
    assert overview.main(["search", "digits"]) == 2
    assert "'search' is not understood here; write python -m tunediff.search" in capsys.readouterr().err
    assert overview.main(["serch"]) == 2
    assert "'serch' is not understood here; allowed: search, report, " in capsys.readouterr().err
