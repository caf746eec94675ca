from __future__ import annotations

import pytest
from click.testing import CliRunner

from benchmarks.cli import main
from benchmarks.plan import Limits, full_plan, only
from benchmarks.results import UNITS
from benchmarks.targets import TARGETS
from benchmarks.tasks import TASKS

PLAN = full_plan(Limits(), ray=True)


def test_names_of_measurements_are_unique() -> None:
    names = [measurement.name for stage in PLAN for measurement in stage.measurements]
    assert len(set(names)) == len(names)


def test_every_task_is_there_and_every_system_is_a_group_of_the_stage() -> None:
    for stage in PLAN:
        for measurement in stage.measurements:
            assert measurement.task in {*TASKS, "idle", "memory"}
            assert set(measurement.systems) <= set(stage.groups)
            assert all(
                plan.shape.clients >= measurement.clients + (measurement.background is not None)
                for plan in stage.groups.values()
            )


def test_every_target_is_about_something_that_is_measured() -> None:
    measured = {
        (measurement.name, system)
        for stage in PLAN
        for measurement in stage.measurements
        for system in measurement.systems or stage.groups
    }
    for target in TARGETS:
        assert (target.measurement, target.system) in measured
        assert (target.base_measurement or target.measurement, target.base_system) in measured
        assert target.number in UNITS
        assert target.at_most is not UNITS[target.number][1]
        assert target.at_most == (target.stretch < target.limit)


def test_without_ray_there_is_no_ray() -> None:
    for stage in full_plan(Limits(), ray=False):
        assert "ray" not in stage.groups
        assert all("ray" not in measurement.systems for measurement in stage.measurements)


def test_a_measurement_without_systems_is_not_made_to_mean_all_by_leaving_ray_out() -> None:
    with_ray = {each.name: each for stage in PLAN for each in stage.measurements}
    for stage in full_plan(Limits(), ray=False):
        for measurement in stage.measurements:
            assert bool(measurement.systems) == bool(with_ray[measurement.name].systems)


def test_only_keeps_what_a_pattern_is_found_in() -> None:
    kept = only(PLAN, ["push 1 MiB", "^Training"])
    names = [measurement.name for stage in kept for measurement in stage.measurements]
    assert names[0] == "push 1 MiB"
    assert len(names) == 3
    assert only(PLAN, []) == PLAN


def test_a_pattern_that_finds_nothing_is_an_error_that_lists_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"nothing matches 'pusch'(.|\n)*push 1 MiB"):
        only(PLAN, ["push", "pusch"])


def test_the_command_lists_what_it_would_measure() -> None:
    listed = CliRunner().invoke(main, ["--list", "--only", "fan-out"])
    assert listed.exit_code == 0
    assert "fan-out: empty call to each of 8 workers" in listed.output
    wrong = CliRunner().invoke(main, ["--list", "--only", "nothing like it"])
    assert wrong.exit_code == 2
    assert "nothing matches" in wrong.output
