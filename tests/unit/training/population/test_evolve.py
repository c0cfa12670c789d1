"""Evolution is pure, keeps its elites, and stays within the bounds of the genes."""

from random import Random

import pytest

from babylon.core.errors import ConfigError
from babylon.core.learning_settings import PreferenceSettings, TrainingSettings
from babylon.training.population.evolve import PopulationMember, Rated, evolve, founders, mutated
from babylon.training.population.genes import (
    GENES,
    OneOf,
    chosen_genes,
    genes_of,
    preferences_with,
    training_with,
)

OWN = genes_of(tuple(GENES), TrainingSettings(), PreferenceSettings(), 1e-4)


def rated_founders(size: int = 4, seed: int = 0) -> list[Rated]:
    members = founders(OWN, size, Random(seed))
    return [Rated(member=one, fitness=float(one.member)) for one in members]


def test_the_first_founder_has_the_given_settings_and_the_others_differ() -> None:
    members = founders(OWN, 4, Random(0))
    assert members[0].genes == OWN
    assert all(one.genes != OWN and one.origin == "founder" for one in members[1:])


def test_equal_members_and_seeds_give_equal_children() -> None:
    rated = rated_founders()
    first = evolve(rated, 1, 4, Random(5))
    assert first == evolve(list(rated), 1, 4, Random(5))
    assert first != evolve(rated, 1, 4, Random(6))


def test_elites_go_on_unchanged_and_every_mutant_differs_from_its_parent() -> None:
    rated = rated_founders()
    for seed in range(50):
        children = evolve(rated, 2, 6, Random(seed))
        assert [c.genes for c in children[:2]] == [rated[3].member.genes, rated[2].member.genes]
        assert [c.origin for c in children] == ["elite"] * 2 + ["mutant"] * 4
        for child in children[2:]:
            assert child.parent is not None
            assert child.genes != rated[child.parent].member.genes
        assert [c.member for c in children] == list(range(6))
        assert {c.generation for c in children} == {1}


def test_fitter_members_have_more_children() -> None:
    rated = rated_founders()
    parents = [c.parent for seed in range(200) for c in evolve(rated, 1, 4, Random(seed))[1:]]
    assert parents.count(3) > parents.count(2) > parents.count(1) > parents.count(0) == 0


def test_members_that_could_not_be_measured_come_last() -> None:
    members = founders(OWN, 3, Random(0))
    rated = [Rated(member=m, fitness=f) for m, f in zip(members, (None, -9.0, None), strict=True)]
    assert evolve(rated, 1, 3, Random(0))[0].parent == 1
    unknown = [Rated(member=m, fitness=None) for m in members]
    assert evolve(unknown, 1, 3, Random(0))[0].parent == 0  # the oldest


@pytest.mark.parametrize("name", GENES)
def test_a_gene_changes_with_every_mutation_and_stays_within_its_bounds(name: str) -> None:
    gene, value, rng = GENES[name], OWN[name], Random(1)
    seen = {value}
    for _ in range(300):
        before, value = value, gene.mutated(value, rng)
        assert value != before
        seen.add(value)
        if isinstance(gene, OneOf):
            assert value in gene.values
        else:
            assert gene.low <= float(value) <= gene.high or (gene.zero and value == 0)
            assert isinstance(value, int) or not gene.integer
    assert len(seen) > 3


@pytest.mark.parametrize("name", GENES)
def test_mutants_are_settings_that_are_valid_and_differ(name: str) -> None:
    training, preferences = TrainingSettings(), PreferenceSettings()
    for seed in range(20):
        genes = mutated({name: OWN[name]}, Random(seed))
        changed = training_with(training, genes), preferences_with(preferences, genes)
        assert changed != (training, preferences)


@pytest.mark.parametrize("clips", [(0.7, 1.28), (0.8, 2.5), (0.2, 1.1), (0.8, 1.0), (1.0, 1.28)])
def test_the_first_member_has_the_clips_of_the_settings_and_mutants_are_valid(
    clips: tuple[float, float],
) -> None:
    training = TrainingSettings(clip_low=clips[0], clip_high=clips[1])
    genes = genes_of(["clip"], training, PreferenceSettings(), 1e-5)
    first = training_with(training, genes)
    assert (first.clip_low, first.clip_high) == pytest.approx(clips)
    for seed in range(20):
        training_with(training, mutated(genes, Random(seed)))


def test_genes_that_the_objective_never_reads_are_refused() -> None:
    with pytest.raises(ConfigError, match="temperature"):
        chosen_genes("learning_rate,temperature", TrainingSettings())
    assert chosen_genes("temperature", TrainingSettings(objective="dpo")) == ("temperature",)
    asked = "kl_penalty,clip"  # the first is a gene by default
    assert chosen_genes(asked, TrainingSettings()) == ("kl_penalty", "clip")
    assert chosen_genes(asked, TrainingSettings(objective="dpo")) == ("clip",)
    with pytest.raises(ConfigError, match="CALL_WEIGHT=token"):
        chosen_genes("loss", TrainingSettings(call_weight="token"))
    with pytest.raises(ConfigError, match="IMPORTANCE=token_mask"):
        chosen_genes("loss", TrainingSettings(importance="token_mask"))
    with pytest.raises(ConfigError, match="vigour"):
        chosen_genes("vigour", TrainingSettings())
    with pytest.raises(ConfigError, match="no gene"):
        chosen_genes(" , ", TrainingSettings())


def test_a_generation_needs_room_for_its_elites() -> None:
    with pytest.raises(ValueError, match="elites"):
        evolve(rated_founders(), 5, 4, Random(0))
    with pytest.raises(ValueError, match="elites"):
        evolve([], 1, 4, Random(0))


def test_the_scale_of_an_adapter_stays_when_its_rank_evolves() -> None:
    changed = training_with(TrainingSettings(lora_rank=16, lora_alpha=48), {"rank": 8})
    assert (changed.lora_rank, changed.lora_alpha) == (8, 24)


def test_a_member_is_a_plain_record() -> None:
    one = PopulationMember(generation=0, member=0, parent=None, origin="founder", genes=OWN)
    assert one == founders(OWN, 1, Random(0))[0]
