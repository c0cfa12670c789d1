"""The columns of the four tables: the only ones that are written, with their types and meanings.

These schemas are the allow-list. A column, or a field inside one, that is not named here does not
leave this machine. A later schema only adds columns that may be null, and raises
``SCHEMA_VERSION``; a column never changes its type or its meaning, so a reader of an older version
goes on. ``tests/unit/dataset/test_schema.py`` compares with the frozen first version.
"""

import pyarrow as pa

SCHEMA_VERSION = 2  # since 2: trajectories.players
TRAJECTORIES, SCENARIOS, OUTCOMES, PERFORMANCE = (
    "trajectories",
    "scenarios",
    "outcomes",
    "model_performance",
)
TIME = pa.timestamp("us", "UTC")
TEXTS = pa.list_(pa.string())

TOOL_CALL = pa.struct(
    [
        ("id", pa.string()),
        ("type", pa.string()),
        ("function", pa.struct([("name", pa.string()), ("arguments", pa.string())])),
    ]
)
MESSAGE = pa.struct(
    [
        ("role", pa.string()),
        ("content", pa.string()),
        ("tool_calls", pa.list_(TOOL_CALL)),
        ("tool_call_id", pa.string()),
        ("reasoning", pa.string()),
        ("raw_json", pa.string()),
    ]
)
CALL = pa.struct(
    [
        ("step", pa.int32()),
        ("prompt", pa.list_(MESSAGE)),
        ("completion", pa.list_(MESSAGE)),
        ("tools_json", pa.string()),
        ("temperature", pa.float64()),
        ("top_p", pa.float64()),
        ("policy_version", pa.int64()),
        ("untrainable", pa.string()),
        ("prompt_token_ids", pa.list_(pa.int32())),
        ("completion_token_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
    ]
)
STEP = pa.struct(
    [
        ("step", pa.int32()),
        ("at", TIME),
        ("balance_usd", pa.float64()),
        ("action_type", pa.string()),
        ("parameters_json", pa.string()),
        ("success", pa.bool_()),
        ("result_json", pa.string()),
        ("error", pa.string()),
        ("reward", pa.float64()),
    ]
)
OUTCOME_REWARD = pa.struct(
    [("step", pa.int32()), ("reward", pa.float64()), ("correct", pa.bool_())]
)


def _table(*columns: tuple[str, pa.DataType, str]) -> pa.Schema:
    named = [
        *columns,
        ("month", pa.string(), "Month of the window, YYYY-MM."),
        ("split", pa.string(), "train, validation or test; a window is in one split only."),
        ("schema_version", pa.int32(), "Version of this schema."),
    ]
    return pa.schema([pa.field(name, kind, metadata={"about": text}) for name, kind, text in named])


_WINDOW = ("window_id", pa.string(), "Start of the window in UTC, with its recipe if it has one.")
SCHEMAS: dict[str, pa.Schema] = {
    TRAJECTORIES: _table(
        ("trajectory_id", pa.string(), "Id of the play."),
        ("agent_id", pa.string(), "Id of the agent."),
        _WINDOW,
        ("scenario_id", pa.string(), "Window and scenario are the GRPO group."),
        ("start", TIME, "First step, UTC."),
        ("end", TIME, "Last step, UTC."),
        ("policy_versions", pa.list_(pa.int64()), "Policies that answered; empty if unknown."),
        ("pnl_usd", pa.float64(), "Profit inside the window in US dollars."),
        ("wins", pa.int64(), "Trades that closed or resolved in profit."),
        ("trades", pa.int64(), "Trades that were decided."),
        ("actions", pa.int64(), "Successful actions other than HOLD."),
        ("score", pa.float64(), "The scorer's number; comparable within a group only."),
        ("scorer", pa.string(), "Scorer: heuristic, ruler, preference, ..."),
        ("judge_model", pa.string(), "Models that judged; null without a judge."),
        ("rubric", pa.string(), "The judge's rubric, name@digest."),
        ("score_low", pa.float64(), "Lower end of the score's interval, if it has one."),
        ("score_high", pa.float64(), "Upper end of the score's interval."),
        ("score_components_json", pa.string(), "Parts of the score, by name."),
        ("score_reasons", TEXTS, "Ground truth: the judge's reasons, which may tell outcomes."),
        ("steps", pa.list_(STEP), "Actions, results and rewards by step; rewards as the game gave"),
        ("calls", pa.list_(CALL), "Chat requests in order: prompt, completion, tokens, policy."),
        ("token_ids_exact", pa.bool_(), "True if every call has its sampled ids and logprobs."),
        ("players", TEXTS, "Agents that shared its market, whose posts its prompts may show."),
        ("scrubbed", TEXTS, "Rules that replaced something in this row; it has no token ids then."),
        ("outcome_rewards", pa.list_(OUTCOME_REWARD), "Ground truth: rewards from the outcomes."),
        ("ground_truth_json", pa.string(), "Ground truth: what the game knew and agents did not."),
    ),
    SCENARIOS: _table(
        ("scenario_id", pa.string(), "Id of the scenario."),
        _WINDOW,
        ("ticks", pa.int64(), "Ticks of one minute."),
        ("markets", pa.int64(), "Prediction markets."),
        ("perps", pa.int64(), "Perpetuals."),
        ("prices", pa.string(), "Source of prices: exact, seen or interpolated."),
        ("missing", TEXTS, "What was not recorded."),
        ("players", TEXTS, "Agents that shared one market; empty if each had a copy."),
        ("questions", TEXTS, "Questions of the prediction markets."),
        ("trajectory_ids", TEXTS, "Plays of the scenario."),
        ("agents", pa.int64(), "Agents that played it."),
        ("mean_pnl_usd", pa.float64(), "Mean profit of the plays."),
        ("best_pnl_usd", pa.float64(), "Best profit of the plays."),
        ("knowledge_json", pa.string(), "Ground truth: outcomes, prices, the crowd's orders."),
    ),
    OUTCOMES: _table(
        _WINDOW,
        ("ticker", pa.string(), "Ticker of a price; null for a question."),
        ("start_price_usd", pa.float64(), "Ground truth: price at the window's start."),
        ("end_price_usd", pa.float64(), "Ground truth: price at the window's end."),
        ("change_percent", pa.float64(), "Ground truth: change in percent."),
        ("market_id", pa.string(), "Prediction market; null for a ticker."),
        ("question", pa.string(), "Question of the market."),
        ("outcome", pa.string(), "Ground truth: YES, NO, or null while it is open."),
        ("final_probability", pa.float64(), "Ground truth: last P(YES)."),
    ),
    PERFORMANCE: _table(
        _WINDOW,
        ("policy_version", pa.int64(), "Measured policy."),
        ("parent_version", pa.int64(), "Policy that it was trained from."),
        ("kind", pa.string(), "base, full or lora."),
        ("base_model", pa.string(), "Model that the line began with."),
        ("measured", pa.string(), "play: in the window; validation: at the gate."),
        ("trajectories", pa.int64(), "Plays measured."),
        ("scenarios", pa.int64(), "Scenarios measured."),
        ("pnl_usd", pa.float64(), "Mean profit a play."),
        ("win_rate", pa.float64(), "Mean of the plays' shares of decided trades that won."),
        ("malformed", pa.float64(), "Share of replies that were no decision."),
        ("promoted", pa.bool_(), "Did the gate let the policy pass?"),
        ("reason", pa.string(), "The gate's reason."),
    ),
}
