"""Find regions of a trace with one exit: what is computed for one operation alone."""

from __future__ import annotations

from dataclasses import dataclass, field

from hookdrop.survey.trace import Node, Op, Trace


@dataclass
class Region:
    """What is computed for one operation alone, on the way to one of its inputs."""

    inside: set[Node] = field(default_factory=set)
    """The tensors of which every use leads to that input."""
    entries: list[Node] = field(default_factory=list)
    """The tensors that the region reads from outside, the most recent first."""


class Regions:
    """The regions of a trace. Uses without an effect on the output of the model, such as statistics, do not count."""

    def __init__(self, trace: Trace) -> None:
        self.outputs = {*trace.outputs}
        live = {*self.outputs}
        for op in reversed(trace.ops):
            if not self.outputs or not live.isdisjoint(op.outputs):
                live.update(op.inputs, op.outputs)
        self._users = {
            node: [op for op in ops if any((one.fits or one.dtype.is_complex) and one in live for one in op.outputs)]
            for node, ops in trace.users.items()
        }

    def uses(self, node: Node) -> list[Op]:
        """Return the operations that read a tensor, with an effect on the output of the model."""
        return self._users.get(node, [])

    def before(self, end: Node, op: Op) -> Region:
        """Return the region that ends with an input of an operation; empty if the input has other uses."""
        found, done, waiting = Region(), {op}, {end}
        while waiting:  # the most recent first, so that the users of a tensor are known
            node = max(waiting, key=lambda one: one.index)
            waiting.remove(node)
            uses = self.uses(node)
            is_free = node not in self.outputs and all(use in done and (use is not op or node is end) for use in uses)
            if not is_free or node.op is None:
                found.entries.append(node)
                continue
            found.inside.add(node)
            if all(one in found.inside or not (self.uses(one) or one in self.outputs) for one in node.op.outputs):
                done.add(node.op)
            waiting.update(one for one in node.op.inputs if one.is_data or one.op is not None)
        return found
