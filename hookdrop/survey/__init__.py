"""Ask a model what it computes, by running it on an example: calls, shapes, residual branches.

This package is the only place that runs the user's model besides `probe` and `predict`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hookdrop.survey.branches import Branch
    from hookdrop.survey.facts import Survey, survey
    from hookdrop.survey.trace import record

__all__ = ["Branch", "Survey", "record", "survey"]


def __getattr__(name: str) -> Any:
    """Import the analyses on first use, because most programs survey no model."""
    if name in __all__:
        for file in ("facts", "branches", "trace"):
            module = importlib.import_module(f"hookdrop.survey.{file}")
            if name in vars(module):
                return vars(module)[name]
    raise AttributeError(f"module 'hookdrop.survey' has no attribute {name!r}")
