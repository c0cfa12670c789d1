"""Text of play in what a stage found has no effect on a page."""

from datetime import UTC, datetime

from markdown_it import MarkdownIt

from babylon.core.windows import WindowState
from babylon.ops.pages.window_facts import WindowFacts
from babylon.ops.pages.window_page import window_markdown
from babylon.store.policies import Policy
from babylon.store.windows import WindowRow

NOW = datetime(2025, 11, 14, tzinfo=UTC)
PROMPT = "![x](https://evil.example/p.png)"


def test_a_prompt_in_a_reason_is_text_on_the_page() -> None:
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
        metrics={},
        verdict=None,
        created_at=NOW,
        removed_at=None,
    )
    page = window_markdown(WindowFacts(row=row, policy=policy))
    assert page.count(PROMPT) == 1
    assert "<img" not in MarkdownIt("gfm-like", {"linkify": False}).render(page)
