"""Siblings of a window: one update for each member of the population, of which the fittest goes on.

All siblings start from the serving policy and learn from the same rows. They are adapters over one
base that is loaded once. Each is stored as soon as it exists and again once it has played, so a run
that resumes goes on with the next one. The fittest is committed as the window's policy and meets
the gate like any other; the others' checkpoints are removed, their figures stay.

After ``EVOLVE_EVERY`` windows of a generation, the settings evolve.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from random import Random
from statistics import fmean

from babylon.core.errors import (
    ArtifactError,
    ModelError,
    StorageError,
    TrainingError,
    WindowNotReadyError,
)
from babylon.core.learning_settings import PopulationSettings, reading_precision
from babylon.core.objects import remove
from babylon.core.settings import EvaluationSettings, JudgeSettings
from babylon.core.types import Metrics, Scored
from babylon.evaluation.arena.fitness import (
    Fitness,
    FitnessWorlds,
    best_of,
    fitness,
    fitness_worlds,
)
from babylon.policies.shared_files import fetch_checkpoint, publish_checkpoint
from babylon.stages.sample_replies import replies_for
from babylon.stages.words import words_for
from babylon.store.policies import next_batch
from babylon.store.population import (
    MemberRow,
    Sibling,
    add_generation,
    list_members,
    list_siblings,
    put_sibling,
)
from babylon.training.backends.registry import updater
from babylon.training.backends.train_input import TrainInput
from babylon.training.population.evolve import PopulationMember, Rated, evolve, founders
from babylon.training.population.genes import (
    Value,
    chosen_genes,
    genes_of,
    preferences_with,
    training_with,
)
from babylon.training.progress_directory import forget_progress, take_up_progress
from babylon.training.update_health import ruled_out
from babylon.training.update_result import update_metrics

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """An update that can be committed."""

    target: Path
    metrics: Metrics
    trajectory_ids: tuple[str, ...]


async def make_update(
    work: TrainInput,
    scored: Scored,
    population: PopulationSettings,
    evaluation: EvaluationSettings,
    judge: JudgeSettings,
    only: int | None = None,
) -> Made | None:
    """Get the replies or words that the objective needs, and run the update, or all siblings'.

    Raises:
        WindowNotReadyError, TrainingError: as the trainer.
    """
    objective = work.settings.training.objective
    words = await words_for(work.store, work.settings.home, scored, work.rows, objective)
    work = replace(work, words=words)
    if not _own_replies(work, population):
        work = replace(work, replies=await replies_for(work, scored, judge))
    if population.size > 1:
        return await best_sibling(work, scored, population, evaluation, judge, only)
    # in a thread, because importing a trainer takes seconds
    trainer = await asyncio.to_thread(updater, work.settings.training.trainer)
    update = await trainer(work)
    metrics, ids = update_metrics(update, scored), update.trajectory_ids
    return Made(target=work.target, metrics=metrics, trajectory_ids=ids)


def _own_replies(work: TrainInput, population: PopulationSettings) -> bool:
    """True if each member samples at its own temperature: nothing would learn from other replies,
    and a judge would be paid for them."""
    return population.size > 1 and "temperature" in chosen_genes(
        population.genes, work.settings.training
    )


async def best_sibling(
    work: TrainInput,
    scored: Scored,
    population: PopulationSettings,
    evaluation: EvaluationSettings,
    judge: JudgeSettings,
    only: int | None = None,
) -> Made | None:
    """Train a window's siblings, let them play, and return the fittest.

    With ``only``, train one member and let it play, and return nothing: several workers may do that
    side by side. What they have done is not done again.

    An update that fails leaves its member without fitness, and so does one that the gate would
    refuse, for its replies or for its own metrics. Where no worlds can be made, the first member
    that it would take goes on; the elite of the generation before comes first.

    Raises:
        WindowNotReadyError: the window teaches no sibling anything.
        TrainingError: every update failed.
    """
    store, batch_id = work.store, await next_batch(work.store, work.claim.window_id)
    members = await present_generation(work, population)
    known = {
        one.member: one
        for one in await list_siblings(store, batch_id=batch_id)
        if one.generation == members[0].generation
        and one.parent_version == work.parent.policy_version
        and one.scored == scored.artifact.sha256  # a window that failed may be scored again
    }
    for one in known.values():
        if one.chosen and await _is_here(work, one):
            return _made(one, len(members))
    wanted = members if only is None else [members[only]]
    found = await _trained(work, scored, judge, wanted, known, batch_id)
    worlds = await fitness_worlds(
        store,
        work.claim.window_id,
        f"{work.settings.seed}:{batch_id}",
        evaluation,
        population.worlds,
    )
    if worlds is None:
        log.warning("window %s: no worlds can be made to compare siblings", work.claim.window_id)
    else:
        found = await _played(work, worlds, found)
    if only is not None:
        return None
    # The choice is stored before anything is removed, so that a run that resumes makes the same.
    able = [one for one in found if one.uri]
    best = _fittest(able)
    await put_sibling(store, work.claim, replace(best, chosen=True))
    for one in able:
        if one.member != best.member:
            with suppress(OSError, StorageError):  # retention tries again
                await asyncio.to_thread(remove, store.home, Path(one.uri))
    return _made(best, len(members))


async def present_generation(
    work: TrainInput, population: PopulationSettings
) -> list[PopulationMember]:
    """Return the members whose turn it is; found or evolve the population if that is due."""
    store, seed = work.store, work.settings.seed
    training = work.settings.training
    names = chosen_genes(population.genes, training)
    members = await list_members(store)
    newest = members[-1].generation if members else -1
    current = [_member(row) for row in members if row.generation == newest]
    own = await asyncio.to_thread(_own_genes, work, names)
    if not current or set(current[0].genes) != set(names) or len(current) != population.size:
        # other genes or another size begin anew: their fitness cannot be compared
        began = founders(own, population.size, Random(f"{seed}:founders:{newest + 1}"))
        current = [replace(one, generation=newest + 1) for one in began]
    else:
        siblings = await list_siblings(store, generation=newest)
        seen = {one.window_id for one in siblings if one.chosen} - {work.claim.window_id}
        if len(seen) < population.evolve_every:
            return current
        means = rated(siblings)
        current = evolve(
            [Rated(member=one, fitness=means.get(one.member)) for one in current],
            min(population.elites, population.size),
            population.size,
            Random(f"{seed}:evolve:{newest}"),
        )
    await add_generation(store, [_row(one) for one in current])
    stored = await list_members(store)  # another worker may have been first
    return [_member(row) for row in stored if row.generation == stored[-1].generation]


def _own_genes(work: TrainInput, names: Sequence[str]) -> dict[str, Value]:
    """Return the settings as genes, with the rate at which a single update would begin."""
    from babylon.training.learning_rate import first_rate  # torch takes seconds to import

    training = work.settings.training
    rate = training.learning_rate or first_rate(work.parent.uri, training.tuning)
    return genes_of(names, training, work.settings.preferences, rate)


def rated(siblings: Sequence[Sibling]) -> dict[int, float]:
    """Return member → its mean fitness over the windows in which it played.

    A failed or unfit update counts as the worst result of its window: settings that diverge must
    not win.
    """
    windows: dict[str, list[Sibling]] = defaultdict(list)
    for one in siblings:
        windows[one.batch_id].append(one)
    values: dict[int, list[float]] = defaultdict(list)
    for together in windows.values():
        played = [one.fitness for one in together if one.fitness is not None]
        if not played:
            continue
        for one in together:
            values[one.member].append(min(played) if one.fitness is None else one.fitness)
    return {member: fmean(found) for member, found in values.items()}


async def _trained(
    work: TrainInput,
    scored: Scored,
    judge: JudgeSettings,
    members: Sequence[PopulationMember],
    known: Mapping[int, Sibling],
    batch_id: str,
) -> list[Sibling]:
    # imported here, because torch takes seconds to import
    from babylon.training.population.shared_base import Siblings

    found: list[Sibling] = []
    errors: list[Exception] = []
    together = Siblings(work.parent.uri)
    for member in members:
        before = known.get(member.member)
        if before and before.uri and await _is_here(work, before):
            found.append(before)
            continue
        own = await _work_of(work, scored, judge, member)
        sibling = Sibling(
            window_id=work.claim.window_id,
            batch_id=batch_id,
            generation=member.generation,
            member=member.member,
            parent_version=work.parent.policy_version,
            uri="",
            fitness=None,
            fitness_error=None,
            worlds=0,
            metrics={},
            trajectory_ids=(),
            chosen=False,
            scored=scored.artifact.sha256,
        )
        try:
            update = await asyncio.to_thread(together.train, own)
        except (TrainingError, WindowNotReadyError) as error:
            log.warning("member %d of the population: %s", member.member, error)
            errors.append(error)
            sibling = replace(sibling, metrics={"error": str(error)})
        else:
            metrics = update_metrics(update, scored)
            await asyncio.to_thread(publish_checkpoint, work.store.home, str(own.target))
            ids = update.trajectory_ids
            sibling = replace(sibling, uri=str(own.target), metrics=metrics, trajectory_ids=ids)
        await put_sibling(work.store, work.claim, sibling)
        if sibling.uri:
            await asyncio.to_thread(forget_progress, work.store.home, own.progress_directory)
        found.append(sibling)
    if not any(one.uri for one in found):
        raise errors[0]
    return found


async def _is_here(work: TrainInput, one: Sibling) -> bool:
    """Return whether a sibling's checkpoint exists; another machine's is fetched."""
    try:
        await asyncio.to_thread(fetch_checkpoint, work.store.home, one.uri)
    except (ArtifactError, ModelError) as error:
        log.warning("member %d of the population is trained again: %s", one.member, error)
        return False
    return Path(one.uri).exists()


async def _work_of(
    work: TrainInput, scored: Scored, judge: JudgeSettings, member: PopulationMember
) -> TrainInput:
    """Return the update of one member."""
    training = training_with(work.settings.training, member.genes)
    preferences = preferences_with(work.settings.preferences, member.genes)
    settings = work.settings.model_copy(update={"training": training, "preferences": preferences})
    replies = work.replies
    if "temperature" in member.genes:
        replies = await replies_for(replace(work, settings=settings), scored, judge)
    part = f"-m{member.member}"
    home = work.store.home
    return replace(
        work,
        settings=settings,
        target=work.target.with_name(work.target.name + part),
        progress_directory=await asyncio.to_thread(take_up_progress, home, work.claim, part),
        replies=replies,
        resize="rank" in member.genes,
    )


def _fittest(able: Sequence[Sibling]) -> Sibling:
    sound = [one for one in able if not ruled_out(one.metrics)] or able
    return sound[best_of([one.fitness for one in sound])]


async def _played(
    work: TrainInput, worlds: FitnessWorlds, siblings: Sequence[Sibling]
) -> list[Sibling]:
    """Return the siblings with their fitness. Those that have played do not play again.

    One that its own metrics rule out does not play: the gate rejects it without a game.
    """
    waiting = {one.member for one in siblings if one.uri and not one.worlds}
    waiting -= {one.member for one in siblings if ruled_out(one.metrics)}
    if not waiting:
        return list(siblings)
    seed, training = work.settings.seed, work.settings.training
    precision = reading_precision(training.tuning, training.base_precision)
    parent = await asyncio.to_thread(worlds.played_by, work.parent.uri, seed, precision)
    found = []
    for one in siblings:
        if one.member in waiting:
            try:
                own = await asyncio.to_thread(worlds.played_by, one.uri, seed, precision)
            except ModelError as failure:
                log.warning("member %d of the population: %s", one.member, failure)
            else:
                one = _measured(one, fitness(parent, own))
                await put_sibling(work.store, work.claim, one)
        found.append(one)
    return found


def _measured(one: Sibling, result: Fitness) -> Sibling:
    """Return the sibling with the result of its play. An unfit one has no fitness."""
    if result.unfit:
        log.warning("member %d of the population: %s", one.member, result.unfit)
        return replace(one, worlds=result.worlds, metrics={**one.metrics, "unfit": result.unfit})
    known = result.error if isfinite(result.error) else None
    return replace(one, fitness=result.mean, fitness_error=known, worlds=result.worlds)


def _made(chosen: Sibling, size: int) -> Made:
    return Made(
        target=Path(chosen.uri),
        metrics={
            **chosen.metrics,
            "population": size,
            "population_generation": chosen.generation,
            "population_member": chosen.member,
            "population_fitness": chosen.fitness,
        },
        trajectory_ids=chosen.trajectory_ids,
    )


def _member(row: MemberRow) -> PopulationMember:
    return PopulationMember(
        generation=row.generation,
        member=row.member,
        parent=row.parent,
        origin=row.origin,  # type: ignore[arg-type]
        genes=row.genes,
    )


def _row(one: PopulationMember) -> MemberRow:
    return MemberRow(
        generation=one.generation,
        member=one.member,
        parent=one.parent,
        origin=one.origin,
        genes=dict(one.genes),
    )
