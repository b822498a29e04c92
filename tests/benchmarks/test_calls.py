"""The counts of `benchmarks/calls.py`, which must not creep back up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import calls


@pytest.mark.parametrize("action", calls.ACTIONS)
def test_calls_and_files_stay_within_their_limits(action: str) -> None:
    count, most_calls, most_files = calls.ACTIONS[action]
    counted = count()
    assert 0 < counted.calls <= most_calls, counted.functions
    assert most_files is None or len(counted.files) <= most_files, counted.files


def test_a_step_evaluates_the_schedule_once() -> None:
    assert calls.schedule_evaluations() == 1


def test_a_hook_has_no_listeners_in_steady_state() -> None:
    drop, model = calls.ramp(3)
    assert all(hook.listeners for hook in drop._hooks)
    for _ in range(2):
        drop.step()
        model(calls.torch.ones(2))
    assert [hook.listeners for hook in drop._hooks] == [()] * 3


def test_counting_counts() -> None:
    """One call of a function in the package, and none of one outside."""
    from hookdrop.utils.validation import number

    assert calls.counted(lambda: number(1.0, "p", "test")).calls == 1
    assert calls.counted(lambda: len([])).calls == 0


def test_it_prints_a_table() -> None:
    program = Path(calls.__file__)
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=True)
    assert all(action in done.stdout for action in calls.ACTIONS)
