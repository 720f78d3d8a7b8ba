"""The plain loop: drafted = undrafted, a batch = each alone, where completions end, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from model.dspark import Draft
from serve.offline import Completion, generate
from serve.request import Sampling
from serve.runner import Runner
from tests.small import VOCAB, config, runner, tokens

CFG = config()
PROMPTS = [tokens(n, seed) for seed, n in enumerate((7, 1, 66, 20, 3))]
GREEDY = [Sampling(max_tokens=n) for n in (9, 4, 6, 1, 12)]
WARMTH = ((9, 1.0, 3), (4, 0.0, 0), (6, 0.7, -5), (1, 2.0, 8), (12, 1.0, 3))
SAMPLED = [Sampling(max_tokens=n, temperature=t, seed=s) for n, t, s in WARMTH]
settings = pytest.mark.parametrize("how", [GREEDY, SAMPLED], ids=["greedy", "sampled"])


@pytest.fixture(scope="module")
def r() -> Runner:
    return runner(CFG)


def texts(found: list[Completion]) -> list[list[int]]:
    return [c.tokens for c in found]


@pytest.fixture(scope="module")
def plain(r) -> dict[str, list[Completion]]:
    """Undrafted completions of all prompts together."""
    return {name: generate(r, PROMPTS, how) for name, how in (("greedy", GREEDY), ("sampled", SAMPLED))}


def oracle(r: Runner, found: list[Completion], right) -> Runner:
    """The runner with a drafter that drafts the known completion, of which the first ``right(position)`` are kept true.
    Sequence i has slot i + 1."""

    def draft(batch):
        drafts = []
        for position, slot in zip(batch.positions.tolist(), batch.slots.tolist()):
            prompt = PROMPTS[slot - 1]
            rest = found[slot - 1].tokens[position + 1 - len(prompt) :] + [0] * r.block
            good = right(position)
            drafts.append([t if i < good else (t + 1) % VOCAB for i, t in enumerate(rest[: r.block])])
        return Draft(torch.tensor(drafts), torch.empty(0), torch.zeros(len(drafts), r.block))

    clone = object.__new__(Runner)
    clone.__dict__.update(r.__dict__, draft=draft)
    return clone


@settings
def test_drafted_equals_undrafted(r, plain, how):
    name = "greedy" if how is GREEDY else "sampled"
    assert texts(generate(r, PROMPTS, how, speculate=True)) == texts(plain[name])


@settings
@pytest.mark.parametrize("right", [lambda p: 99, lambda p: p % 4, lambda p: 0], ids=["all", "some", "none"])
def test_accepted_drafts_save_steps_and_change_no_token(r, plain, how, right):
    want = plain["greedy" if how is GREEDY else "sampled"]
    got = generate(oracle(r, want, right), PROMPTS, how, speculate=True)
    assert texts(got) == texts(want) and [c.finish for c in got] == [c.finish for c in want]
    most = right(3) + 1 if right(3) < 99 else r.block + 1
    assert [c.steps for c in want] == [len(c.tokens) - 1 for c in want]
    for before, after in zip(want, got):
        assert -(-before.steps // most) <= after.steps <= before.steps
    if right(0) == 99:
        assert [c.steps for c in got] == [-(-c.steps // (r.block + 1)) for c in want]


def test_verdicts_tell_what_was_kept(r, plain):
    """One a step; ``kept`` and the target's own token make up what the step gave."""
    verdicts, steps = [], []
    clone = oracle(r, plain["greedy"], lambda p: p % 4)
    generate(clone, PROMPTS, GREEDY, True, lambda i, new: steps.append((i, new)), verdicts.append)
    given = {}
    for i, new in steps[len(PROMPTS) :]:  # after the prefill's
        given.setdefault(i, []).append(new)
    for i, own in given.items():
        mine = [v for v in verdicts if v.index == i]
        assert all(len(v.confidence) == len(v.drafts) for v in mine)
        assert [v.drafts[: v.kept] for v in mine[:-1]] == [new[:-1] for new in own[:-1]]


@settings
def test_a_batch_gives_what_each_prompt_gives_alone(r, plain, how):
    want = plain["greedy" if how is GREEDY else "sampled"]
    alone = [generate(r, [p], [s], speculate=i % 2 == 0)[0] for i, (p, s) in enumerate(zip(PROMPTS, how))]
    assert texts(alone) == texts(want)


@pytest.mark.parametrize("sizes", [{"slots": 3}, {"pages": 4}], ids=["slots", "pages"])
def test_more_prompts_than_fit_go_in_groups(plain, sizes):
    got = generate(runner(CFG, **sizes), PROMPTS, SAMPLED, speculate=True)
    assert texts(got) == texts(plain["sampled"])


def test_the_seed_decides(r):
    base = SAMPLED[0]
    first, again, other = (generate(r, PROMPTS[:1], [s])[0].tokens for s in (base, base, replace(base, seed=4)))
    assert first == again != other


@pytest.mark.parametrize("speculate", [False, True])
def test_a_stop_id_ends_a_completion_and_is_no_part_of_it(r, plain, speculate):
    want = plain["greedy"][0].tokens
    stop = want[5]
    heard: list[int] = []
    how = [replace(GREEDY[0], stop_ids=(stop, VOCAB + 1))]
    (got,) = generate(r, PROMPTS[:1], how, speculate, lambda index, new: heard.extend(new))
    assert got.tokens == heard == want[: want.index(stop)]
    assert got.finish == "stop"
    (empty,) = generate(r, PROMPTS[:1], [replace(GREEDY[0], stop_ids=(want[0],))], speculate)
    assert (empty.tokens, empty.finish, empty.steps) == ([], "stop", 0)


@pytest.mark.parametrize("speculate", [False, True])
def test_no_stop_id_comes_before_min_tokens(r, plain, speculate):
    stop = plain["greedy"][0].tokens[0]
    how = Sampling(max_tokens=9, min_tokens=4, stop_ids=(stop, VOCAB + 1))
    (got,) = generate(r, PROMPTS[:1], [how], speculate)
    assert len(got.tokens) >= 4 and stop not in got.tokens


def test_top_k_and_top_p_cut_what_may_be_drawn(r, plain):
    """Each sequence by its own rule: with one token left to draw, warm is greedy."""
    warm = [replace(s, temperature=2.0, seed=5) for s in GREEDY]
    assert texts(generate(r, PROMPTS, warm)) != texts(plain["greedy"])
    for cut in ({"top_k": 1}, {"top_p": 1e-6}):
        assert texts(generate(r, PROMPTS, [replace(s, **cut) for s in warm])) == texts(plain["greedy"])
    mixed = [replace(s, top_k=i % 3, top_p=1 - i / 10) for i, s in enumerate(warm)]
    alone = [generate(r, [p], [s])[0].tokens for p, s in zip(PROMPTS, mixed)]
    for speculate in (False, True):
        assert texts(generate(r, PROMPTS, mixed, speculate)) == alone


def test_tokens_are_told_as_they_come(r, plain):
    heard: dict[int, list[list[int]]] = {i: [] for i in range(len(PROMPTS))}
    generate(r, PROMPTS, GREEDY, on_tokens=lambda index, new: heard[index].append(new))
    assert [[t for new in heard[i] for t in new] for i in heard] == texts(plain["greedy"])
    assert all(len(new) == 1 for told in heard.values() for new in told)


@pytest.mark.parametrize("speculate", [False, True])
def test_completions_end_at_max_tokens_or_the_end_of_the_context(r, speculate):
    got = generate(r, PROMPTS, GREEDY, speculate)
    assert [len(c.tokens) for c in got] == [s.max_tokens for s in GREEDY]
    assert {c.finish for c in got} == {"length"}
    short = runner(replace(CFG, max_position_embeddings=30))
    (end,) = generate(short, [tokens(22)], [Sampling(max_tokens=50)], speculate)
    (before,) = generate(r, [tokens(22)], [Sampling(max_tokens=8)])
    assert (end.tokens, end.finish) == (before.tokens, "length")
    (last,) = generate(runner(CFG, pages=2), [tokens(61)], [Sampling(max_tokens=50)], speculate)
    assert len(last.tokens) == 3, "the cache holds 64 tokens"


REFUSED = [
    ([], "the prompt is empty"),
    ([3, -1], "token id -1; ids are 0 to 95"),
    ([3, VOCAB], "token id 96; ids are 0 to 95"),
    ([1] * 960, "the prompt has 960 tokens; the context is 960"),
]


@pytest.mark.parametrize(("bad", "message"), REFUSED, ids=["empty", "negative", "beyond", "long"])
def test_a_bad_prompt_is_refused_before_anything_runs(r, bad, message, monkeypatch):
    monkeypatch.setattr(r, "step", lambda *args: pytest.fail("a step ran"))
    with pytest.raises(ValueError, match=message):
        generate(r, [PROMPTS[0], np.array(bad, np.int64)], GREEDY[:2])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be >= 1, got 0"),
        ({"max_tokens": 1, "temperature": -0.5}, "temperature must be in .*, got -0.5"),
        ({"max_tokens": 1, "temperature": float("nan")}, "temperature must be in .*, got nan"),
        ({"max_tokens": 1, "temperature": float("inf")}, "temperature must be in .*, got inf"),
    ],
)
def test_bad_sampling_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**values)


def test_drafting_needs_a_drafter():
    plain = runner(config(stages=0))
    with pytest.raises(ValueError, match="speculate=true needs a drafter"):
        generate(plain, PROMPTS[:1], GREEDY[:1], speculate=True)
    assert len(generate(plain, PROMPTS[:1], GREEDY[:1])[0].tokens) == 9


def test_nothing_to_do(r):
    assert generate(r, [], []) == []
