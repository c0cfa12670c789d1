from babylon.game.market.scenario import HOUR
from benchmarks.market import REFERENCE, Sizes, measure, table

TINY = Sizes(agents=3, envs=2, markets=2, plays=1, pool=2, scalar_games=1, sync_envs=1)


def test_every_contender_is_measured() -> None:
    results = {result.name: result for result in measure(TINY, turns=1)}
    steps = {name: result.units for name, result in results.items()}
    assert steps == {
        "a game hour of scripted agents in one market": 3 * HOUR.ticks,
        "TraderVectorEnv": 2 * HOUR.ticks,
        "vectorised core, shared markets": 6 * HOUR.ticks,
        "scalar Game": HOUR.ticks,
        REFERENCE: HOUR.ticks,
        "making worlds": 2,
    }
    assert all(result.wall_s > 0 for result in results.values())
    assert results[REFERENCE].times_reference == 1.0
    hour = results["a game hour of scripted agents in one market"]
    assert hour.times_real_time == 3600 / hour.wall_s
    assert len(table([*results.values()]).splitlines()) == 2 + len(results)
