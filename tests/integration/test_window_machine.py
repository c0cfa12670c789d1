"""A model of the window machine, played at random against the real store.

Several owners claim, work, are stopped, fenced or killed while time passes and rows arrive. The
model knows what each step must do; after every step Postgres must agree with it.
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

from babylon.core.errors import AlreadyTrainedError, FencedError, WindowError
from babylon.core.game_rows import UNTRAINED
from babylon.core.settings import Settings
from babylon.core.types import Claim
from babylon.core.windows import DONE, FINISHED, IN_WORK, TRANSITIONS, Window, WindowState
from babylon.store import Store, open_store
from babylon.store.late import admit_late, note_late, store_collected
from babylon.store.policies import commit_policy, ensure_base
from babylon.store.windows import claim_window, list_windows, release, set_state

START = datetime(2025, 11, 14, 9, tzinfo=UTC)
FIRST = Window(START)
WINDOWS = (FIRST, Window(START, recipe="again"))
OWNERS = ("ada", "bob")
NEXT = {WindowState.COLLECTED: WindowState.VALIDATED, WindowState.VALIDATED: WindowState.SCORED}
STORED = tuple(s for s in WindowState if s not in (WindowState.OPEN, WindowState.CLOSING))
ENDS = (WindowState.FAILED, WindowState.SKIPPED, WindowState.CLAIMED)
TABLES = (
    "babylon.windows, babylon.collected, babylon.late, babylon.trained, babylon.routes,"
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
    """What the model knows of one window."""

    state: WindowState = WindowState.READY
    epoch: int = 0
    owner: str | None = None  # while the lease runs
    attempts: int = 0
    collected: set[str] | None = None


@dataclass
class Held:
    """A claim as its worker has it, live or not, and what that worker collected."""

    window: Window
    claim: Claim
    batch: list[str] = field(default_factory=list)


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
        self.run(self.begin())

    def run(self, coroutine):
        return self.runner.run(coroutine)

    async def begin(self) -> None:
        await self.store.pool.execute(f"TRUNCATE {TABLES}")
        await ensure_base(self.store, uri="file:///base", base_model="tiny")

    # ── the game ──

    @initialize()
    def some_play(self) -> None:
        self.play(2)

    @rule(rows=st.integers(1, 3))
    def play(self, rows: int) -> None:
        moment = FIRST.start.replace(tzinfo=None)
        for _ in range(rows):
            name = f"t{len(self.played):03}"
            self.run(self.store.pool.execute(PLAY, name, moment, FIRST.id))
            self.played[name] = FIRST.id

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
        assert self.run(note_late(self.store, 60)) == len(fresh)
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
                self.train(held)
            elif state == WindowState.TRAINED:
                self.change(held, end if end in DONE else WindowState.DEPLOYED)
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
            self.play(1)

    @rule(held=claims)
    def collect(self, held: Held) -> None:
        rows = self.run(self.store.pool.fetch(ROWS, held.window.id))
        batch = [row["trajectoryId"] for row in rows]
        free = {name for name in self.played if name not in self.trained}
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
    def train(self, held: Held) -> None:
        known = self.known[held.window.key]
        commit = commit_policy(
            self.store,
            held.claim,
            parent_version=0,
            kind="lora",
            uri="file:///checkpoint",
            base_model="tiny",
            batch_id=f"window-{held.window.key}",
            trajectory_ids=held.batch,
            metrics={},
        )
        consumed = set(held.batch) & self.trained.keys()
        committed = held.window.key in self.committed
        if held.claim.epoch == known.epoch and (consumed or committed):
            self.refused(commit, AlreadyTrainedError)
        elif self.write(held, commit, WindowState.TRAINED):
            self.trained |= dict.fromkeys(held.batch, held.window.key)
            self.seen["late, trained"] += len(set(held.batch) & self.late.keys())

    @rule(held=claims, failed=st.booleans())
    def stop(self, held: Held, failed: bool) -> None:
        known = self.known[held.window.key]
        stop = release(self.store, held.claim, "stopped", failed=failed)
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
        if state not in IN_WORK | {WindowState.FAILED}:
            known.attempts = 0
        return True

    def refused(self, operation, error: type[WindowError]) -> None:
        with pytest.raises(error) as caught:
            self.run(operation)
        assert caught.type is error
        self.seen[error.__name__] += 1

    @property
    def committed(self) -> set[str]:
        return set(self.trained.values()) | {
            key for key, known in self.known.items() if known.state in FINISHED
        }

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
