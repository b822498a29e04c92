"""What an injection drives: anything with a rate, such as a hook or a rate of the dropout that a model already has."""

from __future__ import annotations

from typing import Any, Self

from torch import nn

from hookdrop.core.regularizer import CurrentRate, Rate


class RateSink:
    """One site of a placed injection. Each kind of site has a class, in `hookdrop.core.parts.KINDS`."""

    site: str
    at: str
    state: Any  # the `InjectionState`
    rate: Rate
    """What the regularizer declares of its rate; of no meaning without a target."""
    p_scale: float
    target: float | None
    """The rate before the schedule and `p_scale`; None without a rate."""
    initial_target: float | None
    called: bool | None = None
    """Whether the layer has been called; None if that is not known."""

    # --- in a plan

    @staticmethod
    def check_site(regularizer: Any, module: nn.Module, tensor: Any, name: str) -> str:
        """Return how the regularizer reads what it gets there, or raise if it cannot act there."""
        return ""

    @staticmethod
    def site_warnings(root: nn.Module, sites: Any, tensor: Any) -> list[str]:
        """Return what the plan should warn about."""
        return []

    @staticmethod
    def place_of(module: nn.Module | None, what: Any) -> Any:
        """Identify what a sink or a planned site changes."""
        return id(module), what.at

    @classmethod
    def elsewhere(cls) -> list[tuple[nn.Module, RateSink]]:
        """Return sinks outside of the model that may change the same."""
        return []

    @classmethod
    def refuse_beside(cls, present: list[RateSink]) -> None:
        """Raise `InjectionError` if such a sink cannot act beside those that are present at its layer."""

    # --- placing and removing

    @classmethod
    def of(cls, site: Any, plan: Any, state: Any) -> Self:
        """Create the sink of a `PlannedSite`."""
        raise NotImplementedError

    def place(self, module: nn.Module) -> None:
        raise NotImplementedError

    def take_over(self, replaced: Any) -> None:
        """Restore in the end what those of the `replaced` sinks would that change the same."""

    @property
    def placed(self) -> bool:
        raise NotImplementedError

    @property
    def is_attached(self) -> bool:
        """Whether the sink is placed and its module still exists."""
        raise NotImplementedError

    def remove(self) -> None:
        raise NotImplementedError

    # --- the rate

    @property
    def p(self) -> float | None:
        """The current rate; None without one."""
        raise NotImplementedError

    def set_rate(self, rate: CurrentRate, on: bool, sampling: bool) -> None:
        raise NotImplementedError

    def valid_target(self, value: object) -> float:
        """Return `value` as a float, or raise if it is out of range."""
        raise NotImplementedError

    def before_sampling(self, model: nn.Module) -> None:
        """Prepare for acting in eval mode."""

    def describe(self, rate: float | None = None) -> str:
        """Return the regularizer as text, at the given rate or at its target."""
        raise NotImplementedError
