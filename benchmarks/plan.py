"""What is measured: stages, each with its groups and measurements."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any, Literal

from benchmarks.systems.base import Shape

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

SIZES = {
    "1 KiB": KIB,
    "64 KiB": 64 * KIB,
    "1 MiB": MIB,
    "16 MiB": 16 * MIB,
    "128 MiB": 128 * MIB,
    "1 GiB": GIB,
}
#: Clients at work at once on one broker.
CLIENTS = (1, 4, 16)
#: Calls that each of several clients keeps under way.
EACH_IN_FLIGHT = 100


@dataclass(frozen=True)
class GroupPlan:
    """A group of a stage.

    Attributes:
        system: The module of ``benchmarks.systems``.
        shape: How many clients and workers.
        options: Of its launcher.
        environment: Variables of its peers.
    """

    system: str
    shape: Shape = field(default_factory=Shape)
    options: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Background:
    """What the last client does meanwhile: a task, with its arguments."""

    task: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Measurement:
    """One thing to measure, on several systems.

    Attributes:
        name: What the report calls it; unique.
        task: The task of ``benchmarks.tasks``; or ``idle`` or ``memory``, which the runner
            does itself.
        arguments: Of the task.
        systems: The groups to measure; none is all of the stage.
        clients: How many clients do it at once; their rates are added up.
        background: What another client does meanwhile.
        scale: Times the seconds that a task usually has.
        only_in: The repeat in which it is made, if not in each.
    """

    name: str
    task: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    systems: tuple[str, ...] = ()
    clients: int = 1
    background: Background | None = None
    scale: float = 1.0
    only_in: Literal["", "first", "last"] = ""


@dataclass(frozen=True)
class Stage:
    """Groups that run side by side, and what is measured on them, in turns.

    Attributes:
        name: What the report calls it.
        groups: By the name that the report gives each.
        measurements: In order.
    """

    name: str
    groups: Mapping[str, GroupPlan]
    measurements: tuple[Measurement, ...]


@dataclass(frozen=True)
class Limits:
    """How large a plan is.

    Attributes:
        largest: Bytes of the largest transfer.
        workers: Workers of the fan-out.
        idle_workers: Workers that do nothing.
        clients: Numbers of clients at once.
        wide: Width of the larger training step.
    """

    largest: int = GIB
    workers: int = 8
    idle_workers: int = 64
    clients: tuple[int, ...] = CLIENTS
    wide: int = 1024


NO_SHM = {"TENSORPLAY_SHM": "0"}


def has_ray() -> bool:
    """Whether Ray is installed."""
    return find_spec("ray") is not None


def full_plan(limits: Limits, *, ray: bool) -> list[Stage]:
    """Returns all stages.

    Args:
        limits: How large.
        ray: Whether to measure Ray, too.
    """
    stages = [
        _pair(limits),
        _training(limits),
        _fan_out(limits),
        _clients(limits),
        _busy(limits),
        _scale(limits),
        _curve(limits),
    ]
    return stages if ray else [_without_ray(stage) for stage in stages]


def only(stages: Iterable[Stage], patterns: Iterable[str]) -> list[Stage]:
    """Keeps the measurements whose name, or stage's name, a pattern is found in.

    Args:
        stages: The plan.
        patterns: Regular expressions, upper and lower case alike; none keeps everything.

    Raises:
        ValueError: If a pattern finds nothing, with the names that there are.
    """
    stages, patterns = list(stages), list(patterns)
    if not patterns:
        return stages
    names = [
        f"{stage.name}: {measurement.name}"
        for stage in stages
        for measurement in stage.measurements
    ]
    for pattern in patterns:
        if not any(re.search(pattern, name, re.IGNORECASE) for name in names):
            listed = "\n  ".join(names)
            raise ValueError(f"nothing matches {pattern!r}; there are\n  {listed}")
    kept = []
    for stage in stages:
        chosen = tuple(
            measurement
            for measurement in stage.measurements
            if any(
                re.search(pattern, f"{stage.name}: {measurement.name}", re.IGNORECASE)
                for pattern in patterns
            )
        )
        if chosen:
            kept.append(replace(stage, measurements=chosen))
    return kept


def _sizes(limits: Limits) -> dict[str, int]:
    return {name: nbytes for name, nbytes in SIZES.items() if nbytes <= limits.largest}


def _pair(limits: Limits) -> Stage:
    """One client and one worker."""
    calls = (
        Measurement(
            "memory after the start",
            "memory",
            systems=("tensorplay", "frames", "torch"),
            only_in="first",
        ),
        Measurement("empty call", "latency", systems=("tensorplay", "torch", "ray", "relay")),
        Measurement(
            "RemoteModule forward",
            "forward",
            systems=("tensorplay", "frames", "torch", "ray", "local"),
        ),
        Measurement("empty calls", "rate", systems=("tensorplay", "torch", "ray")),
        Measurement(
            "one-tensor calls", "rate", {"elements": 8}, systems=("tensorplay", "torch", "ray")
        ),
    )
    moving = ("tensorplay", "frames", "torch", "ray")
    transfers = tuple(
        Measurement(f"{task} {name}", task, {"nbytes": nbytes}, systems=moving)
        for task in ("push", "pull", "echo")
        for name, nbytes in _sizes(limits).items()
    )
    ends = (
        Measurement(
            "memory after all of it",
            "memory",
            systems=("tensorplay", "frames", "torch"),
            only_in="last",
        ),
    )
    groups = {
        "tensorplay": GroupPlan("tensorplay"),
        "frames": GroupPlan("tensorplay", environment=NO_SHM),
        "torch": GroupPlan("torch"),
        "ray": GroupPlan("ray"),
        "local": GroupPlan("local"),
        "relay": GroupPlan("relay"),
    }
    return Stage("one client, one worker", groups, calls + transfers + ends)


def _training(limits: Limits) -> Stage:
    """Two layers on two workers."""
    shape = Shape(clients=1, workers=2)
    return Stage(
        "training",
        {
            "tensorplay": GroupPlan("tensorplay", shape),
            "torch": GroupPlan("torch", shape),
            "local": GroupPlan("local", shape),
        },
        (
            Measurement("training step, 2 x 64x64, batch 8", "train", {"width": 64, "batch": 8}),
            Measurement(
                f"training step, 2 x {limits.wide}x{limits.wide}, batch 64",
                "train",
                {"width": limits.wide, "batch": 64},
            ),
        ),
    )


def _fan_out(limits: Limits) -> Stage:
    """One client, many workers."""
    shape = Shape(clients=1, workers=limits.workers)
    count = limits.workers
    return Stage(
        "fan-out",
        {
            "tensorplay": GroupPlan("tensorplay", shape),
            "torch": GroupPlan("torch", shape),
            "ray": GroupPlan("ray", shape),
        },
        (
            Measurement(f"empty call to each of {count} workers", "fan_out"),
            Measurement(f"1 MiB to and from each of {count} workers", "fan_out", {"nbytes": MIB}),
            Measurement(f"empty calls, spread over {count} workers", "rate", {"spread": True}),
        ),
    )


def _clients(limits: Limits) -> Stage:
    """Many clients on one broker."""
    shape = Shape(clients=max(limits.clients), workers=4)
    return Stage(
        "clients",
        {"tensorplay": GroupPlan("tensorplay", shape), "torch": GroupPlan("torch", shape)},
        tuple(
            Measurement(
                f"empty calls of {count} client{'s' if count > 1 else ''} to 4 workers",
                "rate",
                {"in_flight": EACH_IN_FLIGHT, "spread": True},
                clients=count,
            )
            for count in limits.clients
        ),
    )


def _busy(limits: Limits) -> Stage:
    """Small calls while another client pushes a gigabyte again and again."""
    shape = Shape(clients=2, workers=2)
    pushing = Background("push", {"nbytes": limits.largest, "worker": 1})
    return Stage(
        "busy broker",
        {
            "frames": GroupPlan("tensorplay", shape, environment=NO_SHM),
            "torch": GroupPlan("torch", shape),
        },
        (
            Measurement("empty call, idle broker", "latency", scale=3),
            Measurement(
                "empty call, 1 GiB pushed meanwhile", "latency", background=pushing, scale=6
            ),
        ),
    )


def _scale(limits: Limits) -> Stage:
    """Many workers that do nothing."""
    count = limits.idle_workers
    return Stage(
        "scale",
        {
            "tensorplay": GroupPlan("tensorplay", Shape(workers=1)),
            "crowd": GroupPlan("tensorplay", Shape(workers=count)),
        },
        (
            Measurement("idle", "idle", scale=5),
            Measurement("memory", "memory"),
            Measurement("empty call in a crowd", "latency"),
            Measurement("empty calls in a crowd", "rate"),
        ),
    )


def _curve(limits: Limits) -> Stage:
    """The cost of encryption."""
    names = [name for name in ("64 KiB", "16 MiB") if SIZES[name] <= limits.largest]
    return Stage(
        "CURVE",
        {
            "frames": GroupPlan("tensorplay", environment=NO_SHM),
            "curve": GroupPlan("tensorplay", options={"curve": "yes"}, environment=NO_SHM),
        },
        (
            Measurement("empty call, encrypted", "latency"),
            Measurement("empty calls, encrypted", "rate"),
            *(
                Measurement(f"push {name}, encrypted", "push", {"nbytes": SIZES[name]})
                for name in names
            ),
        ),
    )


def _without_ray(stage: Stage) -> Stage:
    groups = {name: plan for name, plan in stage.groups.items() if plan.system != "ray"}
    measurements = tuple(
        replace(each, systems=tuple(name for name in each.systems if name != "ray"))
        for each in stage.measurements
    )
    return replace(stage, groups=groups, measurements=measurements)
