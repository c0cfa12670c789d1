"""Exports of a dataset's rows, as far as they need no other library."""

from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from babylon.core.errors import ConfigError
from babylon.core.home import Home
from babylon.core.trajectories import Call
from babylon.dataset.export import EXPORTS, export_dataset
from babylon.dataset.export_names import ExportTarget
from babylon.dataset.messages import call_column
from babylon.dataset.schema import TRAJECTORIES
from babylon.dataset.table_file import TableName, write_table
from babylon.formats.atif import read_atif
from babylon.formats.trace import Document
from tests.unit.dataset.test_scrub import row

TOOL = {"type": "function", "function": {"name": "buy", "parameters": {}}}
CALL = {"id": "1", "type": "function", "function": {"name": "buy", "arguments": "{}"}}
WINDOW = "2025-11-14T09:00"


def rows() -> list[dict[str, Any]]:
    """Two plays of one group: the same prompt, other replies and scores; one call was forced."""
    made = []
    for name, reply, score in (("a", "HOLD", 0.25), ("b", "", 0.75)):
        call = Call(
            step=0, messages=({"role": "user", "content": "what now?"},), response=reply,
            policy_version=1, prompt_token_ids=(5, 6), completion_token_ids=(7, 8),
            logprobs=(-0.5, -0.25), tools=(TOOL,), tool_calls=() if reply else (CALL,),
            reasoning=None if reply else "because",
        )  # fmt: skip
        forced = Call(step=1, messages=({"role": "user", "content": "x"},), response="y",
                      untrainable="prefilled")  # fmt: skip
        step = {
            "step": 0, "at": None, "action_type": "HOLD", "success": True,
            "parameters_json": '{"n":1}', "result_json": None, "error": "no funds", "reward": 0.5,
        }  # fmt: skip
        made.append(
            row(
                "", trajectory_id=name, window_id=WINDOW, scenario_id="s", score=score, pnl_usd=1.0,
                start=None, end=None, steps=[step], ground_truth_json='{"outcome":"YES"}',
                calls=[call_column(call), call_column(forced)],
            )
        )  # fmt: skip
    return made


def lines(target: ExportTarget) -> tuple[list[dict[str, Any]], Counter[str]]:
    left: Counter[str] = Counter()
    return list(EXPORTS[target](iter(rows()), left)), left


def test_no_export_holds_ground_truth_and_forced_replies_are_counted() -> None:
    for target in ExportTarget:
        told, left = lines(target)
        assert told and "YES" not in str(told), target
        if target != ExportTarget.ATIF:
            assert left["not sampled from the policy alone"] == 2


def test_trl_gets_prompts_completions_tools_and_scores() -> None:
    first, second = lines(ExportTarget.TRL)[0]
    assert first["prompt"] == [{"role": "user", "content": "what now?"}]
    assert first["completion"] == [{"role": "assistant", "content": "HOLD"}]
    assert second["completion"][0]["tool_calls"] == [CALL] and second["tools"] == [TOOL]
    assert (first["reward"], first["group"]) == (0.25, f"{WINDOW}/s")


def test_the_better_reply_to_one_prompt_is_chosen() -> None:
    (pair,), _ = lines(ExportTarget.TRL_PREFERENCE)
    assert pair["chosen"][0]["tool_calls"] == [CALL] and pair["margin"] == 0.5
    assert pair["rejected"] == [{"role": "assistant", "content": "HOLD"}]


def test_tinker_gets_shifted_tokens_and_advantages_on_completions_only() -> None:
    (datum, other), _ = lines(ExportTarget.TINKER)
    assert datum["model_input"] == [5, 6, 7]
    inputs = datum["loss_fn_inputs"]
    assert inputs["target_tokens"] == [6, 7, 8]
    assert inputs["logprobs"] == [0.0, -0.5, -0.25]
    assert inputs["advantages"] == [0.0, -0.25, -0.25]
    assert other["loss_fn_inputs"]["advantages"] == [0.0, 0.25, 0.25]


def test_rows_without_token_ids_are_left_out_of_tinker() -> None:
    given = rows()
    for one in given:
        one["calls"] = [{**call, "completion_token_ids": None} for call in one["calls"]]
    left: Counter[str] = Counter()
    assert not list(EXPORTS[ExportTarget.TINKER](given, left))
    assert left["no exact token ids"] == 2


def test_openai_s_format_has_no_reasoning() -> None:
    told, _ = lines(ExportTarget.OPENAI)
    assert "because" not in str(told) and told[1]["messages"][-1]["tool_calls"] == [CALL]


def test_atif_comes_back_with_its_tokens() -> None:
    first, _ = lines(ExportTarget.ATIF)[0]
    (trace,) = read_atif(Document("here", first))
    assert (trace.trajectory_id, trace.final_pnl) == ("a", 1.0)
    assert trace.steps[0].tokens[0].logprobs == (-0.5, -0.25)
    assert trace.steps[0].action["parameters"] == {"n": 1}
    assert trace.steps[0].action["error"] == "no funds"
    assert trace.steps[1].tokens[0].untrainable == "prefilled"


def test_a_file_that_holds_no_trajectories_is_named(tmp_path: Path) -> None:
    text, other = tmp_path / "x.jsonl", tmp_path / "x.parquet"
    text.write_text('{"a": 1}')
    pq.write_table(pa.table({"window_id": [WINDOW]}), other)
    write_table(home := Home(tmp_path), TableName(TRAJECTORIES, WINDOW), [rows()])
    (torn,) = (home.datasets / TRAJECTORIES).rglob("*.parquet")
    torn.write_bytes(torn.read_bytes().replace(b"\x28\xb5\x2f\xfd", bytes(4)))  # zstd's marks
    for file, message in (
        (text, "no Parquet file"),
        (torn, "damaged.*remove it"),
        (other, "no file of the table trajectories"),
    ):
        with pytest.raises(ConfigError, match=f"{file} is .*{message}"):
            export_dataset(file, ExportTarget.TRL, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()
