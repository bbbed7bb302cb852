"""The digest of weights."""

import pytest
import torch

from tunediff.training.weights import digest


def weights():
    return {
        "a": torch.arange(6000.0).view(10, 20, 5, 6),
        "b": torch.ones(3, dtype=torch.bfloat16),
        "c": torch.tensor(1),
    }


def test_digest_takes_empty_weights():
    assert digest({"a": torch.empty(0), "b": torch.empty(0, 5)}) != digest({"a": torch.empty(0)})


def test_digest_does_not_depend_on_how_weights_lie_in_memory():
    other = weights()
    other["a"] = other["a"].to(memory_format=torch.channels_last)
    other["b"] = torch.ones(8, dtype=torch.bfloat16)[1:4]
    assert digest(other) == digest(weights())


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_digest_notices_a_change_of_one_element(name):
    other = weights()
    other[name].view(-1)[-1] += 1
    assert digest(other) != digest(weights())


@pytest.mark.parametrize(
    "change",
    [lambda a: a.flip(0), lambda a: a.roll(1, 1), lambda a: a.view(20, 10, 5, 6), lambda a: a.double()],
    ids=["order of rows", "order of columns", "shape", "type"],
)
def test_digest_notices_what_is_moved_or_converted(change):
    assert digest(weights() | {"a": change(weights()["a"])}) != digest(weights())


def test_digest_notices_names_that_are_exchanged():
    one, other = {"a": torch.zeros(4), "b": torch.ones(4)}, {"b": torch.zeros(4), "a": torch.ones(4)}
    assert digest(one) != digest(other)
