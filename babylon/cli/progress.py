"""Progress on stderr: one bar for the stages of a window, one for the windows of a backfill."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from babylon.cli.output import stderr

RETIRE = "retire"
STAGES = (
    "collect",
    "validate",
    "dropout",
    "score",
    "train",
    "validate checkpoint",
    "deploy",
    "publish",
    "track",
    "publish policy",
    RETIRE,
    "pages",
)
WINDOWS = "windows"  # the stage that ``backfill`` announces


@contextmanager
def stage_progress() -> Iterator[None]:
    """Draw the stages that run in the body. Draw nothing where stderr is not a terminal."""
    from babylon.tasks.progress import listener

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[stage]}", markup=False),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=stderr, disable=not stderr.is_terminal) as progress:
        bars: dict[str, TaskID] = {}

        def draw(window: str, stage: str, done: int, total: int) -> None:
            name = WINDOWS if stage == WINDOWS else window
            if stage in (WINDOWS, STAGES[0]):  # the window before has ended
                for other in set(bars) - {WINDOWS, name}:
                    progress.remove_task(bars.pop(other))
            if name not in bars and stage == RETIRE:  # of a run, and of no window
                return
            if name not in bars:
                bars[name] = progress.add_task(name, total=len(STAGES), stage="")
            if name == WINDOWS:
                progress.update(bars[name], completed=done, total=total, stage=f"{done}/{total}")
                return
            share = done / total if total else 0
            text = f"{stage} {done}/{total}" if total else stage
            # Approval and experiment are stages of few windows: the bar stands still.
            done_so_far = STAGES.index(stage) + share if stage in STAGES else None
            progress.update(bars[name], completed=done_so_far, stage=text)

        token = listener.set(draw)
        try:
            yield
        finally:
            listener.reset(token)
