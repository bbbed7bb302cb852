"""Which timesteps are drawn, and what the adaptive samplers learn from."""

import copy
import math
import typing
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.fft import dctn, idctn
from torch import Tensor

from tests.helpers import ranks
from tests.workloads.diffusion.test_policy import generator, images
from tunediff import config as cfg
from tunediff.config import ConfigError, schema
from tunediff.distributed import World, alone
from tunediff.workloads.diffusion import knobs, methods, timesteps
from tunediff.workloads.diffusion.objective import DiffusionLoss, build_weighting
from tunediff.workloads.diffusion.process import Diffusion
from tunediff.workloads.diffusion.timesteps import base, wiener
from tunediff.workloads.diffusion.timesteps.base import TableSampler, TimestepSampler

ALL = typing.get_args(typing.get_args(methods.Timesteps)[0])
EVERY = [kind() for kind in ALL]
BY_ERRORS = {kind for kind, one in timesteps.KINDS.items() if issubclass(one, base.Adaptive)} - {methods.Wiener}
PACE = base.REFRESH_EVERY


@pytest.fixture(autouse=True)
def refresh_every(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What is learned shows after every batch, unless a test asks for so many."""

    def refresh_every(batches: int) -> None:
        monkeypatch.setattr(base, "REFRESH_EVERY", batches)

    refresh_every(1)
    return refresh_every


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wiener draws by no share of its spectrum."""
    monkeypatch.setattr(wiener, "SPECTRAL", 0.0)


def build(
    member: Any, steps: int = 1000, schedule: str = "linear", device: str = "cpu", world: World | None = None
) -> TimestepSampler:
    diffusion = Diffusion(knobs.Process(schedule=schedule, steps=steps), device)
    return timesteps.build(member, diffusion, 1, world or alone(device))


def draw(sampler: TimestepSampler, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    return sampler.sample(images(count), generator(seed))


def learn(sampler: TimestepSampler, t: Tensor, losses: Tensor) -> None:
    sampler.update(t, losses, torch.ones(len(t)))


def learned(member: methods.LossSecondMoment | None = None) -> TimestepSampler:
    """T = 4, after the losses 0.1·(t+1)·(1+0.05·i), i = 0 … 9."""
    sampler = build(member or methods.LossSecondMoment(), 4)
    for i in range(10):
        t = torch.arange(4)
        learn(sampler, t, 0.1 * (t + 1) * (1 + 0.05 * i))
    return sampler


def trained(member: Any, steps: int = 100) -> TimestepSampler:
    """After 30 batches whose error is large at low noise and falls, faster where the noise is high."""
    sampler, source = build(member, steps), generator(3)
    for i in range(30):
        t = torch.randint(steps, (256,), generator=source)
        noise_level = (t + 1) / steps
        learn(sampler, t, (1.2 - noise_level) * (1 + i) ** (-noise_level))
    return sampler


def factors(sampler: TimestepSampler) -> Tensor:
    """The factor of each t, collected from draws."""
    t, factor = draw(sampler, 20_000)
    found = torch.full((sampler.steps,), torch.nan)
    found[t] = factor
    return found


def expect(found: Tensor, values: list[float], atol: float) -> None:
    torch.testing.assert_close(found, torch.tensor(values, dtype=found.dtype), atol=atol, rtol=0)


# ---------------------------------------------------------------------------------------------------------- every one
@pytest.mark.parametrize("member", EVERY, ids=lambda member: member.name)
def test_draws(member: Any) -> None:
    sampler = build(member, schedule="cosine")
    sampler.sample(images(wiener.LEARNED_FROM), generator())  # what learns from images has learned all it will
    t, factor = draw(sampler, 64, seed=1)
    assert (t.shape, t.dtype, factor.shape, factor.dtype) == ((64,), torch.int64, (64,), torch.float32)
    assert t.min() >= 0
    assert t.max() < 1000
    torch.testing.assert_close(factor, torch.ones(64))  # no correction, or still uniform
    assert torch.equal(t, draw(sampler, 64, seed=1)[0])
    assert not torch.equal(t, draw(sampler, 64, seed=2)[0])
    p = sampler.probabilities()
    assert (p.shape, p.dtype) == ((1000,), torch.float64)
    assert p.sum().item() == pytest.approx(1, abs=1e-9)
    assert p.min() >= 0
    torch.testing.assert_close(sampler.mass(), p)


@pytest.mark.parametrize(
    "sampler",
    [build(member, 7) for member in EVERY]
    + [
        build(methods.Speed(dual=True), 40),
        build(methods.Speed(stratified=True), 40),
        build(methods.LogitNormal(mean=1.0, std=0.5, uniform_share=0.1, stratified=True), 40),
        build(methods.LogSnrLaplace(log_snr=-2.0, scale=1.0), 40, "cosine"),
        trained(methods.InfoNoise()),
        trained(methods.InfoNoise(stratified=True, importance_correction=1.0, uniform_share=0.2)),
        learned(),
        learned(methods.LossSecondMoment(uniform_share=0.5)),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_draws_follow_the_probabilities(sampler: TimestepSampler) -> None:
    sampler.sample(images(wiener.LEARNED_FROM), generator())
    p, source, batch, x0 = sampler.probabilities(), generator(), 1000, images(1000)
    seen = torch.cat([sampler.sample(x0, source)[0] for _ in range(100)])
    share = torch.bincount(seen, minlength=sampler.steps) / len(seen)
    # Mirrored draws come in pairs: twice the variance.
    assert bool(((share - p).abs() < 6 * (p * (1 - p) / len(seen)).sqrt() + 1 / (100 * batch)).all())


@pytest.mark.parametrize("member", EVERY, ids=lambda member: member.name)
def test_only_the_adaptive_ones_learn(member: Any) -> None:
    sampler = build(member, 4)
    before = sampler.probabilities()
    for i in range(10):
        learn(sampler, torch.arange(4), torch.tensor([1.0, 2.0, 3.0, 4.0]) / (1 + i * torch.arange(4)))
    changed = not torch.allclose(sampler.probabilities(), before)
    others = {"beta_policy", "wiener"}  # they learn from steps and from images, not from errors
    assert changed == (type(member) in BY_ERRORS)
    assert bool(sampler.state_dict()) == (changed or member.name in others)


@pytest.mark.parametrize("member", EVERY, ids=lambda member: member.name)
def test_ranks_that_share_a_batch_draw_what_one_draws(member: Any) -> None:
    sampler, x0 = build(member), images(8)
    sampler.sample(images(wiener.LEARNED_FROM), generator())
    whole, whole_factor = sampler.sample(x0, generator(5))
    for first in (0, 2, 4, 6):
        t, factor = sampler.sample(x0[first : first + 2], generator(5), batch=8, first=first)
        assert torch.equal(t, whole[first : first + 2])
        assert torch.equal(factor, whole_factor[first : first + 2])


TABLES = [member for member in EVERY if issubclass(timesteps.KINDS.get(type(member), TableSampler), TableSampler)]


@pytest.mark.parametrize("member", [*TABLES, methods.Speed(dual=True)], ids=lambda member: member.name)
def test_from_a_fraction_of_the_training_on_draws_are_uniform(member: Any) -> None:
    sampler = build(replace(member, until=0.25), 40)
    sampler.sample(images(wiener.LEARNED_FROM), generator())
    sampler.advance(0.2)
    before = sampler.probabilities()
    for progress in (0.25, 0.3):
        sampler.advance(progress)
        learn(sampler, torch.arange(40), torch.rand(40, generator=generator()))
        assert torch.equal(sampler.probabilities(), torch.full((40,), 1 / 40, dtype=torch.float64))
    t, factor = draw(sampler, 20_000)
    assert t.bincount(minlength=40).min() > 400
    assert torch.equal(factor, torch.ones(20_000))
    whole = build(member, 40)
    whole.sample(images(wiener.LEARNED_FROM), generator())
    whole.advance(1.0)  # by default never
    assert torch.equal(whole.probabilities(), before)


@pytest.mark.parametrize("member", TABLES, ids=lambda member: member.name)
def test_what_is_drawn_does_not_hang_on_the_order_of_a_sum(member: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU sums floating-point numbers in whatever order; whole numbers come to the same in any."""
    plain, backwards = build(member), Tensor.cumsum

    def summed(numbers: Tensor, dim: int) -> Tensor:
        parts = [part.flip(0).sum(dim) for part in numbers.split(7)]
        ends = [
            torch.stack(parts[:i]).flip(0).sum(0) if i else torch.zeros((), dtype=numbers.dtype)
            for i in range(len(parts))
        ]
        return torch.cat([end + backwards(part, dim) for end, part in zip(ends, numbers.split(7), strict=True)])

    monkeypatch.setattr(Tensor, "cumsum", summed)
    other: Any = build(member)
    assert torch.equal(other.cumulative, plain.cumulative)
    torch.testing.assert_close(other.cumulative.diff() / 2**52, other.probabilities()[1:], rtol=0, atol=1e-15)


@pytest.mark.parametrize("member", EVERY, ids=lambda member: member.name)
def test_it_never_waits_for_the_device(member: Any) -> None:
    """Tensors on the meta device have no values: reading one would raise."""
    sampler = build(member, 10 if member.name != "beta_policy" else 1000, device="meta")
    source: Any = None
    x0 = torch.empty(6, 1, 8, 8, device="meta")
    for _ in range(4):
        t, factor = sampler.sample(x0, source)
        sampler.update(t, factor, factor)
        sampler.before_step(lambda x0, noise, t: torch.empty(len(t), device="meta"), source)
        sampler.after_step(lambda x0, noise, t: torch.empty(len(t), device="meta"))
    assert sampler.probabilities().shape == (sampler.steps,)


SMALL = {methods.LossSecondMoment: (methods.LossSecondMoment(history=2), 4)}  # has learned after four batches


@pytest.mark.parametrize(("member", "steps"), [SMALL.get(kind, (kind(), 30)) for kind in ALL if kind in BY_ERRORS])
@pytest.mark.parametrize("every", [1, 3])
def test_it_continues_exactly_from_its_state(member: Any, steps: int, every: int, refresh_every: Any) -> None:
    """Also between two refreshes, when some batches wait to be learned from."""
    refresh_every(every)

    def batch(i: int) -> tuple[Tensor, Tensor]:
        return torch.randint(steps, (99,), generator=generator(i)), torch.rand(99, generator=generator(100 + i)) / (
            1 + i
        )

    sampler = build(member, steps)
    for i in range(4):
        learn(sampler, *batch(i))
    state, restored = sampler.state_dict(), build(member, steps)
    for i in range(4, 8):
        learn(sampler, *batch(i))  # must not change the state that was taken
    restored.load_state_dict(copy.deepcopy(state))
    assert state["pending"].shape[1] == 4 % every
    assert not torch.equal(restored.probabilities(), sampler.probabilities())
    for i in range(4, 8):
        learn(restored, *batch(i))
    assert torch.equal(restored.probabilities(), sampler.probabilities())
    for mine, theirs in zip(draw(restored, 50), draw(sampler, 50), strict=True):
        assert torch.equal(mine, theirs)


def test_several_batches_are_learned_from_at_once(refresh_every: Any) -> None:
    """p(t) stands still between two refreshes, and what came in between is not lost."""
    batches = [(torch.randint(30, (64,), generator=generator(i)), torch.rand(64)) for i in range(2 * PACE)]
    at_once = build(methods.LossSecondMoment(history=2), 30)
    for batch in batches:
        learn(at_once, *batch)
    refresh_every(PACE)
    for member in (methods.LossSecondMoment(history=2), methods.InfoNoise()):
        sampler, seen = build(member, 30), []
        for batch in batches:
            learn(sampler, *batch)
            seen.append(sampler.probabilities())
        changes = [i + 1 for i in range(1, len(seen)) if not torch.equal(seen[i], seen[i - 1])]
        assert changes == [PACE, 2 * PACE]
        if isinstance(member, methods.LossSecondMoment):
            assert torch.equal(seen[-1], at_once.probabilities())


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"timesteps.name": "logit_normal", "timesteps.importance_correction": 0.5}, "uniform_share"),
        ({"timesteps.name": "loss_second_moment", "timesteps.uniform_share": 0.0}, "uniform_share"),
        ({"timesteps.name": "speed", "timesteps.dual": True, "loader.batch_size": 63}, "even"),
        ({"timesteps.name": "speed", "timesteps.dual": True, "timesteps.stratified": True}, "choose one"),
        ({"timesteps.name": "beta_policy", "timesteps.selected": 9, "timesteps.scan": 8}, "chosen among"),
        ({"timesteps.name": "beta_policy", "timesteps.scan": 1001}, "process.steps"),
        ({"timesteps.name": "beta_policy", "compile.mode": "max-autotune"}, "CUDA graphs"),
        ({"timesteps.name": "wiener", "timesteps.importance_correction": 1.0, "timesteps.uniform_share": 0.0}, "share"),
        ({"timesteps.name": "loss_second_moment", "weighting.name": "uncertainty"}, "nothing to go by"),
    ],
)
def test_nonsense_is_refused_with_its_reason(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        cfg.override(cfg.baseline("cifar10"), values)


def test_a_knob_that_several_samplers_share_allows_the_same_everywhere() -> None:
    seen: dict[str, tuple[Any, ...]] = {}
    for kind in ALL:
        for knob in schema.knobs_of(kind, "timesteps."):
            if knob.name != "timesteps.name":
                assert seen.setdefault(knob.name, (knob.kind, knob.allowed)) == (knob.kind, knob.allowed)


# --------------------------------------------------------------------------------------------------------- stratified
def test_a_stratified_batch_is_evenly_spread() -> None:
    t = draw(build(methods.Stratified()), 8)[0].sort().values
    assert t.diff().tolist() == [125] * 7
    few = draw(build(methods.Stratified(), 10), 64)[0]
    assert set(torch.bincount(few, minlength=10).tolist()) <= {6, 7}


# -------------------------------------------------------------------------------------------------------------- fixed
def test_speed() -> None:
    p = build(methods.Speed()).probabilities()
    expect(p[[0, 699, 700, 999]], [0.00131579, 0.00131579, 0.000263158, 0.000263158], atol=5e-9)
    assert p[700:].sum().item() == pytest.approx(0.0789, abs=5e-5)


def test_speed_with_mirrored_half_batches() -> None:
    """Shares of the public code's draws: [0, 100), [100, 300), [300, 700), [700, 1000); it drew them at random."""
    p = build(methods.Speed(dual=True)).probabilities()
    shares = torch.stack([p[a:b].sum() for a, b in ((0, 100), (100, 300), (300, 700), (700, 1000))])
    expect(shares, [0.1739, 0.2891, 0.4969, 0.0401], atol=1e-3)
    assert build(methods.Speed(dual=True), schedule="cosine").probabilities()[700:].sum().item() == pytest.approx(
        0.208, abs=4e-3
    )


@pytest.mark.parametrize("path", [{"schedule": "edm"}, {"schedule": "cosine"}, {"path": "flow"}], ids=str)
def test_speed_mirrors_where_the_noise_stops_growing_not_where_it_begins(path: dict[str, str]) -> None:
    """EDM's noise begins as slowly as it ends. On these chains mirrored draws favour small t less than plain ones."""
    diffusion = Diffusion(knobs.Process(**path))
    plain, dual = (
        timesteps.build(methods.Speed(dual=dual), diffusion, 1, alone("cpu")).probabilities() for dual in (False, True)
    )
    assert plain[:500].sum().item() == pytest.approx(0.658, abs=1e-3)
    assert 0.5 < dual[:500].sum().item() < 0.63
    assert dual[:100].sum() < 0.1


def test_logit_normal_directions() -> None:
    p = build(methods.LogitNormal()).probabilities()
    torch.testing.assert_close(p, p.flip(0))
    assert p.argmax().item() in (499, 500)
    noisier = build(methods.LogitNormal(mean=1.0)).probabilities()
    assert noisier[500:].sum() > 0.8
    # P(t < 500) = Φ(−m/s)
    assert noisier[:500].sum().item() == pytest.approx(0.158655, abs=1e-5)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_laplace_puts_half_of_the_draws_above_its_median(schedule: str) -> None:
    diffusion = Diffusion(knobs.Process(schedule=schedule))
    log_snr = diffusion.snr_table.log()
    for centre in (-1.0, 0.0, 2.0):
        p = build(methods.LogSnrLaplace(log_snr=centre), schedule=schedule).probabilities()
        assert p[log_snr > centre].sum().item() == pytest.approx(0.5, abs=0.01)
        # e^(−1/b) of the mass lies further away than 1
        assert p[(log_snr - centre).abs() > 1].sum().item() == pytest.approx(torch.tensor(-2.0).exp().item(), abs=0.01)


def test_log_snr_of_the_cosine_schedule_is_uniform_on_that_schedule() -> None:
    p = build(methods.LogSnrCosine(), schedule="cosine").probabilities()
    torch.testing.assert_close(p[50:950], torch.full((900,), 1e-3, dtype=torch.float64), rtol=0.1, atol=0)
    assert build(methods.LogSnrCosine(log_snr=-2.0), schedule="cosine").probabilities()[500:].sum() > 0.7


# ------------------------------------------------------------------------------------------------- loss second moment
def test_loss_second_moment() -> None:
    sampler = learned()
    expect(sampler.probabilities(), [0.10015, 0.20005, 0.29995, 0.39985], atol=5e-6)
    expect(factors(sampler), [2.49626, 1.24969, 0.833472, 0.625234], atol=5e-6)
    expect(sampler.mass(), [0.25] * 4, atol=1e-12)  # unbiased: the objective stays that of uniform t


@pytest.mark.parametrize("power", [0.0, 0.5])
def test_importance_correction(power: float) -> None:
    found = factors(learned(methods.LossSecondMoment(importance_correction=power)))
    expect(found, [f**power for f in (2.49626, 1.24969, 0.833472, 0.625234)], atol=5e-6)


def test_uniform_until_the_history_is_full() -> None:
    sampler = build(methods.LossSecondMoment(history=2), 3)
    learn(sampler, torch.tensor([0, 0, 1, 1, 2, 0]), torch.tensor([1.0, 1.0, 2.0, 2.0, 3.0, 1.0]))
    expect(sampler.probabilities(), [1 / 3] * 3, atol=1e-12)
    learn(sampler, torch.tensor([2]), torch.tensor([3.0]))
    expect(sampler.probabilities(), [0.999 * w / 6 + 0.001 / 3 for w in (1, 2, 3)], atol=1e-12)


def test_loss_second_moment_equals_a_plain_history() -> None:
    """Batches so large that some timesteps occur more often than the history is long."""
    steps, history = 6, 3
    sampler = build(methods.LossSecondMoment(history=history, uniform_share=0.1), steps)
    plain: list[deque[float]] = [deque(maxlen=history) for _ in range(steps)]
    source = generator()
    for _ in range(20):
        t, losses = torch.randint(steps, (17,), generator=source), torch.rand(17, generator=source)
        learn(sampler, t, losses)
        for step, loss in zip(t.tolist(), losses.tolist(), strict=True):
            plain[step].append(loss)
        if all(len(past) == history for past in plain):
            w = torch.tensor([sum(x * x for x in past) / history for past in plain], dtype=torch.float64).sqrt()
            torch.testing.assert_close(sampler.probabilities(), 0.9 * w / w.sum() + 0.1 / steps)
    assert all(len(past) == history for past in plain)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_does_not_poison_the_sampler(bad: float) -> None:
    sampler, before = learned(), learned().probabilities()
    learn(sampler, torch.tensor([2]), torch.tensor([bad]))
    expect(sampler.probabilities(), [0.25] * 4, atol=0)
    learn(sampler, torch.tensor([2] * 10), 0.3 * (1 + 0.05 * torch.arange(10)))
    torch.testing.assert_close(sampler.probabilities(), before)


# --------------------------------------------------------------------------------------------- gradient norm and slope
@pytest.mark.parametrize("steps", [2, 1000])
def test_every_timestep_keeps_its_uniform_share(steps: int) -> None:
    sampler = trained(methods.InfoNoise(uniform_share=0.2), steps)
    assert sampler.probabilities().min().item() >= 0.2 / steps - 1e-12
    assert sampler.probabilities().sum().item() == pytest.approx(1)


def test_what_a_bin_said_long_ago_is_forgotten() -> None:
    """Once less than one image of it counts, it is taken for what the others are."""
    sampler = build(methods.InfoNoise(bins=2, gate=0.0, half_life=0.1), 2)
    sampler.update(torch.arange(2), torch.tensor([0.04, 0.16]), torch.ones(2))
    assert sampler.probabilities()[0] != sampler.probabilities()[1]
    sampler.update(torch.zeros(20, dtype=torch.int64), torch.full((20,), 0.04), torch.ones(20))
    expect(sampler.probabilities(), [1 / 2, 1 / 2], atol=1e-3)


def of_gaussian_data(
    member: Any, s: float, schedule: Any, prediction: Any, weighting: Any = None
) -> tuple[DiffusionLoss, Diffusion]:
    """After one error at each t, that of the best network for normal data of variance s, in units of the prediction."""
    diffusion = Diffusion(knobs.Process(schedule=schedule, prediction=prediction))
    sampler = timesteps.build(member, diffusion, 3, alone("cpu"))
    objective = DiffusionLoss(sampler, build_weighting(weighting or methods.Constant(), diffusion), diffusion)
    snr = diffusion.snr_table
    objective.learn(torch.arange(1000), s * snr / (1 + s * snr) / diffusion.to_epsilon)
    return objective, diffusion


def beyond(found: Tensor, log_snr: Tensor, edges: tuple[float, ...]) -> list[float]:
    """The share of `found` [T] above each log-SNR."""
    return [(found[log_snr > edge].sum() / found.sum()).item() for edge in edges]


def entropy_rate_beyond(s: float, gate: float, edges: tuple[float, ...], schedule: Any) -> list[float]:
    """The same of dH/dλ = ½·s·SNR/(1 + s·SNR) under the gate, by quadrature over λ instead of sums over t."""
    log_snr = Diffusion(knobs.Process(schedule=schedule)).log_snr
    grid = torch.linspace(float(log_snr.min()), float(log_snr.max()), 100_001, dtype=torch.float64)
    sigma = (-grid / 2).exp()
    rate = 0.5 * s / (sigma**2 + s) * sigma**3 / (sigma**3 + gate**3)
    return beyond(rate, grid, edges)


@pytest.mark.parametrize(("schedule", "prediction"), [("linear", "epsilon"), ("linear", "x0"), ("cosine", "v")])
@pytest.mark.parametrize(("s", "gate"), [(1.0, 0.15), (0.2, 0.5), (0.2, 0.0)])
def test_info_noise_follows_the_entropy_rate_of_gaussian_data(
    s: float, gate: float, schedule: Any, prediction: Any
) -> None:
    """κ = 0: p over λ does, in every unit. κ = 1: p times the weight on the error of x0 does, under any weighting."""
    edges = (-4.0, -2.0, 0.0, 2.0, 4.0, 6.0)
    expected = pytest.approx(entropy_rate_beyond(s, gate, edges, schedule), abs=0.03)
    divided = methods.InfoNoise(gate=gate, compensation=1.0)
    plain, diffusion = of_gaussian_data(methods.InfoNoise(gate=gate), s, schedule, prediction)
    assert beyond(plain.sampler.probabilities(), diffusion.log_snr, edges) == expected
    for weighting in (methods.Constant(), methods.MinSnr()):
        objective, _ = of_gaussian_data(divided, s, schedule, prediction, weighting)
        on_x0 = objective.effective_weight() * diffusion.snr_table  # MSE_ε = SNR·MSE_x0
        assert beyond(on_x0, diffusion.log_snr, edges) == expected


def test_a_network_that_is_worse_than_no_network_at_high_noise_does_not_fool_info_noise() -> None:
    """An ε-error of 0.1 is an x0-error of 2,000 at t = 999; counted so, hardly anything else would be drawn."""
    sampler = build(methods.InfoNoise(compensation=1.0))
    learn(sampler, torch.arange(1000), torch.full((1000,), 0.1))
    p, log_snr = sampler.probabilities(), Diffusion(knobs.Process()).log_snr
    assert p[log_snr < -8].sum().item() == pytest.approx(2.1 / 10, abs=0.05)  # its share of what is above the gate


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_error_that_is_not_finite_is_not_remembered(bad: float) -> None:
    sampler = trained(methods.InfoNoise())
    before = sampler.probabilities()
    assert before.max() > 0.011
    learn(sampler, torch.arange(100), torch.full((100,), bad))
    torch.testing.assert_close(sampler.probabilities(), before)


@pytest.mark.parametrize("steps", [15, 20, 24, 30])
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_short_chains(schedule: str, steps: int) -> None:
    for member in (methods.Speed(dual=True), methods.LogSnrLaplace(log_snr=10.0, scale=0.001), methods.LogSnrCosine()):
        p = build(member, steps, schedule).probabilities()
        assert p.isfinite().all()
        assert p.sum().item() == pytest.approx(1)


# ------------------------------------------------------------------------------------------------- from images alone
def gaussian(variances: Tensor, count: int = wiener.LEARNED_FROM, seed: int = 0) -> Tensor:
    """Images [count, C, H, W] whose cosine components vary independently by `variances` [C, H, W] around a mean."""
    drawn = torch.randn(count, *variances.shape, generator=generator(seed)) * variances.sqrt()
    return torch.from_numpy(idctn(drawn.numpy(), axes=(1, 2, 3), norm="ortho")) + 0.3


def shown(member: methods.Wiener, x0: Tensor, schedule: Any = "linear", batch: int = 128) -> TimestepSampler:
    """After it has seen these images."""
    diffusion = Diffusion(knobs.Process(schedule=schedule))
    sampler = timesteps.build(member, diffusion, x0.shape[1], alone("cpu"))
    for part in x0.split(batch):
        sampler.sample(part, generator())
    return sampler


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("s", [1.0, 0.2])
def test_wiener_draws_a_normal_log_snr_around_that_of_gaussian_data(s: float, schedule: Any) -> None:
    """With data of one variance s, errors of image and noise are s/(1 + s·SNR) and SNR times that: λ* = −log s."""
    sampler = shown(methods.Wiener(width=0.5), gaussian(torch.full((3, 8, 8), s)), schedule)
    p, log_snr, centre = sampler.probabilities(), Diffusion(knobs.Process(schedule=schedule)).log_snr, -math.log(s)
    assert p[log_snr > centre].sum().item() == pytest.approx(0.5, abs=0.06)
    for deviations, beyond in ((1, 0.3173), (2, 0.0455)):
        found = p[(log_snr - centre).abs() > 0.5 * deviations].sum().item()
        assert found == pytest.approx(beyond, abs=0.02)


def natural(side: int) -> Tensor:
    """Variances that fall with the square of the frequency, as those of photographs; colours vary least."""
    row, column = torch.arange(side)[:, None], torch.arange(side)
    return torch.tensor([1.0, 0.1, 0.05])[:, None, None] * 20 / (1 + row**2 + column**2)


def test_wiener_weighs_all_components() -> None:
    """Twelve components of unlike variance: where what their filter leaves of image and noise is largest together."""
    variances = natural(2)
    log_snr = Diffusion(knobs.Process()).log_snr
    s, snr = variances.flatten().double(), log_snr.exp()[:, None]
    of_image, of_noise = (s / (1 + s * snr)).sum(1), (s * snr / (1 + s * snr)).sum(1)
    expected = log_snr[(of_image * of_noise).argmax()].item()
    p = shown(methods.Wiener(uniform_share=0.25), gaussian(variances)).probabilities()
    assert p.min().item() == pytest.approx(0.25 / 1000, rel=1e-3)
    own = (p - 0.25 / 1000) / 0.75
    mean = (own * log_snr).sum().item()
    assert mean == pytest.approx(expected, abs=0.05)
    assert (own * (log_snr - mean).square()).sum().sqrt().item() == pytest.approx(0.85, abs=0.02)


def test_wiener_looks_for_the_place_of_a_larger_picture_at_more_noise_and_passes_over_its_texture() -> None:
    """A picture on twice the side is log 4 lower; components beyond the 20 coarsest change nothing."""
    variances, log_snr = natural(20), Diffusion(knobs.Process()).log_snr
    larger = torch.full((3, 40, 40), 0.5)
    larger[:, :20, :20] = 4 * variances
    small, large = (shown(methods.Wiener(), gaussian(each)).probabilities() for each in (variances, larger))
    assert ((small - large) * log_snr).sum().item() == pytest.approx(math.log(4), abs=0.1)


def test_wiener_learns_from_the_first_images_and_goes_on_from_its_state() -> None:
    x0 = gaussian(natural(4), wiener.LEARNED_FROM + 512)
    sampler, whole = build(methods.Wiener()), shown(methods.Wiener(), x0)
    assert torch.equal(sampler.probabilities(), torch.full((1000,), 1e-3, dtype=torch.float64))
    for i, part in enumerate(x0.split(128)):
        state, sampler = copy.deepcopy(sampler.state_dict()), build(methods.Wiener())
        sampler.load_state_dict(state)
        sampler.sample(part, generator())
        assert sampler.state_dict()["images"] == min(128 * (i + 1), wiener.LEARNED_FROM)
    assert torch.equal(sampler.probabilities(), whole.probabilities())
    assert sampler.probabilities().max() > 0.002


def errors_of(sampler: Any, t: Tensor, quotient: float) -> Tensor:
    """The errors, in units of the prediction, of a network whose ε-error is so many times the filter's."""
    return quotient * sampler.filter_error[t] / sampler.to_epsilon[t]


def taught(sampler: Any, quotients: list[float], batch: int = 512) -> None:
    """Let it train on batches at which the network's error is so many times the filter's."""
    source = generator(11)
    for quotient in quotients:
        t, _ = sampler.sample(images(batch), source)
        learn(sampler, t, errors_of(sampler, t, quotient))


def times(sampler: TimestepSampler) -> float:
    """How many times as wide it draws as at first."""
    return float(sampler.state_dict()["times"])


def widened(sampler: TimestepSampler, width: float) -> TimestepSampler:
    sampler.load_state_dict(sampler.state_dict() | {"times": torch.tensor(width, dtype=torch.float64)})
    return sampler


def deviation(sampler: TimestepSampler) -> float:
    """Standard deviation of the log-SNR that is drawn."""
    p, log_snr = sampler.probabilities(), Diffusion(knobs.Process()).snr_table.log()
    mean = (p * log_snr).sum()
    return float((p * (log_snr - mean).square()).sum().sqrt())


def falling(by: float, batches: int, batch: int = 512, until: float = 0.5) -> list[float]:
    """Quotients that end at `until` after a fall of `by` with each doubling of the images."""
    return [until + by * math.log2(batches / (i + 0.5)) for i in range(batches)]


@pytest.mark.parametrize(("quotient", "share"), [(0.4, 0.45), (0.6, 0.3), (0.7, 0.0), (1.7, 0.0), (math.nan, 0.0)])
def test_wiener_draws_by_the_spectrum_as_far_as_the_network_leads_the_filter(quotient: float, share: float) -> None:
    """One coarse component has half of the variance: it is decided at λ = −6, far from all others."""
    variances = torch.full((1, 8, 8), math.exp(6.0) / 63, dtype=torch.float64)
    variances[0, 0, 0] = math.exp(6.0)
    sampler: Any = shown(methods.Wiener(width=0.5), gaussian(variances))
    coarse = Diffusion(knobs.Process()).snr_table.log() < -4.0
    assert float(sampler.probabilities()[coarse].sum()) < 0.001
    taught(sampler, [quotient] * 16)
    assert float(sampler.probabilities()[coarse].sum()) == pytest.approx(share / 2, abs=0.005)


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("prediction", ["epsilon", "v"])
def test_wiener_widens_as_the_lead_over_the_linear_filter_stops_growing(prediction: Any) -> None:
    """The error falls by 0.02 per doubling and the lead is one half: it grows by 0.04, half of `GROWTH`."""
    diffusion = Diffusion(knobs.Process(prediction=prediction))
    sampler: Any = timesteps.build(methods.Wiener(width=0.5), diffusion, 1, alone("cpu"))
    sampler.sample(images(wiener.LEARNED_FROM), generator())
    assert deviation(sampler) == pytest.approx(0.5, rel=0.01)
    taught(sampler, falling(0.02, 400))
    widest = times(sampler)
    assert widest == pytest.approx(2.0, rel=0.06)
    assert deviation(sampler) == pytest.approx(0.5 * widest, rel=0.06)  # and its base nears uniform t
    taught(sampler, [0.5 - 0.001 * i for i in range(100)])
    assert times(sampler) == pytest.approx(widest, rel=0.02), "it never narrows, though the lead grows again"


def test_wiener_nears_uniform_t_as_it_widens() -> None:
    """Between the two it is the narrow density to a power, which is their geometric mixture."""
    sampler: Any = build(methods.Wiener(width=0.5))
    sampler.sample(images(wiener.LEARNED_FROM), generator())
    narrow = sampler.probabilities()
    half = narrow.sqrt() / narrow.sqrt().sum()
    torch.testing.assert_close(widened(sampler, math.sqrt(2)).probabilities(), half)
    uniform = torch.full_like(narrow, 1 / len(narrow))
    torch.testing.assert_close(widened(sampler, 1e4).probabilities(), uniform, rtol=1e-3, atol=0)
    torch.testing.assert_close(widened(sampler, 1.0).probabilities(), narrow)


@pytest.mark.parametrize(
    "quotients",
    [falling(0.1, 60), falling(0.0, 60, until=0.97), falling(0.0, 60, until=1.5), [0.5] * 31, [math.nan] * 60],
    ids=["the lead grows by a fifth", "hardly a lead", "worse than the filter", "too early", "not finite"],
)
@pytest.mark.usefixtures("narrow")
def test_wiener_stays_narrow(quotients: list[float]) -> None:
    sampler: Any = build(methods.Wiener())
    sampler.sample(images(wiener.LEARNED_FROM), generator())
    before = sampler.probabilities()
    taught(sampler, quotients)
    assert torch.equal(sampler.probabilities(), before)


@pytest.mark.parametrize(("width", "progress", "ends"), [(2.0, 0.8, True), (2.0, 0.7, False), (1.2, 0.8, False)])
def test_wiener_ends_with_uniform_t_where_it_has_widened(width: float, progress: float, ends: bool) -> None:
    sampler: Any = build(methods.Wiener())
    sampler.sample(images(wiener.LEARNED_FROM), generator())
    widened(sampler, width)
    before = sampler.probabilities()
    sampler.advance(progress)
    uniform = torch.full_like(before, 1 / len(before))
    torch.testing.assert_close(sampler.probabilities(), uniform if ends else before, rtol=1e-9, atol=0)
    restored: Any = build(methods.Wiener())
    restored.load_state_dict(copy.deepcopy(sampler.state_dict()))
    restored.advance(progress)
    assert torch.equal(restored.probabilities(), sampler.probabilities())


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 2, 5), (2, 1, 1), (3, 24, 21)])
def test_the_cosine_transform_is_that_of_scipy(shape: tuple[int, ...]) -> None:
    x = torch.randn(4, *shape, generator=generator(), dtype=torch.float64)
    expected = torch.from_numpy(dctn(x.numpy(), axes=(1, 2, 3), norm="ortho"))
    torch.testing.assert_close(wiener.cosine_transform(x), expected)


# -------------------------------------------------------------------------------------------------------- distributed
DISTRIBUTED: list[Any] = [methods.LossSecondMoment(history=3), methods.InfoNoise(bins=4)]


def global_batch(i: int) -> tuple[Tensor, Tensor]:
    return torch.randint(5, (12,), generator=generator(i)), torch.rand(12, generator=generator(100 + i)) / (1 + i)


def of_a_rank(world: World) -> list[Tensor]:
    found, first = [], 6 * world.rank
    rounding = 1 + 1e-13 * world.rank * torch.rand(1000, dtype=torch.float64)  # of another GPU, or in another order
    wiener.SETTLED = 0
    sampler: Any = build(methods.Wiener(), world=world)
    sampler._cell *= rounding
    of_this_rank = images(wiener.LEARNED_FROM).tensor_split(2)[world.rank]
    sampler.sample(of_this_rank, generator(), wiener.LEARNED_FROM, len(of_this_rank) * world.rank)
    for i in range(2 * PACE):
        t, losses = global_batch(i)
        learn(sampler, t[first : first + 6], 0.01 * losses[first : first + 6])
    found.append(sampler.probabilities())
    for member in DISTRIBUTED:
        sampler = build(member, 5, world=world)
        importance = type(sampler)._importance
        for i in range(2 * PACE):
            sampler._importance = lambda sampler=sampler, of=importance: of(sampler) * rounding[:5]
            if i == PACE + 3:  # three batches wait to be learned from
                state, sampler = sampler.state_dict(), build(member, 5, world=world)
                sampler.load_state_dict(state)
            t, losses = global_batch(i)
            learn(sampler, t[first : first + 6], losses[first : first + 6])
        found.append(sampler.probabilities())
    return found


def test_two_processes_learn_what_one_learns_from_the_global_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refresh_every: Any
) -> None:
    """Refreshed at the usual pace, and continued from a state in between."""
    refresh_every(PACE)
    monkeypatch.setattr(wiener, "SETTLED", 0)
    from_images, *others = zip(*ranks(of_a_rank, tmp_path), strict=True)
    both: Any = build(methods.Wiener())
    both.sample(images(wiener.LEARNED_FROM), generator())
    for i in range(2 * PACE):
        t, losses = global_batch(i)
        learn(both, t, 0.01 * losses)
    assert times(both) > 1
    for probabilities in from_images:
        assert torch.equal(probabilities, from_images[0])
        torch.testing.assert_close(probabilities, both.probabilities(), rtol=1e-6, atol=0)
    for member, of_ranks in zip(DISTRIBUTED, others, strict=True):
        alone = build(member, 5)
        for i in range(2 * PACE):
            learn(alone, *global_batch(i))
        for probabilities in of_ranks:
            assert torch.equal(probabilities, of_ranks[0]), "bit for bit, or they draw other timesteps"
            torch.testing.assert_close(probabilities, alone.probabilities(), rtol=0, atol=1e-12)
        assert alone.probabilities().max() > 0.21  # something was learned
