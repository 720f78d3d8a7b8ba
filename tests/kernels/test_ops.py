"""Every op, backend and case against `reference`; and the reference bodies against plain Python or the formula."""

import importlib
import math
import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import kernels
from kernels import quant, steady
from kernels.attention import sparse_attention
from kernels.engram import engram_hash, engram_mix
from kernels.index import mask_blocks, select_blocks, select_topk
from kernels.mhc import mhc_mix, mhc_post
from kernels.moe import grouped_mlp, route
from kernels.registry import OPS
from kernels.rows import read_rows, row_bytes, store_index, store_kv, store_window

for module in pkgutil.walk_packages(kernels.__path__, "kernels."):
    importlib.import_module(module.name)  # registers whatever backends there are

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # of the largest value wanted; other types exactly
OPAQUE = [name for name, each in OPS.items() if each.traced is not each.body]


def cases(name: str) -> list[tuple]:
    torch.manual_seed(0)
    return OPS[name].examples()


def runs() -> list:
    """(op, backend, case number) of all backends but `reference`; `compile` takes seconds an op that can be traced."""
    slow = lambda name, backend: [pytest.mark.slow] if backend == "compile" and name not in OPAQUE else []  # noqa: E731
    return [
        pytest.param(name, backend, i, marks=slow(name, backend))
        for name in OPS
        for backend in OPS[name].impls
        for i in range(len(cases(name)))
        if backend != "reference"
    ]


@contextmanager
def filled_with_nan() -> Iterator[None]:
    """Memory that nothing has written holds NaN (integers: their largest value)."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def copied(args: tuple) -> tuple:
    return tuple(a.clone() if isinstance(a, Tensor) else a for a in args)


def tensors(values) -> list[Tensor]:
    values = values if isinstance(values, tuple) else (values,)
    return [v for v in values if isinstance(v, Tensor)]


def assert_close(got: Tensor, want: Tensor):
    assert got.dtype == want.dtype and got.shape == want.shape
    tolerance = TOLERANCE.get(want.dtype)
    if tolerance is None:
        assert torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))
        return
    assert torch.equal(got.isinf(), want.isinf()) and not got.isnan().any()
    got, want = (torch.where(want.isinf(), 0, t).float() for t in (got, want))
    assert (got - want).abs().max() <= tolerance * want.abs().max()


@pytest.mark.parametrize(("name", "backend", "case"), runs())
def test_backend_agrees_with_reference(name, backend, case):
    compare(name, backend, cases(name)[case])


@pytest.mark.parametrize("name", OPS)
def test_reference_reads_nothing_that_nobody_wrote(name):
    for args in cases(name):
        compare(name, "reference", args)


def compare(name: str, backend: str, args: tuple) -> None:
    """A backend where unwritten memory is NaN against the reference where it is whatever was there."""
    mine, theirs = copied(args), copied(args)
    want = OPS[name](*mine)
    with filled_with_nan():
        got = OPS[name](*theirs, backend=backend)
    for pair in zip(tensors(got), tensors(want), strict=True):
        assert_close(*pair)
    for pair in zip(tensors(theirs), tensors(mine), strict=True):  # what was written in place, and nothing else
        assert_close(*pair)


@pytest.mark.parametrize("name", OPAQUE)
def test_opaque_ops_are_what_they_say_to_a_trace(name):
    """Shapes and types of results without data."""
    for args in cases(name):
        torch.library.opcheck(OPS[name].traced, copied(args), test_utils="test_faketensor")


def normed(x: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def mixed(x: Tensor, kv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> Tensor:
    keys, value = kv.unflatten(-1, (-1, x.shape[-1])).split((x.shape[1], 1), 1)
    score = (normed(x, eps) * q_weight * normed(keys, eps) * k_weight).sum(-1) / math.sqrt(x.shape[-1])
    return x + torch.sigmoid(score.sign() * score.abs().clamp(min=1e-6).sqrt()).unsqueeze(-1) * value


FORMULAS = {  # in fp64
    "linear": lambda x, weight: x @ weight.T,
    "grouped_linear": lambda x, weight, _: torch.cat(
        [a @ w.T for a, w in zip(x.unbind(1), weight.chunk(x.shape[1]))], 1
    ),
    "rms_norm": lambda x, weight, eps: normed(x, eps) * weight,
    "mhc_collapse": lambda pre, x: torch.einsum("nc,ncd->nd", pre, x),
    "engram_mix": mixed,
}


@pytest.mark.parametrize("name", FORMULAS)
def test_reference_is_its_formula(name):
    for args in cases(name):
        got = OPS[name](*copied(args))
        want = FORMULAS[name](*(a.double() if isinstance(a, Tensor) else a for a in args))
        assert_close(got, want.to(got.dtype))


def test_every_op_has_cases():
    assert [name for name in OPS if not cases(name)] == []


# --- selection ---

SCORES = st.lists(st.sampled_from((-math.inf, -1.0, -0.0, 0.0, 0.5, 2.0)), min_size=1, max_size=12)


def best(scores: list[float], k: int) -> list[int]:
    """Positions of the k largest, lowest position first among equals, never -inf; ascending."""
    order = sorted(range(len(scores)), key=lambda j: (-scores[j], j))
    return sorted(j for j in order[:k] if scores[j] > -math.inf)


@given(st.lists(SCORES, min_size=1, max_size=3), st.integers(1, 15))
def test_select_topk_is_a_sort(rows, k):
    width = max(map(len, rows))
    rows = [r + [-math.inf] * (width - len(r)) for r in rows]
    want = [(best(r, k) + [-1] * k)[:k] for r in rows]
    assert select_topk(torch.tensor(rows), k).tolist() == want


@given(SCORES, st.integers(1, 4), st.integers(1, 4), st.data())
def test_select_blocks_keeps_the_best_and_the_newest(scores, block, keep, data):
    reach = data.draw(st.integers(0, len(scores)))
    scores = [s if j < reach else -math.inf for j, s in enumerate(scores)]
    blocks = [max(scores[j : j + block]) for j in range(0, len(scores), block)]
    if reach:
        blocks[(reach - 1) // block] = math.inf
    got = select_blocks(torch.tensor([scores]), torch.tensor([reach]), block, keep)
    assert got[0].nonzero().flatten().tolist() == best(blocks, keep)


def test_mask_blocks_keeps_whole_blocks_and_a_partial_last_one():
    kept = torch.tensor([[True, False, True]])
    got = mask_blocks(torch.arange(8.0)[None], kept, 3)
    assert got[0].tolist() == [0, 1, 2, -math.inf, -math.inf, -math.inf, 6, 7]


# --- experts ---


def test_grouped_mlp_is_a_loop_over_rows():
    x, ids, weights, *w, limit, _, pad = cases("grouped_mlp")[0]
    w1, w3, w2 = w[0::2]
    got = grouped_mlp(x, ids, weights, *w, limit, False, pad)
    for n, k in np.ndindex(*ids.shape):
        e = int(ids[n, k])
        if e >= len(w1):
            assert not got[n, k].any()
            continue
        gate, up = (w1[e] @ x[n]).clamp(max=limit), (w3[e] @ x[n]).clamp(-limit, limit)
        want = w2[e] @ (gate * torch.sigmoid(gate) * up * weights[n, k])
        torch.testing.assert_close(got[n, k], want, rtol=1e-5, atol=1e-5)
    assert (ids >= len(w1)).any(), "no case of a row without an expert"


@pytest.mark.parametrize(("dtype", "pad"), [(torch.float32, 16), (torch.bfloat16, 4)])
def test_a_row_does_not_know_how_many_chose_its_expert(dtype, pad):
    torch.manual_seed(1)
    w = [v for s in ((3, 32, 64), (3, 32, 64), (3, 64, 32)) for v in (torch.randn(s).to(dtype) / 8, None)]
    x, ids, weights = torch.randn(19, 64).to(dtype), torch.randint(0, 4, (19, 2)), torch.rand(19, 2)
    quantise = dtype is torch.bfloat16
    whole = grouped_mlp(x, ids, weights, *w, 10.0, quantise, pad)
    for n in (1, 2, 5, 11):
        assert torch.equal(grouped_mlp(x[:n], ids[:n], weights[:n], *w, 10.0, quantise, pad), whole[:n])


@pytest.mark.parametrize(("dtype", "pad"), [(torch.float32, 16), (torch.bfloat16, 4)])
def test_all_experts_on_all_rows_give_the_bits_of_the_loop(dtype, pad):
    torch.manual_seed(3)
    w = [v for s in ((16, 32, 64), (16, 32, 64), (16, 64, 32)) for v in (torch.randn(s).to(dtype) / 8, None)]
    for n in (16, 24, 64):
        ids = torch.stack([torch.randperm(17)[:2] for _ in range(n)])  # id 16: no expert
        args = (torch.randn(n, 64).to(dtype), ids, torch.rand(n, 2), *w, 10.0, dtype is torch.bfloat16, pad)
        assert torch.equal(grouped_mlp(*args, backend="dense"), grouped_mlp(*args))


def test_route_chooses_by_bias_and_weighs_without():
    x, weight = torch.randn(5, 32), torch.randn(8, 32)
    bias = torch.zeros(8)
    bias[3] = 100.0
    ids, weights = route(x, weight, bias, 2, 1.5)
    scores = torch.nn.functional.softplus(x @ weight.T).sqrt()
    assert (ids[:, 0] == 3).all()
    torch.testing.assert_close(weights.sum(1), torch.full((5,), 1.5))
    torch.testing.assert_close(weights[:, 0] / weights[:, 1], scores[:, 3] / scores.gather(1, ids[:, 1:])[:, 0])


# --- attention ---


def turned(row: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """The tail of a row [d], taken as complex pairs, times e^(i angle)."""
    pairs = (row[-2 * len(angles) :: 2] + 1j * row[-2 * len(angles) + 1 :: 2]) * np.exp(1j * angles)
    return np.concatenate((row[: -2 * len(angles)], np.stack((pairs.real, pairs.imag), -1).ravel()))


@pytest.mark.parametrize("case", [0, 1])
def test_sparse_attention_is_a_softmax_a_row(case):
    q, cos, sin, sink, fresh, ring, window, pool, slots, planes, stride = cases("sparse_attention")[case]
    got = sparse_attention(q, cos, sin, sink, fresh, ring, window, pool, slots, planes, stride).double().numpy()
    angles = torch.atan2(sin, cos).double().numpy()
    for n in range(len(q)):
        keys = [ring[w] if w >= 0 else fresh[-2 - w] for w in window[n].tolist() if w != -1]
        for s in [] if slots is None else slots[n].tolist():
            if s >= 0:  # two atoms of 32 in a page of 8 rows
                keys.append(pool[s // 8 * stride + s % 8 * 2 :][:2].flatten())
        for h in range(q.shape[1]):
            row = turned(q[n, h].double().numpy(), angles[n])
            weights = [math.exp(float(row @ k.double().numpy()) / math.sqrt(len(row))) for k in keys]
            total = sum(weights) + math.exp(float(sink[h]))
            out = sum((w * k.double().numpy() for w, k in zip(weights, keys)), np.zeros(len(row)))
            np.testing.assert_allclose(got[n, h], turned(out / total, -angles[n]), rtol=1e-4, atol=1e-5)
    assert not got[-1].any(), "the padding row sees nothing"


# --- streams, hashes, rows ---


@pytest.mark.parametrize("narrow", [1, 2, 3, 4])
def test_a_row_does_not_know_how_many_follow(narrow):
    """Odd numbers of experts and streams: rows then end where no SIMD register does."""
    torch.manual_seed(2)
    x, c = torch.randn(40, narrow, 32), narrow
    mixing = torch.randn((2 + c) * c, c * 32), torch.randn((2 + c) * c), torch.rand(3), 3, 1e-6, 1e-20
    kv, weight = torch.randn(40, (c + 1) * 32), torch.rand(c, 32)
    calls = (
        lambda n: route(x[:n, 0], torch.ones(c, 32), torch.zeros(c), 1, 1.5)[1],
        lambda n: route(x[:n, 0], mixing[0][:c, :32], torch.zeros(c), c, 1.5)[1],
        *(lambda n, i=i: mhc_mix(x[:n], *mixing)[i] for i in range(3)),
        lambda n: engram_mix(x[:n], kv[:n], weight, weight, 1e-20),
    )
    for call in calls:
        for n in (16, 24):
            assert torch.equal(call(n), call(40)[:n])


def test_steady_functions_are_torch_s():
    x = torch.tensor([-200.0, -20, -1e-3, 0, 0.5, 19.9, 20.1, 200])
    torch.testing.assert_close(steady.sigmoid(x), torch.sigmoid(x), rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(steady.softplus(x), torch.nn.functional.softplus(x), rtol=1e-6, atol=1e-12)


def test_mhc_mixing_is_doubly_normalised():
    pre, post, mixing = mhc_mix(*cases("mhc_mix")[1])
    assert mixing.min() > 0
    torch.testing.assert_close(mixing.sum(1), torch.ones(7, 4), rtol=0, atol=1e-5)  # columns last
    torch.testing.assert_close(mixing.sum(2), torch.ones(7, 4), rtol=0, atol=1e-2)
    assert 0 < pre.min() and pre.max() < 1 + 1e-5 and 0 < post.min() and post.max() < 2


def test_mhc_post_sums_over_source_streams():
    o, x, post, mixing = cases("mhc_post")[1]
    want = post.unsqueeze(-1) * o.unsqueeze(1) + torch.einsum("njk,njd->nkd", mixing, x)
    torch.testing.assert_close(mhc_post(o, x, post, mixing), want)


def test_engram_hash_in_python_integers():
    history, multipliers, primes, offsets = cases("engram_hash")[1]
    rows = []
    for ids in history.tolist():
        mixed, row = ids[0] * int(multipliers[0]), []
        for i in range(1, len(ids)):
            mixed ^= ids[i] * int(multipliers[i])
            row += [mixed % p + o for p, o in zip(primes[i - 1].tolist(), offsets[i - 1].tolist())]
        rows.append(row)
    assert engram_hash(history, multipliers, primes, offsets).tolist() == rows


@pytest.mark.parametrize(("store", "fmt", "dim", "kind"), [(store_kv, "nvfp4", 64, 0), (store_index, "mxfp4", 32, 2)])
def test_packed_rows_equal_plain_rows(store, fmt, dim, kind):
    """Both storage forms of a page: 8 rows of 64 latents, 8 of 32 index keys."""
    x = (torch.randn(40, dim) * torch.exp2(torch.randint(-9, 6, (40, 1)))).bfloat16()
    slots = torch.randperm(48)[:40]
    plain, packed = torch.zeros(6 * 24, 32, dtype=torch.bfloat16), torch.zeros(6 * 512, dtype=torch.uint8)
    where = {plain: (torch.tensor([0, 0, 16, 16, 8]), 24), packed: (torch.tensor([0, 256, 288, 416, 8]), 512)}
    read = []
    for pool, (planes, stride) in where.items():
        store(pool, slots, planes, stride, x, True)
        read.append(read_rows(pool, slots, planes, stride, dim, fmt, kind, torch.bfloat16))
    assert torch.equal(*read) and read[0].any()


def test_packed_window_rows_equal_plain_rows():
    x, at = torch.randn(5, 64).bfloat16(), torch.tensor([7, 0, 3, 9, 4])
    plain, packed = (
        torch.zeros(10, 64, dtype=torch.bfloat16),
        torch.zeros(10 * sum(row_bytes("fp8", 64)), dtype=torch.uint8),
    )
    seen = [store_window(ring, at, x, True) for ring in (plain, packed)]
    read = [kernels.attention.read_window(ring, x, at) for ring in (plain, packed)]
    assert all(torch.equal(quant.fake_fp8(x), t) for t in seen + read)
