"""Text of play in what a stage found: not in a log, and without effect on a page."""

from datetime import UTC, datetime

from markdown_it import MarkdownIt

from babylon.core.types import Claim, Metrics, Trained
from babylon.core.windows import WindowState
from babylon.ops.pages.stage_lines import stage_lines
from babylon.ops.pages.window_facts import WindowFacts
from babylon.ops.pages.window_page import window_markdown
from babylon.store.judgments import Spent
from babylon.store.policies import Policy
from babylon.store.windows import WindowRow

NOW = datetime(2025, 11, 14, tzinfo=UTC)
PROMPT = "![x](https://evil.example/p.png)"
METRICS: Metrics = {
    "lost_tokens": 50,
    "unique_tokens": 100,
    "sharing_advice": f"a segment of 9 tokens ({PROMPT!r} in one call) differs between calls",
}


def test_the_log_of_an_update_quotes_no_prompt() -> None:
    found = Trained(
        claim=Claim(window_id="w", epoch=1, owner="o"),
        batch_id="b",
        policy_version=2,
        parent_version=1,
        checkpoint_uri="c",
        metrics=METRICS,
    )
    lines = "\n".join(stage_lines(found))
    assert "50% of the forwarded tokens" in lines and PROMPT not in lines


def test_a_prompt_in_a_warning_and_a_reason_are_text_on_the_page() -> None:
    row = WindowRow(
        window_id="2025-11-14T07:00",
        minutes=60,
        state=WindowState.FAILED,
        epoch=1,
        owner=None,
        lease_until=None,
        leased=False,
        attempts=1,
        retry_at=None,
        batch_id="b",
        reason=f"agent {PROMPT} is odd",
        metrics={},
        scored=None,
        updated_at=NOW,
    )
    policy = Policy(
        policy_version=2,
        parent_version=1,
        kind="full",
        uri="u",
        base_model="tiny",
        window_id=row.window_id,
        batch_id="b",
        metrics=METRICS,
        verdict=None,
        created_at=NOW,
        removed_at=None,
    )
    page = window_markdown(WindowFacts(row=row, spent=Spent(), policy=policy))
    assert page.count(PROMPT) == 2
    assert "<img" not in MarkdownIt("gfm-like", {"linkify": False}).render(page)
