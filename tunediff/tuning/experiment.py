"""One search from its folder: start or resume it, run it through Ray Tune, and leave everything on disk.

ray_results/NAME/
  search.yaml  baseline.yaml   what was asked for, as checked
  sessions.jsonl               when it ran, with which command, on what
  trials/t0000/                journal.jsonl, samples.png, ema.safetensors
  study.db                     the Optuna study; optuna-dashboard opens it
  tune/  train/                Ray's own files
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shlex
import shutil
import signal
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from tunediff import config as cfg
from tunediff import record
from tunediff import space as spaces
from tunediff.config import ConfigError
from tunediff.space import SearchSpace
from tunediff.tuning import resources

log = logging.getLogger(__name__)

Listener = Callable[[str, str, dict[str, Any]], None]
"""Called with (event, trial name, content); events: start, point, end."""


class StoppedError(RuntimeError):
    """The search had to stop for a reason that lies outside of it; it can be resumed once that is mended."""


def create(folder: Path, space: SearchSpace, content: dict[str, Any]) -> None:
    """Make the folder of a new search. Raises `ConfigError` if the name is taken or the place cannot be written."""
    if folder.exists():
        raise ConfigError(
            f"--name: {folder.name!r} exists in {folder.parent}; choose another name, or --resume {folder.name}"
        )
    new = folder.with_name(f".{folder.name}-{os.getpid()}")
    try:
        (new / "trials").mkdir(parents=True)
        kept = {key: value for key, value in content.items() if key not in ("workload", "base", "fixed", "baseline")}
        kept["base"] = "baseline.yaml"
        limits = {"per_trial": f"{space.budget.per_trial_s:.10g}s", "trials": space.budget.trials}
        limits["compile"] = "charged" if space.budget.compile_charged else "free"
        if space.budget.total_s is not None:
            limits["total"] = f"{space.budget.total_s:.10g}s"
        if space.budget.deadline_s is not None:
            limits["deadline"] = f"{space.budget.deadline_s:.10g}s"
        kept["budget"], kept["seed"] = limits, space.seed
        (new / "baseline.yaml").write_text(cfg.dump(space.baseline, [f"the baseline of {space.source}"]))
        (new / "search.yaml").write_text(yaml.safe_dump(kept, sort_keys=False, allow_unicode=True))
        new.rename(folder)  # a folder of that name is complete, whenever this process is killed
    except OSError as error:
        shutil.rmtree(new, ignore_errors=True)
        raise ConfigError(f"--storage: {folder} cannot be written: {error.strerror}") from None


def reopen(folder: Path, limits: dict[str, Any] | None = None) -> SearchSpace:
    """The space of an existing search; `limits` (`trials`, `total`) replace its own from now on."""
    path = spaces.of_search(folder)
    space = spaces.load(path, budget=limits)
    if limits:
        content = cfg.read_yaml(path)
        content["budget"] |= limits
        path.write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
    return space


def spent_s(folder: Path) -> float:
    """Wall-clock of the sessions so far; a session that was killed lasted until its last line."""
    total, path = 0.0, folder / "sessions.jsonl"
    if not path.exists():
        return 0.0
    lines = []
    for line in path.read_text().splitlines():
        with contextlib.suppress(ValueError):
            lines.append(json.loads(line))
    begins = [line["time"] for line in lines if line["event"] == "begin"]
    stamps = [line["time"] for line in lines]
    stamps += [event["time"] for trial in (folder / "trials").glob("t*") for event in record.events(trial)]
    for begin, following in zip(begins, [*begins[1:], float("inf")], strict=True):
        total += max(stamp for stamp in stamps if begin <= stamp < following) - begin
    return total


def _note(folder: Path, event: str, **content: Any) -> None:
    with open(folder / "sessions.jsonl", "a") as file:
        file.write(json.dumps({"event": event, "time": time.time(), **content}) + "\n")


@contextlib.contextmanager
def cluster(address: str | None) -> Iterator[Any]:
    """A Ray cluster: the one at `address`, or one on this machine for the duration of the search."""
    import ray

    # The dashboard also frees the placement groups of trials that were stopped early: without it a search can hang.
    local: dict[str, Any] = {"include_dashboard": True, "dashboard_host": "127.0.0.1"} if address is None else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        context = ray.init(
            address=address or "local",
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=True,
            **local,
        )
    try:
        yield context
    finally:
        ray.shutdown()


def machine(address: str | None) -> resources.Machine:
    """What the search may use: this machine, or the cluster Ray is connected to."""
    if address is None:
        return resources.local()
    import ray

    total = ray.cluster_resources()
    return resources.Machine(int(total.get("CPU", 0)), int(total.get("GPU", 0)))


def run(folder: Path, space: SearchSpace, listener: Listener, address: str | None = None, greet: Any = None) -> None:
    """Run the search in `folder` until a limit is reached. Raises `KeyboardInterrupt` on Ctrl-C and SIGTERM."""
    share = resources.share(space, machine(None)) if address is None else None
    with _alone(folder):
        before = spent_s(folder)
        _note(folder, "begin", command=shlex.join(sys.argv), environment=environment.describe())
        try:
            with _terminable(), cluster(address) as context, _terminable():  # Ray sets a handler of its own
                if greet is not None:
                    greet(context)
                _search(folder, space, share or resources.share(space, machine(address)), before, listener)
        finally:
            with contextlib.suppress(OSError):  # a full disk is told otherwise
                _note(folder, "end")


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Two processes must not run one search; the lock ends with the process, however it ends."""
    if (why := record.unwritable(folder)) is not None:
        raise ConfigError(f"--storage: {folder} cannot be written: {why}")
    with open(folder / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"--resume: {folder.name} is running in another process; wait for it, or stop it"
            ) from None
        yield


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM, as batch schedulers send it, ends the search like Ctrl-C does."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def scheduler(space: SearchSpace) -> Any:
    """Tune's scheduler that stops hopeless trials on training seconds, or None. Rungs lie at evaluation points.

    Early on curves cross: compilation, warm-up and the EMA make the later winner look bad at first; no trial is judged
    before `GRACE` of its budget.
    """
    from ray.tune.schedulers import ASHAScheduler, MedianStoppingRule

    from tunediff.tuning.searcher import GRACE

    budget_s = space.budget.per_trial_s
    if space.early_stopping == "asha":
        return ASHAScheduler(time_attr="train_s", max_t=budget_s, grace_period=GRACE * budget_s, reduction_factor=2)
    if space.early_stopping == "median":
        return MedianStoppingRule(time_attr="train_s", grace_period=GRACE * budget_s, min_samples_required=3)
    return None


def _search(folder: Path, space: SearchSpace, share: resources.Share, before_s: float, listener: Listener) -> None:
    import optuna
    import ray
    from ray import tune
    from ray.tune.progress_reporter import TrialProgressCallback

    from tunediff.tuning import dashboard
    from tunediff.tuning import slot as slots
    from tunediff.tuning.searcher import Searcher
    from tunediff.tuning.trial import Driver, plan

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    logging.getLogger("ray.tune").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="optuna|ray")
    searcher = Searcher(space, folder, share.slots, before_s)
    session = uuid.uuid4().hex[:6]  # several searches may share a cluster
    names = [f"{folder.name}-{session}-slot-{i}" for i in range(share.slots)]
    actors = [slots.create(name, str(folder / "train"), share.to_dict()) for name in names]
    if not space.fresh and space.baseline.compile.mode == "none":
        for actor in actors:  # the workers of the first trials start while Tune does
            actor.warm.remote(slots.kind_of_group(space.baseline))

    class Events(TrialProgressCallback):  # type: ignore[misc]
        """Passes Tune's events on, in place of Tune's own printing; hooks are called by keyword."""

        def __init__(self, *listeners: Listener) -> None:
            super().__init__()
            self._listeners = listeners

        def __getstate__(self) -> dict[str, Any]:
            return {"_listeners": ()}  # Tune keeps a pickled copy of all it was given; a terminal cannot be pickled

        def _tell(self, event: str, name: str, content: dict[str, Any]) -> None:
            for listener in self._listeners:
                try:
                    listener(event, name, content)
                except Exception:  # what is only shown must not end a night of trials
                    log.exception("could not show %s of %s", event, name)

        def on_trial_start(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
            self._tell("start", trial.config["trial"], trial.config)

        def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: Any, **info: Any) -> None:
            self._tell("point", trial.config["trial"], {**result, "slot": trial.config["slot"]})

        def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
            self._tell("end", trial.config["trial"], trial.config)

        def on_trial_error(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
            self._tell("end", trial.config["trial"], trial.config)

    number = len(list((folder / "tune").glob("*"))) if (folder / "tune").exists() else 0
    tuner = tune.Tuner(
        tune.with_resources(tune.with_parameters(Driver, plan=plan(space, folder, names)), {"CPU": 0.01}),
        tune_config=tune.TuneConfig(
            num_samples=-1,  # the searcher knows the limits
            max_concurrent_trials=share.slots,
            search_alg=searcher,
            scheduler=scheduler(space),
            metric="objective",
            mode=space.mode,
            trial_name_creator=_readable,
            trial_dirname_creator=_readable,
            reuse_actors=True,  # a new driver process per trial costs seconds
        ),
        run_config=tune.RunConfig(
            name=f"session-{number}",
            storage_path=str(folder / "tune"),
            verbose=0,
            callbacks=[Events(listener, dashboard.Board(folder, space, actors).tell)],
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),  # the workers keep their own
            failure_config=tune.FailureConfig(max_failures=1),  # a killed driver comes back and finds its workers busy
        ),
    )
    try:
        tuner.fit()
    except Exception as error:
        if (why := record.unwritable(folder)) is None:
            raise
        raise StoppedError(f"{folder} cannot be written: {why}") from error
    if searcher.broken is not None:
        raise StoppedError(f"{folder} cannot be written: {record.unwritable(folder) or searcher.broken}")
    for actor in actors:
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(actor.close.remote(), timeout=30)


def _readable(trial: Any) -> str:
    """t0007_batch_size=256,amp=bf16: what Ray's pages and folders show."""
    knobs = [
        f"{name.rpartition('.')[2]}={value:.3g}" if isinstance(value, float) else f"{name.rpartition('.')[2]}={value}"
        for name, value in trial.config.items()
        if name not in ("trial", "slot")
    ]
    words = "_".join([trial.config["trial"], ",".join(knobs)])
    return "".join(c if c.isalnum() or c in "_=,.-" else "-" for c in words)[:100]
