"""Indexer: scores of compressed entries, exact top-k with a stated tie rule, candidate blocks (spec sections 6.3-6.5).

N rows, T tiles of R rows of one sequence, Hi index heads, Di index dim, S latents in reach of the page tables.
`select_topk` has the contract the field calls DeepSelect.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.registry import op
from kernels.rows import read_rows


def latent_slots(page_tables: Tensor, latents: Tensor, rows_per_page: Tensor | int) -> Tensor:
    """Cache slots of latents by number: page_tables [.., P], latents [.., J] -> [.., J]."""
    return page_tables.gather(-1, latents // rows_per_page) * rows_per_page + latents % rows_per_page


@op
def index_scores(
    q: Tensor, w: Tensor, reach: Tensor, tiles: Tensor, tile_of: Tensor, tables: Tensor, pool: Tensor, planes: Tensor,
    stride: int, rows_per_page: int,
) -> Tensor:  # fmt: skip
    """I(t, j) = sum_h w_h relu(q_h . k_j), -inf where j >= reach; the keys of a tile's sequence are read once.

    q [N, Hi, Di] and w [N, Hi] in the compute dtype, each product rounded to it (spec 6.3); reach [N] latents a row may
    see; tiles [T, R] row numbers, -1 none; tile_of [N] place of each row in the flattened tiles; tables [T, P] page
    table of each tile's sequence. Returns [N, P * rows_per_page] fp32.
    """
    heads, dim = q.shape[1:]
    tile_count, tile_rows = tiles.shape
    latents = torch.arange(tables.shape[1] * rows_per_page, device=q.device)
    slots = latent_slots(tables, latents.expand(tile_count, -1), rows_per_page)
    keys = read_rows(pool, slots, planes, stride, dim, "mxfp4", 2, q.dtype)
    rows = tiles.clamp(min=0)
    dots = torch.bmm(q[rows].flatten(1, 2), keys.transpose(1, 2)).view(tile_count, tile_rows, heads, -1)
    scores = (torch.relu(dots) * w[rows].unsqueeze(-1)).float().sum(2).to(q.dtype).float()
    scores = scores.flatten(0, 1)[tile_of]
    return scores.masked_fill(latents >= reach.unsqueeze(-1), float("-inf"))


def topk_mask(scores: Tensor, k: int) -> Tensor:
    """The k largest of each row as a mask, lowest position first among equals; -inf is never taken. scores [N, S]."""
    kth = F.pad(scores, (0, k), value=float("-inf")).topk(k, dim=-1).values[:, -1:]
    above = scores > kth
    tied = (scores == kth) & (scores > float("-inf"))
    room = k - above.sum(-1, keepdim=True)
    return above | (tied & (tied.cumsum(-1) <= room))


@op
def select_topk(scores: Tensor, k: int) -> Tensor:
    """Positions of the k largest scores of each row, ascending, then -1: never -inf, lowest position among equals.

    scores [N, S] fp32 -> [N, k] int64.
    """
    take = topk_mask(scores, k)
    rank = torch.where(take, take.cumsum(-1) - 1, k)
    positions = torch.arange(scores.shape[1], device=scores.device).expand_as(rank)
    out = torch.full((scores.shape[0], k + 1), -1, dtype=torch.int64, device=scores.device)
    return out.scatter(1, rank, positions)[:, :k]


@op
def select_blocks(scores: Tensor, reach: Tensor, block: int, keep: int) -> Tensor:
    """Candidate blocks (spec section 6.4): the ``keep`` best by block maximum, the newest reachable one forced in.

    scores [N, S] fp32, -inf where unreachable; reach [N]. Returns [N, ceil(S / block)] bool.
    """
    best = F.pad(scores, (0, -scores.shape[1] % block), value=float("-inf")).unflatten(-1, (-1, block)).amax(-1)
    newest = torch.div(reach - 1, block, rounding_mode="floor").unsqueeze(-1)
    numbers = torch.arange(best.shape[1], device=scores.device)
    return topk_mask(best.masked_fill((numbers == newest) & (reach.unsqueeze(-1) > 0), float("inf")), keep)


@op
def mask_blocks(scores: Tensor, blocks: Tensor, block: int) -> Tensor:
    """Scores with everything outside the kept blocks at -inf. scores [N, S], blocks [N, ceil(S / block)] bool."""
    kept = blocks.repeat_interleave(block, dim=-1)[:, : scores.shape[1]]
    return scores.masked_fill(~kept, float("-inf"))


@index_scores.cases
def _index_cases() -> list[tuple]:
    def case(dtype: torch.dtype) -> tuple:
        tiles = torch.tensor([[0, 1, 2], [3, 4, -1], [-1, -1, -1]])
        tile_of, tables = torch.tensor([0, 1, 2, 3, 4]), torch.tensor([[1, 2], [3, 5], [0, 0]])
        pool, planes = torch.randn(6 * 24, 32).to(dtype), torch.tensor([0, 0, 16, 16, 8])
        q, w = torch.randn(5, 2, 32).to(dtype), torch.randn(5, 2).to(dtype)
        return (q, w, torch.tensor([1, 2, 3, 16, 0]), tiles, tile_of, tables, pool, planes, 24, 8)

    return [case(torch.float32), case(torch.bfloat16)]


@select_topk.cases
def _select_cases() -> list[tuple]:
    ties = torch.randint(0, 4, (7, 40)).float()
    few = torch.full((3, 40), float("-inf"))
    few[1, 5:9] = 1.0
    return [(torch.randn(5, 64), 8), (ties, 16), (few, 8), (torch.randn(2, 4), 8)]


@select_blocks.cases
def _block_cases() -> list[tuple]:
    scores = torch.randn(4, 30)
    reach = torch.tensor([0, 1, 17, 30])
    scores = scores.masked_fill(torch.arange(30) >= reach.unsqueeze(-1), float("-inf"))
    return [(scores, reach, 4, 3), (scores, reach, 8, 20)]


@mask_blocks.cases
def _mask_cases() -> list[tuple]:
    return [(torch.randn(3, 30), torch.rand(3, 8) > 0.5, 4)]
