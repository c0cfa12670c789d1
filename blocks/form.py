"""The settings of one run, as Prefect's UI asks for them: a form that is checked before it runs.

A form field is generated from its setting, so that limits, choices and texts are the setting's own.
The list below is short, because the UI shows every field of it. All other settings come from the
environment of the worker, and a program that calls a flow may override any setting.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema
from pydantic.fields import FieldInfo

from babylon.core.settings import Settings, fields, variable_of
from babylon.core.settings_group import Group
from babylon.core.windows import RECIPE_PATTERN

Schema = dict[str, Any]
Overrides = dict[str, Any]  # settings by group: ``{"windows": {"min_agents": 5}}``
_START = r"\d{4}-\d\d-\d\dT\d\d:\d\d"
BY_HAND: Mapping[str, Sequence[str]] = {
    "windows": ("minutes", "min_agents", "lookback_hours", "recipe", "include_late"),
    "quality": ("min_actions", "reward_threshold", "target_trajectories", "max_dropout"),
    "scoring": ("scorer",),
    "training": (
        "trainer",
        "tuning",
        "loss",
        "advantage",
        "learning_rate",
        "iterations",
        "objective",
    ),
    "population": ("size", "evolve_every"),
    "evaluation": ("scenarios", "rules"),
    "deployment": ("strategy",),
}
"""Settings that a person sets for one window, by group."""
PUBLISHED = {"publish": ("repository", "private", "license", "agents")}
"""Settings that a person sets for one run of the daily publication."""


def form(asked: Mapping[str, Sequence[str]]) -> Schema:
    """Return the JSON schema of a form. An empty field leaves the setting as the worker has it."""
    known = {(group, name): field for group, name, field in fields()}
    groups = {
        group: {
            "type": "object",
            "title": group,
            "additionalProperties": False,
            "properties": {name: _property(group, name, known[group, name]) for name in names},
        }
        for group, names in asked.items()
    }
    return {"type": "object", "additionalProperties": False, "properties": groups}


def _property(group: str, name: str, field: FieldInfo) -> Schema:
    """The setting without its default, which the form would send as if a person had chosen it."""
    owner = Settings.model_fields[group].annotation
    assert isinstance(owner, type) and issubclass(owner, Group)
    found: Schema = owner.model_json_schema()["properties"][name]
    found = {**found, **found.get("anyOf", [{}])[0]}  # the other kind is null
    text = " ".join((field.description or "").split())
    kept = {key: found[key] for key in found.keys() - {"default", "anyOf", "variable"}}
    return {**kept, "title": name, "description": f"{text} ({variable_of(field)})"}


WindowForm = Annotated[Overrides | None, WithJsonSchema(form(BY_HAND))]
PublishForm = Annotated[Overrides | None, WithJsonSchema(form(PUBLISHED))]
WindowName = Annotated[str, Field(pattern=rf"^{_START}(\+{RECIPE_PATTERN})?$")]
DayOrWindow = Annotated[str, Field(pattern=rf"^{_START}$|^\d{{4}}-\d\d-\d\d$")]
BlockName = Annotated[str, Field(pattern=r"^babylon-[a-z-]+/.+$")]
AtLeastOne = Annotated[int, Field(ge=1)]
