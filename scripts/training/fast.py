"""Faster equals of the dense forward's functions: compiled, attention in blocks, exact Sinkhorn gradients.

N rows, S streams, D model dim, H heads, T tokens, C compressed entries, W window.
"""

import ctypes
import math
import platform

import torch
import torch.nn.functional as F
from torch import Tensor

from model import dense_ops
from model.dense import Ops

MALLOC = ((-3, 1 << 30), (-1, (1 << 31) - 1), (-2, 1 << 28))  # glibc: mmap threshold, trim threshold, top pad
PLACES = 256  # step of an expert's capacity in a batch
NEVER = -1e30  # a score that softmax turns to zero without making NaN of a row


def keep_memory() -> None:
    """Let glibc keep freed memory: a step frees and takes the same gigabyte, and every page given back is a page fault.

    Started under GLIBC_TUNABLES=glibc.malloc.hugetlb=1 the heap also lies in huge pages (another fifth faster).
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        for option, value in MALLOC:
            libc.mallopt(option, value)


def compiled_ops() -> Ops:
    """Ops for training on a CPU. One graph for each shape of a run, kept in Inductor's cache folder."""
    torch._dynamo.config.recompile_limit = 64  # past the limit dynamo runs eager without a word
    fuse = lambda f: torch.compile(f, fullgraph=True, dynamic=False)  # noqa: E731
    sinkhorn = fused_sinkhorn(fuse)
    swiglu = fuse(dense_ops.swiglu)
    coefficients, softmax = fuse(_coefficients), fuse(_softmax_with_sink)

    def mix(x: Tensor, fn: Tensor, scale: Tensor, base: Tensor, rounds: int, eps: float):
        p, q, z = coefficients(x, fn, scale, base, eps)
        return p, q, sinkhorn(z, rounds, eps)

    def attend(*given) -> Tensor:
        return attend_in_blocks(*given, softmax)

    return Ops(
        mix=mix,
        attend=attend,
        collapse=fuse(dense_ops.collapse),
        post=fuse(dense_ops.post),
        rms=fuse(dense_ops.rms),
        rope=fuse(dense_ops.rope),
        swiglu=swiglu,
        experts=lambda *given: experts_as_batch(*given, swiglu),
        gate=fuse(dense_ops.engram_gate),
    )


def _coefficients(x: Tensor, fn: Tensor, scale: Tensor, base: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """P [N, S], Q [N, S] and the Sinkhorn logits [S, S, N]; the product runs in x's type, the rest in fp32."""
    s = x.shape[1]
    flat = x.flatten(1)
    m = F.linear(flat, fn.to(x.dtype)).float() * torch.rsqrt(flat.float().square().mean(-1, keepdim=True) + 1e-20)
    p = torch.sigmoid(m[:, :s] * scale[0] + base[:s]) + eps
    q = 2 * torch.sigmoid(m[:, s : 2 * s] * scale[1] + base[s : 2 * s])
    z = m[:, 2 * s :] * scale[2] + base[2 * s :]
    return p, q, z.T.reshape(s, s, -1).contiguous()


def fused_sinkhorn(fuse):
    """A function (z [S, S, N], rounds, eps) -> C [N, S, S] with exact gradients through every round.

    Each normalisation scales rows or columns, so C_jk = a_j c_jk b_k with c = softmax + eps; a round updates only a
    and b. The gradients walk the rounds backwards (eps in a denominator is ignored there: one part in a million).
    """
    forward, backward = fuse(_sinkhorn), fuse(_sinkhorn_gradient)

    class Sinkhorn(torch.autograd.Function):
        @staticmethod
        def forward(ctx, z: Tensor, rounds: int, eps: float) -> Tensor:
            ctx.save_for_backward(z)
            ctx.settings = rounds, eps
            return forward(z, rounds, eps)

        @staticmethod
        def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
            return backward(ctx.saved_tensors[0], grad.contiguous(), *ctx.settings), None, None

    return Sinkhorn.apply


def _scalings(z: Tensor, rounds: int, eps: float):
    """softmax + eps as a list of rows of [N], and the history of row scalings a and column scalings b."""
    s = range(z.shape[0])
    top = [torch.stack([z[j, k] for k in s]).amax(0) for j in s]
    e = [[(z[j, k] - top[j]).exp() for k in s] for j in s]
    totals = [sum(row) for row in e]
    c = [[e[j][k] / totals[j] + eps for k in s] for j in s]
    a = [torch.ones_like(z[0, 0])] * len(s)
    b = [1 / (sum(c[j][k] for j in s) + eps) for k in s]
    history = [(a, b)]
    for _ in range(rounds - 1):
        a = [a[j] / (a[j] * sum(c[j][k] * b[k] for k in s) + eps) for j in s]
        b = [b[k] / (b[k] * sum(c[j][k] * a[j] for j in s) + eps) for k in s]
        history.append((a, b))
    return c, history


def _sinkhorn(z: Tensor, rounds: int, eps: float) -> Tensor:
    s = range(z.shape[0])
    c, history = _scalings(z, rounds, eps)
    a, b = history[-1]
    return torch.stack([torch.stack([a[j] * c[j][k] * b[k] for k in s], -1) for j in s], 1)


def _sinkhorn_gradient(z: Tensor, grad: Tensor, rounds: int, eps: float) -> Tensor:
    """z [S, S, N], grad of C [N, S, S] -> grad of z."""
    s = range(z.shape[0])
    c, history = _scalings(z, rounds, eps)
    g = [[grad[:, j, k] for k in s] for j in s]
    a, b = history[-1]
    gc = [[g[j][k] * a[j] * b[k] for k in s] for j in s]
    ga = [sum(g[j][k] * c[j][k] * b[k] for k in s) for j in s]
    gb = [sum(g[j][k] * c[j][k] * a[j] for j in s) for k in s]
    for r in range(rounds - 1, 0, -1):
        (a, b), before = history[r], history[r - 1][1]
        gt = [-b[k] * b[k] * gb[k] for k in s]
        ga = [ga[j] + sum(c[j][k] * gt[k] for k in s) for j in s]
        gs = [-a[j] * a[j] * ga[j] for j in s]
        gb = [sum(c[j][k] * gs[j] for j in s) for k in s]
        gc = [[gc[j][k] + a[j] * gt[k] + gs[j] * before[k] for k in s] for j in s]
        ga = [torch.zeros_like(z[0, 0])] * len(s)
    b = history[0][1]
    gc = [[gc[j][k] - b[k] * b[k] * gb[k] for k in s] for j in s]
    p = [[c[j][k] - eps for k in s] for j in s]
    return torch.stack([torch.stack([p[j][k] * (gc[j][k] - sum(p[j][i] * gc[j][i] for i in s)) for k in s]) for j in s])


def _softmax_with_sink(z: Tensor, allowed: Tensor, sink: Tensor, scale: float) -> Tensor:
    """z [B, blocks, W, H, K] scores -> probabilities; allowed [B or 1, blocks, W, 1, K] bool; sink [H]."""
    f = torch.where(allowed, z.float() * scale, NEVER)
    s = sink.float()[:, None]
    top = torch.maximum(f.amax(-1, keepdim=True), s).detach()
    e = (f - top).exp()
    return (e / (e.sum(-1, keepdim=True) + (s - top).exp())).to(z.dtype)


def attend_in_blocks(q, k, latent, selection, sink, window: int, softmax=_softmax_with_sink) -> Tensor:
    """``dense_ops.attend`` with each block of W queries against its 2 W window keys and the entries before its end.

    All heads of a block share the keys, so a block is one matrix product. Sequence halves are done apart: the first
    half reads only half of the compressed entries.
    """
    b, t, h, d = q.shape
    blocks = -(-t // window)
    fill = blocks * window - t
    q, k = F.pad(q, (0, 0, 0, 0, 0, fill)), F.pad(k, (0, 0, window, fill))
    before, now = k[:, :-window].unflatten(1, (blocks, window)), k[:, window:].unflatten(1, (blocks, window))
    age = torch.arange(window)[:, None] + window - torch.arange(2 * window)
    near = ((age >= 0) & (age < window)).expand(1, blocks, -1, -1)
    near = near & (torch.arange(blocks)[:, None, None] * window + torch.arange(2 * window) >= window)
    keys = torch.cat([before, now], 2)
    parts = 1 if latent is None or blocks % 4 else 4
    out = []
    for i in range(parts):
        mine = slice(i * blocks // parts, (i + 1) * blocks // parts)
        part_keys, allowed = keys[:, mine], near[:, mine]
        n = part_keys.shape[1]
        if latent is not None:
            c = latent.shape[1] * (i + 1) // parts
            part_keys = torch.cat([part_keys, latent[:, None, :c].expand(-1, n, -1, -1)], 2)
            far = F.pad(selection, (0, 0, 0, fill)).unflatten(1, (blocks, window))[:, mine, :, :c]
            allowed = torch.cat([allowed.expand(far.shape[0], -1, -1, -1), far], 3)
        rows = q.unflatten(1, (blocks, window))[:, mine].flatten(2, 3)  # [B, n, W * H, d]
        z = (rows.flatten(0, 1) @ part_keys.flatten(0, 1).transpose(1, 2)).view(b, n, window, h, -1)
        p = softmax(z, allowed[:, :, :, None], sink, 1 / math.sqrt(d))
        out.append((p.flatten(0, 1).flatten(1, 2) @ part_keys.flatten(0, 1)).view(b, n * window, h, d))
    return torch.cat(out, 1)[:, :t]


def experts_as_batch(x, ids, weights, stacks, limit: float, act, swiglu=dense_ops.swiglu) -> Tensor:
    """``dense_ops.experts`` as three batched products: every expert gets the same number of places, some empty.

    The places are a multiple of PLACES, so that only a few matrix shapes ever occur: the CPU library prepares a
    kernel for each new shape, which costs more than the product.
    """
    n, k = ids.shape
    count, flat = stacks[0].shape[0], ids.flatten()
    loads = torch.bincount(flat, minlength=count)
    places = -(-int(loads.max()) // PLACES) * PLACES
    order = flat.argsort(stable=True)
    rank = torch.arange(n * k) - (loads.cumsum(0) - loads)[flat[order]]
    place = torch.empty_like(order)
    place[order] = flat[order] * places + rank
    source = torch.full((count * places,), n).index_put_((place,), torch.arange(n * k) // k)
    rows = F.pad(x, (0, 0, 0, 1)).index_select(0, source).view(count, places, -1)
    factor = torch.zeros(count * places).index_put((place,), weights.flatten())
    gate, up = (torch.bmm(rows, w.transpose(1, 2)).flatten(0, 1) for w in stacks[:2])
    hidden = act(swiglu(gate, up, factor, limit)).view(count, places, -1)
    y = torch.bmm(hidden, stacks[2].transpose(1, 2)).flatten(0, 1)
    return y.index_select(0, place).unflatten(0, (n, k)).float().sum(1)
