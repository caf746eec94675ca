"""Starts the groups of each stage, takes turns between them, repeats, and collects."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from time import perf_counter
from typing import Any

from benchmarks import machine
from benchmarks.machine import Load, LoadMeter
from benchmarks.plan import Measurement, Stage
from benchmarks.processes import Group, MeasurementError, UnsupportedError
from benchmarks.results import Results
from benchmarks.tasks import Numbers

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """How thoroughly to measure.

    Attributes:
        repeats: How often each measurement is made on each system.
        seconds: What one of them may take, beside its warm-up.
        threads: Threads for torch's operators in each process.
        pause: Seconds between two, so that what the last one left has settled.
    """

    repeats: int = 5
    seconds: float = 0.3
    threads: int = 1
    pause: float = 0.02


@dataclass(frozen=True)
class Report:
    """A whole run.

    Attributes:
        started: When, in ISO format.
        seconds: How long it took.
        machine: What it ran on.
        settings: How thorough it was.
        results: What was measured.
    """

    started: str
    seconds: float
    machine: dict[str, Any]
    settings: Settings
    results: Results


def run(stages: Iterable[Stage], settings: Settings, progress: Progress = lambda _: None) -> Report:
    """Runs all stages.

    A system that fails to start, or at a measurement, is left out there and the results say why.
    Interrupted (SIGINT), it returns what was measured until then.

    Args:
        stages: The plan.
        settings: How thoroughly.
        progress: Called with a line before each stage and repeat.
    """
    started, start = datetime.now(timezone.utc), perf_counter()
    described = machine.describe()
    results = Results()
    # Whoever interrupts a run has what was measured until then.
    with suppress(KeyboardInterrupt):
        for stage in stages:
            progress(f"{stage.name}: starting")
            with ExitStack() as stack:
                groups = _start_groups(stage, settings, results, stack)
                _StageRunner(stage, groups, settings, results, progress).run()
    return Report(
        started.isoformat(timespec="seconds"),
        perf_counter() - start,
        described,
        settings,
        results,
    )


def _systems(stage: Stage, measurement: Measurement) -> list[str]:
    return [name for name in measurement.systems or stage.groups if name in stage.groups]


def _start_groups(
    stage: Stage, settings: Settings, results: Results, stack: ExitStack
) -> dict[str, Group]:
    needed = {name for each in stage.measurements for name in _systems(stage, each)}
    groups: dict[str, Group] = {}
    for name, plan in stage.groups.items():
        if name not in needed:
            continue
        try:
            group = Group(
                plan.system,
                plan.shape,
                options=plan.options,
                environment=plan.environment,
                threads=settings.threads,
            )
        except (MeasurementError, ImportError, RuntimeError, OSError) as error:
            for each in stage.measurements:
                if name in _systems(stage, each):
                    results.missing[each.name, name] = f"did not start: {_last_line(error)}"
            continue
        groups[name] = stack.enter_context(group)
        group.pause()
    return groups


class _StageRunner:
    """Measures on the groups of one stage."""

    def __init__(
        self,
        stage: Stage,
        groups: dict[str, Group],
        settings: Settings,
        results: Results,
        progress: Progress,
    ) -> None:
        self._stage = stage
        self._groups = groups
        self._settings = settings
        self._results = results
        self._progress = progress

    def run(self) -> None:
        """Repeats all measurements; the first system of a turn is another one each time.

        Each repeat goes through the whole stage, so that a disturbance of a minute touches one
        repeat of many cells, which medians bear, rather than all repeats of one.
        """
        for repeat in range(self._settings.repeats):
            self._progress(f"{self._stage.name}: repeat {repeat + 1} of {self._settings.repeats}")
            for measurement in self._stage.measurements:
                if not self._is_due(measurement, repeat):
                    continue
                systems = _systems(self._stage, measurement)
                turn = repeat % len(systems)
                for name in systems[turn:] + systems[:turn]:
                    if name in self._groups and (measurement.name, name) not in (
                        self._results.missing
                    ):
                        self._measure(measurement, name)

    def _is_due(self, measurement: Measurement, repeat: int) -> bool:
        only = {"": repeat, "first": 0, "last": self._settings.repeats - 1}
        return only[measurement.only_in] == repeat

    def _measure(self, measurement: Measurement, name: str) -> None:
        group = self._groups[name]
        group.resume()
        time.sleep(self._settings.pause)
        try:
            numbers, load = self._numbers(measurement, group)
        except MeasurementError as error:
            kind = "cannot do it" if isinstance(error, UnsupportedError) else "failed"
            self._results.missing[measurement.name, name] = f"{kind}: {_last_line(error)}"
            if not isinstance(error, UnsupportedError):
                # Its processes may be in any state: what follows would measure the failure.
                del self._groups[name]
                self._skip_rest(name, measurement)
                group.close()
        else:
            self._results.add(measurement.name, name, numbers, load)
        finally:
            group.pause()

    def _skip_rest(self, name: str, failed: Measurement) -> None:
        for each in self._stage.measurements:
            if name in _systems(self._stage, each):
                self._results.missing.setdefault(
                    (each.name, name), f"ended after it failed at {failed.name!r}"
                )

    def _numbers(self, measurement: Measurement, group: Group) -> tuple[Numbers, Load | None]:
        seconds = self._settings.seconds * measurement.scale
        if measurement.task == "memory":
            return group.memory(), None
        meter = LoadMeter(self._own_seconds())
        if measurement.task == "idle":
            numbers = _idle(group, seconds)
        else:
            numbers = _task(measurement, group, seconds)
        return numbers, meter.stop(self._own_seconds())

    def _own_seconds(self) -> float:
        harness = time.process_time()
        return harness + sum(group.cpu_seconds() for group in self._groups.values())


#: Tasks that do nothing but the calls that they count.
_COUNTED = ("latency", "rate", "fan_out")


def _task(measurement: Measurement, group: Group, seconds: float) -> Numbers:
    """Has the clients do the task; adds up their rates, and the broker's time for a call."""
    clients = range(measurement.clients)
    last = group.shape.clients - 1
    behind = measurement.background
    if behind is not None:
        # Longer than what is measured: it must not end before.
        group.start(last, behind.task, seconds * 1.5, behind.arguments)
        time.sleep(seconds / 4)
    broker = group.broker_seconds()
    for client in clients:
        group.start(client, measurement.task, seconds, measurement.arguments)
    answers = [group.finish(client) for client in clients]
    broker = group.broker_seconds() - broker
    if behind is not None:
        group.finish(last)
    numbers = dict(answers[0])
    for name in ("rate", "calls"):
        if name in numbers:
            numbers[name] = sum(each[name] for each in answers)
    if group.has_broker and behind is None and measurement.task in _COUNTED:
        numbers["broker CPU"] = broker / numbers["calls"]
    return numbers


def _idle(group: Group, seconds: float) -> Numbers:
    broker, worker, start = group.broker_seconds(), group.worker_seconds(), perf_counter()
    time.sleep(seconds)
    took = perf_counter() - start
    numbers = {"idle worker": (group.worker_seconds() - worker) / took}
    if group.has_broker:
        numbers["idle broker"] = (group.broker_seconds() - broker) / took
    return numbers


def _last_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__
