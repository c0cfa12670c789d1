"""``babylon model``: the base model and every policy trained from it."""

from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Annotated, Literal

import typer
from rich.progress import Progress

from babylon.cli.options import Json, Version, require_new_directory
from babylon.cli.output import print_json, print_table, show_values, stderr, with_store
from babylon.core.errors import ConfigError
from babylon.core.learning_settings import reading_precision
from babylon.core.settings_loading import load_settings
from babylon.deployment.checks.check_result import as_lines
from babylon.training.update_health import in_order, warnings

GIB = 2**30
app = typer.Typer(help="The base model and its policies.", no_args_is_help=True)


@app.command()
def init(json: Json = False) -> None:
    """Make the base model, or find it, and register it as policy 0."""
    from babylon.stages.champion import ensure_champion
    from babylon.store import Store
    from babylon.store.policies import get_policy

    settings = load_settings()

    async def register(store: Store) -> str:
        await ensure_champion(
            store,
            settings.home,
            settings.model,
            settings.seed,
            progress=lambda done, total: progress.update(bar, completed=done, total=total),
        )
        return (await get_policy(store, 0)).uri

    with Progress(console=stderr, disable=not stderr.is_terminal) as progress:
        bar = progress.add_task("embedded model", total=None)
        uri = with_store(settings, register)
    show_values({"base_model": uri, "policy_version": 0}, json)


@app.command()
def sft(
    chats: Annotated[Path, typer.Argument(help="Chats to imitate, in any format of `db import`.")],
    target: Annotated[Path, typer.Argument(help="New directory of the checkpoint.")],
    tuning: Annotated[
        Literal["full", "lora"], typer.Option(help="Weights that are trained.")
    ] = "full",
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the chats.")] = 1,
    batch_size: Annotated[int, typer.Option(min=1, help="Chats an optimiser step.")] = 16,
    json: Json = False,
) -> None:
    """Teach the base model the replies of recorded chats. The result can be the BASE_MODEL."""
    from babylon.formats.import_files import guess_format, read_traces
    from babylon.formats.trace_rows import training_rows_of
    from babylon.training.base_model import resolve_base
    from babylon.training.sft import fine_tune
    from babylon.training.update_options import tuning_options

    require_new_directory(target)
    settings = load_settings()
    rows = training_rows_of(read_traces(chats, guess_format(chats)))
    base = resolve_base(settings.model.base, settings.home.models, settings.seed)
    order = Random(settings.seed)  # the end of a file must not be what is learned last
    passes = [row for _ in range(epochs) for row in order.sample(rows, len(rows))]
    steps = fine_tune(
        base,
        passes,
        target,
        tuning=tuning,
        batch_size=batch_size,
        options=tuning_options(settings.training),
    )
    learnt = sum(step.chats for step in steps) // epochs
    result = {
        "checkpoint": str(target.resolve()),
        "chats": learnt,
        "chats_left_out": len(rows) - learnt,
        "steps": len(steps),
        "first_loss": steps[0].loss,
        "last_loss": steps[-1].loss,
    }
    show_values(result, json)


@app.command("list")
def list_(json: Json = False) -> None:
    """List every policy, with the champion, its verdict and removed checkpoints marked."""
    from babylon.store import Store
    from babylon.store.policies import Policy, champion, list_policies

    async def read(store: Store) -> tuple[list[Policy], int | None]:
        policies = await list_policies(store)
        serving = (await champion(store))[0].policy_version if policies else None
        return policies, serving

    policies, serving = with_store(load_settings(), read)
    if json:
        marked = [asdict(p) | {"champion": p.policy_version == serving} for p in policies]
        print_json({"policies": marked})
        return
    columns = ["version", "champion", "parent", "kind", "window", "removed", "passed", "reason"]
    rows = [
        [
            p.policy_version,
            "*" if p.policy_version == serving else "",
            p.parent_version,
            p.kind,
            p.window_id,
            p.removed_at and f"{p.removed_at:%Y-%m-%d}",
            (p.verdict or {}).get("promote"),
            (p.verdict or {}).get("reason"),
        ]
        for p in policies
    ]
    print_table("Policies", columns, rows)


@app.command()
def show(version: Version, json: Json = False) -> None:
    """Show one policy: its checkpoint, metrics, verdict and checks, with warnings."""
    from babylon.store.policies import get_policy

    found = with_store(load_settings(), get_policy, version)
    policy = asdict(found) | {"metrics": in_order(found.metrics)}
    if json:
        show_values(policy, json)
        return
    if found.checks:
        policy["checks"] = as_lines(found.checks)
    show_values(policy, json)
    for warning in warnings(found.metrics):
        print(f"! {warning}")


@app.command()
def publish(
    version: Annotated[
        int | None, typer.Argument(min=0, metavar="VERSION", help="Default: the champion.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be sent, and send nothing.")
    ] = False,
    json: Json = False,
) -> None:
    """Send a promoted policy with its model card to the hub: one commit, and a tag on it."""
    from babylon.dataset.publish_policy import publish_policy

    settings = load_settings()
    made = with_store(
        settings, publish_policy, settings.home, settings.publish, version, dry_run=dry_run
    )
    if json:
        print_json({"dry_run": dry_run, "published": made and asdict(made)})
    elif made is None:
        print(f"{settings.publish.models} has this policy, or none was promoted: nothing to send")
    else:
        show_values(asdict(made), json)


@app.command()
def export(
    version: Version,
    target: Annotated[Path, typer.Argument(help="New directory of the model.")],
    json: Json = False,
) -> None:
    """Write a policy's whole weights: merged, in the base's precision, with gguf if it can be."""
    from babylon.policies.shared_files import fetch_checkpoint
    from babylon.policies.whole_weights import write_gguf, write_whole
    from babylon.store.policies import get_policy

    require_new_directory(target)
    settings = load_settings()
    policy = with_store(settings, get_policy, version)
    if policy.removed_at is not None:
        raise ConfigError(f"the checkpoint of policy {version} is gone: export a newer policy")
    base = fetch_checkpoint(settings.home, with_store(settings, get_policy, 0).uri)
    write_whole(fetch_checkpoint(settings.home, policy.uri), base, target)
    gguf = write_gguf(target, target / "model.gguf")
    show_values({"model": str(target.resolve()), "gguf": gguf and str(gguf)}, json)


@app.command("memory")
def memory_plan(
    model: Annotated[str, typer.Argument(help="Directory or id of a model.")],
    context: Annotated[int, typer.Option(min=1, help="Tokens of the longest call.")] = 8192,
    device_gib: Annotated[
        float | None, typer.Option(min=0, help="Memory of the GPU. Default: this machine's.")
    ] = None,
    json: Json = False,
) -> None:
    """Estimate the GPU memory of update, engine and checks with the present settings.

    It exits with 1 if they do not fit one device side by side.
    """
    from babylon.training.memory_plan import (
        device_memory,
        model_config,
        plan_memory,
        portions_that_fit,
        share_device,
    )
    from babylon.training.update_options import tuning_options

    settings = load_settings()
    training, serving = settings.training, settings.serving
    memory = device_memory() if device_gib is None else round(device_gib * GIB)
    config = model_config(model)
    # with kept activations: the table of portions says what recomputing them would save
    plan = plan_memory(
        config,
        tuning=training.tuning,
        layers=training.transfer_layers,
        options=tuning_options(training),
        context=context,
        ranks=max(1, training.processes) * training.nodes,
    )
    values: dict[str, object] = {
        f"{name}_gib": round(value / GIB, 2) for name, value in asdict(plan).items()
    }
    values["total_gib"] = round(plan.total / GIB, 2)
    if memory is not None:
        precision = reading_precision(training.tuning, training.base_precision)

        def portions(memory: int) -> dict[str, int | None]:
            return portions_that_fit(
                plan, config, precision=precision, context=context, memory=memory
            )

        fitting = portions(memory)
        values |= {f"portion_activations_{name}": tokens for name, tokens in fitting.items()}
        shared = share_device(
            config,
            engine="remote" if serving.engine_url else serving.engine,
            vllm_args=serving.vllm_args,
            turns=serving.vllm_turns,
            tuning=training.tuning,
            memory=memory,
            precision=precision,
        )
        values |= {f"{name}_gib": round(one / GIB, 2) for name, one in asdict(shared).items()}
        beside = portions(shared.beside_engine)
        values |= {f"portion_beside_engine_{name}": tokens for name, tokens in beside.items()}
        fits = any(beside.values()) and shared.checks <= shared.beside_engine
        values["fits_beside_engine"] = fits
    show_values(values, json)
    if memory is not None and not fits:
        raise typer.Exit(1)


@app.command()
def lineage(json: Json = False) -> None:
    """Draw the line of policies: the champion, and what became of every other one."""
    from babylon.cli.lineage_page import lineage_lines
    from babylon.store import Store
    from babylon.store.learning import LinePolicy, count_fates, policy_line
    from babylon.store.policies import champion

    async def read(store: Store) -> tuple[list[LinePolicy], int | None, dict[str, int]]:
        policies = await policy_line(store)
        serving = (await champion(store))[0].policy_version if policies else None
        return policies, serving, await count_fates(store)

    policies, serving, fates = with_store(load_settings(), read)
    if json:
        print_json({"champion": serving, "policies": policies, "trajectories": fates})
        return
    for line in lineage_lines(policies, serving):
        print(line)
    counts = ", ".join(f"{count} {fate}" for fate, count in fates.items())
    print(f"\ntrajectories: {counts or 'none was collected'}")
