from collections import deque
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tunediff import config
from tunediff.diffusion import timesteps
from tunediff.diffusion.timesteps import TimestepSampler

MEMBERS: list[config.Timesteps] = [config.Uniform(), config.Stratified(), config.LossSecondMoment()]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def learned(member: config.LossSecondMoment | None = None) -> TimestepSampler:
    """T = 4, after the losses 0.1·(t+1)·(1+0.05·i), i = 0 … 9."""
    sampler = timesteps.build(member or config.LossSecondMoment(), 4, "cpu")
    for i in range(10):
        t = torch.arange(4)
        sampler.update(t, 0.1 * (t + 1) * (1 + 0.05 * i))
    return sampler


def factors(sampler: TimestepSampler) -> Tensor:
    """The factor of each t, collected from draws."""
    t, factor = sampler.sample(20_000, generator())
    found = torch.full((sampler.steps,), torch.nan)
    found[t] = factor
    return found


def expect(found: Tensor, values: list[float], atol: float) -> None:
    torch.testing.assert_close(found, torch.tensor(values, dtype=found.dtype), atol=atol, rtol=0)


# ---------------------------------------------------------------------------------------------------------- every one
def test_every_member_of_the_configuration_has_a_class() -> None:
    names = {member().name for member in timesteps.KINDS}
    assert names == set(config.knobs()["timesteps.name"].choices or ())


@pytest.mark.parametrize("member", MEMBERS)
def test_draws(member: config.Timesteps) -> None:
    sampler = timesteps.build(member, 1000, "cpu")
    t, factor = sampler.sample(64, generator(1))
    assert (t.shape, t.dtype, factor.shape, factor.dtype) == ((64,), torch.int64, (64,), torch.float32)
    assert t.min() >= 0
    assert t.max() < 1000
    assert torch.equal(factor, torch.ones(64))
    assert torch.equal(t, sampler.sample(64, generator(1))[0])
    assert not torch.equal(t, sampler.sample(64, generator(2))[0])
    torch.testing.assert_close(sampler.probabilities(), torch.full((1000,), 1e-3, dtype=torch.float64))


@pytest.mark.parametrize(
    "sampler",
    [
        timesteps.build(config.Uniform(), 7, "cpu"),
        timesteps.build(config.Stratified(), 7, "cpu"),
        timesteps.build(config.LossSecondMoment(), 7, "cpu"),
        learned(),
        learned(config.LossSecondMoment(uniform_share=0.5)),
    ],
)
def test_draws_follow_the_probabilities(sampler: TimestepSampler) -> None:
    p, source, draws = sampler.probabilities(), generator(), 100
    assert p.dtype == torch.float64
    assert p.sum().item() == pytest.approx(1)
    seen = torch.cat([sampler.sample(1000, source)[0] for _ in range(draws)])
    share = torch.bincount(seen, minlength=sampler.steps) / len(seen)
    assert bool(((share - p).abs() < 4 * (p * (1 - p) / len(seen)).sqrt()).all())


def test_only_the_adaptive_one_learns() -> None:
    for member in MEMBERS:
        sampler = timesteps.build(member, 4, "cpu")
        for _ in range(10):
            sampler.update(torch.arange(4), torch.tensor([1.0, 2.0, 3.0, 4.0]))
        uniform = bool((sampler.probabilities() == 0.25).all())
        assert sampler.adaptive != uniform
        assert bool(sampler.state_dict()) == sampler.adaptive


# --------------------------------------------------------------------------------------------------------- stratified
def test_a_stratified_batch_is_evenly_spread() -> None:
    sampler = timesteps.build(config.Stratified(), 1000, "cpu")
    t = sampler.sample(8, generator())[0].sort().values
    assert t.diff().tolist() == [125] * 7
    few = timesteps.build(config.Stratified(), 10, "cpu").sample(64, generator())[0]
    assert set(torch.bincount(few, minlength=10).tolist()) <= {6, 7}


def test_each_place_of_a_stratified_batch_is_uniform() -> None:
    sampler, source = timesteps.build(config.Stratified(), 5, "cpu"), generator()
    first = torch.stack([sampler.sample(3, source)[0][0] for _ in range(4000)])
    assert bool((torch.bincount(first, minlength=5) / 4000 - 0.2).abs().max() < 0.03)


def test_pieces_that_draw_the_same_number_are_one_stratified_batch() -> None:
    sampler = timesteps.build(config.Stratified(), 1000, "cpu")
    pieces = [sampler.sample(2, generator(5), part=(index, 4))[0] for index in range(4)]
    assert torch.equal(torch.cat(pieces).sort().values, sampler.sample(8, generator(5))[0].sort().values)


# ------------------------------------------------------------------------------------------------- loss second moment
def test_loss_second_moment() -> None:
    sampler = learned()
    expect(sampler.probabilities(), [0.10015, 0.20005, 0.29995, 0.39985], atol=5e-6)
    expect(factors(sampler), [2.49626, 1.24969, 0.833472, 0.625234], atol=5e-6)


def test_several_losses_of_one_timestep_in_one_batch() -> None:
    sampler = learned()
    sampler.update(torch.tensor([0, 3, 0]), torch.tensor([1.0, 0.5, 2.0]))
    expect(sampler.probabilities(), [0.390137, 0.134515, 0.201648, 0.273700], atol=5e-7)


@pytest.mark.parametrize("power", [0.0, 0.5])
def test_importance_correction(power: float) -> None:
    found = factors(learned(config.LossSecondMoment(importance_correction=power)))
    expect(found, [f**power for f in (2.49626, 1.24969, 0.833472, 0.625234)], atol=5e-6)


def test_uniform_until_the_history_is_full() -> None:
    sampler = timesteps.build(config.LossSecondMoment(history=2), 3, "cpu")
    sampler.update(torch.tensor([0, 0, 1, 1, 2, 0]), torch.tensor([1.0, 1.0, 2.0, 2.0, 3.0, 1.0]))
    expect(sampler.probabilities(), [1 / 3] * 3, atol=1e-12)
    sampler.update(torch.tensor([2]), torch.tensor([3.0]))
    expect(sampler.probabilities(), [0.999 * w / 6 + 0.001 / 3 for w in (1, 2, 3)], atol=1e-12)


def test_loss_second_moment_equals_a_plain_history() -> None:
    """Batches so large that some timesteps occur more often than the history is long."""
    steps, history = 6, 3
    sampler = timesteps.build(config.LossSecondMoment(history=history, uniform_share=0.1), steps, "cpu")
    plain: list[deque[float]] = [deque(maxlen=history) for _ in range(steps)]
    source = generator()
    for _ in range(20):
        t, losses = torch.randint(steps, (17,), generator=source), torch.rand(17, generator=source)
        sampler.update(t, losses)
        for step, loss in zip(t.tolist(), losses.tolist(), strict=True):
            plain[step].append(loss)
        if all(len(past) == history for past in plain):
            w = torch.tensor([sum(x * x for x in past) / history for past in plain], dtype=torch.float64).sqrt()
            torch.testing.assert_close(sampler.probabilities(), 0.9 * w / w.sum() + 0.1 / steps)
    assert all(len(past) == history for past in plain)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_does_not_poison_the_sampler(bad: float) -> None:
    sampler, before = learned(), learned().probabilities()
    sampler.update(torch.tensor([2]), torch.tensor([bad]))
    expect(sampler.probabilities(), [0.25] * 4, atol=0)
    sampler.update(torch.tensor([2] * 10), 0.3 * (1 + 0.05 * torch.arange(10)))
    torch.testing.assert_close(sampler.probabilities(), before)


def test_losses_that_are_all_zero() -> None:
    sampler = timesteps.build(config.LossSecondMoment(history=1), 2, "cpu")
    sampler.update(torch.tensor([0, 1]), torch.zeros(2))
    expect(sampler.probabilities(), [0.5, 0.5], atol=0)


def test_it_continues_exactly_from_its_state() -> None:
    def batch(i: int) -> tuple[Tensor, Tensor]:
        return torch.randint(4, (9,), generator=generator(i)), torch.rand(9, generator=generator(100 + i))

    sampler = learned()
    sampler.update(*batch(0))
    state, restored = sampler.state_dict(), timesteps.build(config.LossSecondMoment(), 4, "cpu")
    for i in range(1, 4):
        sampler.update(*batch(i))  # must not change the state that was taken
    restored.load_state_dict(state)
    assert not torch.equal(restored.probabilities(), sampler.probabilities())
    for i in range(1, 4):
        restored.update(*batch(i))
    assert torch.equal(restored.probabilities(), sampler.probabilities())
    for mine, theirs in zip(restored.sample(50, generator()), sampler.sample(50, generator()), strict=True):
        assert torch.equal(mine, theirs)


def test_state_of_another_configuration_is_refused() -> None:
    state = learned().state_dict()
    with pytest.raises(ValueError, match=r"\(4, 10\).*\(4, 5\)"):
        timesteps.build(config.LossSecondMoment(history=5), 4, "cpu").load_state_dict(state)
    with pytest.raises(ValueError, match="history, counts"):
        timesteps.build(config.Uniform(), 4, "cpu").load_state_dict(state)


def test_it_never_waits_for_the_device() -> None:
    """Tensors on the meta device have no values: reading one would raise."""
    sampler = timesteps.build(config.LossSecondMoment(), 10, "meta")
    t, factor = sampler.sample(6)
    sampler.update(t, factor)
    assert sampler.probabilities().shape == (10,)


# -------------------------------------------------------------------------------------------------------- distributed
def global_batch(i: int) -> tuple[Tensor, Tensor]:
    return torch.randint(5, (12,), generator=generator(i)), torch.rand(12, generator=generator(100 + i))


def train_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    sampler = timesteps.build(config.LossSecondMoment(history=3), 5, "cpu")
    for i in range(4):
        t, losses = global_batch(i)
        sampler.update(t[6 * rank : 6 * rank + 6], losses[6 * rank : 6 * rank + 6])
    torch.save(sampler.state_dict(), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_two_processes_learn_what_one_learns_from_the_global_batch(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(train_rank, (str(tmp_path),), nprocs=2)  # type: ignore[attr-defined, no-untyped-call]
    alone = timesteps.build(config.LossSecondMoment(history=3), 5, "cpu")
    for i in range(4):
        alone.update(*global_batch(i))
    for rank in range(2):
        state = torch.load(tmp_path / f"{rank}.pt")
        assert state.keys() == alone.state_dict().keys()
        for name, tensor in alone.state_dict().items():
            assert torch.equal(state[name], tensor), name
    assert alone.probabilities().max() > 0.21  # something was learned
