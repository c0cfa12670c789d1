"""Progress of the stages, one bar a window, on stderr."""

from collections.abc import Iterator
from contextlib import contextmanager

from prefect.runtime import flow_run
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

        def hear(stage: str) -> None:
            window = flow_run.name or "window"
            if window not in bars:
                bars[window] = progress.add_task(window, total=len(STAGES), stage="")
            progress.update(bars[window], completed=STAGES.index(stage), stage=stage)

        token = listener.set(hear)
        try:
            yield
        finally:
            listener.reset(token)
