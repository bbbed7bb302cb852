"""The commands of `examples/records`, on the toys that print the lines of public speedruns."""

import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from tunediff import compare

FOLDER = Path(__file__).parents[2] / "examples" / "records"
COMMANDS = re.findall(r"tunediff compare (.*?)\n```", (FOLDER / "README.md").read_text(), re.S)


@pytest.mark.parametrize("toy", ["nanogpt", "airbench"])
def test_a_record_is_judged_as_its_page_says(tmp_path, capsys, toy, at_tmp_path):
    shutil.copy(FOLDER / f"{toy}.py", tmp_path)
    line = next(line for line in COMMANDS if f"{toy}.py" in line and "--at" not in line)
    words = [re.sub("^python ", f"{sys.executable} ", word) for word in shlex.split(line.replace("\\\n", " "))]
    assert compare.main([*words, "--no-check", "--json", "--quiet"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["clock"] == ("training" if toy == "nanogpt" else "process")
    b = result["candidates"][1]
    if toy == "nanogpt":
        assert b["effect"]["value"] == pytest.approx(1600 / 1750, rel=0.01)
        assert max(b["others"]["val_loss"]) < 3.28
    else:
        assert result["sides"]["results_per_process"] == [20, 20], "without the run that compiles"
        assert 0.945 < b["value"] < 0.955


def test_the_commands_of_the_toys_are_those_of_the_records():
    """But for the program, its parameters and its revisions."""
    records, toys = COMMANDS[::2], COMMANDS[1::2]
    for record, toy in zip(records, toys, strict=True):
        assert record.partition("--unseeded")[2] == toy.partition("--unseeded")[2]
