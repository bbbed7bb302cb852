"""Train one configuration outside any search: `python -m tunediff.train --config best.yaml --budget 5m`.

The same command again resumes an interrupted training, and does nothing to a finished one. Runs alone, or as
`torchrun --nproc-per-node N -m tunediff.train …` with parallel.workers = N.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tunediff import cli, record
from tunediff import config as cfg
from tunediff.clock import Budget, Clock
from tunediff.config import Config, ConfigError
from tunediff.space import duration_s


def main(argv: Sequence[str] | None = None) -> int:
    """Train; see `--help`."""
    return cli.guarded(_main, argv)


def _main(argv: Sequence[str] | None) -> int:
    parser = cli.parser("train", __doc__ or "")
    parser.add_argument("words", nargs="*", metavar="knob=value", help="changes to the configuration")
    parser.add_argument("--config", type=Path, required=True, help="configuration file, such as an exported best.yaml")
    parser.add_argument("--budget", help="training seconds, e.g. 90s, 10m, 8h")
    parser.add_argument("--images", type=int, help="training images, instead of or besides --budget")
    parser.add_argument("--out", type=Path, help="folder of the run (default: ray_results/train-CONFIG)")
    parser.add_argument("--initial", type=Path, help="safetensors weights to start from")
    args = parser.parse_args(argv)
    if args.budget is None and args.images is None:
        raise ConfigError("--budget: is missing; training seconds such as 5m, or --images")
    if args.images is not None and args.images < 1:
        raise ConfigError(f"--images: {args.images} is not allowed; allowed: a whole number of at least 1")
    budget = Budget(duration_s(args.budget, "--budget") if args.budget else None, args.images)
    config = cfg.load(args.config, cfg.parse_overrides(args.words))
    folder = args.out or cli.STORAGE / f"train-{args.config.stem}"
    _check(config, budget, folder, args.initial)
    return _train(config, budget, folder.absolute(), args.initial)


def _check(config: Config, budget: Budget, folder: Path, initial: Path | None) -> None:
    """Refuse what would fail later, and a folder that holds another training."""
    from tunediff.data import sources
    from tunediff.evaluation import weights

    sources.check(config.data)
    weights.check(config)
    if initial is not None and not initial.is_file():
        raise ConfigError(f"--initial: {initial}: no such file; allowed: weights in a .safetensors file")
    if (known := record.read_trial(folder)) is not None:
        if known.fingerprint != cfg.fingerprint(config):
            theirs = cfg.from_dict(cfg.nest(known.config), str(folder))
            changed = cli.knobs(cfg.differences(config, theirs))
            raise ConfigError(f"--out: {folder} holds a training of another configuration ({changed}); choose another")
        if (known.budget_s, known.drawn.get("images")) != (budget.seconds, budget.images):
            raise ConfigError(
                f"--budget: {folder} holds a training with a budget of {known.budget_s} s and "
                f"{known.drawn.get('images')} images; repeat it to resume, or choose another --out"
            )


def _train(config: Config, budget: Budget, folder: Path, initial: Path | None) -> int:
    from tunediff.data import images as data
    from tunediff.evaluation.distance import NonFiniteError
    from tunediff.evaluation.evaluator import Evaluator, image_grid
    from tunediff.training import checkpoint, loop
    from tunediff.training.parallel import from_environment
    from tunediff.training.precision import NotFiniteError

    with from_environment() as world:
        if world.size != config.parallel.workers:
            raise ConfigError(
                f"parallel.workers: {config.parallel.workers} is not allowed with {world.size} processes; start it as "
                f"torchrun --nproc-per-node {config.parallel.workers} -m tunediff.train …, or set parallel.workers=1"
            )
        known = record.read_trial(folder)
        if known is not None and known.status == "ok":
            if world.main:
                _conclude(folder)
            return cli.OK

        clock = Clock(budget, world.synchronize)
        with clock.part("setup"):
            images = data.load(config.data)
            evaluate = Evaluator(config, images, world.device, world.rank, world.size)
            start = checkpoint.load_weights(initial) if initial is not None else None
        journal = record.Journal(folder) if world.main else None
        if journal is not None:
            for name, reason in images.skipped[:20]:
                print(f"skipped {name}: {reason}", file=sys.stderr)
            journal.write(
                "start", name=folder.name, number=0, config=cfg.flat(config), drawn={"images": budget.images},
                fingerprint=cfg.fingerprint(config), budget_s=budget.seconds, environment=record.environment(),
            )  # fmt: skip
            (folder / "config.yaml").write_text(cfg.dump(config), encoding="utf-8")

        def report(point: dict[str, Any]) -> bool:
            assert journal is not None
            if not record.is_recorded(folder, point):
                journal.write("point", **point)
                if evaluate.last_images is not None:
                    image_grid(evaluate.last_images, folder / "samples.png")
                print(
                    f"{point['train_s']:8.1f} s  {evaluate.label} {cli.number(point['frechet'])}  "
                    f"loss {cli.number(point['loss'])}  {point['images_per_s']:.0f} images/s",
                    flush=True,
                )
            return True

        try:
            outcome = loop.train(
                config, budget, images, evaluate, world, folder, report,
                clock=clock, checkpoint_every_s=60.0, initial=start,
            )  # fmt: skip
        except (NotFiniteError, NonFiniteError) as error:
            if journal is not None:
                journal.write("end", status="nan", reason=str(error))
                print(f"error: {error}", file=sys.stderr)
            return cli.FAILED
        except KeyboardInterrupt:
            print("\ninterrupted; the same command again resumes", file=sys.stderr)
            return cli.INTERRUPTED
        if journal is not None:
            checkpoint.save_weights(
                outcome.ema.state_dict(), folder / checkpoint.WEIGHTS, {"fingerprint": cfg.fingerprint(config)}
            )
            journal.write(
                "end", status="ok", reason="", seconds=outcome.seconds, steps=outcome.steps, peak=outcome.peak
            )
            _conclude(folder)
    return cli.OK


def _conclude(folder: Path) -> None:
    """The result of a finished training, as `key: value`."""
    known = record.read_trial(folder)
    assert known is not None
    last = known.points[-1]
    lines = {
        last["label"]: last["frechet"],
        "train_s": last["train_s"],
        "images": last["images"],
        "steps": last["steps"],
        **{f"{part}_s": spent for part, spent in known.end["seconds"].items() if part != "train"},
        "weights": folder / "ema.safetensors",
        "samples": folder / "samples.png",
        "journal": folder / record.JOURNAL,
    }
    print("\n".join(f"{key}: {cli.number(value)}" for key, value in lines.items()))


if __name__ == "__main__":
    sys.exit(main())
