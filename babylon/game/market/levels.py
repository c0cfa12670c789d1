"""The curriculum: rules of the game from a bandit to the full hour and worlds that change.

A level is the rules of an hour of play. Each level adds one difficulty to those below it. Levels
without ``spread``, perps and feed have the short prompt of the small game.
"""

from dataclasses import dataclass, replace

from babylon.game.market.scenario import HOUR, STARTER, Rules

_TWELVE = Rules(markets=2, ticks=12, max_order=75.0, spread=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class CurriculumLevel:
    """Rules by hour. Regimes follow each other, each for ``hours`` hours, and begin again.

    ``shared``: the agents of a world share one market, and each keeps its wealth from hour to hour.
    """

    name: str
    lesson: str
    regimes: tuple[Rules, ...]
    hours: int = 1
    shared: bool = False

    def rules(self, hour: int) -> Rules:
        """Return the rules of an hour, the first of which is 0."""
        return self.regimes[hour // self.hours % len(self.regimes)]


LEVELS = {
    level.name: level
    for level in (
        CurriculumLevel(name="L0", lesson="a bandit: follow the headline", regimes=(STARTER,)),
        CurriculumLevel(
            name="L1",
            lesson="headlines are right in two of three cases: count those of the whole hour",
            regimes=(replace(_TWELVE, news_reliability=0.67),),
        ),
        CurriculumLevel(
            name="L2",
            lesson="perpetuals: direction, size and leverage",
            regimes=(
                Rules(
                    markets=1,
                    perps=3,
                    ticks=12,
                    news_reliability=0.85,
                    trend=0.002,
                    volatility=0.003,
                ),
            ),
        ),
        CurriculumLevel(name="L3", lesson="the full hour", regimes=(HOUR,)),
        CurriculumLevel(
            name="L4",
            lesson="the full hour, shared, with wealth carried over",
            regimes=(HOUR,),
            shared=True,
        ),
        CurriculumLevel(
            name="L5",
            lesson="regimes that switch: reliability, fees, noise",
            regimes=(
                STARTER,
                replace(STARTER, news_reliability=0.05),
                replace(STARTER, fee=0.02, noise_order=120.0),
            ),
            hours=12,
        ),
    )
}
