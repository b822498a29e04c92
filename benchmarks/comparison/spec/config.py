"""The configuration of a comparison, from a YAML file."""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pydantic
import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PositiveFloat

from comparison.spec import arms
from comparison.spec.run_spec import Arm, ConfigError, Data, Model, Training, cell_of, suggest
from comparison.spec.tuning import TuningConfig
from hookdrop import recipes

NONE = Arm(name="none", kind="none", schedule="none")
RESERVED = ("none", "none (other seeds)", "p = 0 (A/A)")
Kind = Literal["regularizer", "recipe", "peer", "probe"]
KINDS: tuple[Kind, ...] = ("regularizer", "recipe", "peer", "probe")
CONFIGS = Path(__file__).parents[2] / "configs"


def _as_arm(value: Any) -> Any:
    """Find out the kind of a plain text from its name."""
    if not isinstance(value, str):
        return value
    name = value.partition("(")[0].strip()
    return {"peer" if name in arms.PEERS else "recipe" if name in recipes.RECIPE_NAMES else "regularizer": value}


def _known_schedule(schedule: str | None) -> str | None:
    if schedule is not None:
        arms.read_schedule(schedule)
    return schedule


Listed = BeforeValidator(lambda value: value if isinstance(value, list | tuple) else [value])
Named = BeforeValidator(lambda value: {"name": value} if isinstance(value, str) else value)
Schedule = BeforeValidator(_known_schedule)


class ArmConfig(BaseModel):
    """One regularizer, recipe, peer or linear probe; a plain string is one of the first three."""

    model_config = ConfigDict(extra="forbid")

    regularizer: str | None = None
    recipe: str | None = None
    peer: str | None = None
    probe: PositiveFloat | None = None
    """The learning rate of a linear probe: only the classifier is trained. A reference, not a regularizer."""
    name: Annotated[str, Field(min_length=1)] | None = None
    layers: Annotated[list[str], Listed, Field(min_length=1)] | None = None  # instead of those of the comparison
    schedule: Annotated[str | None, Schedule] = None
    equal: Literal["p", "fraction"] = "p"
    like: str | None = None
    """Whose tuned settings a peer uses. None: those of the regularizer of the same name, or of the first one."""

    @pydantic.model_validator(mode="after")
    def _is_one(self) -> Self:
        if len([kind for kind in KINDS if getattr(self, kind)]) != 1:
            raise ValueError("an arm has exactly one of `regularizer`, `recipe`, `peer` and `probe`")
        try:
            if self.kind != "probe":
                arms.read(self.kind, self.text)
        except TypeError as error:
            raise ValueError(str(error)) from None
        hooked, peer = self.takes_layers, self.kind == "peer"
        valid = {"layers": hooked, "schedule": self.takes_schedule, "equal": peer and hooked, "like": peer}
        if wrong := [name for name, holds in valid.items() if name in self.model_fields_set and not holds]:
            raise ValueError(f"{self.text} takes no `{wrong[0]}`: remove it")
        return self

    @pydantic.field_validator("name")
    @classmethod
    def _is_free(cls, name: str | None) -> str | None:
        if name in RESERVED:
            raise ValueError(f"the name {name!r} is reserved: choose another `name`")
        if "," in (name or ""):
            raise ValueError(f"the name {name!r} has a comma, which separates names in the report: use parentheses")
        return name

    @property
    def kind(self) -> Kind:
        return next(kind for kind in KINDS if getattr(self, kind))

    @property
    def text(self) -> str:
        """The call as written in the configuration."""
        return self.regularizer or self.recipe or self.peer or "linear probe"

    @property
    def takes_layers(self) -> bool:
        """Whether it has hooks on the layers that the configuration names."""
        is_module = self.kind == "peer" and not isinstance(arms.read("peer", self.text), arms.ModelArgument)
        return self.kind == "regularizer" or is_module

    @property
    def takes_schedule(self) -> bool:
        """Whether it has a rate that can change during the training."""
        return self.takes_layers or self.kind == "recipe"

    @property
    def bare_name(self) -> str:
        return self.text.partition("(")[0].strip()

    def title(self, alone: bool) -> str:
        """The arm's name; with its settings, if it is not alone with its regularizer."""
        peer = f"{self.bare_name} (equal {self.equal})" if self.kind == "peer" and self.takes_layers else ""
        return self.name or peer or (self.bare_name if alone else self.text.replace(",", ""))


class Config(Training):
    title: str = "A comparison of regularizers"
    models: Annotated[list[Annotated[Model, Named]], Listed, Field(min_length=1)]
    data: Annotated[list[Annotated[Data, Named]], Listed, Field(min_length=1)]
    layers: Annotated[list[str], Listed] = Field(default=[])  # the sites of all regularizers and peers
    arms: Annotated[list[Annotated[ArmConfig, BeforeValidator(_as_arm)]], Field(min_length=1)]
    schedule: Annotated[str, Schedule] = "LinearSchedule"
    seeds: int = Field(default=8, ge=2, le=10_000)  # the number of pairs, fixed before the first run
    first_seed: int = Field(default=0, ge=0, lt=100_000)
    tuning: TuningConfig | None = None
    timing: float = Field(default=12.0, ge=0)  # seconds for measuring the cost of a training step; 0 skips it

    @pydantic.model_validator(mode="after")
    def _fits(self) -> Self:
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
        return [self._arm(arm, counts[arm.kind, arm.bare_name] == 1) for arm in self.arms]

    def _arm(self, arm: ArmConfig, alone: bool) -> Arm:
        if arm.kind == "probe":
            return Arm(name=arm.title(alone), kind="probe", schedule="none", lr=arm.probe)
        schedule = (arm.schedule or self.schedule) if arm.takes_schedule else "none"
        layers = tuple(arm.layers or self.layers) if arm.takes_layers else ()
        settings: Any = {"layers": layers, "schedule": schedule, "equal": arm.equal}
        p = arms.rate_of(arms.read(arm.kind, arm.text))
        return Arm(name=arm.title(alone), kind=arm.kind, call=arm.text, p=p, **settings)

    def like(self, name: str) -> str:
        """The regularizer whose tuned settings the arm uses: its own name, except for a peer."""
        arm, config = next(both for both in zip(self.all_arms(), self.arms, strict=True) if both[0].name == name)
        if arm.kind != "peer":
            return name
        ours = [other for other in self.all_arms() if other.kind == "regularizer"]
        bare = config.bare_name.split(".")[1].removesuffix("2d")
        equivalent = {"StochasticDepth": "DropPath"}.get(bare, bare)
        namesake = [other.name for other in ours if other.call.startswith(f"{equivalent}(")]
        return config.like or [*namesake, *(other.name for other in ours), name][0]

    def cells(self) -> Iterator[tuple[Data, Model]]:
        return itertools.product(self.data, self.models)


def read(path: Path) -> tuple[Config, str]:
    try:
        settings = yaml.safe_load(text := path.read_text())
    except OSError as error:
        known = [str(one) for folder in (path.parent, CONFIGS) for one in sorted(folder.glob("*.y*ml"))]
        raise ConfigError(
            f"--config: cannot read {path}: {error.strerror}.\n{suggest(str(path), known)}\nNothing was trained."
        ) from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path}: invalid YAML: {error}\nNothing was trained.") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: expected a mapping of settings, such as `seeds: 8`.\nNothing was trained.")
    return validate(settings, str(path)), text


def validate(settings: Mapping[str, Any], source: str) -> Config:
    """Validate the settings of a comparison; `source` names their file in messages."""
    try:
        return Config.model_validate(dict(settings))
    except pydantic.ValidationError as error:
        messages = [f"{source}: {_message(one)}" for one in error.errors()]
        raise ConfigError("\n".join([*messages, "Nothing was trained."])) from None


def _message(found: Any) -> str:
    """Format an error with its place, such as `arms[1].p: `, and the value."""
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in found["loc"]).removeprefix(".")
    value = f", got {found['input']!r}" if isinstance(found["input"], str | int | float) else ""
    return f"{place}{': ' if place else ''}{found['msg'].removeprefix('Value error, ')}{value}"
