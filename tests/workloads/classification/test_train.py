"""The training of a classifier: what it learns, however its batches are divided; how it is judged."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from tests.helpers import CPU, Dies, KilledError, Told, assert_equal, ranks, train, weights
from tunediff import config as cfg
from tunediff.core.trial_record import NotFiniteError
from tunediff.data.images import load
from tunediff.training.observer import Recorder
from tunediff.workloads.classification import sets
from tunediff.workloads.classification.train import HeldOutEvaluator, augmented, crop, network


def digits(**values):
    """The baseline; knobs with two underscores for a dot."""
    own = {"evaluation.points": 2, "loader.batch_size": 32}
    own |= {name.replace("__", "."): value for name, value in values.items()}
    return cfg.override(cfg.baseline("digits_classifier"), own)


# ------------------------------------------------------------------------------------------------------ augmentation
def naive_crops(pixels, padding, drawn):
    found = torch.empty_like(pixels)
    for i, image in enumerate(pixels):
        padded = F.pad(image, (padding,) * 4)
        top, left = (int(drawn[f"crop {axis}"][i] * (2 * padding + 1)) for axis in ("row", "column"))
        found[i] = padded[:, top : top + image.shape[1], left : left + image.shape[2]]
    return found


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_crops_are_those_of_a_loop(dtype):
    pixels = torch.randint(1, 256, (64, 3, 6, 5), dtype=torch.uint8).to(dtype)
    drawn = {axis: torch.rand(64) for axis in ("crop row", "crop column")}
    drawn["crop row"][:2] = torch.tensor([0.0, 1 - 2**-24])  # both ends
    found = crop(pixels, 2, drawn.__getitem__)
    assert torch.equal(found, naive_crops(pixels, 2, drawn))
    assert found.is_contiguous(), "the memory order is a knob of the system"
    assert found[0, 0, :2].max() == 0
    assert found[1, 0, -2:].max() == 0


def test_batches_are_mirrored_windows_in_the_unit_range():
    pixels, labels = torch.full((4, 1, 2, 2), 255, dtype=torch.uint8), torch.arange(4)
    pixels[..., 0] = 0
    uniform = {
        "flip": torch.tensor([0.1, 0.9, 0.1, 0.9]),
        "crop row": torch.full((4,), 0.5),
        "crop column": torch.full((4,), 0.5),
    }
    found, same = augmented(flip=True, padding=1)((pixels, labels), uniform.__getitem__)
    assert torch.equal(same, labels)
    assert found[:, 0, 0].tolist() == [[1, -1], [-1, 1], [1, -1], [-1, 1]]
    assert found.dtype == torch.float32


def evaluator_of(knobs, world):
    return HeldOutEvaluator(sets.held_out(knobs.data, knobs.evaluation.images), knobs.evaluation.batch_size, world)


# ---------------------------------------------------------------------------------------------------------- the loop
def test_learns_the_digits_and_shows_which_it_takes_for_which(tmp_path):
    recorder = Recorder(tmp_path)
    outcome = train(digits(), samples=32 * 120, evaluates=True, observer=recorder, folder=tmp_path)
    accuracy = [point["accuracy"] for point in outcome.points]
    assert accuracy[-1] > 0.9
    assert outcome.points[-1]["validation_loss"] < 0.5
    lines = [line.split(",") for line in (tmp_path / "confusion.csv").read_text().splitlines()]
    assert lines[0] == ["class", "images", "right", *(f"as {digit}" for digit in range(10))]
    counts = torch.tensor([[float(cell) for cell in line[3:]] for line in lines[1:]])
    assert counts.sum() == 359
    assert counts.diag().sum().item() / 359 == pytest.approx(accuracy[-1])
    net = network(digits().knobs)
    net.load_state_dict(outcome.weights)
    again = judged(evaluator_of(digits().knobs, CPU), net)
    assert again == {name: outcome.points[-1][name] for name in ("accuracy", "validation_loss")}


@pytest.mark.parametrize(
    "values",
    [
        {"optimizer__name": "adamw", "regularization__crop_padding": 1, "optimizer__clip_norm": 1.0},
        {"loader__accumulation": 2, "precision__amp": "bf16", "optimizer__decay": "one_cycle"},
    ],
    ids=["adamw, crops, clipping", "accumulation, bf16, one cycle"],
)
def test_a_killed_training_ends_where_an_uninterrupted_one_does(tmp_path, values):
    config = digits(model__width=4, **values)
    whole = weights(train(config, samples=32 * 8, folder=tmp_path / "whole"))
    with pytest.raises(KilledError):
        train(config, samples=32 * 8, folder=tmp_path / "killed", observer=Dies())
    again = train(config, samples=32 * 8, folder=tmp_path / "killed")
    assert_equal(whole, weights(again))


def test_smoothed_labels_are_those_of_szegedy():
    """One step of plain gradient descent with smoothed labels, by hand."""
    values = {"optimizer__momentum": 0.0, "optimizer__nesterov": False, "optimizer__weight_decay": 0.0}
    values |= {"optimizer__warmup": 0.0, "optimizer__decay": "constant", "optimizer__lr": 0.1, "evaluation__points": 1}
    config = digits(model__width=4, regularization__label_smoothing=0.2, **values)
    seen, cross_entropy = [], F.cross_entropy

    def remembered(logits, labels, **how):
        seen.append((logits.detach(), labels, cross_entropy(logits, labels, **how)))
        return seen[-1][-1]

    with mock.patch.object(F, "cross_entropy", remembered):
        train(config, samples=32)
    logits, labels, losses = seen[-1]
    wanted = 0.8 * F.one_hot(labels, 10) + 0.2 / 10
    assert torch.allclose(losses, -(wanted * logits.log_softmax(1)).sum(1), rtol=1e-5)


# ----------------------------------------------------------------------------------------------------------- judging
def judged(judge, net):
    """What is found of a model in an evaluation."""
    with torch.no_grad():
        return judge(net.eval())


def test_judged_as_by_hand_whatever_the_batch_size():
    config = digits(model__width=4)
    held, net = sets.held_out(config.data, None), network(config.knobs)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    found = [judged(HeldOutEvaluator(held, size, CPU), net) for size in (7, 100, 1000)]
    assert_equal(before, dict(net.state_dict()))
    logits = net(held.pixels.float() / 127.5 - 1)
    assert found[0]["accuracy"] == (logits.argmax(1) == held.labels).double().mean().item()
    for one in found:
        assert one["accuracy"] == found[0]["accuracy"]
        assert one["validation_loss"] == pytest.approx(F.cross_entropy(logits, held.labels).item(), rel=1e-5)


def test_a_network_that_diverged_is_no_result():
    held, net = sets.held_out(digits().data, 10), torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    judge = HeldOutEvaluator(held, 10, CPU)
    torch.nn.init.constant_(net[1].weight, float("nan"))
    with pytest.raises(NotFiniteError):
        judge(net)


TWO = {
    "model__name": "timm/test_convnext", "data__image_size": 32, "loader__batch_size": 16, "optimizer__lr": 0.01,
    "regularization__crop_padding": 1, "evaluation__batch_size": 50, "evaluation__points": 1,
}  # fmt: skip


def both(world):
    """Two trainings: without batch statistics, and with them."""
    told = Told()
    outcome = train(digits(parallel__workers=2, **TWO), samples=16 * 6, world=world, observer=told, evaluates=True)
    divided = {"parallel__workers": 2, "parallel__strategy": "pipeline"}
    divided |= {"parallel__schedule": "gpipe", "parallel__microbatches": 1}  # the statistics of the whole batch
    piped_with_norm = train(digits(**divided), samples=32 * 4, world=world)
    with_norm = train(digits(parallel__workers=2), samples=32 * 4, world=world)
    (net := network(digits().knobs)).load_state_dict(weights(with_norm))
    judge = evaluator_of(digits(parallel__workers=2, evaluation__batch_size=50).knobs, world)
    return {
        "weights": weights(outcome), "points": told.points, "with_norm": weights(with_norm),
        "judged": judged(judge, net), "piped_with_norm": weights(piped_with_norm),
    }  # fmt: skip


@pytest.mark.nightly
def test_two_ranks_learn_and_find_what_one_does(tmp_path):
    pytest.importorskip("timm")
    load(digits().data)
    one = train(digits(**TWO), samples=16 * 6, evaluates=True)
    first, second = ranks(both, tmp_path)
    assert_equal(first["weights"], second["weights"])
    assert_equal(weights(one), first["weights"], rtol=1e-3, atol=1e-4)
    assert first["points"][0]["validation_loss"] == pytest.approx(one.points[0]["validation_loss"], rel=1e-3)
    assert first["points"][0]["accuracy"] == pytest.approx(one.points[0]["accuracy"], abs=0.01)
    for rank in (first, second):
        assert_equal(weights(train(digits(), samples=32 * 4)), rank["piped_with_norm"], rtol=1e-3, atol=1e-4)

    # With batch statistics of its own each rank learns a little else; both are judged by rank 0's, which are saved.
    assert first["judged"] == second["judged"]
    assert_equal(first["with_norm"], second["with_norm"])
    alone = network(digits().knobs)
    alone.load_state_dict(first["with_norm"])
    found = judged(evaluator_of(digits().knobs, CPU), alone)
    assert found["accuracy"] == first["judged"]["accuracy"]
    assert found["validation_loss"] == pytest.approx(first["judged"]["validation_loss"], rel=1e-5)
