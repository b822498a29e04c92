"""`benchmarks/calls.py`: the numbers of Python calls stay within their limits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import calls


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
    from hookdrop.utils.validation import number

    assert calls.count_calls(lambda: number(1.0, "p", "test")).total() == 1
    assert calls.count_calls(lambda: len([])).total() == 0


def test_calls_prints_a_table() -> None:
    program = Path(calls.__file__)
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=True)
    assert all(action in done.stdout for action in calls.ACTIONS)
