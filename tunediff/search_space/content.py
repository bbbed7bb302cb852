"""The content of a search file before it is parsed: found, read, completed, narrowed."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from tunediff import config as cfg
from tunediff.config import ConfigError, Lines, Schema, workload
from tunediff.config.knobs import nearest, refuse
from tunediff.core import remote, text
from tunediff.experiment import model
from tunediff.experiment.model import Experiment
from tunediff.search_space.dimension import listed, owners_of, spread

_PACKAGE = Path(__file__).resolve().parents[1]
# In a checkout the search files lie beside the package; an installed wheel carries them inside it.
SHIPPED = next(
    (d for d in (_PACKAGE.parent / "search_spaces", _PACKAGE / "search_spaces") if d.is_dir()),
    _PACKAGE,
)
DEFAULT = "digits.yaml"


def find(name: str | None) -> Path:
    """Return the search file that a user names: a path, or a shipped one's name (`cifar10`).

    A workload's file or module stands for a search file that contains only its name.
    """
    if name is None:
        return SHIPPED / DEFAULT
    if is_workload(Path(name)):
        return Path(name)
    for path in (Path(name), SHIPPED / name, SHIPPED / f"{name}.yaml"):
        if path.is_file():
            return path
    if Path(name).is_dir():
        hint = f"to learn the images in it: {text.command('search', 'images', f'data.path={name}')}"
        if model.is_search(Path(name)):
            hint = f"its search file is {Path(name) / model.FILE}"
        raise ConfigError(f"{name}: is a folder, not a search file; {hint}")
    hint = nearest(name.removesuffix(".yaml"), shipped()).replace("allowed:", "shipped:")
    raise ConfigError(f"{name}: no such search file; {hint}")


def shipped() -> list[str]:
    """Return the names of the shipped search files: `digits`, `studies/ladder`, …"""
    return sorted(
        str(path.relative_to(SHIPPED).with_suffix("")) for path in SHIPPED.rglob("*.yaml")
    )


def is_workload(path: Path) -> bool:
    """Return whether a path is the file or module of a workload, perhaps with a preset's name."""
    return cfg.is_users(str(path).partition(":")[0])


def folder_of(name: str, storage: Path) -> Path:
    """Return the absolute folder of an experiment that a user names: inside `storage`, or as a
    path.

    What is new at a storage's address is fetched, without weights. Raises `ConfigError`.
    """
    remote.pull(storage / name)
    places = (storage / name, Path(name))
    return next(
        (place for place in places if model.kind_of(place) is not None), places[0]
    ).absolute()


def of_search(folder: Path) -> Path:
    """Return the file in the folder of a search.

    Raises `ConfigError` if there is none, with a list.
    """
    if not model.is_search(folder):
        searches = sorted(path.name for path in folder.parent.glob("*/") if model.is_search(path))
        missing = f"{folder.name or folder}: no such search in {folder.parent}"
        others = ", ".join(searches) or "none; --storage names another folder"
        raise ConfigError(f"{missing}; there are: {others}")
    return folder / model.FILE


# ---- reading
OF_A_WORKLOAD = {"budget": {"per_trial": "60s", "trials": 16}, "confirm": {"of": 2}}
"""Budget and confirmation of a search for which only a workload's file is given."""


def read(path: Path, world_sizes: Sequence[int] = (1,), gpu: bool = False) -> Lines:
    """Return the content of a search file, with lists in the place of `all` and `not`.

    `all` is every choice of a searched knob; in a grid, `parallel.workers: all` is `world_sizes`,
    those that fit on this machine, and `parallel.strategy: all` what shares something, `dp` only
    with a GPU. `when: {KNOB: {not: [VALUE]}}` is all other choices that have the searched knob. A
    point of `first:` with `all` is one point for each choice, with the knobs that apply there.
    """
    content = {"workload": path.name, **OF_A_WORKLOAD} if is_workload(path) else cfg.read_yaml(path)
    if "kind" in content:  # of a search that has been made
        return Experiment.of(content, str(path)).search_file
    if "command" in content:
        content = workload.commands.search_file(content, str(path), Path())
    strategies = ["ddp", *(["dp"] if gpu else []), "fsdp", "pipeline"]
    machine: dict[str, list[Any]] = {}  # what a cluster has is not known beforehand
    if world_sizes:
        machine = {"parallel.workers": list(world_sizes), "parallel.strategy": strategies}
    return _Derived(content, path, machine).lists()


class _Derived:
    """Writes lists in the place of `all` and `not`; see `read`."""

    def __init__(self, content: Lines, path: Path, machine: Mapping[str, list[Any]]) -> None:
        """`machine`: the choices of knobs that depend on it; {}: it is not known beforehand."""
        self.content, self.path, self.machine = content, path, machine

    @functools.cached_property
    def schema(self) -> Schema:
        named = str(self.content.get("workload"))
        return cast(Schema, start(named, str(self.path), self.path.parent).schema)

    def lists(self) -> Lines:
        content = dict(self.content)
        for form in ("search", "grid"):
            if isinstance(knobs := content.get(form), dict):
                spaces = spread(knobs, f"{self.path}: {form}")
                content[form] = {
                    name: self._space(name, space, form) for name, space in spaces.items()
                }
        if isinstance(points := content.get("first"), list):
            searched = content.get("search") or {}
            content["first"] = [each for point in points for each in self._points(point, searched)]
        return content

    def _choices(self, name: str, form: str) -> list[Any]:
        if form == "grid" and name.startswith("parallel."):
            unknown = "'all' is not allowed with --address, whose nodes are not known yet"
            where = f"{self.path}: grid: {name}: {unknown}; allowed: a list of values"
            refuse(name not in self.machine, where)
            return self.machine[name]
        where = f"{self.path}: {form}"
        choices = self.schema.knob(name, where).choices
        refuse(choices is None, f"{where}: {name}: 'all' is not allowed; allowed: a list of values")
        return list(choices or ())

    def _space(self, name: str, space: Any, form: str) -> Any:
        """Return the line of a searched knob with lists."""
        if space == "all":
            return self._choices(name, form)
        when = space.get("when") if isinstance(space, dict) else None
        if not isinstance(when, dict):
            return space
        lists = {}
        for on, allowed in when.items():
            if isinstance(allowed, dict) and allowed.keys() == {"not"}:
                _, owners = owners_of(self.schema, self.schema.knob(name, f"{self.path}: {form}"))
                allowed = [one for one in owners if one not in listed(allowed["not"])]
            lists[on] = allowed
        return {**space, "when": lists}

    def _points(self, point: Any, searched: Lines) -> Iterator[Any]:
        """Yield a point for each of the choices that its `all` stands for."""
        flat = cfg.flatten(point, f"{self.path}: first") if isinstance(point, dict) else {}
        every = [name for name, value in flat.items() if value == "all"]
        if not every:
            yield point
            return
        for values in itertools.product(*(self._choices(name, "search") for name in every)):
            chosen = {**flat, **dict(zip(every, values, strict=True))}
            yield {
                name: value
                for name, value in chosen.items()
                if self._applies(name, chosen, searched)
            }

    def _applies(self, name: str, chosen: Lines, searched: Lines) -> bool:
        """Return whether a knob of a point applies beside the other ones."""
        union, owners = owners_of(self.schema, self.schema.knob(name, f"{self.path}: first"))
        space = searched.get(name)
        when = space.get("when", {}) if isinstance(space, dict) else {}
        conditions = {**({union: owners} if union else {}), **when}
        return all(chosen[on] in allowed for on, allowed in conditions.items() if on in chosen)


def start(name: str, source: str, folder: Path) -> Any:
    """Return the configuration that `workload:` names: a baseline, a user's file, or `best.yaml`.

    Raises `ConfigError`.
    """
    if name.endswith((".yaml", ".yml")) and not cfg.is_command(name):
        return cfg.load(folder / name)
    return cfg.baseline(name, source, folder)


# ---- what the command line fixes
def narrow(
    content: Lines, source: str, folder: Path = Path(), words: Sequence[str] = ()
) -> tuple[Lines, list[str], list[str]]:
    """Let `knob=value` override a file's `search:` or `grid:`, not points of `trials:` or rungs.

    A fixed knob is not searched. One of a union's member keeps its line with one choice while the
    union is searched: others do not have it. Returns the content without what is fixed, words for
    the baseline, and notices for the user. Raises `ConfigError` for unknown knobs or values.
    """
    form = next((key for key in ("search", "grid") if isinstance(content.get(key), dict)), None)
    if not words or form is None or "workload" not in content:
        return content, list(words), []
    searched = spread(content[form], f"{source}: {form}")
    base, of_file = start(str(content["workload"]), source, folder), Lines()
    for place in ("fixed", "baseline"):
        of_file = cfg.flatten(content.get(place) or {}, f"{source}: {place}")
        base = cfg.override(base, of_file, f"{source}: {place}", check=False)

    # ---- what the command line fixes: of all configurations, or of those of a union's member
    values, members = cfg.parse_overrides(words, base.schema), base.schema.members
    fixed = {name: value for name, value in values.items() if name in searched}
    union_of = {name: (base.schema.knob(name, source).member or ("",))[0] for name in searched}
    unions = searched.keys() - values.keys()
    of_members = {name: value for name, value in fixed.items() if union_of[name] in unions}
    everywhere = {name: value for name, value in values.items() if name not in of_members}
    chosen = cfg.flat(cfg.override(base, everywhere, "command line", check=False))
    notices = list[str]()
    for name, value in fixed.items():
        if name in of_members:  # the member that has it knows what is allowed
            union, member = base.schema.knobs[name].member
            cfg.override(base, {union: member, name: value}, "command line", check=False)
        how = f"is fixed at {text.knob_value(value)} by the command line"
        notices.append(f"{name} {how}; what {Path(source).name} says of it is not searched")
    lines = {
        name: _with_one_choice(space, of_members[name]) if name in of_members else space
        for name, space in searched.items()
        if name not in fixed.keys() - of_members.keys()
        and (union_of[name] not in fixed or name in members[union_of[name]][fixed[union_of[name]]])
    }
    all_fixed = f"command line: fixes every knob that {source} searches; leave one out"
    refuse(fixed and not lines, all_fixed)
    of_baseline = {**of_file, **of_members}
    baseline = {name: v for name, v in of_baseline.items() if name in lines and name in chosen}
    content = {**content, form: lines, "baseline": baseline}

    # ---- points are taken without what is not searched any more, or left out
    if isinstance(content.get("first"), list):
        left = list[Any]()
        for index, point in enumerate(content["first"]):
            where = f"first[{index}]"
            flat = cfg.flatten(point, f"{source}: {where}") if isinstance(point, dict) else {}
            kept = (lines.keys() | flat.keys() - searched.keys()) - fixed.keys()
            flat = {name: value for name, value in flat.items() if name in kept}
            try:
                config = cfg.flat(cfg.override(base, {**everywhere, **flat}, where))
                left.append(flat | {name: v for name, v in of_members.items() if name in config})
            except ConfigError as error:
                notices.append(f"a point is left out: {error}")
        content["first"] = left
    return content, [w for w in words if w.partition("=")[0] not in of_members], notices


def _with_one_choice(space: Any, value: Any) -> Lines:
    """Return the line of a searched knob with one choice, under its condition."""
    when = space.get("when") if isinstance(space, dict) else None
    return {"choice": [value], **({"when": when} if when else {})}


# ---- a file that names a workload alone
def infer_search_space(
    baseline: Any,
    cores: int,
    gpu: bool,
    leave: Collection[str] = (),
    emulated: Collection[str] = (),
    engine: bool = True,
) -> Lines:
    """Return the section `search:` for a baseline.

    It contains every knob that declares a `Range` or `Choice`, then the workload's `SEARCH`
    (written as in a search file), then the system knobs that can make a training faster on this
    machine. `cores`, `gpu`: the hardware of a training process; `leave`: knobs that the user's file
    sets, which are not searched; `emulated`: values of `precision.amp` that would be slower here;
    `engine`: false where the engine trains nothing, and has no knobs.
    Raises `ConfigError` for a `SEARCH` that is no dictionary.
    """
    # Knobs of the workload, and of a union's member that the baseline has or the search draws
    searched: Lines = {}
    values = cfg.flat(baseline)
    for knob in baseline.schema.knobs.values():
        absent = (
            knob.member is not None and knob.member[0] not in searched and knob.name not in values
        )
        if knob.space is not None and not absent:
            searched[knob.name] = knob.space
    workload = cfg.of(baseline)
    search = getattr(workload.declared, "SEARCH", {})
    refuse(
        not isinstance(search, dict),
        f"{workload.title}: SEARCH is {search!r}; it needs a dictionary",
    )
    searched |= spread(search, f"{workload.title}: SEARCH")
    system = _of_system(baseline, cores, gpu, emulated) if engine else {}
    searched |= {name: space for name, space in system.items() if name not in searched}
    return {name: space for name, space in searched.items() if name not in leave}


def _of_system(baseline: Any, cores: int, gpu: bool, emulated: Collection[str]) -> Lines:
    """Return the spaces of system knobs, around the baseline's values."""
    loader, passes = baseline.loader, baseline.parallel.workers * baseline.loader.accumulation
    sizes = [loader.batch_size * times // 2 for times in (1, 2, 4, 8)]
    most = baseline.schema.knobs["loader.batch_size"].high
    system: Lines = {
        "loader.batch_size": [size for size in sizes if 0 < size <= most and not size % passes]
    }
    if not loader.resident:
        system["loader.workers"] = sorted(
            {0, loader.workers, *(n for n in (1, 2, 4, 8) if n < cores)}
        )
    if gpu or "bf16" not in emulated:
        system["precision.amp"] = _with(baseline.precision.amp, "none", "bf16")
    if gpu:
        system["precision.matmul"] = _with(baseline.precision.matmul, "highest", "high")
        system |= {
            "memory.channels_last": [False, True],
            "precision.cudnn_benchmark": [False, True],
        }
        system["compile.mode"] = _with(baseline.compile.mode, "none", "default")
    return system


def completed(
    content: Lines,
    path: Path,
    words: Sequence[str],
    cores: int,
    gpu: bool,
    emulated: Collection[str] = (),
    engine: bool = True,
) -> Lines:
    """Return a search file's content, with an inferred `search:` if it names only a workload.

    `words`: `knob=value` that change its baseline. Raises `ConfigError`.
    """
    workload = content.get("workload")
    file = isinstance(workload, str) and cfg.is_users(workload.partition(":")[0])
    if not file or {"search", "grid", "trials", "ladder"} & content.keys():
        return content
    baseline = cfg.baseline(str(workload), str(path), path.parent)
    fixed = cfg.flatten(content.get("fixed") or {}, f"{path}: fixed")
    baseline = cfg.override(baseline, fixed, f"{path}: fixed", check=False)
    baseline = cfg.override(baseline, cfg.parse_overrides(words, baseline.schema), "command line")
    return {
        **content,
        "search": infer_search_space(baseline, cores, gpu, fixed, emulated, engine),
    }


def _with(value: str, *others: str) -> list[str]:
    """Return the choices without duplicates, the baseline's own value first."""
    return list(dict.fromkeys((value, *others)))
