import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers.vector import RecordEpisodeStatistics

from babylon.game.envs import IDS, TraderEnv, TraderVectorEnv
from babylon.game.market.scenario import HOUR, STARTER, make_scenario
from tests.worlds import quiet_world


def test_it_plays_what_the_environment_of_one_plays() -> None:
    """Observations, rewards and ends, beyond the first play."""
    scenarios = [make_scenario(seed, HOUR) for seed in range(5)]
    envs, ones = TraderVectorEnv(3, scenarios=scenarios), [TraderEnv("hour") for _ in range(3)]
    envs.action_space.seed(0)

    def start(row: int) -> np.ndarray:
        assert envs.core is not None
        scenario = scenarios[envs.core.ledger.world[row]]
        return ones[row].reset(options={"scenario": scenario})[0]

    observations, _ = envs.reset(seed=0)
    np.testing.assert_allclose(observations, [start(row) for row in range(3)], rtol=1e-6, atol=1e-6)
    for _ in range(HOUR.ticks + 5):
        actions = envs.action_space.sample()
        observations, rewards, terminated, truncated, infos = envs.step(actions)
        assert not truncated.any()
        for row, env in enumerate(ones):
            seen, reward, ended, _, info = env.step(actions[row])
            assert rewards[row] == pytest.approx(reward, abs=1e-9)
            assert terminated[row] == ended
            mine = infos["final_info"] if ended else infos
            assert mine["_pnl"][row] and mine["pnl"][row] == pytest.approx(info["pnl"], abs=1e-9)
            assert mine["success"][row] == info["success"]
            if ended:
                assert infos["_final_obs"][row] and infos["_final_info"][row]
                final = infos["final_obs"][row]
                np.testing.assert_allclose(final, seen, rtol=1e-6, atol=1e-6)
                seen = start(row)
            np.testing.assert_allclose(observations[row], seen, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("env_id", IDS)
def test_gymnasium_makes_it_by_its_name(env_id: str) -> None:
    envs = gymnasium.make_vec(env_id, num_envs=4, worlds=3)
    assert isinstance(envs.unwrapped, TraderVectorEnv)
    assert envs.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    assert envs.single_observation_space == gymnasium.make(env_id).observation_space
    observations, _ = envs.reset(seed=0)
    assert observations in envs.observation_space
    observations, *_ = envs.step(envs.action_space.sample())
    assert observations in envs.observation_space
    envs.close()


def test_a_seed_repeats_everything() -> None:
    def played(seed: int) -> list[np.ndarray]:
        envs = TraderVectorEnv(4, "starter", worlds=4)
        seen = [envs.reset(seed=seed)[0]]
        envs.action_space.seed(seed)
        for _ in range(2 * STARTER.ticks):
            observations, rewards, *_ = envs.step(envs.action_space.sample())
            seen += [observations, rewards]
        return seen

    for one, two in zip(played(1), played(1), strict=True):
        np.testing.assert_array_equal(one, two)
    assert not np.array_equal(played(1)[0], played(2)[0])


def test_observations_of_earlier_steps_stay_as_they_were() -> None:
    envs = TraderVectorEnv(2, "starter", worlds=2)
    first, _ = envs.reset(seed=0)
    kept = first.copy()
    for _ in range(STARTER.ticks + 1):
        envs.step(envs.action_space.sample())
    np.testing.assert_array_equal(first, kept)


def test_gymnasiums_statistics_agree_with_the_pnl() -> None:
    envs = RecordEpisodeStatistics(TraderVectorEnv(4, "starter", worlds=8))
    envs.reset(seed=0)
    envs.action_space.seed(0)
    for _ in range(STARTER.ticks):
        *_, terminated, _, infos = envs.step(envs.action_space.sample())
    assert terminated.all()
    assert [*infos["episode"]["l"]] == [STARTER.ticks] * 4
    assert infos["episode"]["r"] * 100 == pytest.approx(infos["final_info"]["pnl"])


def test_a_mask_resets_some_rows_only() -> None:
    envs = TraderVectorEnv(3, "starter", worlds=3)
    envs.reset(seed=0)
    before, *_ = envs.step(np.zeros((3, 2), dtype=np.int64))
    mask = np.array([False, True, False])
    after, _ = envs.reset(options={"reset_mask": mask})
    assert [*after[:, 0]] == pytest.approx([1 - 1 / 6, 1.0, 1 - 1 / 6])
    np.testing.assert_array_equal(before[~mask], after[~mask])


def test_steps_come_after_a_reset() -> None:
    envs = TraderVectorEnv(1, scenarios=[quiet_world()])
    with pytest.raises(ValueError, match=r"call reset\(\) before step\(\)"):
        envs.step(envs.action_space.sample())
