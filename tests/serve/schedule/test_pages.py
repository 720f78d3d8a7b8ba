"""Pages against a model of them: who holds what, what is found, what is forgotten first."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.schedule.pages import NOTHING, Pages, chain

NAMES = [bytes([i]) for i in range(8)]


class Model:
    """The same in lists: ``free`` in the order in which pages will be taken, nameless ones first, newest first."""

    def __init__(self, count: int):
        self.refs = [0] * count
        self.blank = list(range(count - 1, 0, -1))
        self.named: list[int] = []
        self.names: dict[int, bytes] = {}

    def take(self, count: int) -> list[int] | None:
        if count > len(self.blank) + len(self.named):
            return None
        new = [self.blank.pop() for _ in range(min(count, len(self.blank)))]
        old, self.named = self.named[: count - len(new)], self.named[count - len(new) :]
        for page in old:
            del self.names[page]
        for page in new + old:
            self.refs[page] = 1
        return new + old

    def hold(self, pages: list[int]) -> None:
        for page in pages:
            self.refs[page] += 1
        self.named = [p for p in self.named if not self.refs[p]]

    def release(self, pages: list[int]) -> None:
        for page in reversed(pages):
            self.refs[page] -= 1
            if not self.refs[page]:
                (self.named if page in self.names else self.blank).append(page)

    def publish(self, page: int, name: bytes) -> None:
        if page not in self.names and name not in self.names.values():
            self.names[page] = name

    def find(self, names: list[bytes]) -> list[int]:
        where = {name: page for page, name in self.names.items()}
        out = []
        for name in names:
            if name not in where:
                break
            out.append(where[name])
        return out


@settings(max_examples=200)
@given(
    st.integers(2, 9),
    st.lists(st.tuples(st.sampled_from("tthrrp"), st.integers(0, 50), st.integers(0, 50)), max_size=60),
)
def test_pages_do_what_a_model_does(count, moves):
    pages, model = Pages(count, 4), Model(count)
    held: list[list[int]] = []
    known: dict[int, object] = {}
    for kind, a, b in moves:
        names = NAMES[a % 4 :]  # a prompt
        if kind == "t":
            taken, want = pages.take(a % 4), model.take(a % 4)
            assert (taken is None) == (want is None)
            if want is not None:
                assert sorted(taken.tolist()) == sorted(want)
                held.append(taken.tolist())
        elif kind == "r" and held:
            gone = held.pop(a % len(held))
            pages.release(np.array(gone, np.int32))
            model.release(gone)
        elif kind == "p" and held and held[a % len(held)]:
            page = held[a % len(held)][b % len(held[a % len(held)])]
            pages.publish([page], [NAMES[b % 8]])
            model.publish(page, NAMES[b % 8])
        elif kind == "h":
            limit = b % 6
            run = pages.follow(names, limit, known.get(a % 4, NOTHING))
            assert run.pages.tolist() == model.find(names[:limit]) == pages.find(names, limit).tolist()
            known[a % 4] = run
            pages.hold(run.pages)
            model.hold(run.pages.tolist())
            held.append(run.pages.tolist())
        pages.check(np.array(h, np.int32) for h in held)
        assert pages.free == len(model.blank) + len(model.named)
        assert {p: n for p, n in enumerate(pages._names) if n is not None} == model.names
    for one in held:
        pages.release(np.array(one, np.int32))
    assert pages.used == 0


def test_what_was_freed_longest_ago_is_forgotten_first_and_the_end_of_a_prompt_before_its_beginning():
    pages, names = Pages(7, 4), [b"a", b"b", b"c", b"d", b"e", b"f"]
    first, second = pages.take(3), pages.take(3)
    pages.publish(first.tolist(), names[:3])
    pages.publish(second.tolist(), names[3:])
    pages.release(second)
    pages.release(first)
    lost = []
    for _ in names:
        pages.take(1)
        lost += [n for n in names if n not in pages._index and n not in lost]
    assert lost == [b"f", b"e", b"d", b"c", b"b", b"a"]


def test_a_page_that_is_found_again_and_given_back_is_young_again():
    pages = Pages(3, 4)
    one, two = pages.take(1), pages.take(1)
    pages.publish([one[0]], [b"a"])
    pages.publish([two[0]], [b"b"])
    pages.release(one)
    pages.release(two)
    for _ in range(20):  # more than the queue is long: old entries are cleared away
        found = pages.find([b"a"], 1)
        pages.hold(found)
        pages.release(found)
    pages.check([])
    assert pages.take(1).tolist() == two.tolist() and pages.find([b"a"], 1).tolist() == one.tolist()


def test_a_name_that_another_page_has_stays_there():
    pages = Pages(4, 4)
    one, two = pages.take(1), pages.take(1)
    pages.publish(one.tolist(), [b"a"])
    pages.publish(two.tolist(), [b"a"])
    assert pages.find([b"a"], 1).tolist() == one.tolist()
    pages.release(two)
    pages.check([one])
    assert pages.take(2).tolist() == [3, 2]  # nameless: taken before what is cached


def test_known_runs_follow_what_is_forgotten_and_what_comes():
    pages, names = Pages(5, 4), [b"a", b"b", b"c"]
    own = pages.take(4)
    pages.publish(own[:2].tolist(), names[:2])
    run = pages.follow(names, 3, NOTHING)
    assert run.pages.tolist() == own[:2].tolist()
    pages.publish([own[2]], [b"c"])
    run = pages.follow(names, 3, run)
    assert run.pages.tolist() == own[:3].tolist()
    pages.release(own)
    again = pages.take(2)  # the nameless one, and c, forgotten
    pages.publish([again[1]], [b"z"])
    assert pages.follow(names, 3, run).pages.tolist() == own[:2].tolist()


def test_a_page_given_back_twice_is_caught():
    pages = Pages(3, 4)
    taken = pages.take(1)
    pages.release(taken)
    with pytest.raises(AssertionError, match="nobody holds"):
        pages.release(taken)


def test_no_pages_is_an_error():
    with pytest.raises(ValueError, match=r"serve\.pages must be >= 1, got 0"):
        Pages(1, 4)


def test_names_are_of_all_tokens_before():
    tokens = np.arange(12, dtype=np.int32)
    whole = chain(tokens, 4)
    assert whole == chain(tokens[:8], 4) + chain(tokens[8:], 4, whole[1])
    other = tokens.copy()
    other[0] = 99
    assert not set(whole) & set(chain(other, 4))
    assert chain(tokens[:3], 4) == []
