"""The dataset's card: README.md with the configs that ``load_dataset`` reads, made from the data.

The same files give the same card, byte for byte, so that nothing is committed when nothing changed.
"""

import io
import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from importlib.resources import files as resources
from pathlib import Path
from statistics import fmean
from string import Template
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from babylon.core.artifacts import DIGEST_CHARS
from babylon.core.errors import reason_of
from babylon.core.home import Home
from babylon.core.settings import PublishSettings
from babylon.dataset.schema import OUTCOMES, PERFORMANCE, SCHEMAS, TRAJECTORIES
from babylon.dataset.table_file import SPLITS, UNREADABLE, split_of
from babylon.store.published import PublishedFile

log = logging.getLogger(__name__)
PLOT = "images/profit.png"
README = "README.md"
_PLACE = "./datasets"  # of the code in a card that was not published


def write_card(
    home: Home, files: Sequence[PublishedFile], publish: PublishSettings
) -> dict[str, Path | bytes]:
    """Write README.md and its picture to the local dataset → path in the repository and content."""
    plot = _plot(home, files)
    contents: dict[str, Path | bytes] = {README: render(files, publish, plot=bool(plot)).encode()}
    if plot:
        contents[PLOT] = plot
    for path, content in contents.items():
        target = home.datasets / path
        target.parent.mkdir(parents=True, exist_ok=True)
        assert isinstance(content, bytes)
        target.write_bytes(content)
    return contents


def render(files: Sequence[PublishedFile], publish: PublishSettings, *, plot: bool = False) -> str:
    """Return the text of README.md."""
    present = _present(files)
    splits = present.get(TRAJECTORIES) or list(SPLITS[:1])
    repository = publish.repository
    place = repository or _PLACE
    load = f'outcomes = load_dataset("{place}", "{OUTCOMES}", split="{splits[0]}")\n'
    template = resources("babylon.dataset").joinpath("card_template.md").read_text("utf-8")
    body = Template(template).substitute(
        title=(repository or "babylon/dataset").partition("/")[2],
        place=place,
        files=f"hf://datasets/{repository}" if repository else _PLACE,
        split=splits[0],
        # A game need not write any, and a split of them may be empty.
        outcomes=load if splits[0] in present.get(OUTCOMES, ()) else "",
        counts=_counts(files),
        plot=f"![Mean profit of the plays by window]({PLOT})" if plot else "",
        tables=_tables(files),
        splits=_splits(files),
        columns=_columns(),
    )
    return f"---\n{_front(present, publish)}---\n\n{body}"


def _present(files: Iterable[PublishedFile]) -> dict[str, list[str]]:
    """Return the splits of each table that have rows. ``load_dataset`` fails on any other."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for file in files:
        if file.rows:
            found[file.config].add(split_of(file.window_id))
    return {name: [s for s in SPLITS if s in found[name]] for name in SCHEMAS if found[name]}


def _front(present: dict[str, list[str]], publish: PublishSettings) -> str:
    lines = [
        *([f"license: {publish.license}"] if publish.license else []),
        f"pretty_name: {(publish.repository or 'babylon/dataset').partition('/')[2]}",
        "task_categories:\n- text-generation\n- reinforcement-learning",
        "tags:\n- agents\n- grpo\n- trajectories",
        "configs:" if present else "",
    ]
    for name, splits in present.items():
        lines.append(f"- config_name: {name}")
        lines += ["  default: true"] if name == TRAJECTORIES else []
        lines.append("  data_files:")
        for split in splits:  # a recipe's name may hold `-train-`, but no digest stands behind it
            path = f"{name}/*/*-{split}-{'?' * DIGEST_CHARS}.parquet"
            lines += [f"  - split: {split}", f"    path: {path}"]
    lines.append("dataset_info:" if present else "")
    for name in present:
        lines += [f"- config_name: {name}", "  features:"]
        for field in SCHEMAS[name]:
            lines += [f"  {line}" for line in _feature(field)]
    return "\n".join(filter(None, lines)) + "\n"


_DTYPES = {pa.string(): "string", pa.int32(): "int32", pa.int64(): "int64", pa.bool_(): "bool",
           pa.float32(): "float32", pa.float64(): "float64",
           pa.timestamp("us", "UTC"): "timestamp[us, tz=UTC]"}  # fmt: skip


def _feature(field: pa.Field) -> list[str]:
    """Return a column as the library ``datasets`` writes its features in YAML."""
    return [f"- name: {field.name}", *(f"  {line}" for line in _kind(field.type))]


def _kind(kind: pa.DataType) -> list[str]:
    if pa.types.is_list(kind):
        inner = kind.value_type
        if inner in _DTYPES:
            return [f"list: {_DTYPES[inner]}"]
        return ["list:", *_members(inner)]
    if pa.types.is_struct(kind):
        return ["struct:", *_members(kind)]
    return [f"dtype: {_DTYPES[kind]}"]


def _members(kind: pa.StructType) -> list[str]:
    return [line for index in range(kind.num_fields) for line in _feature(kind.field(index))]


def _counts(files: Sequence[PublishedFile]) -> str:
    rows = Counter[str]()
    for file in files:
        rows[file.config] += file.rows
    windows = {file.window_id for file in files}
    agents = {agent for file in files for agent in file.agents}
    months = sorted({window[:7] for window in windows})
    return (
        f"{rows[TRAJECTORIES]:,} trajectories of {len(agents):,} agents in {len(windows):,} windows"
        f" ({', '.join(months) or 'no month yet'}), {sum(f.bytes for f in files) / 1e6:,.1f} MB."
    )


def _tables(files: Sequence[PublishedFile]) -> str:
    about = {
        TRAJECTORIES: "one agent's play of a scenario (the default)",
        "scenarios": "a played scenario, complete enough to be played again",
        "outcomes": "a price or a question, and what came true",
        PERFORMANCE: "a policy in a window, or at its validation",
    }
    lines = ["| config | a row is | rows | MB |", "| --- | --- | --- | --- |"]
    for name in SCHEMAS:
        own = [file for file in files if file.config == name]
        size = sum(file.bytes for file in own) / 1e6
        lines.append(f"| `{name}` | {about[name]} | {sum(f.rows for f in own):,} | {size:,.1f} |")
    return "\n".join(lines)


def _splits(files: Sequence[PublishedFile]) -> str:
    windows = {file.window_id for file in files}
    rows = Counter[str]()
    for file in files:
        if file.config == TRAJECTORIES:
            rows[split_of(file.window_id)] += file.rows
    counts = Counter(split_of(window) for window in windows)
    lines = ["| split | windows | trajectories |", "| --- | --- | --- |"]
    return "\n".join(lines + [f"| {s} | {counts[s]:,} | {rows[s]:,} |" for s in SPLITS])


def _columns() -> str:
    parts = []
    for name, schema in SCHEMAS.items():
        lines = [f"### {name}", "", "| column | type | meaning |", "| --- | --- | --- |"]
        for field in schema:
            kind = str(field.type).replace("element: ", "").replace("|", "/")
            lines.append(f"| `{field.name}` | `{kind}` | {field.metadata[b'about'].decode()} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _plot(home: Home, files: Sequence[PublishedFile]) -> bytes | None:
    """Return a picture of the mean profit by window, None if fewer than two windows lie here."""
    means: dict[str, float] = {}
    for file in files:
        path = home.datasets / file.path
        if file.config == TRAJECTORIES and file.rows and path.exists():
            try:
                profit: list[Any] = pq.read_table(path, columns=["pnl_usd"])["pnl_usd"].to_pylist()
            except UNREADABLE as error:  # a picture must hold up neither a commit nor a take-down
                log.warning("%s is not in the card's picture: %s", path, reason_of(error))
                continue
            means[file.window_id] = fmean(profit)
    if len(means) < 2:
        return None
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "babylon"}):
        figure = Figure(figsize=(8, 2.6), layout="constrained")
        axes = figure.subplots()
        windows = sorted(means)
        axes.plot(range(len(windows)), [means[w] for w in windows], marker=".", linewidth=1)
        axes.axhline(0, color="grey", linewidth=0.6)
        axes.set(xlabel=f"windows, {windows[0]} to {windows[-1]}", ylabel="mean profit, US dollars")
        picture = io.BytesIO()
        # Without the library's version and the date, the same data gives the same bytes.
        figure.savefig(picture, format="png", dpi=110, metadata={"Software": None})
    return picture.getvalue()
