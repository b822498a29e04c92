"""Ask a model what it computes, by running it on an example: calls, shapes, residual branches.

This package is the only place that runs the user's model besides `probe` and `predict`.
"""

from hookdrop.survey.branches import Branch
from hookdrop.survey.facts import LayerFacts, Survey, survey
from hookdrop.survey.trace import Call, Node, Op, Trace, record

__all__ = ["Branch", "Call", "LayerFacts", "Node", "Op", "Survey", "Trace", "record", "survey"]
