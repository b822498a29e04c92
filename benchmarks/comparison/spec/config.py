"""The configuration of a comparison, from a YAML file or from flags."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

from comparison.spec import arms
from comparison.spec.call_syntax import parse_call, parse_schedule
from comparison.spec.errors import ConfigError, suggest
from comparison.spec.peers import is_model_argument
from comparison.spec.run_spec import Arm, Data, Model, Optimizer, cell_of
from comparison.spec.tuning import TuningConfig
from comparison.spec.yaml_lines import Lines, Place, format_place

NONE = Arm(name="none", kind="none", schedule="none")
RESERVED = ("none", "none (other seeds)", "p = 0 (A/A)")
Kind = Literal["regularizer", "recipe", "peer", "probe"]
KINDS: tuple[Kind, ...] = ("regularizer", "recipe", "peer", "probe")


def _named(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


def _listed(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else [value]


class ArmConfig(BaseModel):
    """One regularizer, recipe, peer or linear probe; a plain string is a regularizer."""

    model_config = ConfigDict(extra="forbid")

    regularizer: str | None = None
    recipe: str | None = None
    peer: str | None = None
    probe: PositiveFloat | None = None
    """The learning rate of a linear probe: only the classifier is trained. A reference, not a regularizer."""
    name: Annotated[str, Field(min_length=1)] | None = None
    layers: Annotated[list[str], BeforeValidator(_listed), Field(min_length=1)] | None = None
    """Overrides the `layers` of the comparison."""
    schedule: str | None = None
    equal: Literal["p", "fraction"] = "p"
    like: str | None = None
    """The regularizer or recipe whose tuned settings a peer uses.

    If None: the regularizer of the same name, or the first one.
    """

    @model_validator(mode="after")
    def _is_one(self) -> ArmConfig:
        given = [kind for kind in KINDS if getattr(self, kind)]
        if len(given) != 1:
            raise ValueError("an arm has exactly one of `regularizer`, `recipe`, `peer` and `probe`")
        if self.layers and not self.takes_layers:
            raise ValueError(f"{self.text} selects its own layers: remove `layers`")
        if self.schedule and not self.takes_schedule:
            raise ValueError(f"{self.text} has no schedule: remove `schedule`")
        if self.equal == "fraction" and given == ["peer"] and not self.takes_layers:
            raise ValueError("an argument of a model has no sites: remove `equal`")
        if given != ["peer"] and (self.equal != "p" or self.like):
            raise ValueError("`equal` and `like` are only valid for a peer")
        if given == ["probe"]:
            return self
        try:
            arms.split_rate(given[0], self.text)
        except TypeError as error:
            raise ValueError(str(error)) from None
        return self

    @field_validator("name")
    @classmethod
    def _is_free(cls, name: str | None) -> str | None:
        if name in RESERVED:
            raise ValueError(f"the name {name!r} is reserved: choose another `name`")
        if "," in (name or ""):
            raise ValueError(f"the name {name!r} has a comma, which separates names in the report: use parentheses")
        return name

    @field_validator("schedule")
    @classmethod
    def _is_known(cls, schedule: str | None) -> str | None:
        if schedule is not None:
            parse_schedule(schedule)
        return schedule

    @property
    def kind(self) -> Kind:
        """Which of the four it is."""
        return next(kind for kind in KINDS if getattr(self, kind))

    @property
    def text(self) -> str:
        """The call as written in the configuration."""
        return self.regularizer or self.recipe or self.peer or "a linear probe"

    @property
    def takes_layers(self) -> bool:
        """Whether it has hooks on the layers that the configuration names."""
        return self.kind == "regularizer" or (self.kind == "peer" and not is_model_argument(self.text))

    @property
    def takes_schedule(self) -> bool:
        """Whether it has a rate that can change during the training."""
        return self.takes_layers or self.kind == "recipe"

    @property
    def bare_name(self) -> str:
        """The name without settings."""
        return "linear probe" if self.kind == "probe" else parse_call(self.text).name

    def title(self, count: int) -> str:
        """The arm's name, given `count` arms of the same regularizer."""
        if self.name:
            return self.name
        if self.kind == "peer" and self.takes_layers:
            return f"{self.bare_name} (equal {self.equal})"
        return self.bare_name if count == 1 else self.text.replace(",", "")


def _as_regularizer(value: Any) -> Any:
    return {"regularizer": value} if isinstance(value, str) else value


class Config(BaseModel):
    """A comparison."""

    model_config = ConfigDict(extra="forbid")

    title: str = "A comparison of regularizers"
    models: Annotated[list[Annotated[Model, BeforeValidator(_named)]], BeforeValidator(_listed), Field(min_length=1)]
    data: Annotated[list[Annotated[Data, BeforeValidator(_named)]], BeforeValidator(_listed), Field(min_length=1)]
    train_sizes: Annotated[list[PositiveInt], BeforeValidator(_listed)] | None = None
    """Training set sizes for every dataset; None uses the sizes in `data`."""
    layers: Annotated[list[str], BeforeValidator(_listed)] = []
    """Sites of all regularizers and peers."""
    arms: Annotated[list[Annotated[ArmConfig, BeforeValidator(_as_regularizer)]], Field(min_length=1)]
    schedule: str = "LinearSchedule"
    seeds: int = Field(default=8, ge=2, le=10_000)
    """Number of pairs, fixed before the first run."""
    first_seed: int = Field(default=0, ge=0, lt=100_000)
    epochs: PositiveInt
    batch_size: PositiveInt = 20
    optimizer: Optimizer = Optimizer()
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    precision: Literal["float32", "bfloat16"] = "float32"
    channels_last: bool = False
    """Store images and convolution weights with the channels last, which is faster for most convolutions."""
    compile: bool = False
    device: str = "cpu"
    tuning: TuningConfig | None = None
    timing: float = Field(default=12.0, ge=0)
    """Time budget in seconds for measuring the cost of a training step; 0 skips the measurement."""
    max_steps: PositiveInt | None = None
    """Stop every run after this many optimizer steps, for a smoke test."""

    @field_validator("schedule")
    @classmethod
    def _is_known(cls, schedule: str) -> str:
        parse_schedule(schedule)
        return schedule

    @model_validator(mode="after")
    def _fits(self) -> Config:
        if not self.layers and any(arm.takes_layers and not arm.layers for arm in self.arms):
            raise ValueError("`layers` is missing: name the sites, for example `layers: 'layer[34].*.bn2'`")
        cells = Counter(cell_of(data, model) for data, model in self.cells())
        if twice := [name for name, count in cells.items() if count > 1]:
            raise ValueError(
                f"two cells are named {twice[0]!r}: use separate files for models or datasets that differ only in "
                "other settings"
            )
        names = Counter(arm.name for arm in self.all_arms())
        if twice := [name for name, count in names.items() if count > 1 or name in RESERVED]:
            raise ValueError(f"the arm name {twice[0]!r} is duplicate or reserved: set a unique `name`")
        known = [arm.name for arm in self.all_arms() if arm.kind in ("regularizer", "recipe")]
        for arm in self.arms:
            if arm.like and arm.like not in known:
                raise ValueError(f"like: no regularizer or recipe is named {arm.like!r}.\n{suggest(arm.like, known)}")
            if arm.probe and self.tuning and "lr" in self.tuning.space_none:
                raise ValueError("a probe has its own learning rate, so `lr` cannot be tuned: remove one of them")
        return self

    def all_arms(self) -> list[Arm]:
        """All arms at their configured rates, without none."""
        counts = Counter((arm.kind, arm.bare_name) for arm in self.arms)
        return [self._arm(arm, counts[arm.kind, arm.bare_name]) for arm in self.arms]

    def like(self, name: str) -> str:
        """The regularizer whose tuned settings the arm uses: its own name, except for a peer."""
        arm, config = next(both for both in zip(self.all_arms(), self.arms, strict=True) if both[0].name == name)
        if arm.kind != "peer":
            return name
        ours = [other for other in self.all_arms() if other.kind == "regularizer"]
        bare = parse_call(arm.call).name.split(".")[1].removesuffix("2d")
        equivalent = {"StochasticDepth": "DropPath"}.get(bare, bare)
        namesake = [other.name for other in ours if parse_call(other.call).name == equivalent]
        return config.like or [*namesake, *(other.name for other in ours), name][0]

    def cells(self) -> Iterator[tuple[Data, Model]]:
        """Every combination of dataset, training set size and model."""
        for data in self.data:
            sizes: Sequence[int | None] = self.train_sizes or [data.train_size]
            for size in sizes:
                for model in self.models:
                    yield data.model_copy(update={"train_size": size}), model

    def _arm(self, arm: ArmConfig, count: int) -> Arm:
        if arm.kind == "probe":
            return Arm(name=arm.title(count), kind="probe", schedule="none", lr=arm.probe)
        call, p = arms.split_rate(arm.kind, arm.text)
        return Arm(
            name=arm.title(count),
            kind=arm.kind,
            call=call,
            p=p,
            layers=tuple(arm.layers or self.layers) if arm.takes_layers else (),
            schedule=(arm.schedule or self.schedule) if arm.takes_schedule else "none",
            equal=arm.equal,
        )


def validate(settings: Mapping[str, Any], lines: Lines) -> Config:
    """Validate the settings of a comparison.

    Raises:
        ConfigError: Some settings are invalid; the message names the line of each.
    """
    try:
        return Config.model_validate(dict(settings))
    except ValidationError as error:
        messages = [_message(one["loc"], one["msg"], one["type"], lines, settings) for one in error.errors()]
        raise ConfigError("\n".join([*messages, "Nothing was trained."])) from None


def _message(loc: Place, message: str, kind: str, lines: Lines, settings: Mapping[str, Any]) -> str:
    # pydantic adds the names of union members and validators to the path: they are not in the document.
    place = tuple(part for part in loc if isinstance(part, int) or part.isidentifier())
    text = message.removeprefix("Value error, ")
    if kind == "extra_forbidden":
        known = _sibling_fields(place)
        text = f"unknown setting {place[-1]!r}.\n{suggest(str(place[-1]), known)}"
    elif kind == "missing":
        text = f"{format_place(place)} is missing"
    elif "\n" not in text and isinstance(given := _at(settings, place), str | int | float):
        text = f"{text}, got {given!r}"
    return f"{lines.where(place)}: {text}"


def _sibling_fields(place: Place) -> Sequence[str]:
    """The valid settings at the place of an unknown one."""
    of: dict[str, type[BaseModel]] = {
        "models": Model, "data": Data, "arms": ArmConfig, "optimizer": Optimizer, "tuning": TuningConfig,
    }  # fmt: skip
    model = of.get(str(place[0]), Config) if len(place) > 1 else Config
    return list(model.model_fields)


def _at(settings: Any, place: Place) -> Any:
    for part in place:
        try:
            settings = settings[part]
        except (KeyError, IndexError, TypeError):
            return None
    return settings
