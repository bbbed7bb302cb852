"""A schema of anybody's dataclass: its names, what is refused, what makes two configurations equal."""

import dataclasses
import re
from dataclasses import dataclass, field
from typing import Annotated, Literal

import pytest
from annotated_types import Ge, Gt, Le, Lt

from tunediff import config as cfg
from tunediff.config import ConfigError, Schema, Systems, systems
from tunediff.config.knobs import EvaluationProtocol, File, Fixed, Refusal


@dataclass(frozen=True)
class Sgd:
    """Plain gradient descent."""

    name: Literal["sgd"] = "sgd"
    momentum: Annotated[float, Ge(0.0), Lt(1.0)] = 0.9


@dataclass(frozen=True)
class Adam:
    """Adam."""

    name: Literal["adam"] = "adam"
    beta: float = 0.999


@dataclass(frozen=True)
class Head:
    """The last layers."""

    layers: int = 2
    """How many of them."""
    bias: bool = True
    sizes: tuple[int, ...] = (64, 32)


@dataclass(frozen=True)
class Net:
    """The network."""

    depth: Annotated[int, Ge(1), Le(8)] = 3
    head: Head = field(default_factory=Head)

    def check(self, config):
        if self.depth > config.width:
            raise Refusal("net.depth", f"deeper than wide (width = {config.width})")


@dataclass(frozen=True)
class Knobs:
    """A training of somebody's own."""

    width: int = 64
    """Neurons in each layer."""
    lr: Annotated[float, Gt(0.0)] = 1e-3
    word: str = "plain"
    note: str | None = None
    net: Net = field(default_factory=Net)
    rule: Sgd | Adam = Sgd()


MINE = Schema("mine", Knobs, Systems)
DEFAULT = MINE.default()
OWN = """width lr word note net.depth net.head.layers net.head.bias net.head.sizes rule.name rule.momentum rule.beta"""


def test_own_knobs_come_first_and_then_those_of_every_training():
    names = list(MINE.knobs)
    assert names[: len(OWN.split())] == OWN.split()
    assert {"loader.batch_size", "compile.mode", "evaluation.points", "seed"} < set(names)
    assert MINE.members == {"rule.name": {"sgd": frozenset({"rule.momentum"}), "adam": frozenset({"rule.beta"})}}


def test_a_knob_says_what_it_takes():
    knobs = MINE.knobs
    assert knobs["net.depth"].allowed == "a whole number of at least 1 and at most 8"
    assert (knobs["width"].kind, knobs["lr"].low, knobs["lr"].low_open) == ("int", 0.0, True)
    assert (knobs["note"].optional, knobs["note"].allowed) == (True, "a string, or null")
    assert (knobs["rule.name"].choices, knobs["rule.name"].default) == (("sgd", "adam"), "sgd")
    assert knobs["rule.momentum"].member == ("rule.name", "sgd")
    assert knobs["net.head.sizes"].default == (64, 32)


def test_the_training_gets_its_own_knobs():
    knobs = cfg.override(DEFAULT, {"net.head.layers": 5, "rule.name": "adam"}).knobs
    assert isinstance(knobs, Knobs)
    assert isinstance(knobs.net.head, Head)
    assert isinstance(knobs.rule, Adam)
    assert (knobs.width, knobs.net.head.layers, knobs.rule.beta, knobs.net.head.sizes) == (64, 5, 0.999, (64, 32))


def test_configurations_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        DEFAULT.loader.batch_size = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        DEFAULT.net.depth = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        DEFAULT.net.head.layers = 1


REFUSED = [
    ({"width": "64"}, "width: '64' is not allowed; allowed: a whole number"),
    ({"width": True}, "width: True is not allowed; allowed: a whole number"),
    ({"width": 64.0}, "width: 64.0 is not allowed; allowed: a whole number"),
    ({"word": 3}, "word: 3 is not allowed; allowed: a string"),
    ({"lr": 0.0}, "lr: 0.0 is not allowed; allowed: a number above 0"),
    ({"lr": float("inf")}, "lr: inf is not allowed"),
    ({"lr": "1e-3"}, "lr: '1e-3' is not allowed; allowed: a number above 0"),
    ({"word": False}, "word: False is not allowed; allowed: a string"),
    ({"net.depth": 9}, "net.depth: 9 is not allowed; allowed: a whole number of at least 1 and at most 8"),
    ({"net.depth": "3"}, "net.depth: '3' is not allowed"),
    ({"net.head.layers": "2"}, "net.head.layers: '2' is not allowed; allowed: a whole number"),
    ({"net.head.layers": True}, "net.head.layers: True is not allowed"),
    ({"net.head.bias": 1}, "net.head.bias: 1 is not allowed; allowed: true or false"),
    ({"net.head.sizes": [64, "a"]}, "net.head.sizes: 'a' is not allowed; allowed: a list of whole numbers"),
    ({"net.head.sizes": [64, True]}, "net.head.sizes: True is not allowed"),
    ({"net.head.layer": 2}, "net.head.layer: no such knob; did you mean net.head.layers"),
    ({"rule.name": "rms"}, "rule.name: 'rms' is not allowed; allowed: one of sgd, adam"),
    ({"rule.momentum": 1.0}, "rule.momentum: 1.0 is not allowed; allowed: a number of at least 0 and below 1"),
    ({"rule.beta": 0.9}, "rule.beta: belongs to rule.name = adam, which is not chosen here"),
    ({"rule.name": "adam", "rule.beta": "0.9"}, "rule.beta: '0.9' is not allowed"),
    ({"width": 2, "net.depth": 3}, "net.depth: 3 is not allowed: deeper than wide (width = 2)"),
    ({"loader.batch": 64}, "loader.batch: no such knob; did you mean loader.batch_size"),
]


@pytest.mark.parametrize(("values", "message"), REFUSED, ids=lambda x: str(x)[:40])
def test_what_does_not_fit_is_refused(values, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        cfg.override(DEFAULT, values, where="my.yaml")
    assert str(error.value).startswith("my.yaml: ")


def test_unknown_keys_of_a_file_are_refused_wherever_they_stand():
    for nested in (
        {"widht": 1},
        {"net": {"dept": 1}},
        {"net": {"head": {"layer": 1}}},
        {"rule": {"name": "sgd", "momentun": 0.5}},
    ):
        with pytest.raises(ConfigError, match="no such knob; did you mean"):
            MINE.from_dict(nested, "my.yaml")


def test_from_dict_fills_in_what_is_missing():
    assert MINE.from_dict({}, "here") == DEFAULT
    partly = MINE.from_dict({"net": {"head": {"layers": 4}}, "rule": {"name": "adam"}}, "here")
    assert partly == cfg.override(DEFAULT, {"net.head.layers": 4, "rule.name": "adam"})
    assert MINE.from_dict(MINE.to_dict(partly), "here") == partly


def test_fingerprints_are_equal_for_equal_configurations():
    wider = cfg.override(DEFAULT, {"width": 128})
    assert cfg.fingerprint(DEFAULT) == cfg.fingerprint(cfg.override(wider, {"width": 64})) != cfg.fingerprint(wider)
    assert cfg.fingerprint(Schema("other", Knobs, Systems).default()) != cfg.fingerprint(DEFAULT)
    assert cfg.fingerprint(Schema("mine", Knobs, Systems, "changed").default()) != cfg.fingerprint(DEFAULT)
    assert cfg.differences(wider, DEFAULT) == {"width": 128}
    assert cfg.to_dict(DEFAULT)["workload"] == "mine"


@dataclass(frozen=True)
class OtherEvaluation(systems.EvaluationSection):
    """How it is judged here."""

    votes: Annotated[int, Ge(1)] = 3
    points: Annotated[int, Ge(1), Le(10)] = 2


def test_a_section_of_the_systems_may_be_extended():
    @dataclass(frozen=True)
    class Judged:
        evaluation: OtherEvaluation = field(default_factory=OtherEvaluation)

    schema = Schema("judged", Judged, Systems)
    assert [name for name in schema.knobs if name.startswith("evaluation.")] == [
        "evaluation.points",
        "evaluation.votes",
    ]
    assert schema.default().evaluation.points == 2
    assert not schema.knobs["evaluation.votes"].searchable
    assert schema.knobs["evaluation.points"].protocol, "declared again, it still belongs to the protocol"
    assert not schema.knobs["evaluation.votes"].protocol
    with pytest.raises(ConfigError, match=r"evaluation.votes: True is not allowed"):
        cfg.override(schema.default(), {"evaluation.votes": True})


@dataclass(frozen=True)
class Marked(systems.EvaluationSection):
    points: Annotated[int, Ge(1), Fixed()] = 2
    weights: Annotated[str | None, File(), EvaluationProtocol()] = None
    """Where they lie."""


@dataclass(frozen=True)
class MarkedAgain(Marked):
    points: Annotated[int, Ge(2)] = 3
    weights: str | None = "there"


def test_what_is_declared_again_keeps_its_marks_and_words():
    @dataclass(frozen=True)
    class Judged:
        evaluation: MarkedAgain = field(default_factory=MarkedAgain)

    knobs = Schema("judged", Judged, Systems).knobs
    points, weights = knobs["evaluation.points"], knobs["evaluation.weights"]
    assert (points.protocol, points.low, points.high, points.searchable, points.default) == (True, 2, None, False, 3)
    assert points.description.startswith("Evaluations per training")
    assert (weights.protocol, weights.file, weights.optional, weights.default) == (True, True, True, "there")
    assert weights.description == "Where they lie."


@dataclass(frozen=True)
class Stranger:
    points: int = 3


@dataclass
class Open:
    depth: int = 3


def knobs_with(kind, **options):
    return dataclasses.make_dataclass("Knobs", [(options.pop("name", "width"), kind, field(**options))], frozen=True)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (type("Knobs", (), {"width": 3}), "mine: Knobs: is not a dataclass; write @dataclass(frozen=True) above it"),
        (Open, "mine: Knobs: is not frozen; write @dataclass(frozen=True) above it"),
        (
            knobs_with(Open, default_factory=Open),
            "mine: Knobs: width: is not frozen; write @dataclass(frozen=True) above",
        ),
        (knobs_with(int), "mine: Knobs: width: has no default; the baseline needs one"),
        (
            knobs_with(Stranger, default_factory=Stranger, name="evaluation"),
            "mine: Knobs: evaluation: every workload has a",
        ),
        (knobs_with(int, default=3, name="loader"), "mine: Knobs: loader: every workload has a section of this name"),
        (knobs_with(int, default=3, name="workload"), "mine: Knobs: workload: is a name that tunediff needs"),
        (knobs_with(int, default=3, name="schema"), "mine: Knobs: schema: is a name that tunediff needs"),
        (knobs_with(dict[str, int], default_factory=dict), "mine: Knobs: width: unsupported type dict[str, int]"),
        (knobs_with(Net | None, default=None), "mine: Knobs: width: a union of dataclasses needs a field"),
        (knobs_with(Sgd | Net, default=Sgd()), "mine: Knobs: width: a union of dataclasses needs a field"),
        (knobs_with(int | str, default=3), "mine: Knobs: width: unsupported type int | str; allowed: int, float, bool"),
        (
            knobs_with(Annotated[int, Ge(1)], default=0),
            "mine: Knobs: width: 0 is not allowed; allowed: a whole number of at",
        ),
        (knobs_with(int, default="3"), "mine: Knobs: width: '3' is not allowed"),
        (knobs_with(Sgd, default=Sgd(momentum=1.5)), "mine: Knobs: width.momentum: 1.5 is not allowed"),
    ],
)
def test_knobs_that_cannot_be_used_are_refused(own, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        Schema("mine", own, Systems)


def test_words_stand_under_the_knobs():
    assert MINE.knobs["width"].description == "Neurons in each layer."
    assert MINE.knobs["net.head.layers"].description == "How many of them."
    assert MINE.knobs["rule.name"].description == "`sgd`: Plain gradient descent. · `adam`: Adam."
