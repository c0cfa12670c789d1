"""One trajectory's feedback must not cost the others of its window their scores."""

import pytest
from msgspec.structs import replace

from babylon.core.types import Rejection
from babylon.quality.decode import Reason
from babylon.scoring import feedback
from babylon.scoring.scorer import Score, ScoringContext, score
from babylon.store.feedback import Feedback
from tests.unit.scoring.rewards.test_trading import trajectory


@pytest.mark.parametrize("worst", [(1e39,), (-1e308, 1e308), (1e308, 1e308)])
async def test_a_reward_without_measure_rejects_its_own_trajectory_alone(
    worst: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [
        Feedback(trajectory_id="t7", value=0.5),
        Feedback(trajectory_id="t7", name="latency", value=1e308),
        Feedback(trajectory_id="t7", name="latency", value=1e308, step=0),
        *(Feedback(trajectory_id="t8", value=v, step=n) for n, v in enumerate(worst)),
    ]

    async def known(*_: object) -> list[Feedback]:
        return given

    monkeypatch.setattr(feedback, "known_feedback", known)
    context = ScoringContext(window_id="w", settings=None, store=None, artifact=None)  # type: ignore[arg-type]
    plays = [trajectory(), replace(trajectory(), trajectory_id="t8")]
    sound, refused = await score("feedback", feedback.feedback, plays, context)
    assert sound == Score(0.5, {}, {})
    assert isinstance(refused, Rejection) and refused.reason is Reason.NON_FINITE_NUMBER
    assert "e+" in refused.detail and "1e+12" in refused.detail
