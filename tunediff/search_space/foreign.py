"""Read search files and spaces that are written as W&B, Optuna and Ray Tune write them.

Keys are translated to those of `sections.SearchFile`, and each translation is told; what has no
counterpart is refused with what to write. Spaces are also read as Ray's and Optuna's calls
(`loguniform(1e-5, 1e-2)`) and objects.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping, Sequence
from typing import Any

from tunediff.config import ConfigError, Lines
from tunediff.config.knobs import refuse

TRIALS = ("n_trials", "num_samples", "run_cap")
TOTAL = ("timeout", "time_budget_s")
STOPPING = ("scheduler", "pruner", "early_terminate")
"""Keys of Optuna, Ray Tune and W&B for trials, total wall-clock and early stopping."""
UNUSED = ("name", "description", "project", "entity")
"""Keys of W&B that say where its service shows a sweep."""
HALVING = ("asha", "asynchyperband", "hyperband", "bohb", "successivehalving", "async_hyperband")
NO_STOPPING = ("none", "fifo", "nop", "nothing")


# ---- keys of a file
def translated(content: Lines, source: str) -> tuple[Lines, list[str]]:
    """Return a search file's content in our keys, and a line for each key that was translated.

    Raises `ConfigError` for a key that is given in both forms.
    """
    file, notes = dict(content), list[str]()
    budget = dict(file["budget"]) if isinstance(file.get("budget"), Mapping) else {}

    def move(key: str, target: Lines, name: str, value: Any, words: str) -> None:
        refuse(
            name in target, f"{source}: {key}: is not allowed with {words}; allowed: one of them"
        )
        target[name] = value
        notes.append(f"{source}: {key} is read as {words}: {value}")

    for key in TRIALS:
        if key in file:
            move(key, budget, "trials", file.pop(key), "budget: trials")
    for key in TOTAL:
        if key in file:
            value = file.pop(key)
            seconds = isinstance(value, int | float) and not isinstance(value, bool)
            move(key, budget, "total", f"{value:g}s" if seconds else value, "budget: total")
    if budget:
        file["budget"] = budget
    for key in STOPPING:
        if key in file:
            rule = _early_stopping(file.pop(key), f"{source}: {key}")
            move(key, file, "early_stopping", rule, "early_stopping")
    if type(finalists := file.get("confirm")) is int:  # as --confirm has it
        file["confirm"] = {"of": finalists}
        if finalists == 0:
            del file["confirm"]
    _translate_objective(file, source, notes)
    _translate_sweep(file, source, notes)
    for form in ("search", "grid"):
        if isinstance(file.get(form), Mapping):
            file[form] = spaces(file[form], f"{source}: {form}")
    return file, notes


def _early_stopping(value: Any, where: str) -> str:
    """Return the rule that comes next to a scheduler, a pruner or an early termination."""
    name = value.get("type") or value.get("name") if isinstance(value, Mapping) else value
    plain = str(name).lower().removesuffix("scheduler").removesuffix("pruner").rstrip("_")
    if plain in NO_STOPPING:
        return "none"
    allowed = "allowed: early_stopping: asha, or none"
    refuse(plain not in HALVING, f"{where}: {name!r} is not allowed; {allowed}")
    return "asha"


def _translate_objective(file: Lines, source: str, notes: list[str]) -> None:
    """Replace `metric:`, `mode:`, `goal:` and `direction:` by `objective:`."""
    name_key = "name" if {"command", "program"} & file.keys() else "metric"
    found: Lines = {}
    if "metric" in file:
        metric = file.pop("metric")
        found = dict(metric) if isinstance(metric, Mapping) else {"name": metric}
    for key in ("mode", "direction"):
        if key in file:
            found[key] = file.pop(key)
    if not found:
        return
    refuse("objective" in file, f"{source}: metric: is not allowed with objective:")
    direction = next((found[k] for k in ("goal", "mode", "direction") if k in found), None)
    objective = {name_key: found["name"]} if "name" in found else {}
    if direction is not None:
        mode = str(direction).lower()[:3]
        allowed = f"{direction!r} is not allowed; allowed: minimize, maximize, min, max"
        refuse(mode not in ("min", "max"), f"{source}: goal: {allowed}")
        objective["mode"] = mode
    file["objective"] = objective
    words = ", ".join(f"{key}: {value}" for key, value in objective.items())
    notes.append(f"{source}: metric is read as objective: {{{words}}}")


def _translate_sweep(file: Lines, source: str, notes: list[str]) -> None:
    """Replace the keys of a sweep of W&B: `parameters:`, `method:` and `program:`."""
    if "parameters" not in file:
        return
    refuse("search" in file, f"{source}: parameters: is not allowed with search:")
    method = str(file.pop("method", "bayes")).lower()
    form = "grid" if method == "grid" else "search"
    drawn, fixed = dict[str, Any](), dict[str, Any]()
    for name, space in _nested(file.pop("parameters")).items():
        single = isinstance(space, Mapping) and "value" in space
        (fixed if single else drawn)[name] = space["value"] if single else space
    file[form] = drawn
    how = "every combination" if form == "grid" else "drawn by Optuna's TPE"
    notes.append(f"{source}: parameters is read as {form}: ({method}: {how})")
    if fixed:
        file["fixed"] = {**(file.get("fixed") or {}), **fixed}
        notes.append(f"{source}: parameters with a value are read as fixed:")
    for key in UNUSED:
        if key in file:
            unused = f"{key}: {file.pop(key)} has no effect"
            notes.append(f"{source}: {unused}; --track wandb shows runs")
    if "program" in file:
        _translate_program(file, source, notes, [*drawn, *fixed])


def _nested(parameters: Any, prefix: str = "") -> Lines:
    """Return a sweep's parameters by dotted name: W&B nests them by more `parameters:`."""
    flat: Lines = {}
    for name, space in dict(parameters).items():
        if isinstance(space, Mapping) and isinstance(space.get("parameters"), Mapping):
            flat |= _nested(space["parameters"], f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = space
    return flat


def _translate_program(file: Lines, source: str, notes: list[str], names: Sequence[str]) -> None:
    """Replace `program: train.py` by the command that W&B starts, with a seed.

    A baseline, which a sweep has not, is the middle of each space.
    """
    refuse(
        isinstance(file.get("command"), list),
        f"{source}: command: of a sweep is not read; write  command: python train.py --lr {{lr}}",
    )
    program = file.pop("program")
    start = f"python {program}" if str(program).endswith(".py") else str(program)
    arguments = [f"--{name}={{{name}}}" for name in [*names, "seed"]]
    file["command"] = " ".join([start, *arguments])
    searched = file.get("search") or file.get("grid") or {}
    middle = {
        name: _middle(space_of(space, f"{source}: parameters: {name}"))
        for name, space in searched.items()
    }
    file["baseline"] = {**middle, **(file.get("baseline") or {})}
    notes.append(f"{source}: program is read as command: {file['command']}")
    notes.append(f"{source}: the baseline is the middle of each space; baseline: sets another")


def _middle(space: Any) -> Any:
    choices = space.get("choice") if isinstance(space, Mapping) else space
    if isinstance(choices, list) and choices:
        return choices[(len(choices) - 1) // 2]
    low, high = space["low"], space["high"]
    value = float(f"{math.sqrt(low * high):.3g}") if space.get("log") else (low + high) / 2
    if isinstance(low, int) and isinstance(high, int):
        return round(value)
    step = space.get("step")
    return low + step * round((value - low) / step) if step else value


# ---- spaces
def spaces(content: Mapping[str, Any], where: str) -> Lines:
    """Return `search:` or `grid:` with every space in our form."""
    return {name: space_of(space, f"{where}: {name}") for name, space in content.items()}


def space_of(space: Any, where: str) -> Any:
    """Return a space as choices or `{low: …, high: …}`; anything else as it is.

    Example: `{min: 1.0e-5, max: 1.0e-2, distribution: log_uniform_values}`,
    `loguniform(1e-5, 1e-2)` and `optuna.distributions.FloatDistribution(1e-5, 1e-2, log=True)` are
    all `{"low": 1e-5, "high": 1e-2, "log": True}`.
    """
    if isinstance(space, str) and space.endswith(")"):
        return _of_call(space, where)
    if isinstance(space, Mapping):
        if _is_distribution(space):
            return _of_mapping(space, where)
        return {name: space_of(inner, f"{where}: {name}") for name, inner in space.items()}
    module = type(space).__module__
    if module.startswith("optuna.distributions"):
        return _of_optuna(space)
    return _of_ray(space) if module.startswith("ray.tune") else space


def _is_distribution(space: Mapping[str, Any]) -> bool:
    """Whether a mapping is a space of W&B or Optuna, and not a section with knobs inside."""
    ends = [space[key] for key in ("min", "max") if key in space]
    return (
        (bool(ends) and all(isinstance(end, int | float) for end in ends))
        or isinstance(space.get("values"), list)
        or isinstance(space.get("distribution"), str)
        or ("type" in space and {"low", "high"} <= space.keys())
    )


def _range(low: Any, high: Any, log: bool = False, step: Any = None) -> Lines:
    found: Lines = {"low": low, "high": high}
    found |= {"log": True} if log else {}
    return found | ({"step": step} if step is not None else {})


def _of_mapping(space: Mapping[str, Any], where: str) -> Any:
    """Return a space of W&B: `values`, or `min` and `max` with a `distribution`."""
    rest = {key: value for key, value in space.items() if key not in ("type", "distribution")}
    kind = str(space.get("distribution") or "").lower()
    allowed = "allowed: values, or min and max"
    if "values" in rest:
        refuse("probabilities" in rest, f"{where}: probabilities: is not allowed; {allowed}")
        return list(rest["values"])
    if not {"min", "max"} & rest.keys():
        return rest  # ours, with a type that says nothing new
    refuse(not {"min", "max"} <= rest.keys(), f"{where}: {dict(space)} is not a space; {allowed}")
    normal = "normal" in kind or kind.startswith("inv_") or kind == "beta"
    refuse(normal, f"{where}: distribution: {kind!r} is not allowed; {allowed}, uniform or log")
    low, high, log = rest["min"], rest["max"], "log" in kind
    if log and not kind.endswith("_values"):  # the limits are exponents of e
        low, high = (float(f"{math.exp(end):.6g}") for end in (low, high))
    others = {key: value for key, value in rest.items() if key not in ("min", "max", "q")}
    return {**others, **_range(low, high, log, rest.get("q"))}


def _of_call(call: str, where: str) -> Any:
    """Return the space of a call of Ray Tune or Optuna in a file; other text as it is."""
    try:
        tree = ast.parse(call, mode="eval").body
    except SyntaxError:
        return call
    if not isinstance(tree, ast.Call):
        return call
    name = ast.unparse(tree.func).rpartition(".")[2]
    if name not in _CALLS:
        allowed = f"allowed: {{low: …, high: …}}, {', '.join(_CALLS)}"
        raise ConfigError(f"{where}: {call!r} is not a space; {allowed}")
    try:
        values = [ast.literal_eval(value) for value in tree.args]
        named = {str(word.arg): ast.literal_eval(word.value) for word in tree.keywords}
        return _CALLS[name](*values, **named)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{where}: {call!r} is not understood: {error}") from None


def _optuna_range(low: Any, high: Any, log: bool = False, step: Any = None, **_: Any) -> Lines:
    return _range(low, high, log, None if type(step) is int and step == 1 else step)


_CALLS: dict[str, Any] = {
    "uniform": lambda low, high: _range(low, high),
    "loguniform": lambda low, high, base=10: _range(low, high, log=True),
    "quniform": lambda low, high, q: _range(low, high, step=q),
    "randint": lambda low, high: _range(low, high - 1),
    "qrandint": lambda low, high, q=1: _range(low, high, step=q),
    "lograndint": lambda low, high, base=10: _range(low, high - 1, log=True),
    "choice": list,
    "grid_search": list,
    "FloatDistribution": _optuna_range,
    "IntDistribution": _optuna_range,
    "CategoricalDistribution": list,
}
"""Calls of Ray Tune, whose `randint` leaves its upper end out, and of Optuna."""


def _of_optuna(space: Any) -> Any:
    if type(space).__name__ == "CategoricalDistribution":
        return list(space.choices)
    return _optuna_range(space.low, space.high, space.log, space.step)


def _of_ray(space: Any) -> Any:
    """Return the space of a domain of Ray Tune."""
    if (categories := getattr(space, "categories", None)) is not None:
        return list(categories)
    sampler, step = space.get_sampler(), None
    if (step := getattr(sampler, "q", None)) is not None:
        sampler = sampler.get_sampler()
    log = "LogUniform" in type(sampler).__name__
    integer = type(space).__name__ == "Integer"
    return _range(space.lower, space.upper - integer * (step is None), log, step)
