"""A search file of the digits, and changes to it."""

import yaml

from tunediff import search_space

FILE = """
workload: digits
budget: {per_trial: 20s, trials: 8}
search:
  loader.batch_size: [64, 128]
  optimizer.lr: {low: 5.0e-4, high: 8.0e-3, log: true}
  timesteps.name: [uniform, loss_second_moment]
  timesteps.history: {choice: [5, 10], when: {timesteps.name: loss_second_moment}}
  timesteps.uniform_share: {low: 0.001, high: 0.3, log: true, when: {timesteps.name: loss_second_moment}}
first:
  - {}
  - {loader.batch_size: 64, timesteps.name: loss_second_moment}
"""


def changed(**changes):
    """The file's content with other keys; `None` leaves one out."""
    content = yaml.safe_load(FILE) | changes
    return {key: value for key, value in content.items() if value is not None}


def parse(**changes):
    return search_space.parse(changed(**changes), "x.yaml")


def listed(**changes):
    """A file of another form: `grid=…`, `trials=…`, `ladder=…`."""
    return parse(**{"search": None, "first": None, "budget": {"per_trial": "20s"}} | changes)


def searched(**dimensions):
    names = {name.replace("__", "."): spec for name, spec in dimensions.items()}
    return changed(search=names, first=[])


def gridded(**changes):
    grid = {"loader.batch_size": [64, 128]}
    return changed(search=None, first=None, grid=grid, budget={"per_trial": "20s"}, **changes)


def rungs(*entries, **changes):
    ladder = dict(entries) if all(isinstance(entry, tuple) for entry in entries) else list(entries)
    return changed(search=None, first=None, ladder=ladder, budget={"per_trial": "20s"}, **changes)


def studied(columns=("epoch_s",), axes=None, **changes):
    section = {"columns": list(columns)} if columns is not None else {}
    return changed(study=section | (axes or {}), **changes)
