"""The events of play as they come over HTTP. ``docs/play.md`` has an example of each.

An event may be sent again: it names what it is about, so the second time changes nothing.
"""

from typing import Annotated, Literal, Self

from pydantic import (
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    model_validator,
)

from babylon.core.llm_calls import Purpose
from babylon.recorder.trajectory import MAX_SCENARIO_ID

MAX_EVENTS = 200  # a batch holds one of few connections
MAX_ID = 200  # characters
MAX_STEPS = 1_000_000  # of a trajectory; its limit of bytes is reached long before
_PRINTABLE = r"^[^\x00-\x1f\x7f-\x9f]+$"


def integer(value: object) -> object:
    """Return 5 for 5.0, which JSON Schema calls an integer too."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Id = Annotated[str, Field(min_length=1, max_length=MAX_ID, pattern=_PRINTABLE)]
Name = Annotated[str, Field(min_length=1, max_length=100, pattern=_PRINTABLE)]
Number = Annotated[float, Field(allow_inf_nan=False)]
# The bounds stand first: after a BeforeValidator they are missing in the schema.
StepNumber = Annotated[int, Field(ge=0, lt=MAX_STEPS), BeforeValidator(integer)]
Object = dict[str, object]
Moment = Annotated[AwareDatetime | None, Field(description="Default: the time of arrival.")]


class PlayModel(BaseModel):
    """The strictness of all events: unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class StartEvent(PlayModel):
    """Begins a trajectory. It belongs to the key from then on, and to the window of its start."""

    type: Literal["start"]
    trajectory_id: Id
    agent_id: Id | None = None
    """Default: the agent that the key is bound to, else `key-` and the key's id."""
    scenario_id: Annotated[str, Field(max_length=MAX_SCENARIO_ID, pattern=_PRINTABLE)] | None = None
    """Trajectories of one scenario are compared with each other. Default: the window."""
    at: Moment = None


class ElsewhereCall(PlayModel):
    """A call to a model that was not made through the gateway."""

    messages: Annotated[list[Object], Field(min_length=1)]
    response: str
    model: str = "unknown"
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    purpose: Purpose = "evaluation"
    """Calls of another purpose than `evaluation` are the policy's own, and are trained on."""
    tool_calls: list[Object] = []


class StepAction(PlayModel):
    """An action of the agent, and its result."""

    action_type: Name = "RESPONSE"
    success: bool = True
    parameters: Object = {}
    result: object = None
    error: str | None = None
    reasoning: str | None = None
    correctness: Object | None = None


class StepEvent(PlayModel):
    """Adds a step to a trajectory. Steps may arrive in any order; the finish refuses a gap."""

    type: Literal["step"]
    trajectory_id: Id
    number: StepNumber
    state: Object = {}
    """The game's own. Only `agentPnL` (US dollars, lifetime) is read: in all steps or in none."""
    calls: Annotated[list[Id | ElsewhereCall], Field(max_length=1000)] = []
    """Ids of the gateway's answers in order; calls that named this step are added to them."""
    action: StepAction = StepAction()
    reward: Number | None = None
    """Feedback named `reward` for this step."""
    at: Moment = None


class FinishEvent(PlayModel):
    """Ends a trajectory and writes its row. Without steps, each of its calls becomes one."""

    type: Literal["finish"]
    trajectory_id: Id
    status: Name = "completed"
    final_balance: Number | None = None
    """US dollars."""
    final_pnl: Number | None = None
    """US dollars, lifetime."""
    knowledge: Object = {}
    """Ground truth, which only the judge sees."""
    reward: Number | None = None
    """Feedback named `reward` for the trajectory."""
    at: Moment = None


def _given(name: str) -> dict[str, JsonValue]:
    return {"required": [name], "properties": {name: {"not": {"type": "null"}}}}


class FeedbackEvent(PlayModel):
    """Feedback for a trajectory, one of its steps, or one of its calls, at any time."""

    model_config = ConfigDict(
        json_schema_extra={
            "allOf": [
                {"anyOf": [_given(name) for name in names]}
                for names in (("trajectory_id", "call_id"), ("value", "label", "comment"))
            ]
        }
    )

    type: Literal["feedback"]
    trajectory_id: Id | None = None
    """May be left out if `call_id` is given."""
    step: StepNumber | None = None
    call_id: Id | None = None
    name: Name = "reward"
    """The scorer `feedback` sums what is named `reward`; other names are metrics."""
    value: Number | None = None
    label: Annotated[str, Field(max_length=200)] | None = None
    comment: Annotated[str, Field(max_length=10_000)] | None = None

    @model_validator(mode="after")
    def _says_something_about_something(self) -> Self:
        if self.trajectory_id is None and self.call_id is None:
            raise ValueError("feedback about nothing: send trajectory_id or call_id")
        if self.value is None and self.label is None and self.comment is None:
            raise ValueError("empty feedback: send a value, a label or a comment")
        return self


class PriceEvent(PlayModel):
    """Ground truth: the price of a ticker."""

    type: Literal["price"]
    ticker: Annotated[str, Field(min_length=1, max_length=20, pattern=_PRINTABLE)]
    price_usd: Annotated[float, Field(gt=0, le=99_999_999.99)]
    at: Moment = None


class ProbabilityEvent(PlayModel):
    """Ground truth: a market's P(YES)."""

    type: Literal["probability"]
    market_id: Id
    question: Annotated[str, Field(max_length=10_000)]
    yes: Annotated[float, Field(ge=0, le=1)]
    at: Moment = None


class ResolutionEvent(PlayModel):
    """Ground truth: the answer of a question."""

    type: Literal["resolution"]
    market_id: Id
    question: Annotated[str, Field(max_length=10_000)]
    outcome: Literal["YES", "NO"]
    at: Moment = None


class OutcomesEvent(PlayModel):
    """Writes the market outcomes of a window that is over, from the ground truth sent so far."""

    type: Literal["outcomes"]
    window_id: Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}T\d{2}:\d{2}$")]


Truth = PriceEvent | ProbabilityEvent | ResolutionEvent | OutcomesEvent
Event = Annotated[
    StartEvent | StepEvent | FinishEvent | FeedbackEvent | Truth, Field(discriminator="type")
]


class EventResult(BaseModel):
    """The fate of one event. ``status`` is an HTTP status: 200, or why it was refused."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    status: int = 200
    code: str | None = None
    error: str | None = None
    trajectory_id: str | None = None
    repeated: bool = False
    """It was stored before."""
    window_id: str | None = None
    late: bool = False
    """The feedback came after the window was collected: a recipe reads it."""
    calls: int | None = None
    """Of a finish: recorded calls in the row."""
    unrecorded: int | None = None
    """Of a finish: calls in the row that a rule or a full disk kept out of the records."""


class PlayState(BaseModel):
    """A trajectory as far as it is stored."""

    trajectory_id: str
    agent_id: str | None
    scenario_id: str | None
    window_id: str | None
    started_at: AwareDatetime | None
    finished_at: AwareDatetime | None
    next_step: int
