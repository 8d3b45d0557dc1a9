"""choose(): which requests are computed next, together."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from graphwright.serving.batching import Choice, Timings, choose

NOW = 100.0


@dataclass(frozen=True)
class Request:
    sizes: tuple[int, ...]
    key: tuple[bytes, ...] = ()
    deadline: float | None = None


def rows(*counts: int) -> list[Request]:
    return [Request((n,)) for n in counts]


def test_one_request_is_computed_at_once_in_the_smallest_size() -> None:
    timings = Timings({(1,): 1.0, (4,): 1.5, (8,): 2.0}, exact=True)
    assert choose(rows(1), timings, NOW) == Choice((0,), (1,))


def test_a_larger_size_is_taken_where_that_does_more_a_second() -> None:
    cheap = Timings({(1,): 1.0, (4,): 1.0, (8,): 1.1}, exact=True)
    assert choose(rows(*[1] * 5), cheap, NOW) == Choice((0, 1, 2, 3, 4), (8,))
    dear = Timings({(1,): 1.0, (4,): 1.0, (8,): 1.9}, exact=True)
    assert choose(rows(*[1] * 5), dear, NOW) == Choice((0, 1, 2, 3), (4,))


def test_where_any_size_is_computed_there_is_no_padding() -> None:
    timings = Timings({(1,): 1.0, (4,): 1.0, (8,): 1.1}, exact=False)
    assert choose(rows(*[1] * 5), timings, NOW) == Choice((0, 1, 2, 3, 4), (5,))


# 8 rows take hardly longer than one, and time grows with the length.
BY_LENGTH = Timings(
    {(n, length): length * (1 + n / 8) for n in (1, 4, 8) for length in (8, 64)}, exact=True
)


def test_short_requests_wait_for_a_batch_of_their_own() -> None:
    short, long = Request((1, 8)), Request((1, 64))
    waiting = [long, *[short] * 8, *[long] * 7]
    first = choose(waiting, BY_LENGTH, NOW)
    assert first.sizes == (8, 64)
    assert first.members == (0, *range(9, 16))  # The long ones.
    second = choose([waiting[i] for i in range(16) if i not in first.members], BY_LENGTH, NOW)
    assert second == Choice(tuple(range(8)), (8, 8))


def test_short_requests_fill_rows_that_are_computed_anyway() -> None:
    waiting = [Request((1, 64)), Request((1, 64)), Request((1, 8)), Request((1, 64))]
    assert choose(waiting, BY_LENGTH, NOW) == Choice((0, 1, 2, 3), (4, 64))


def test_lengths_that_are_padded_to_the_same_size_are_computed_in_turn() -> None:
    """The shortest would overtake all others for as long as there are any."""
    lengths = [60, 50, 40, 12, 11, 10, 9, 30, 20, 58, 57]
    choice = choose([Request((1, n)) for n in lengths], BY_LENGTH, NOW)
    assert choice == Choice(tuple(range(8)), (8, 64))


def test_nobody_waits_for_long_behind_others_of_the_same_cost() -> None:
    timings = Timings({(n, 128): 1.0 for n in (1, 4, 8)}, exact=True)
    drawn = random.Random(5)
    queue = [(0, Request((1, drawn.randint(1, 128)))) for _ in range(64)]
    waited = []
    for turn in range(200):
        chosen = choose([request for _, request in queue], timings, NOW).members
        waited += [turn - queue[index][0] for index in chosen]
        queue = [each for index, each in enumerate(queue) if index not in chosen]
        queue += [(turn + 1, Request((1, drawn.randint(1, 128)))) for _ in chosen]
    assert max(waited) <= 64 / 8


def test_the_oldest_is_always_computed_next() -> None:
    waiting = [Request((1, 64)), *[Request((1, 8))] * 30]
    assert 0 in choose(waiting, BY_LENGTH, NOW).members


def test_what_would_be_late_is_computed_first_in_a_size_that_is_quick_enough() -> None:
    timings = Timings({(1,): 1.0, (8,): 5.0}, exact=True)
    waiting = [*rows(1, 1, 1), Request((1,), deadline=NOW + 1.5)]
    assert choose(waiting, timings, NOW) == Choice((3,), (1,))
    unhurried = [*rows(1, 1, 1), Request((1,), deadline=NOW + 60)]
    assert 0 in choose(unhurried, timings, NOW).members


def test_requests_that_would_be_late_pass_the_oldest_only_a_few_times() -> None:
    timings = Timings({(1,): 1.0}, exact=True)
    waiting = [*rows(1), *[Request((1,), (b"other",), NOW + 1.5)] * 3]
    taken = [choose(waiting, timings, NOW, passed=n).members for n in range(5)]
    assert taken == [(1,), (1,), (1,), (0,), (0,)]


def test_requests_with_other_values_are_not_joined() -> None:
    timings = Timings({(8,): 1.0}, exact=True)
    waiting = [Request((1,), (b"a",)), Request((1,), (b"b",)), Request((1,), (b"a",))]
    assert choose(waiting, timings, NOW).members == (0, 2)


def test_where_padding_does_harm_only_equal_lengths_are_joined() -> None:
    for exact in (True, False):
        timings = Timings(dict(BY_LENGTH.seconds), exact=exact, pads=False)
        waiting = [Request((1, 8)), Request((1, 5)), Request((1, 8)), Request((1, 64))]
        assert choose(waiting, timings, NOW).members == (0, 2)
    timings = Timings(dict(BY_LENGTH.seconds), exact=True, pads=False)
    assert choose([Request((1, 5)), Request((1, 5))], timings, NOW) == Choice((0,), (1, 5))


def test_timings_without_padding_forget_what_was_found_with_it() -> None:
    with_padding = Timings({(1, 8): 1.0, (1, 16): 2.0}, exact=True)
    assert with_padding.points_for((1, 5))
    assert with_padding.share((1, 5)) == 1.0
    without = replace(with_padding, pads=False)
    assert not without.points_for((1, 5))
    assert without.share((1, 5)) == 2.0  # The most there is, since nothing is known.


def test_what_no_size_holds_is_computed_alone() -> None:
    assert choose([Request((9, 8)), Request((1, 8))], BY_LENGTH, NOW) == Choice((0,), (9, 8))


def test_what_is_computed_alone_has_a_size_that_there_is() -> None:
    """What was saved without its model answers no other."""
    assert BY_LENGTH.sizes_alone((2, 5)) == (4, 8)
    assert BY_LENGTH.sizes_alone((9, 5)) == (9, 5)
    assert Timings(dict(BY_LENGTH.seconds), exact=False).sizes_alone((2, 5)) == (2, 5)


def test_the_most_rows_of_a_call_are_those_of_its_length() -> None:
    seconds = {(8, 8): 1.0, (2, 64): 1.0}
    assert Timings(seconds, exact=True).most_rows((5,)) == 8
    assert Timings(seconds, exact=True).most_rows((9,)) == 2
    assert Timings(seconds, exact=True).most_rows((65,)) == 0
    assert Timings(seconds, exact=True, pads=False).most_rows((5,)) == 0


def test_the_smallest_measured_size_is_named_whatever_was_quickest() -> None:
    noisy = Timings({(1, 8): 2.0, (2, 8): 1.0}, exact=False)
    assert noisy.measured((1, 5)) == (1, 8)
    assert noisy.measured((1, 9)) is None


sizes_of_requests = st.tuples(st.integers(1, 10), st.integers(1, 80))
requests = st.builds(
    Request,
    sizes_of_requests,
    st.sampled_from([(), (b"x",)]),
    st.none() | st.floats(NOW - 1, NOW + 200),
)


@given(st.lists(requests, min_size=1, max_size=40), st.booleans(), st.booleans())
def test_any_choice_holds_its_members_and_the_queue_comes_to_an_end(
    waiting: Sequence[Request], exact: bool, pads: bool
) -> None:
    timings = Timings(dict(BY_LENGTH.seconds), exact=exact, pads=pads)
    left = list(waiting)
    turns = 0
    while left:
        undated = all(each.deadline is None for each in left)
        made = choose(left, timings, NOW)
        members = [left[index] for index in made.members]
        assert len(set(made.members)) == len(members) >= 1
        assert 0 in made.members or not undated
        assert sum(each.sizes[0] for each in members) <= made.sizes[0]
        assert all(each.sizes[1] <= made.sizes[1] for each in members)
        assert len({each.key for each in members}) == 1
        if not pads:
            assert len({each.sizes[1] for each in members}) == 1
        if exact and len(members) > 1:
            assert made.sizes in timings.seconds
        left = [each for index, each in enumerate(left) if index not in made.members]
        turns += 1
    assert turns <= len(waiting)
