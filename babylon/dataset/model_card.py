"""The model card of a published policy: how to load it, its verdict, its lineage, its metrics.

The same policy gives the same card, byte for byte, so that nothing is committed twice.
"""

from collections.abc import Mapping, Sequence
from importlib.resources import files as resources
from pathlib import PurePath
from string import Template

from babylon.core.settings import PublishSettings
from babylon.store.learning import LinePolicy
from babylon.store.policies import Policy

_GATE = (
    ("scenarios", "scenarios played"),
    ("pnl_before", "mean profit of the policy before"),
    ("pnl_after", "mean profit of this policy"),
    ("win_rate_before", "share of trades won before"),
    ("win_rate_after", "share of trades won by this policy"),
    ("malformed_after", "share of malformed replies"),
)


def base_of(base_model: str) -> str | None:
    """Return the id of the base model on the hub, None for a directory of this machine."""
    path = PurePath(base_model)
    return None if path.is_absolute() or len(path.parts) != 2 else base_model


def base_name(base_model: str) -> str:
    """Return the base model's name; the path of a directory may name a user of this machine."""
    return base_of(base_model) or PurePath(base_model).name


def model_card(
    policy: Policy, line: Sequence[LinePolicy], publish: PublishSettings, form: str, files: set[str]
) -> str:
    """Return README.md of a policy's repository. ``line`` begins with the oldest ancestor."""
    repository = publish.models or ""
    template = resources("babylon.dataset").joinpath(f"model_card_{form}.md").read_text("utf-8")
    common = resources("babylon.dataset").joinpath("model_card_common.md").read_text("utf-8")
    values = {
        "title": repository.partition("/")[2],
        "repository": repository,
        "version": policy.policy_version,
        "base": base_name(policy.base_model),
        "windows": len([one for one in line if one.window_id]),
        "trajectories": sum(one.trajectories for one in line),
        "verdict": _verdict(policy.verdict or {}),
        "lineage": _lineage(line),
        "metrics": _table("metric", "value", _numbers(policy.metrics)),
        "gguf": "`model.gguf` holds the same weights for llama.cpp." if _GGUF in files else "",
    }
    body = Template(template).substitute(values) + Template(common).substitute(values)
    return f"---\n{_front(policy, publish, form)}---\n\n{body}"


_GGUF = "model.gguf"


def _front(policy: Policy, publish: PublishSettings, form: str) -> str:
    base = base_of(policy.base_model)
    lines = [
        f"license: {publish.license}",
        f"library_name: {'peft' if form == 'adapter' else 'transformers'}",
        "pipeline_tag: text-generation",
        "tags:\n- reinforcement-learning\n- grpo\n- agents",
        *([f"base_model: {base}"] if base else []),
        *([f"base_model_relation: {'adapter' if form == 'adapter' else 'finetune'}"] * bool(base)),
        *([f"datasets:\n- {publish.repository}"] if publish.repository else []),
    ]
    return "\n".join(lines) + "\n"


def _verdict(verdict: Mapping[str, object]) -> str:
    if not verdict:
        return "It was promoted by hand: no gate compared it."
    passed = "passed" if verdict.get("promote") else "did not pass; it was promoted by hand"
    rows = {label: verdict[name] for name, label in _GATE if verdict.get(name) is not None}
    # The reason is the gate's own text, and holds no text of a player.
    return f"It {passed}: {verdict.get('reason')}.\n\n" + _table("at the gate", "", _numbers(rows))


def _lineage(line: Sequence[LinePolicy]) -> str:
    lines = ["| policy | trained from | window (UTC) | trajectories |", "| --- | --- | --- | --- |"]
    for one in line:
        parent = "" if one.parent_version is None else one.parent_version
        window = one.window_id or ""
        lines.append(f"| {one.policy_version} | {parent} | {window} | {one.trajectories} |")
    return "\n".join(lines)


def _numbers(values: Mapping[str, object]) -> dict[str, str]:
    """Return the numbers only: a text of a metric may name something of this machine."""
    return {
        name: f"{value:.4g}"
        for name, value in sorted(values.items())
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _table(name: str, value: str, rows: Mapping[str, str]) -> str:
    lines = [f"| {name} | {value} |", "| --- | --- |"]
    return "\n".join([*lines, *(f"| {key} | {text} |" for key, text in rows.items())])
