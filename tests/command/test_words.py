"""What is said of commands before they run."""

import pytest

from tunediff.command.definition import CommandDefinition, honesty


@pytest.mark.parametrize(("command", "warned"), [("docker run x {seed}", 1), ("/usr/bin/ssh h {seed}", 1), ("python docker {seed}", 0)])  # fmt: skip
def test_a_client_whose_work_is_done_elsewhere_is_named(command, warned):
    assert len(honesty([CommandDefinition(command=command, objective="loss", outcome="final")])) == warned
