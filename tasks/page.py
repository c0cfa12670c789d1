"""Pages in Prefect's UI: what a stage found out about a window."""

from prefect.artifacts import acreate_markdown_artifact


async def leave_page(name: str, window_id: str, markdown: str, description: str) -> None:
    """Create the artifact ``update-2025-11-14t0900``. A later run of the window adds a version.

    Prefect allows neither ``:`` nor the ``+`` of a recipe in a key.
    """
    await acreate_markdown_artifact(
        markdown,
        key=f"{name}-{window_id.replace(':', '').replace('+', '-').lower()}",
        description=f"{window_id}: {description}",
    )
