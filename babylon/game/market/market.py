"""A market shared by any number of accounts, and each player's view of it.

In a tick, all players see the same state and each decides once. The market carries out the
decisions in a seeded random order and begins the next tick: perp prices move and positions are
liquidated, funding is paid (at 00:00, 08:00 and 16:00), due questions resolve, the crowd trades and
non-players post. ``settle`` ends the play: it resolves the open questions and closes the positions.

Money is conserved. Balances, margins, the exchange's balance and the collateral of the open
prediction markets always add up to the players' start balances (``total``).
"""

from collections.abc import Callable, Iterable, Mapping
from random import Random

from babylon.game.market.account import Account, Holding, MarketExchange, Outcome, Position, refused
from babylon.game.market.amm import Pool, Side
from babylon.game.market.feed import MAX_CONTENT, Feed, one_line
from babylon.game.market.orders import Comment, Decision, Hold, Order, Post
from babylon.game.market.perp_desk import PerpDesk
from babylon.game.market.perps import FUNDING_MINUTES, Direction
from babylon.game.market.prediction_desk import PredictionDesk
from babylon.game.market.scenario import Question, Rules, Scenario

Bot = Callable[["Seat", Random], Decision]


class Market:
    """The state of a scenario's world.

    ``bots`` are scripted opponents. They see the same state as the players and are carried out
    first.
    """

    def __init__(self, scenario: Scenario, bots: Iterable[Bot] = ()) -> None:
        self.scenario = scenario
        self.tick = 0
        self.exchange = MarketExchange()
        self.predictions = PredictionDesk(scenario.rules, self.exchange)
        self.futures = PerpDesk(
            scenario.rules, self.exchange, {perp.ticker: perp for perp in scenario.perps}
        )
        self.feed = Feed()
        self.accounts: dict[str, Account] = {}
        self.predictions.open(scenario.questions)
        self._bots = {f"trader-{i + 1}": bot for i, bot in enumerate(bots)}
        self._seats = {name: self.join(name) for name in self._bots}
        self._begin_tick()

    @property
    def rules(self) -> Rules:
        return self.scenario.rules

    @property
    def over(self) -> bool:
        return self.tick >= self.rules.ticks

    @property
    def minute_of_day(self) -> int:
        return (self.scenario.start_minute + self.tick) % (24 * 60)

    @property
    def total(self) -> float:
        """Dollars held by all accounts, the exchange and the open markets."""
        cash = sum(account.cash for account in self.accounts.values())
        return cash + self.exchange.balance + self.predictions.collateral

    def join(self, name: str, balance: float | None = None) -> "Seat":
        """Open an account with a balance in dollars, by default the rules' start balance.

        Raises:
            ValueError: An account of that name exists.
        """
        if name in self.accounts:
            raise ValueError(f"{name!r} already has an account: give each player another name")
        opening = self.rules.start_balance if balance is None else balance
        account = self.accounts[name] = Account(name, opening)
        return Seat(self, account)

    def step(self, decisions: Mapping[str, Decision]) -> dict[str, Outcome]:
        """Carry out at most one decision per account and begin the next tick.

        A refused decision has no effect: the account has used its turn.

        Raises:
            ValueError: All ticks are played, or a name has no account.
        """
        if unknown := decisions.keys() - self.accounts.keys():
            raise ValueError(f"{sorted(unknown)} have no account: call join first")
        if self.over:
            raise ValueError(f"all {self.tick} ticks of {self.scenario.scenario_id} are played")
        bots = {
            name: bot(self._seats[name], self._random(f"bot:{name}"))
            for name, bot in self._bots.items()
        }
        outcomes = self._carry_out(bots) | self._carry_out(decisions)
        self._end_tick()
        return {name: outcomes[name] for name in decisions}

    def settle(self) -> None:
        """Resolve every open question and close every perp position at its last price."""
        self._resolve(self.scenario.questions)
        self.futures.close_all(self.accounts.values())

    def _random(self, purpose: str) -> Random:
        return Random(f"{purpose}:{self.scenario.scenario_id}:{self.tick}")

    def _carry_out(self, decisions: Mapping[str, Decision]) -> dict[str, Outcome]:
        names = [name for name in self.accounts if name in decisions]
        if len(names) > 1:
            self._random("order").shuffle(names)
        return {name: self._decide(self.accounts[name], decisions[name]) for name in names}

    def _decide(self, account: Account, decision: Decision) -> Outcome:
        match decision:
            case Hold(error=None):
                outcome = Outcome(action_type="HOLD", success=True)
            case Hold(error=str(error)):
                outcome = refused("TRADING_DECISION", error)
            case Order():
                desk = self.futures if decision.kind.is_perp else self.predictions
                outcome = desk.trade(account, decision)
            case Post() | Comment():
                outcome = self._write(account, decision)
        account.outcomes.append(outcome)
        return outcome

    def _write(self, account: Account, decision: Post | Comment) -> Outcome:
        action = "CREATE_POST" if isinstance(decision, Post) else "COMMENT"
        text = one_line(decision.content)
        if not self.rules.feed:
            return refused(action, "there is no feed in this game")
        if not 1 <= len(text) <= MAX_CONTENT:
            return refused(action, f"content has {len(text)} characters, not 1 to {MAX_CONTENT}")
        if isinstance(decision, Post):
            post = self.feed.post(account.name, text, self.tick)
        else:
            found = self.feed.find(decision.post)
            if found is None:
                return refused(action, f"post {decision.post!r} does not exist")
            post = found
            post.comment(account.name, text)
        return Outcome(action_type=action, success=True, post_id=post.post_id, content=text)

    def _end_tick(self) -> None:
        self.tick += 1
        accounts = self.accounts.values()
        self.futures.move(self.tick, accounts)
        if self.minute_of_day % FUNDING_MINUTES == 0:
            self.futures.fund(accounts)
        if not self.over:
            self._resolve(q for q in self.scenario.questions if q.end(self.rules) <= self.tick)
            self._begin_tick()

    def _resolve(self, questions: Iterable[Question]) -> None:
        pools = self.predictions.pools
        outcomes = {q.market_id: q.outcome for q in questions if q.market_id in pools}
        self.predictions.resolve(outcomes, self.accounts.values())

    def _begin_tick(self) -> None:
        if order := self.scenario.noise[self.tick]:
            self.predictions.crowd(order.market_id, order.side, order.dollars)
        for post in self.scenario.posts:
            if post.tick == self.tick:
                self.feed.post(post.author, post.text, self.tick)


class Seat:
    """A player's view of the market and its own account.

    ``scenario`` includes the ground truth.
    """

    def __init__(self, market: "Market", account: Account) -> None:
        self.market = market
        self.account = account

    @property
    def scenario(self) -> Scenario:
        return self.market.scenario

    @property
    def tick(self) -> int:
        return self.market.tick

    @property
    def over(self) -> bool:
        return self.market.over

    @property
    def pools(self) -> dict[str, Pool]:
        """Pools of the open questions, by market id."""
        return self.market.predictions.pools

    @property
    def prices(self) -> dict[str, float]:
        """Perp prices in dollars, by ticker."""
        return self.market.futures.prices

    @property
    def balance(self) -> float:
        return self.account.balance

    @property
    def holdings(self) -> dict[tuple[str, Side], Holding]:
        return self.account.holdings

    @property
    def positions(self) -> dict[tuple[str, Direction], Position]:
        return self.account.positions

    @property
    def outcomes(self) -> list[Outcome]:
        return self.account.outcomes

    @property
    def equity(self) -> float:
        """Balance, sale value of the shares, and margins with P&L of the perps; before fees."""
        return (
            self.balance
            + sum(
                self.pools[market].sell(side, holding.shares)[1]
                for (market, side), holding in self.holdings.items()
            )
            + sum(
                position.margin + position.pnl(self.market.futures.price(ticker))
                for (ticker, _), position in self.positions.items()
            )
        )

    @property
    def pnl(self) -> float:
        return self.equity - self.account.opening

    def won(self, outcome: Outcome) -> bool | None:
        """Return whether a trade paid off.

        A sale or a closing is judged by its P&L, bought shares by the outcome of their question, an
        opened perp by the price at which its position ended. None: the decision was no trade, or
        the position is still open.
        """
        if not outcome.success:
            return None
        if outcome.realised_pnl is not None:
            return outcome.realised_pnl > 0
        if (fill := outcome.perp) is not None:
            end = fill.exit.price
            return None if end is None else fill.direction.sign * (end - fill.price) > 0
        if outcome.market_id is None:
            return None
        question = self.scenario.question(outcome.market_id)
        return question is not None and question.outcome is outcome.side
