"""A model of the window machine, played at random against the real store.

Several owners claim, work, are stopped, fenced or killed while time passes, rows arrive and the
champion changes. The model knows what each step must do; after every step Postgres must agree with
it, and no trajectory may be lost in the sibling of a champion.
"""

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime

import hypothesis.strategies as st
import pytest
from hypothesis import settings as run_settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from babylon.core.errors import AlreadyTrainedError, FencedError, SupersededError, WindowError
from babylon.core.game_rows import UNTRAINED
from babylon.core.settings import Settings
from babylon.core.types import Claim
from babylon.core.windows import DONE, FINISHED, IN_WORK, TRANSITIONS, Window, WindowState
from babylon.store import Store, open_store
from babylon.store.late import admit_late, note_late, store_collected
from babylon.store.policies import commit_policy, ensure_base, next_batch
from babylon.store.releases import supersede
from babylon.store.routes import commit_route
from babylon.store.windows import MOST_SKIPS, claim_window, list_windows, release, set_state

START = datetime(2025, 11, 14, 9, tzinfo=UTC)
FIRST = Window(START)
WINDOWS = (FIRST, FIRST.next(), Window(START, recipe="again"))
OWNERS = ("ada", "bob")
NEXT = {WindowState.COLLECTED: WindowState.VALIDATED, WindowState.VALIDATED: WindowState.SCORED}
UNSTORED = (WindowState.OPEN, WindowState.CLOSING)
STORED = tuple(s for s in WindowState if s not in (*UNSTORED, WindowState.TRAINED))
ENDS = (WindowState.FAILED, WindowState.SKIPPED, WindowState.CLAIMED)
TABLES = (
    "babylon.windows, babylon.attempts, babylon.collected, babylon.late, babylon.trained,"
    " babylon.released, babylon.releases, babylon.routes,"
    " babylon.proposals, babylon.policies, trajectories, training_batches, trained_models"
)
ROWS = f"""
SELECT "trajectoryId" FROM trajectories t WHERE "windowId" = $1 AND {UNTRAINED} ORDER BY 1
"""
PLAY = """
INSERT INTO trajectories (id, "trajectoryId", "agentId", "startTime", "endTime", "durationMs",
    "windowId", "stepsJson", "rewardComponentsJson", "metricsJson", "metadataJson", "totalReward",
    "episodeLength", "finalStatus", "updatedAt")
VALUES ($1, $1, 'player', $2, $2, 0, $3, '[]', '{}', '{}', '{}', 0, 0, 'completed', now())
"""


@dataclass
class Known:
    """Knowledge of the model about one window."""

    state: WindowState = WindowState.READY
    epoch: int = 0
    owner: str | None = None  # while the lease runs
    attempts: int = 0
    collected: set[str] | None = None
    policy: int | None = None  # committed, and not released


@dataclass
class Held:
    """A claim as its worker has it, live or not, what it collected, and the champion it read."""

    window: Window
    claim: Claim
    batch: list[str] = field(default_factory=list)
    parent: int = 0


class Machine(RuleBasedStateMachine):
    claims = Bundle("claims")

    def __init__(self, runner: asyncio.Runner, store: Store, seen: Counter[str]) -> None:
        super().__init__()
        self.runner, self.store, self.seen = runner, store, seen
        self.newest: dict[str, Held] = {}  # of each window's claims
        self.known = {window.key: Known() for window in WINDOWS}
        self.played: dict[str, str] = {}  # trajectory → window id
        self.trained: dict[str, str] = {}  # trajectory → window key
        self.late: dict[str, bool] = {}  # trajectory → admitted
        self.parents: dict[int, int | None] = {0: None}  # of every policy
        self.champions = [0]  # one for each route
        self.run(self.begin())

    def run(self, coroutine):
        return self.runner.run(coroutine)

    async def begin(self) -> None:
        await self.store.pool.execute(f"TRUNCATE {TABLES} CASCADE")
        await ensure_base(self.store, uri="file:///base", base_model="tiny")

    # ── the game ──

    @initialize()
    def some_play(self) -> None:
        self.play(2, FIRST)
        self.play(2, FIRST.next())

    @rule(rows=st.integers(1, 3), window=st.sampled_from(WINDOWS[:2]))
    def play(self, rows: int, window: Window) -> None:
        moment = window.start.replace(tzinfo=None)
        for _ in range(rows):
            name = f"t{len(self.played):03}"
            self.run(self.store.pool.execute(PLAY, name, moment, window.id))
            self.played[name] = window.id

    @rule()
    def note_late(self) -> None:
        fresh = {
            name
            for name, window_id in self.played.items()
            if name not in self.trained
            and name not in self.late
            and self.known[window_id].state in FINISHED
            and self.known[window_id].collected is not None
            and name not in self.known[window_id].collected
        }
        assert self.run(note_late(self.store)) == len(fresh)
        self.late |= dict.fromkeys(fresh, False)
        self.seen["late"] += len(fresh)

    # ── workers ──

    @rule(
        target=claims,
        window=st.sampled_from(WINDOWS),
        owner=st.sampled_from(OWNERS),
        later=st.booleans(),
    )
    def claim(self, window: Window, owner: str, later: bool):
        """``later``, when every lease is over: workers were killed, or sleep. Their claims stay
        among ``claims``, and may yet write."""
        if later:
            self.leases_end()
        known = self.known[window.key]
        attempt = claim_window(self.store, window, owner=owner, lease_s=600)
        if known.state in DONE:
            self.refused(attempt, AlreadyTrainedError)
            return multiple()
        if known.owner not in (None, owner):
            self.refused(attempt, WindowError)
            return multiple()
        claim = self.run(attempt)
        self.seen[f"{known.state} taken over"] += known.epoch > 0
        known.epoch += 1
        assert claim.epoch == known.epoch
        known.owner, known.attempts = owner, known.attempts + 1
        if known.state not in (WindowState.SCORED, WindowState.TRAINED):
            known.state = WindowState.CLAIMED
        self.newest[window.key] = Held(window, claim)
        return self.newest[window.key]

    @rule(window=st.sampled_from(WINDOWS), end=st.sampled_from([*FINISHED, *IN_WORK]))
    def work_goes_on(self, window: Window, end: WindowState) -> None:
        """The newest claim's next steps, as the flow takes them, until it reaches ``end``."""
        held = self.newest.get(window.key)
        while held is not None and (state := self.known[window.key].state) != end:
            if state == WindowState.CLAIMED:
                if window.recipe:
                    self.note_late()
                    self.admit(held)
                self.collect(held)
            elif state == WindowState.SCORED:
                self.read_champion(held)
                self.train(held)
            elif state == WindowState.TRAINED and end == WindowState.REJECTED:
                self.change(held, end)
            elif state == WindowState.TRAINED and self.leads_after_deploy(held):
                self.change(held, WindowState.DEPLOYED)
            elif state in NEXT:
                self.change(held, NEXT[state])
            if self.known[window.key].state == state:
                return

    @rule(end=st.sampled_from([*DONE, *IN_WORK]))
    def the_usual_course(self, end: WindowState) -> None:
        """A window is worked on, rows come late, and a recipe takes it up."""
        for window in WINDOWS:
            self.claim(window, "ada", later=True)
            self.work_goes_on(window, end)
            self.play(1, WINDOWS[0])

    @rule(committed=st.booleans(), order=st.permutations(WINDOWS[:2]))
    def two_at_once(self, committed: bool, order: list[Window]) -> None:
        """Another window is deployed while one is trained, before its commit or after it."""
        slow, fast = order
        self.claim(slow, "ada", later=True)
        self.work_goes_on(slow, WindowState.SCORED)
        if held := self.newest.get(slow.key):
            self.read_champion(held)
            if committed:
                self.train(held)
            self.claim(fast, "bob", later=False)
            self.work_goes_on(fast, WindowState.DEPLOYED)
            self.train(held)
            self.deploy(held)

    @rule(held=claims)
    def collect(self, held: Held) -> None:
        rows = self.run(self.store.pool.fetch(ROWS, held.window.id))
        batch = [row["trajectoryId"] for row in rows]
        free = {
            name
            for name, window_id in self.played.items()
            if name not in self.trained and window_id == held.window.id
        }
        assert set(batch) == {name for name in free if self.late.get(name, True)}
        if self.write(held, store_collected(self.store, held.claim, batch), WindowState.COLLECTED):
            held.batch = batch
            self.known[held.window.key].collected = set(batch)

    @rule(held=claims, state=st.sampled_from(STORED))
    def change(self, held: Held, state: WindowState) -> None:
        self.write(held, set_state(self.store, held.claim, state), state)

    @rule(window=st.sampled_from(WINDOWS), state=st.sampled_from(ENDS))
    def comes_to_an_end(self, window: Window, state: WindowState) -> None:
        if held := self.newest.get(window.key):
            self.change(held, state)

    @rule(held=claims)
    def read_champion(self, held: Held) -> None:
        """The update begins; the champion may change before its commit."""
        held.parent = self.champions[-1]

    @rule(held=claims)
    def train(self, held: Held) -> None:
        known = self.known[held.window.key]
        commit = commit_policy(
            self.store,
            held.claim,
            parent_version=held.parent,
            kind="lora",
            uri="file:///checkpoint",
            base_model="tiny",
            batch_id=self.run(next_batch(self.store, held.window.key)),
            trajectory_ids=held.batch,
            metrics={},
        )
        consumed = set(held.batch) & self.trained.keys()
        live = held.claim.epoch == known.epoch
        if live and known.policy is not None:
            self.refused(commit, AlreadyTrainedError)
        elif live and held.parent != self.champions[-1]:
            self.refused(commit, SupersededError)
            self.seen["superseded at the commit"] += 1
        elif live and consumed:
            self.refused(commit, AlreadyTrainedError)
        elif self.write(held, commit, WindowState.TRAINED):
            known.policy = len(self.parents)
            self.parents[known.policy] = held.parent
            self.trained |= dict.fromkeys(held.batch, held.window.key)
            self.seen["late, trained"] += len(set(held.batch) & self.late.keys())

    @rule(held=claims)
    def deploy(self, held: Held) -> None:
        self.leads_after_deploy(held)

    def leads_after_deploy(self, held: Held) -> bool:
        """The window's policy becomes champion, or the window is superseded."""
        known = self.known[held.window.key]
        if known.policy is None or known.state != WindowState.TRAINED:
            return False
        if known.policy == self.champions[-1]:
            return True
        deploy = commit_route(
            self.store,
            policy_version=known.policy,
            author=held.claim.owner,
            reason="better",
            expected_route_version=len(self.champions),
            claim=held.claim,
            candidate=known.policy,
        )
        if held.claim.epoch != known.epoch:
            self.refused(deploy, FencedError)
        elif self.parents[known.policy] != self.champions[-1]:
            self.refused(deploy, SupersededError)
            self.seen["superseded at the deployment"] += 1
            self.give_way(held)
        else:
            self.run(deploy)
            self.champions.append(known.policy)
            self.seen["promoted"] += 1
            return True
        return False

    @rule(held=claims)
    def give_way(self, held: Held) -> None:
        """Another policy leads, or seems to: the window is scored again and its play is free."""
        known = self.known[held.window.key]
        way = supersede(self.store, held.claim, "another policy leads")
        if held.claim.epoch != known.epoch:
            self.refused(way, FencedError)
            return
        unused = known.state == WindowState.TRAINED and known.policy not in self.line
        if not unused and known.state != WindowState.SCORED:
            self.refused(way, WindowError)
            return
        self.run(way)
        if unused:
            self.trained = {n: key for n, key in self.trained.items() if key != held.window.key}
            self.seen["superseded"] += 1
        known.state, known.policy, known.owner = WindowState.SCORED, None, None
        known.attempts = max(known.attempts - 1, 0)

    @rule()
    def operator_rolls_back(self) -> None:
        parent = self.parents[self.champions[-1]]
        if parent is not None:
            number = len(self.champions)
            back = commit_route(
                self.store,
                policy_version=parent,
                author="operator",
                reason="it lost money",
                expected_route_version=number,
            )
            self.run(back)
            self.champions.append(parent)

    @property
    def line(self) -> set[int]:
        """The champion and its ancestors."""
        line, version = set(), self.champions[-1]
        while version is not None:
            line.add(version)
            version = self.parents[version]
        return line

    @rule(held=claims, failed=st.booleans())
    def stop(self, held: Held, failed: bool) -> None:
        known = self.known[held.window.key]
        stop = release(self.store, held.claim, "stopped", "failed" if failed else "stopped")
        if held.claim.epoch != known.epoch:
            self.refused(stop, FencedError)
        elif known.state not in IN_WORK | {WindowState.TRAINED}:
            self.refused(stop, WindowError)
        else:
            self.run(stop)
            known.owner = None
            known.attempts = max(known.attempts, 1) if failed else max(known.attempts - 1, 0)

    @rule(held=claims)
    def admit(self, held: Held) -> None:
        if not held.window.recipe:
            return
        admit = admit_late(self.store, held.claim, held.window)
        if held.claim.epoch != self.known[held.window.key].epoch:
            self.refused(admit, FencedError)
            return
        self.run(admit)
        self.late |= {n: True for n in self.late if self.played[n] == held.window.id}

    def leases_end(self) -> None:
        self.run(self.store.pool.execute("UPDATE babylon.windows SET lease_until = now()"))
        for known in self.known.values():
            known.owner = None

    # ── what must hold ──

    def write(self, held: Held, operation, state: WindowState) -> bool:
        """Run a transition; it lands exactly if the claim is live and the table allows it."""
        known = self.known[held.window.key]
        if held.claim.epoch != known.epoch:
            self.refused(operation, FencedError)
            return False
        if state not in TRANSITIONS[known.state]:
            self.refused(operation, WindowError)
            return False
        self.run(operation)
        self.seen[f"{known.state} to {state}"] += 1
        known.state = state
        if state not in IN_WORK | {WindowState.TRAINED}:
            known.owner = None
        if state == WindowState.SKIPPED:
            known.attempts = min(known.attempts, MOST_SKIPS)
        elif state not in IN_WORK | {WindowState.FAILED}:
            known.attempts = 0
        return True

    def refused(self, operation, error: type[WindowError]) -> None:
        with pytest.raises(error) as caught:
            self.run(operation)
        assert caught.type is error
        self.seen[error.__name__] += 1

    @invariant()
    def postgres_agrees(self) -> None:
        self.run(self.compare())

    async def compare(self) -> None:
        stored = {row.window_id: row for row in await list_windows(self.store)}
        for key, known in self.known.items():
            if (row := stored.pop(key, None)) is None:
                assert known.epoch == 0
                continue
            assert (row.state, row.epoch, row.attempts) == (
                known.state,
                known.epoch,
                known.attempts,
            )
            assert (row.owner if row.leased else None) == known.owner
            assert (row.retry_at is not None) <= (known.attempts > 0)
        assert not stored
        trained = await self.store.pool.fetch(
            "SELECT trajectory_id, window_id FROM babylon.trained"
        )
        assert {row[0]: row[1] for row in trained} == self.trained
        late = await self.store.pool.fetch(
            "SELECT trajectory_id, admitted_to IS NOT NULL FROM babylon.late"
        )
        assert {row[0]: row[1] for row in late} == self.late
        assert not {name for name, admitted in self.late.items() if not admitted} & set(
            self.trained
        )
        await self.compare_fates()

    async def compare_fates(self) -> None:
        policies = {key: known.policy for key, known in self.known.items()}
        for name, version, fate in await self.store.pool.fetch(
            "SELECT trajectory_id, policy_version, fate FROM babylon.learning"
        ):
            key = self.trained.get(name)
            if key is None:
                assert fate in ("free", "released for training again")
                continue
            assert version == policies[key]
            if version in self.line:
                assert fate == "in the champion's line"
            elif self.known[key].state == WindowState.TRAINED:
                assert fate == "in a candidate"
            elif version in self.champions:
                assert fate == "in a policy rolled back"
            else:
                assert fate == "in a rejected candidate"


MUST_BE_SEEN = {
    "claimed taken over",
    "claimed to collected",
    "collected to validated",
    "validated to scored",
    "scored to trained",
    "trained to deployed",
    "FencedError",
    "AlreadyTrainedError",
    "WindowError",
    "late",
    "late, trained",
    "promoted",
    "superseded",
    "superseded at the commit",
    "superseded at the deployment",
}


def test_the_store_does_what_the_model_of_the_machine_says(settings: Settings) -> None:
    seen: Counter[str] = Counter()
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        store = runner.run(stack.enter_async_context(open_store(settings)))
        try:
            runner.run(store.pool.execute("INSERT INTO \"User\" (id) VALUES ('player')"))
            run_state_machine_as_test(
                lambda: Machine(runner, store, seen),
                settings=run_settings(max_examples=28, stateful_step_count=25, deadline=None),
            )
        finally:
            runner.run(stack.aclose())
    # what was never played was never checked
    assert {name for name in MUST_BE_SEEN if not seen[name]} == set(), seen
