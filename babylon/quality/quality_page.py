"""The result of validation as a page: health, counts by reason, and sample trajectories of each."""

from collections.abc import Sequence

from babylon.store.rejections import RejectedFor
from babylon.store.window_health import WindowHealth


def quality_markdown(
    window_id: str,
    accepted: int,
    reasons: Sequence[RejectedFor],
    health: WindowHealth | None = None,
) -> str:
    """Return the page in Markdown. Ids and details are escaped, so they add no column or line."""
    rejected = sum(reason.count for reason in reasons)
    lines = [f"# {window_id}: {accepted} trajectories accepted, {rejected} rejected"]
    if health is not None:
        if health.figures.get("outcomes") == 0:
            lines += ["", "Judged without market outcomes: none were written in time."]
        lines += ["", *(f"**Alarm:** {alarm.reason}" for alarm in health.alarms)]
        lines += ["", f"| {' | '.join(health.figures)} |", "|---:" * len(health.figures) + "|"]
        lines += [f"| {' | '.join(f'{value:.4g}' for value in health.figures.values())} |"]
    if reasons:
        lines += ["", "| reason | rejected | for example | detail |", "|---|---:|---|---|"]
    for reason in reasons:
        head = f"{reason.reason} | {reason.count}"
        for sample in reason.samples:
            lines.append(f"| {head} | {_cell(sample.trajectory_id)} | {_cell(sample.detail)} |")
            head = " | "
    return "\n".join([*lines, ""])


def reason_lines(reasons: Sequence[RejectedFor]) -> list[str]:
    """Return the page for a terminal: a line for each reason, then a line for each sample."""
    lines = []
    for reason in reasons:
        lines.append(f"{reason.count} {reason.reason}")
        lines += [f"    {_line(s.trajectory_id)}: {_line(s.detail)}" for s in reason.samples]
    return lines


def _line(text: str) -> str:
    return "".join(c if c.isprintable() else "\ufffd" for c in " ".join(text.split()))


def _cell(text: str) -> str:
    plain = _line(text).replace("`", "'").replace("|", "¦")
    return f"`{plain}`" if plain else ""
