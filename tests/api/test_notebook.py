"""Workloads that are objects of a program: what is written to a file, and what is refused."""

import importlib
import inspect
import linecache
import sys
import types
from pathlib import Path

import pytest

from tests.helpers import train as trained
from tunediff import config as cfg
from tunediff.api import display, notebook
from tunediff.config import ConfigError
from tunediff.report.console import Console

CELLS = (
    "import torch\nimport torch.nn.functional as F\nfrom dataclasses import dataclass\nfrom typing import Annotated",
    "from tunediff import Choice, Metric, Trial",
    "%matplotlib inline is not Python",
    "HIDDEN, LR = 3, {'lr': 0.1}\nprint('ran')\nF2 = F",
    "@dataclass(frozen=True)\nclass Knobs:\n    width: Annotated[int, Choice(4, 8)] = HIDDEN + 5\n",
    "def data():\n    # as long as needed\n    return torch.ones(64, HIDDEN), torch.ones(64, 1)\n",
    "def build(width):\n    net = torch.nn.Linear(HIDDEN, 1)  # a local name, also a variable of another cell\n    return net\n",
    "net = build(3)\nimport json as data2\ndata2 = torch.ones(3)",
    """def train(trial: Trial) -> None:
    net = trial.prepare(build(trial.knobs.width))
    optimizer = torch.optim.SGD(net.parameters(), LR["lr"])
    trial.keep(net=net, optimizer=optimizer)
    trial.evaluate_with(lambda: {"score": 1.0})
    for x, y in trial.batches(data()):
        trial.step(F2.mse_loss(net(x), y), optimizer)
""",
)


def cells(*more):
    """The names of a notebook whose cells have run."""
    scope = {"__name__": "__main__", "In": ["", *CELLS, *more]}
    for number, cell in enumerate(scope["In"]):
        if not cell.startswith("%"):
            name = f"<cell {number}>"
            linecache.cache[name] = (len(cell), None, cell.splitlines(True), name)
            exec(compile(cell, name, "exec", dont_inherit=True), scope)
    scope["OBJECTIVE"] = scope["Metric"]("score", "max")
    return scope


@pytest.fixture
def main(monkeypatch):
    """Let classes find their annotations where the cells put them."""

    def run(*more):
        module = types.ModuleType("__main__")
        monkeypatch.setitem(sys.modules, "__main__", module)
        scope = cells(*more)
        module.__dict__.update(scope)
        return types.SimpleNamespace(Knobs=scope["Knobs"], OBJECTIVE=scope["OBJECTIVE"], train=scope["train"])

    return run


def run_again(workload, cell):
    """Run a cell after the workload was made of those before."""
    scope = inspect.unwrap(workload.train).__globals__
    scope["In"].append(cell)
    exec(compile(cell, "<again>", "exec", dont_inherit=True), scope)


def test_cells_become_a_workload_that_trains(main, tmp_path):
    path = notebook.named(main(), tmp_path)
    text = Path(path).read_text()
    assert "# as long as needed\n" in text, "source as it stands"
    assert "HIDDEN = 3\n" in text
    assert text.index("HIDDEN = 3") < text.index("class Knobs") < text.index("def train")
    assert "data2" not in text
    config = cfg.override(cfg.baseline(path), {"loader.batch_size": 8, "loader.workers": 0, "evaluation.points": 1})
    assert config.knobs.width == 8
    assert trained(config, samples=16, evaluates=True).points[-1]["score"] == 1.0


def test_equal_cells_have_one_file_and_changed_ones_another(main, tmp_path):
    first, again, changed = (notebook.named(main(*more), tmp_path) for more in ((), (), ("HIDDEN = 4",)))
    assert first == again
    assert changed != first


def in_data(*lines):
    return "\n".join(["def data():", *(f"    {line}" for line in lines)])


@pytest.mark.parametrize(
    "cell",
    [
        *(
            f"import numpy as np\nVALUE = {value}\n{in_data('return VALUE')}"
            for value in ("float('inf')", "float('nan')", "[-float('inf'), 1.5]", "complex(0, float('inf'))",
                          "np.float64(0.1)", "{'a': (np.int64(3),)}", "()", "{1, 2}", "set()",
                          "{'key': [None, True, b'x', 'ü']}", "Metric('loss', 'min')")
        ),
        f"@torch.no_grad()\n{in_data('return HIDDEN')}",
        f"import functools\n@functools.cache\n{in_data('return HIDDEN')}",
        f"def twice(f):\n    return lambda: (f(), f())[1]\n@twice\n{in_data('return HIDDEN')}",
        f"input = 64\n{in_data('return input')}",
        f"def sum(x):\n    return 64\n{in_data('return sum([1])')}",
        f"from math import *\n{in_data('return pow(2, 3), sqrt(4), max(1, 2)')}",
        f"from numpy import *\n{in_data('return abs([-1, 2]).tolist(), max(array([1, 2])).dtype.kind')}",
        f"from math import *\npow = 64\n{in_data('return pow')}",
        f"from math import *\ndef pow(x):\n    return x\n{in_data('return pow(64)')}",
        f"def loss(x):\n    return x\nworst = max(loss for loss in [1])\n{in_data('return loss(64)')}",
        f"width = 64\nclass Sizes:\n    width: int = width\n{in_data('return Sizes.width')}",
    ],
)  # fmt: skip
def test_copied_cells_compute_what_the_program_computes(main, tmp_path, cell):
    """Plain values, decorators, names of builtins, star imports, and names with the meaning of their place."""
    workload = main(cell)
    text = Path(notebook.named(workload, tmp_path)).read_text()
    scope = {"__name__": "copied"}
    linecache.cache["copied"] = (len(text), None, text.splitlines(True), "copied")
    exec(compile(text, "copied", "exec"), scope)
    program = workload.train.__globals__
    value, expected = scope["data"](), program["data"]()
    assert value == expected or repr(value) == repr(expected)  # NaN differs from itself


@pytest.mark.parametrize(
    "cell",
    ["def make(n):\n    def train(trial):\n        n\n    return train\ntrain = make(3)", "train = lambda trial: None"],
)
def test_a_member_that_no_file_can_hold_is_refused_by_name(main, tmp_path, cell):
    with pytest.raises(ConfigError, match="^train: <function .* is not allowed; allowed: a plain value, or"):
        notebook.named(main(cell), tmp_path)


@pytest.mark.parametrize("again", [False, True])
def test_a_decorated_train_is_copied_also_under_another_name(main, tmp_path, again):
    cell = "@torch.enable_grad()\ndef learn(trial):\n    data()"
    workload = main(cell)
    workload.train = workload.train.__globals__["learn"]
    if again:
        run_again(workload, cell)
    text = Path(notebook.named(workload, tmp_path)).read_text()
    assert text.count(cell) == 1
    assert text.endswith("train = learn\n")


@pytest.mark.parametrize("edit", ["", "    SIZE = 5\n"])
@pytest.mark.parametrize("cell", [next(cell for cell in CELLS if own in cell) for own in ("class Knobs", "def train")],
                         ids=["Knobs", "train"])  # fmt: skip
def test_a_cell_that_ran_again_after_the_workload_was_made_is_copied_as_it_stands(main, tmp_path, cell, edit):
    workload = main()
    run_again(workload, cell + edit)
    text = Path(notebook.named(workload, tmp_path)).read_text()
    assert cell + edit in text
    assert (text.count("class Knobs"), text.count("def train")) == (1, 1)


def test_builtins_and_what_ipython_puts_there_are_not_copied(main, tmp_path):
    cell = "def data():\n    return open, exit, len, __name__, get_ipython"
    scope = "open = lambda *_: 0\nexit = quit = get_ipython = object()\nprint = print"
    text = Path(notebook.named(main(scope, cell), tmp_path)).read_text()
    assert not any(f"{name} = " in text for name in ("open", "exit", "len", "__name__", "get_ipython", "print"))


def test_names_of_files_and_modules_pass_and_other_objects_are_refused(tmp_path):
    from tests.users import plain

    assert notebook.named("digits", tmp_path) == "digits"
    assert notebook.named(plain, tmp_path) == plain.__file__
    with pytest.raises(ConfigError, match="workload: 3 is not allowed: it has no Knobs; allowed: a path, a module"):
        notebook.named(3, tmp_path)


@pytest.mark.parametrize(
    ("files", "imports", "used"),
    [
        (["beside.py"], "import beside", "beside"),
        (["lib_of_modules/__init__.py", "lib_of_modules/nets.py"], "from lib_of_modules import nets", "nets"),
        (["lib_without_init/nets.py"], "from lib_without_init import nets", "nets"),
        (["lib_of_two/__init__.py", "lib_of_two/nets.py", "lib_of_two/sizes.py"],
         "import lib_of_two.nets\nimport lib_of_two.sizes", "lib_of_two"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("inside", ["", "outer/inner"], ids=["", "in a package"])
def test_files_beside_the_program_are_part_of_it(main, tmp_path, monkeypatch, inside, files, imports, used):
    """Without the packages around the program."""
    program = tmp_path / inside
    for file in [*files, *(f"{folder}/__init__.py" for folder in (".", "..") if inside)]:
        (program / file).parent.mkdir(parents=True, exist_ok=True)
        (program / file).write_text("SIZE = 5\n")
    monkeypatch.chdir(program)
    monkeypatch.syspath_prepend(str(program))
    for module in [name for name in sys.modules if name.partition(".")[0] in ("beside", used, imports.split()[1])]:
        del sys.modules[module]
    path = Path(notebook.named(main(f"{imports}\n{in_data(f'return {used}')}"), tmp_path / "storage"))
    assert imports in path.read_text()
    copy = cfg.take_along(cfg.baseline(str(path)), tmp_path / "search")
    assert {str(file) for file in cfg.of(copy).file.contents} == {*files, "notebook.py"}


def test_knobs_of_the_program_and_an_imported_train_are_a_workload(main, tmp_path, monkeypatch, at_tmp_path):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "loops_beside_it.py").write_text("def train(trial):\n    return 'imported'\n")
    workload = main()
    workload.train = importlib.import_module("loops_beside_it").train
    path = notebook.named(workload, tmp_path / "storage")
    assert "__main__" not in Path(path).read_text(), "no worker has the program's module"
    module = cfg.find(path).declared
    assert (module.Knobs().width, module.train(None)) == (8, "imported")


@pytest.mark.parametrize(("progress", "kind"), [(True, display.NotebookTable), (False, Console)])
def test_a_notebook_shows_no_table_unless_asked_to(monkeypatch, progress, kind):
    monkeypatch.setattr(display, "in_notebook", lambda: True)
    assert display.display_of(display.lines_of(progress)).func is kind


@pytest.mark.parametrize(
    ("progress", "level", "shown"), [(True, "WARNING", "err"), (True, "INFO", "log"), (False, "WARNING", None)]
)
def test_lines_of_a_script_are_on_stderr_or_in_its_own_log(capsys, caplog, progress, level, shown):
    """As Optuna prints one for each trial."""
    caplog.set_level(level)
    lines = display.lines_of(progress)
    assert display.display_of(lines).func is Console, "a table is for terminals"
    lines.say("t0000 start")
    out, err = capsys.readouterr()
    assert out == ""
    assert ("t0000 start" in err, "t0000 start" in caplog.text) == (shown == "err", shown == "log")
