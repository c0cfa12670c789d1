"""Prefix trees against brute force, and the counts of lost sharing."""

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from babylon.training.grpo.attention.layout import Layout, windowed
from babylon.training.grpo.portions import cut
from babylon.training.grpo.prefix_tree import PrefixTree, compile_tree, find_sharing
from babylon.training.grpo.training_input import CallTokens
from tests.unit.training.grpo.trees import call, tokens

binary = st.lists(st.integers(0, 1), min_size=1, max_size=5)
binary_windows = st.lists(st.builds(call, binary, binary), min_size=1, max_size=12)


def inputs(one: CallTokens) -> list[int]:
    return [*one.prompt, *one.completion][:-1]


def prefixes(calls: Sequence[CallTokens]) -> set[tuple[int, ...]]:
    return {tuple(inputs(c)[: n + 1]) for c in calls for n in range(len(inputs(c)))}


def path(tree: PrefixTree, index: int) -> list[int]:
    """Tokens from the root to the node in which a call ends."""
    node, found = tree.node_of_call[index], list[int]()
    while node >= 0:
        found = tree.nodes[node].tokens.tolist() + found
        node = tree.nodes[node].parent
    return found


def assert_is_the_tree_of(tree: PrefixTree, calls: Sequence[CallTokens]) -> None:
    assert list(tree.calls) == list(calls)
    assert tree.unique_tokens == len(prefixes(calls))
    for index, one in enumerate(calls):
        assert path(tree, index)[: len(inputs(one))] == inputs(one)
    for index, node in enumerate(tree.nodes):
        below = [i for i, n in enumerate(tree.nodes) if n.parent == index]
        assert len(below) != 1  # compressed
        assert all(index < i < node.last and tree.nodes[i].start == node.end for i in below)


@given(binary_windows, st.data())
def test_a_tree_holds_every_prefix_once(calls: list[CallTokens], data: st.DataObject) -> None:
    tree = compile_tree(calls)
    assert_is_the_tree_of(tree, calls)
    part = data.draw(st.lists(st.sampled_from(range(len(calls))), min_size=1, unique=True))
    assert_is_the_tree_of(tree.only(part), [calls[index] for index in part])


def window(*, private_first: bool) -> list[CallTokens]:
    """300 calls: 1k system, 2.5k market shared by 10 agents, 500 private, 150 response."""
    random, calls = Random(0), []
    system = [random.randrange(30_000) for _ in range(1000)]
    for _ in range(30):
        market = [random.randrange(30_000) for _ in range(2500)]
        for _ in range(10):
            private = [random.randrange(30_000) for _ in range(500)]
            ordered = private + market if private_first else market + private
            calls.append(call(system + ordered, [random.randrange(30_000) for _ in range(150)]))
    return calls


def test_shared_text_first_shares_4_6_times() -> None:
    sharing = find_sharing(compile_tree(window(private_first=False)))
    assert sharing.flat_tokens == 300 * 4149
    assert sharing.flat_tokens / sharing.unique_tokens == pytest.approx(4.6, abs=0.05)
    assert sharing.lost_tokens == 0 and sharing.advice is None


def test_private_text_first_leaves_1_3_times_and_the_linter_says_where() -> None:
    tree = compile_tree(window(private_first=True))
    sharing = find_sharing(tree)
    assert sharing.flat_tokens / sharing.unique_tokens == pytest.approx(1.3, abs=0.05)
    assert sharing.lost_tokens == pytest.approx(30 * 9 * 2500, abs=100)
    assert sharing.advice is not None
    assert "from token 1000 a segment of 500 tokens differs between calls" in sharing.advice
    assert "shrink 4.6 times, now 1.3 times" in sharing.advice


def test_completions_that_repeat_each_other_are_not_lost_sharing() -> None:
    random = Random(0)
    reply = tokens(random, 80)
    calls = [call(tokens(random, 50), reply) for _ in range(4)]
    assert find_sharing(compile_tree(calls)).lost_tokens == 0


def test_naming_a_call_twice_or_none_is_refused() -> None:
    tree = compile_tree([call([1], [2]), call([1], [3])])
    with pytest.raises(ValueError, match="twice"):
        tree.only([1, 1])
    with pytest.raises(ValueError, match="at least one"):
        compile_tree([])


def coverage(layout: Layout) -> np.ndarray:
    """Number of pieces of a layout in which query i sees key j: ``[Q, K]``."""
    seen = np.zeros((layout.queries, len(layout.first)), dtype=int)
    for d in layout.dense:
        pairs = 1 if d.mask is None else (d.mask == 0).astype(int)
        assert d.mask is None or (d.mask == 0).any(1).all()  # a kernel's row of nothing is NaN
        seen[d.first : d.last, d.keys] += pairs
    for piece in layout.local:
        queries = (piece.last - piece.first) // piece.count
        keys = (piece.end - piece.start) // piece.count
        causal = np.tril(np.ones((queries, keys), dtype=int))
        each = causal if piece.mask is None else (piece.mask == 0).astype(int)
        assert piece.mask is not None or queries == keys
        for run in range(piece.count):
            first, start = piece.first + run * queries, piece.start + run * keys
            seen[first : first + queries, start : start + keys] += each
    return seen


def intervals(layout: Layout, window: int | None = None) -> np.ndarray:
    query = np.arange(layout.queries)[:, None]
    seen = (layout.first <= query) & (query < layout.last)
    if window is not None:
        seen &= layout.positions[layout.rows][:, None] - layout.positions < window
    return seen.astype(int)


def mixed_window(random: Random) -> list[CallTokens]:
    """Long and short segments, equal and unequal leaves, calls inside calls."""
    trunk = tokens(random, random.choice([1, 40, 900]))
    calls = []
    for _ in range(random.randint(1, 6)):
        branch = trunk[: random.randint(1, len(trunk))] + tokens(random, random.choice([1, 9, 450]))
        length = random.choice([5, 30, 140])
        calls += [
            call(branch + tokens(random, random.choice([1, length])), tokens(random, 4))
            for _ in range(random.randint(1, 6))
        ]
    return calls


@pytest.mark.parametrize("seed", range(12))
def test_pieces_cover_every_visible_pair_of_a_portion_exactly_once(seed: int) -> None:
    random = Random(seed)
    tree = compile_tree(mixed_window(random))
    for max_tokens in (10_000, 700, 60):
        portions, _ = cut(tree, max_tokens)
        assert sum(len(p.tokens) for p in portions) == tree.unique_tokens
        for portion in portions:
            assert len(portion.tokens) <= max_tokens
            np.testing.assert_array_equal(coverage(portion.layout), intervals(portion.layout))
            count = random.randint(1, len(portion.tokens))
            rows = np.array(sorted(random.sample(range(len(portion.tokens)), count)))
            some = portion.layout.select(rows)
            np.testing.assert_array_equal(intervals(some), intervals(portion.layout)[rows])
            np.testing.assert_array_equal(coverage(some), intervals(some))
            for layout, window in ((portion.layout, 100), (some, 5)):
                sliding = windowed(layout, window)
                np.testing.assert_array_equal(coverage(sliding), intervals(layout, window))


@pytest.mark.parametrize("seed", range(6))
def test_every_token_of_a_portion_sees_its_own_prefix_and_nothing_else(seed: int) -> None:
    tree = compile_tree(mixed_window(Random(seed)))
    known = prefixes(tree.calls)
    for max_tokens in (10_000, 60):
        portions, _ = cut(tree, max_tokens)
        for portion in portions:
            ends = [portions[a.portion].tokens[a.tokens] for a in portion.ancestors]
            ids = np.concatenate([portion.tokens, *ends])
            places = [portions[a.portion].positions[a.tokens] for a in portion.ancestors]
            positions = np.concatenate([portion.positions, *places])
            for row, seen in enumerate(intervals(portion.layout)):
                keys = np.flatnonzero(seen)
                order = keys[np.argsort(positions[keys])]
                assert positions[order].tolist() == list(range(portion.positions[row] + 1))
                assert tuple(ids[order].tolist()) in known


def conversation(turns: int) -> list[CallTokens]:
    """Each reply is a leaf, because the next prompt holds it in other tokens."""
    random = Random(0)
    said, calls = tokens(random, 30), []
    for _ in range(turns):
        said = said + tokens(random, 20)
        calls.append(call(said, tokens(random, 10)))
        said = said + tokens(random, 10)
    return calls


@pytest.mark.parametrize("max_tokens", [10_000, 500])
def test_a_deep_turn_is_merged_from_few_pieces(max_tokens: int) -> None:
    """Their number grows with the logarithm of the depth, not with the depth."""
    most = {}
    for turns in (4, 64):
        merges = [0]
        for portion in cut(compile_tree(conversation(turns)), max_tokens)[0]:
            pieces = np.zeros(portion.layout.queries, dtype=int)
            for piece in portion.layout.dense:
                pieces[piece.first : piece.last] += 1
            merges.append(int(pieces.max()))
        most[turns] = max(merges)
    assert most[64] <= most[4] + 6
