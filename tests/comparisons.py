"""Folders of comparisons made by hand."""

from pathlib import Path

from tunediff import compare
from tunediff import config as cfg
from tunediff.api import sides
from tunediff.core.journal import Journal
from tunediff.experiment.model import Experiment, Limit, SequentialTest

PLAIN = (Path(__file__).parent / "users" / "plain.py").read_text()
CLOSE = {"A": [2.0, 2.2, 1.9, 2.1], "B": [2.05, 2.1, 1.95, 2.12]}
BETTER = {"A": [2.0, 2.2, 1.9], "B": [1.0, 1.08, 0.96]}


def made(values, a="digits", b=("digits", "loader.batch_size=64"), statuses=(), folder=Path("ray_results/x"), **more):
    """A comparison whose runs are made up: `values` by side; `statuses` by (side, pair)."""
    folder = folder.absolute()
    a, b = ([side] if isinstance(side, str) else list(side) for side in (a, b))
    for place, (side, given) in enumerate(zip("AB", (a, b), strict=True)):
        config = cfg.take_along(sides.side_of(given, folder), folder / side)
        (folder / side).mkdir(parents=True, exist_ok=True)
        (folder / side / "config.yaml").write_text(cfg.dump(config, folder=folder / side))
        metric = cfg.of(config).objective.name
        for number, value in enumerate(values[side]):
            journal = Journal(folder / "trials" / f"t{2 * number + place:04d}")
            seeded = cfg.override(config, {"seed": config.seed + number})
            journal.write(
                "start", name=journal.folder.name, number=2 * number + place, config=cfg.flat(seeded), budget_s=20.0,
                drawn={"side": side, "seed": seeded.seed}, role="side", fingerprint=cfg.fingerprint(seeded),
                environment={"device": "cpu", "cpu": "slow one", "cpu_cores": 2, "versions": {"torch": "2.15"}},
            )  # fmt: skip
            status = dict(statuses).get((side, number + 1), "ok")
            label = {"label": "FD (classifier)"} if metric == "frechet" else {}
            for index in range(1, 5 if status == "ok" else 2):
                on_the_way = value + (4 - index) * abs(value) / 2 * (1 if metric == "frechet" else -0.2)
                journal.write("point", index=index, train_s=5.0 * index, samples=1000 * index, steps=10 * index,
                              samples_per_s=200.0, seconds={"train": 5.0 * index}, **{metric: on_the_way}, **label)  # fmt: skip
            journal.write("end", status=status, reason="" if status == "ok" else "needs 9 GiB", seconds={"train": 20.0})
    content = {"kind": "comparison", "objective": metric, "mode": cfg.of(config).objective.mode}
    content |= {"candidates": {"A": " ".join(a), "B": " ".join(b)}, "limit": {"budget": 20.0}, "test": {}}
    for name, value in more.items():
        sections = [part for part in (SequentialTest, Limit) if name in part.model_fields]
        place = {SequentialTest: content["test"], Limit: content["limit"]}.get(*sections) if sections else content
        place[name] = value
    Experiment.of(content, "made").write(folder)
    return folder


def told(capsys, *options):
    """Exit code and output of the command on a comparison that needs no further run."""
    code = compare.main(["--resume", "x", *options])
    return code, capsys.readouterr().out
