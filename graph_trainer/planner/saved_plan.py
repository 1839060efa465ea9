"""plan.json: a plan that a later run is held to. Data alone: reading it executes nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import tomli

from graph_trainer.core.analysis.mesh_groups import RankClasses
from graph_trainer.errors import ConfigError
from graph_trainer.planner.fingerprint import Entry, Fingerprint
from graph_trainer.titan.config.messages import did_you_mean, show

SCHEMA = "graph_trainer.saved_plan/1"
"""Changes with every change of the format."""

AGAIN = "Write the plan again with `graph-trainer plan --save`."

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Predicted:
    """What the simulation says of one rank."""

    peak_bytes: int
    """The most bytes alive at once."""
    reserved_bytes: int
    """What the allocator takes from the device, gaps included."""
    peak_by_category: dict[str, int]
    made_bytes: int
    """The most bytes alive at once of what the graph makes: the peak above its inputs."""
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    step_seconds: float
    """All microbatches, clipping and optimizer."""
    collectives: dict[str, dict[str, dict[str, int]]]
    """{kind: {role: {"count": of one microbatch, "bytes": that they move}}}."""


@dataclass(frozen=True, slots=True)
class PlannedClass:
    """Ranks whose graphs are alike, told by one of them."""

    rank: int
    """The one that was captured."""
    ranks: int
    """How many there are, itself included."""
    fingerprint: Fingerprint
    predicted: Predicted


@dataclass(frozen=True, slots=True)
class SavedPlan:
    """A plan as `graph-trainer plan --save` writes it."""

    versions: dict[str, str]
    config: str
    """The resolved config as TOML."""
    hardware: str
    device: str
    """ "cuda" or "cpu": what the step was captured for."""
    world_size: int
    passes: tuple[str, ...]
    """Names, in order."""
    microbatches: int
    """How often the graph runs in a step."""
    classes: RankClasses
    by_rank: dict[int, PlannedClass]
    """Every class, by the rank that was captured for it."""

    def of_rank(self, rank: int) -> PlannedClass:
        """The class of a rank."""
        return self.by_rank[self.classes.representative_of(rank)]

    def config_table(self) -> dict[str, Any]:
        """The config as a parsed document."""
        return tomli.loads(self.config)


def write_plan(plan: SavedPlan, file: IO[str]) -> None:
    """Write a plan as JSON."""
    json.dump(_document(plan), file, separators=(",", ":"))
    file.write("\n")


def read_plan(path: Path) -> SavedPlan:
    """Read and check a plan.

    Raises:
        ConfigError: the file cannot be read, is no plan, is of another version, or was changed.
    """
    try:
        text = path.read_bytes().decode("utf-8")
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or a NUL in the path
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"--plan {path}: cannot be read: {reason}. Name a file that `graph-trainer plan "
            "--save` wrote."
        ) from error
    try:
        return _Reader(path).plan(_parsed(path, text))
    except RecursionError:
        raise ConfigError(f"--plan {path}: nested too deeply for a plan. {AGAIN}") from None


def _parsed(path: Path, text: str) -> object:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except ValueError as error:
        raise ConfigError(f"--plan {path}: not JSON, or cut short: {error}. {AGAIN}") from error


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number")


# What has a fingerprint is long and repeats itself: each text is written once and named by its
# place in a list.
class _Texts:
    def __init__(self) -> None:
        self.places: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        return self.places.setdefault(text, len(self.places))


def _document(plan: SavedPlan) -> dict[str, Any]:
    texts = _Texts()
    classes = []
    for each in plan.by_rank.values():
        parts = {
            name: [[texts(e.what), texts(e.where)] for e in entries]
            for name, entries in each.fingerprint.parts().items()
        }
        classes.append(
            {
                "rank": each.rank,
                "ranks": each.ranks,
                "fingerprint": each.fingerprint.digest,
                "predicted": _plain(each.predicted),
                **parts,
            }
        )
    return {
        "schema": SCHEMA,
        "versions": plan.versions,
        "config": plan.config,
        "hardware": plan.hardware,
        "device": plan.device,
        "world_size": plan.world_size,
        "passes": list(plan.passes),
        "microbatches": plan.microbatches,
        "axes": [
            [n, list(of)] for n, of in zip(plan.classes.names, plan.classes.labels, strict=True)
        ],
        "classes": classes,
        "texts": list(texts.places),
    }


def _plain(predicted: Predicted) -> dict[str, Any]:
    return {name: getattr(predicted, name) for name in _PREDICTED}


_PREDICTED: dict[str, str] = {
    "peak_bytes": "count",
    "reserved_bytes": "count",
    "peak_by_category": "counts",
    "made_bytes": "count",
    "parameter_bytes": "count",
    "gradient_bytes": "count",
    "optimizer_bytes": "count",
    "step_seconds": "seconds",
    "collectives": "collectives",
}


class _Reader:
    """Checks every key and type of a document on its way to a SavedPlan."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def plan(self, value: object) -> SavedPlan:
        if not isinstance(value, dict) or "schema" not in value:
            raise ConfigError(
                f"--plan {self._path}: not a plan: it has no schema. Name a file that "
                "`graph-trainer plan --save` wrote; what --json writes is for other programs."
            )
        if value["schema"] != SCHEMA:
            raise ConfigError(
                f"--plan {self._path}: schema = {show(value['schema'])}, and this version reads "
                f"{SCHEMA}. {AGAIN}"
            )
        table = self.keys_of(
            value,
            "",
            ("schema", "versions", "config", "hardware", "device", "world_size", "passes",
             "microbatches", "axes", "classes", "texts"),
        )  # fmt: skip
        texts = self.some_texts(table["texts"], "texts")
        axes = [
            self.axis(a, f"axes[{i}]") for i, a in enumerate(self.a_list(table["axes"], "axes"))
        ]
        classes = RankClasses(tuple(name for name, _ in axes), tuple(labels for _, labels in axes))
        world_size = self.a_count(table["world_size"], "world_size")
        if world_size < 1 or classes.num_ranks != world_size:
            raise self.bad(
                "axes",
                table["axes"],
                f"they multiply to {classes.num_ranks} ranks, and world_size is {world_size}",
            )
        found = [
            self.rank_class(each, texts, f"classes[{i}]")
            for i, each in enumerate(self.a_list(table["classes"], "classes"))
        ]
        by_rank = {each.rank: each for each in found}
        # counted first: a few bytes of axes may stand for more classes than there is memory
        number = math.prod(len(set(labels)) for labels in classes.labels)
        wrong = number != len(by_rank)
        if wrong or {r: c.ranks for r, c in by_rank.items()} != classes.representatives():
            raise self.bad("classes", [c.rank for c in found], "not one for each class of the axes")
        plan = SavedPlan(
            versions={
                k: self.a_text(v, f"versions.{k}")
                for k, v in self.a_table(table["versions"], "versions").items()
            },
            config=self.a_text(table["config"], "config"),
            hardware=self.a_text(table["hardware"], "hardware"),
            device=self.a_text(table["device"], "device"),
            world_size=world_size,
            passes=tuple(self.some_texts(table["passes"], "passes")),
            microbatches=self.a_count(table["microbatches"], "microbatches"),
            classes=classes,
            by_rank=by_rank,
        )
        try:
            plan.config_table()
        except (tomli.TOMLDecodeError, RecursionError) as error:
            raise self.bad("config", plan.config, f"not TOML ({error})") from error
        return plan

    def axis(self, value: object, key: str) -> tuple[str, tuple[int, ...]]:
        match self.a_list(value, key):
            case [name, labels]:
                of = [self.a_count(label, key) for label in self.a_list(labels, key)]
                if not of:
                    raise self.bad(key, value, "an axis without ranks")
                return self.a_text(name, key), tuple(of)
        raise self.bad(key, value, "not a name and a list of classes")

    def rank_class(self, value: object, texts: list[str], key: str) -> PlannedClass:
        names = ("rank", "ranks", "fingerprint", "predicted", "input", "op", "collective")
        table = self.keys_of(value, key, names)
        parts = [self.entries(table[name], texts, f"{key}.{name}") for name in names[-3:]]
        fingerprint = Fingerprint(*parts)
        if table["fingerprint"] != fingerprint.digest:
            raise self.bad(
                f"{key}.fingerprint",
                table["fingerprint"],
                "not that of what follows: the file was changed by hand",
            )
        return PlannedClass(
            self.a_count(table["rank"], f"{key}.rank"),
            self.a_count(table["ranks"], f"{key}.ranks"),
            fingerprint,
            self.predicted(table["predicted"], f"{key}.predicted"),
        )

    def entries(self, value: object, texts: list[str], key: str) -> tuple[Entry, ...]:
        found = []
        for place, pair in enumerate(self.a_list(value, key)):
            match pair:
                case [int(what), int(where)] if min(pair) >= 0 and max(pair) < len(texts):
                    found.append(Entry(texts[what], texts[where]))
                case _:
                    raise self.bad(f"{key}[{place}]", pair, "not two places in texts")
        return tuple(found)

    def predicted(self, value: object, key: str) -> Predicted:
        table = self.keys_of(value, key, tuple(_PREDICTED))
        read: Mapping[str, Callable[[object, str], Any]] = {
            "count": self.a_count,
            "seconds": self.some_seconds,
            "counts": self.some_counts,
            "collectives": lambda v, k: self.nested(
                v, k, lambda w, j: self.nested(w, j, self.volume)
            ),
        }
        return Predicted(
            **{n: read[kind](table[n], f"{key}.{n}") for n, kind in _PREDICTED.items()}
        )

    def volume(self, value: object, key: str) -> dict[str, int]:
        return self.some_counts(self.keys_of(value, key, ("count", "bytes")), key)

    def some_counts(self, value: object, key: str) -> dict[str, int]:
        return self.nested(value, key, self.a_count)

    def nested(self, value: object, key: str, read: Callable[[object, str], T]) -> dict[str, T]:
        return {k: read(v, f"{key}.{k}") for k, v in self.a_table(value, key).items()}

    def keys_of(self, value: object, key: str, names: tuple[str, ...]) -> dict[str, Any]:
        table = self.a_table(value, key or "the file")
        prefix = f"{key}." if key else ""
        for name in table:
            if name not in names:
                raise self.bad(
                    prefix + name,
                    table[name],
                    f"unknown key. {did_you_mean(name, names)}".strip().rstrip("."),
                )
        for name in names:
            if name not in table:
                raise ConfigError(f"--plan {self._path}: {prefix}{name} is missing. {AGAIN}")
        return table

    def a_table(self, value: object, key: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.bad(key, value, "not a table")
        return value

    def a_list(self, value: object, key: str) -> list[Any]:
        if not isinstance(value, list):
            raise self.bad(key, value, "not a list")
        return value

    def some_texts(self, value: object, key: str) -> list[str]:
        return [self.a_text(each, f"{key}[{i}]") for i, each in enumerate(self.a_list(value, key))]

    def a_text(self, value: object, key: str) -> str:
        if not isinstance(value, str):
            raise self.bad(key, value, "not text")
        return value

    def a_count(self, value: object, key: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
            raise self.bad(key, value, "not a whole number from 0 to 2**63 - 1")
        return value

    def some_seconds(self, value: object, key: str) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.bad(key, value, "not a number")
        if not 0 <= value < math.inf:
            raise self.bad(key, value, "not a number from 0 on")
        return float(value)

    def bad(self, key: str, value: object, problem: str) -> ConfigError:
        return ConfigError(f"--plan {self._path}: {key} = {show(value)}: {problem}. {AGAIN}")
