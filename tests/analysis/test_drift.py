"""Readings of the machine between the pairs, and the blocks that follow from them."""

import numpy as np
import pytest

from tunediff.analysis import drift


def readings(*factors):
    """One before the first pair and one after each; the reference takes so many times as long."""
    return [
        {"pairs": pairs, "product_s": 0.01 * factor, "copy_s": 0.002, "loader_s": 0.003}
        for pairs, factor in enumerate(factors)
    ]


def test_pairs_before_and_after_a_drift_are_blocks():
    found = drift.of(readings(1, 1.01, 0.99, 1.1, 1.11, 1.1))
    assert found.blocks == [0, 0, 0, 1, 1], "the pair during which it drifted belongs to the block before"
    assert found.largest == pytest.approx(0.1, abs=0.01)
    assert found.sentence() == (
        "The machine drifted: its reference became 10% slower; the pairs before and after are blocks (3 and 2 pairs)."
    )


def test_a_passing_load_is_no_drift():
    found = drift.of(readings(1, 1.0, 1.5, 1.01, 1.0))
    assert (found.blocks, found.largest) == ([0] * 4, 0.0)
    assert found.sentence() == ""
    assert drift.of([]) == drift.NO_READINGS


def test_a_comparison_that_was_resumed_on_a_slower_machine_has_two_blocks():
    one, two, three = readings(1, 1, 1)
    later = [{**reading, "product_s": 0.02} for reading in readings(1, 1, 1, 1)[2:]]
    assert drift.of([one, two, three, *later]).blocks == [0, 0, 1]
    assert np.isclose(drift.of([one, two, three, *later]).largest, 1.0)
