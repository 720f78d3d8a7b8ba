"""Stops, unfinished characters, and that text, ids and log-probabilities go together."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.bytetext import ByteText
from serve.request import Logprobs
from serve.text import train_bpe
from serve.writer import NoText, Stops, Writer

BYTES = ByteText(512, 0, 1)
BPE = train_bpe(["the end of the line\n" * 8, "é日本語🙂 stop STOP"], 290)


NEVER = Stops()


def write(ids, stops=NEVER, sizes=(1,), text=BYTES, limit=1 << 20):
    """All pieces of ``ids`` in steps of ``sizes``, repeated, and the writer."""
    writer, pieces, at, turn = Writer(text.stream(), stops, limit), [], 0, 0
    while at < len(ids) and not writer.ended:
        step = ids[at : at + sizes[turn % len(sizes)]]
        marks = np.array(step, np.float32)
        logprobs = Logprobs(marks, np.array(step, np.int32)[:, None], marks[:, None])
        pieces.append(writer.push(step, logprobs))
        at, turn = at + len(step), turn + 1
    pieces.append(writer.finish())
    return [p for p in pieces if p], writer


def whole(pieces):
    return "".join(p.text for p in pieces), [t for p in pieces for t in p.tokens]


STEPS = [(1,), (2,), (3, 1), (100,)]


@pytest.mark.parametrize("sizes", STEPS, ids=str)
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_cuts_text_and_tokens(include, sizes):
    ids = BYTES.encode("one two END three")
    pieces, writer = write(ids, Stops(("END",), include=include), sizes)
    text, tokens = whole(pieces)
    assert text == ("one two END" if include else "one two ")
    assert tokens == BYTES.encode("one two END")  # up to the token that completes it
    assert writer.ended and writer.count == len(tokens)


@pytest.mark.parametrize("sizes", STEPS, ids=str)
def test_a_stop_id_that_is_kept(sizes):
    pieces, writer = write(BYTES.encode("ab;cd"), Stops(ids=(BYTES.encode(";")[0],)), sizes)
    assert whole(pieces) == ("ab;", BYTES.encode("ab;")) and writer.ended


def test_failure_39_text_and_ids_are_held_back_together():
    """Nothing of what may begin a stop string is shown, neither text nor ids."""
    writer = Writer(BYTES.stream(), Stops(("</think>",)), 100)
    seen, tokens, ends = "", [], ("so </thin ai", "so </thin air")
    for i in BYTES.encode("so </thin air"):
        piece = writer.push([i])
        seen, tokens = seen + piece.text, tokens + piece.tokens
        assert BYTES.encode(seen) == tokens and seen in ("s", "so", "so ", "so </thin ", "so </thin a", *ends)
    assert seen == "so </thin air"


def test_failure_27_nothing_after_the_stop_when_several_tokens_come_at_once():
    ids = BYTES.encode("x STOP and more")
    pieces, writer = write(ids, Stops(("STOP",)), (100,))
    text, tokens = whole(pieces)
    assert text == "x " and tokens == BYTES.encode("x STOP") and writer.count == 6
    assert sum(len(p.logprobs.chosen) for p in pieces) == 6


@pytest.mark.parametrize(("stops", "text"), [(("bc", "abcd"), "a"), (("d", "abcd"), ""), (("cd", "bcd"), "a")])
def test_the_string_complete_first_counts_and_of_those_the_longest(stops, text):
    assert whole(write(BYTES.encode("abcde"), Stops(stops))[0])[0] == text


def test_a_stop_inside_one_token():
    ids = BPE.encode("the end of the line\n")
    assert len(ids) < 12, "tokens of several characters"
    assert whole(write(ids, Stops(("d o",)), text=BPE)[0])[0] == "the en"


def test_stops_count_from_min_tokens_on():
    ids = BYTES.encode("a.b.c")
    assert whole(write(ids, Stops((".",), min_tokens=2))[0])[0] == "a"
    assert whole(write(ids, Stops((".",), min_tokens=3))[0])[0] == "a.b"
    dot = (BYTES.encode(".")[0],)
    assert whole(write(ids, Stops(ids=dot, min_tokens=1))[0])[0] == "a."
    assert whole(write(ids, Stops(ids=dot, min_tokens=2))[0])[0] == "a.b."


def test_the_limit_drops_tokens():
    pieces, writer = write(BYTES.encode("abc"), limit=0)
    assert pieces == [] and writer.count == 0
    assert whole(write(BYTES.encode("abc"), limit=2)[0])[0] == "ab"


@given(
    st.text(max_size=30), st.lists(st.text(min_size=1, max_size=4), max_size=3), st.lists(st.integers(1, 5), min_size=1)
)
def test_failure_41_any_step_size_gives_the_same(text, strings, sizes):
    """And the text is what a search of the whole would give."""
    for tokenizer in (BYTES, BPE):
        ids = tokenizer.encode(text)
        stops = Stops(tuple(strings))
        pieces, writer = write(ids, stops, sizes, tokenizer)
        one, _ = write(ids, stops, (1,), tokenizer)
        assert whole(pieces) == whole(one)
        got, tokens = whole(pieces)
        assert tokens == ids[: writer.count]
        ends = [(text.find(s) + len(s), text.find(s)) for s in strings if s in text]
        assert got == (text[: min(ends)[1]] if ends else text) and writer.ended == bool(ends)


@given(st.text(max_size=20), st.lists(st.integers(1, 5), min_size=1))
def test_failure_42_no_half_character_is_shown(text, sizes):
    pieces, _ = write(BYTES.encode(text), sizes=sizes)
    assert "".join(p.text for p in pieces) == text
    for p in pieces:
        assert BYTES.encode(p.text) == p.tokens
        assert p.logprobs.ids[:, 0].tolist() == p.tokens and len(p.offsets) == len(p.tokens)
    starts = [o for p in pieces for o in p.offsets]
    assert starts == [i for i, c in enumerate(text) for _ in c.encode()]


def test_an_unfinished_character_ends_as_a_replacement():
    ids = BYTES.encode("ok🙂")[:-1]
    assert whole(write(ids)[0]) == ("ok\ufffd", ids)


def test_without_text_tokens_come_at_once():
    writer = Writer(NoText(), Stops(), 10)
    assert writer.push([1, 2]).tokens == [1, 2]
