"""What is compared, as a person writes it: one YAML file, or flags."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

from comparison.spec import arms
from comparison.spec.call_syntax import read, schedule_of
from comparison.spec.errors import ConfigError, or_nearest
from comparison.spec.run_spec import Arm, Data, Model, Optimizer, cell_of
from comparison.spec.tuning import TuningConfig
from comparison.spec.yaml_lines import Lines, Place, spelled

NONE = Arm(name="none", kind="none", schedule="none")
RESERVED = ("none", "none, other seeds", "p = 0 (A/A)")
KINDS: tuple[Literal["regularizer", "recipe", "peer"], ...] = ("regularizer", "recipe", "peer")


def _named(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


def _listed(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else [value]


class ArmConfig(BaseModel):
    """One regularizer, recipe or peer; a text alone is a regularizer."""

    model_config = ConfigDict(extra="forbid")

    regularizer: str | None = None
    recipe: str | None = None
    peer: str | None = None
    name: Annotated[str, Field(min_length=1)] | None = None
    layers: Annotated[list[str], BeforeValidator(_listed), Field(min_length=1)] | None = None
    """Where, if not where all others are."""
    schedule: str | None = None
    equal: Literal["p", "fraction"] = "p"
    like: str | None = None
    """The arm whose tuned settings a peer takes; its namesake, or the first regularizer, if None."""

    @model_validator(mode="after")
    def _is_one(self) -> ArmConfig:
        given = [kind for kind in KINDS if getattr(self, kind)]
        if len(given) != 1:
            raise ValueError("an arm is one of `regularizer`, `recipe` and `peer`: write exactly one of them")
        if self.layers and given == ["recipe"]:
            raise ValueError("a recipe chooses its layers itself: leave `layers` out")
        if given != ["peer"] and (self.equal != "p" or self.like):
            raise ValueError("`equal` and `like` are for a peer")
        try:
            arms.split(given[0], self.text)
        except TypeError as error:
            raise ValueError(str(error)) from None
        return self

    @field_validator("name")
    @classmethod
    def _is_free(cls, name: str | None) -> str | None:
        if name in RESERVED:
            raise ValueError(f"the comparison itself has an arm called {name!r}: give another name")
        return name

    @field_validator("schedule")
    @classmethod
    def _is_known(cls, schedule: str | None) -> str | None:
        if schedule is not None:
            schedule_of(schedule, 100)
        return schedule

    @property
    def kind(self) -> Literal["regularizer", "recipe", "peer"]:
        """Which of the three it is."""
        return next(kind for kind in KINDS if getattr(self, kind))

    @property
    def text(self) -> str:
        """What was written."""
        return self.regularizer or self.recipe or self.peer or ""

    def title(self, count: int) -> str:
        """Its name among `count` arms of the same regularizer."""
        if self.name:
            return self.name
        bare = read(self.text).name
        if self.kind == "peer":
            return f"{bare}, equal {self.equal}"
        return bare if count == 1 else self.text


def _as_regularizer(value: Any) -> Any:
    return {"regularizer": value} if isinstance(value, str) else value


class Config(BaseModel):
    """A whole comparison."""

    model_config = ConfigDict(extra="forbid")

    title: str = "A comparison of regularizers"
    models: Annotated[list[Annotated[Model, BeforeValidator(_named)]], BeforeValidator(_listed), Field(min_length=1)]
    data: Annotated[list[Annotated[Data, BeforeValidator(_named)]], BeforeValidator(_listed), Field(min_length=1)]
    train_sizes: Annotated[list[PositiveInt], BeforeValidator(_listed)] | None = None
    """Each data set is taken with each of these; as `data` says if None."""
    layers: Annotated[list[str], BeforeValidator(_listed)] = []
    """The sites of all regularizers and peers."""
    arms: Annotated[list[Annotated[ArmConfig, BeforeValidator(_as_regularizer)]], Field(min_length=1)]
    schedule: str = "LinearSchedule"
    seeds: int = Field(default=8, ge=2, le=10_000)
    """Pairs of runs; fixed before the first one."""
    first_seed: int = Field(default=0, ge=0, lt=100_000)
    epochs: PositiveInt
    batch_size: PositiveInt = 20
    optimizer: Optimizer = Optimizer()
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    precision: Literal["float32", "bfloat16"] = "float32"
    compile: bool = False
    device: str = "cpu"
    tuning: TuningConfig | None = None
    timing: float = Field(default=12.0, ge=0)
    """Seconds for measuring what a step of each arm costs; 0 leaves it out."""
    max_steps: PositiveInt | None = None
    """Stop every run after so many optimizer steps, to see that everything works."""

    @field_validator("schedule")
    @classmethod
    def _is_known(cls, schedule: str) -> str:
        schedule_of(schedule, 100)
        return schedule

    @model_validator(mode="after")
    def _fits(self) -> Config:
        if not self.layers and any(arm.kind != "recipe" and not arm.layers for arm in self.arms):
            raise ValueError("`layers` is missing: where do the regularizers go? (as `layers: 'layer[34].*.bn2'`)")
        cells = Counter(cell_of(data, model) for data, model in self.cells())
        if twice := [name for name, count in cells.items() if count > 1]:
            raise ValueError(
                f"two parts of the comparison are called {twice[0]!r}: what differs in a model's or the data's other "
                "settings is compared in two files"
            )
        names = Counter(arm.name for arm in self.all_arms())
        if twice := [name for name, count in names.items() if count > 1 or name in RESERVED]:
            raise ValueError(
                f"two arms are called {twice[0]!r}, or it is a name of the comparison's own: give a `name`"
            )
        known = [arm.name for arm in self.all_arms() if arm.kind == "regularizer"]
        for arm in self.arms:
            if arm.like and arm.like not in known:
                raise ValueError(f"like: no regularizer here is called {arm.like!r}.\n{or_nearest(arm.like, known)}")
        return self

    def all_arms(self) -> list[Arm]:
        """As the runs take them, at the rates that are written; none is not among them."""
        counts = Counter((arm.kind, read(arm.text).name) for arm in self.arms)
        return [self._arm(arm, counts[arm.kind, read(arm.text).name]) for arm in self.arms]

    def like(self, name: str) -> str:
        """The regularizer whose settings the peer of this name takes; the name itself for all others."""
        arm, config = next(both for both in zip(self.all_arms(), self.arms, strict=True) if both[0].name == name)
        if arm.kind != "peer":
            return name
        ours = [other for other in self.all_arms() if other.kind == "regularizer"]
        whose = {"StochasticDepth": "DropPath"}.get(bare := read(arm.call).name.split(".")[1].removesuffix("2d"), bare)
        namesake = [other.name for other in ours if read(other.call).name == whose]
        return config.like or [*namesake, *(other.name for other in ours), name][0]

    def cells(self) -> Iterator[tuple[Data, Model]]:
        """Every data set and size with every model."""
        for data in self.data:
            sizes: Sequence[int | None] = self.train_sizes or [data.train_size]
            for size in sizes:
                for model in self.models:
                    yield data.model_copy(update={"train_size": size}), model

    def _arm(self, arm: ArmConfig, count: int) -> Arm:
        call, p = arms.split(arm.kind, arm.text)
        layers = () if arm.kind == "recipe" else tuple(arm.layers or self.layers)
        schedule = arm.schedule or self.schedule
        return Arm(
            name=arm.title(count), kind=arm.kind, call=call, p=p, layers=layers, schedule=schedule, equal=arm.equal
        )


def check(settings: Mapping[str, Any], lines: Lines) -> Config:
    """The comparison that settings describe.

    Raises:
        ConfigError: with the line of each thing that is wrong.
    """
    try:
        return Config.model_validate(dict(settings))
    except ValidationError as error:
        said = [_said(one["loc"], one["msg"], one["type"], lines, settings) for one in error.errors()]
        raise ConfigError("\n".join([*said, "Nothing was trained."])) from None


def _said(loc: Place, message: str, kind: str, lines: Lines, settings: Mapping[str, Any]) -> str:
    # pydantic puts the kinds of a union and of a validator among the keys: they are in no document.
    place = tuple(part for part in loc if isinstance(part, int) or part.isidentifier())
    text = message.removeprefix("Value error, ")
    if kind == "extra_forbidden":
        known = _fields_beside(place)
        text = f"there is no setting {place[-1]!r}.\n{or_nearest(str(place[-1]), known)}"
    elif kind == "missing":
        text = f"{spelled(place)} is missing"
    elif "\n" not in text and isinstance(given := _at(settings, place), str | int | float):
        text = f"{text}; it is {given!r}"
    return f"{lines.where(place)}: {text}"


def _fields_beside(place: Place) -> Sequence[str]:
    """The settings that there are where an unknown one was found."""
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
