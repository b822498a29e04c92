"""`benchmarks/calls.py` and `structure.py`: calls, files and figures of the structure stay within their limits."""

from __future__ import annotations

import subprocess
import sys

import pytest

import calls
import structure
from hookdrop.utils.validation import number
from tests.support.programs import ROOT


@pytest.mark.parametrize("action", calls.ACTIONS)
def test_calls_and_files_stay_within_their_limits(action: str) -> None:
    count, max_calls, max_files = calls.ACTIONS[action]
    found = count()
    assert 0 < found.total() <= max_calls, found
    assert max_files is None or len(calls.files(found)) <= max_files, found


def test_step_evaluates_the_schedule_once() -> None:
    assert calls.schedule_evaluations() == 1


def test_a_hook_has_no_listeners_in_steady_state() -> None:
    drop, model = calls.ramp(3)
    assert all(hook.listeners for hook in drop._sinks)
    for _ in range(2):
        drop.step()
        model(calls.torch.ones(2))
    assert [hook.listeners for hook in drop._sinks] == [()] * 3


def test_only_calls_in_the_package_are_counted() -> None:
    assert calls.count_calls(lambda: number(1.0, "p", "test")).total() == 1
    assert calls.count_calls(lambda: len([])).total() == 0


def test_figures_of_the_structure_stay_within_their_limits() -> None:
    figures = structure.measure(ROOT)
    assert figures["entries at the root"] <= 16
    assert figures["import levels"] <= 9
    assert figures["modules at `import hookdrop`"] <= 65
    assert figures["`# type: ignore`"] <= 20
    assert figures["public members of Injection"] <= 22
    assert figures["public members of Regularizer"] <= 16
    assert figures["lines of guards/"] <= 730


@pytest.mark.parametrize(("program", "said"), [(calls, "inject with 1 site"), (structure, "lines of the package")])
def test_the_programs_print_the_numbers(program: object, said: str) -> None:
    command = [sys.executable, program.__file__]  # type: ignore[attr-defined]
    assert said in subprocess.run(command, capture_output=True, text=True, check=True).stdout
