"""Penalties at other places than the output or the input of a layer."""

from __future__ import annotations

from hookdrop.methods.parameter_hooks import ParameterHook
from hookdrop.methods.penalties import Penalizing
from hookdrop.methods.rows_hook import RowsHook
from hookdrop.methods.score_hooks import ScoreHook
from hookdrop.methods.skip_hook import SkipHook


class PenaltyParameterHook(Penalizing, ParameterHook):
    apply = Penalizing.act


class PenaltyScoreHook(Penalizing, ScoreHook):
    apply = Penalizing.act


class PenaltyRowsHook(Penalizing, RowsHook):
    pass


class PenaltySkipHook(Penalizing, SkipHook):
    pass
