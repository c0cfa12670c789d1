"""Progress of the stages, one bar a window, on stderr."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from babylon.cli.output import stderr
from tasks.stage import listener

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
    "retire",
)


@contextmanager
def stage_progress() -> Iterator[None]:
    """Draw the stages that run inside the block; nothing where stderr is not a terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[stage]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=stderr, disable=not stderr.is_terminal) as progress:
        bars: dict[str, TaskID] = {}

        def hear(window: str, stage: str, done: int, total: int) -> None:
            if window not in bars:
                bars[window] = progress.add_task(window, total=len(STAGES), stage="")
            share = done / total if total else 0
            text = f"{stage} {done}/{total}" if total else stage
            progress.update(bars[window], completed=STAGES.index(stage) + share, stage=text)

        token = listener.set(hear)
        try:
            yield
        finally:
            listener.reset(token)
