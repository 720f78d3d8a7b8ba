"""Bits per byte of held-out text by the real runner: windows that overlap, every byte counted once.

M scored rows, V vocabulary.
"""

import lzma
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from scripts import report
from scripts.evaluation.given import Given, check_room, pages_of
from scripts.laid import Laid
from scripts.progress import progress
from serve.runner import Runner


@dataclass(frozen=True)
class Window:
    """Rows ``begin`` to ``end`` of a sequence are the input; predictions of row ``scored`` and later count."""

    begin: int
    scored: int
    end: int


def windows(tokens: int, context: int, stride: int) -> Iterator[Window]:
    """Windows of ``context`` rows, each ``stride`` further, so that every one of ``tokens`` predictions counts once."""
    end = 0
    while end < tokens:
        scored, end = end, min(end + (stride if end else context), tokens)
        yield Window(max(0, end - context), scored, end)


def bits_per_byte(
    runner: Runner, text, piece: bytes, context: int, stride: int, batch: int, advance: Callable[[int], None]
) -> float:
    """Bits that the model needs for ``piece``, from BOS on, over its bytes. ``advance`` is told of rows computed."""
    ids = sequence(text, piece)
    cut = list(windows(len(ids) - 1, context, stride))
    nats = 0.0
    for first in range(0, len(cut), batch):
        nats += _nats(runner, ids, cut[first : first + batch], advance)
    return nats / math.log(2) / len(piece)


def sequence(text, piece: bytes) -> np.ndarray:
    """BOS and the ids of ``piece``, int64; the ids must spell every byte."""
    string = piece.decode("utf-8")
    ids = text.encode(string)
    if text.decode(ids) != string:
        raise ValueError("the tokenizer loses text: decode(encode(piece)) differs from the held-out piece")
    return np.array([text.bos_id, *ids], np.int64)


def _nats(runner: Runner, ids: np.ndarray, group: Sequence[Window], advance: Callable[[int], None]) -> float:
    """Negative log likelihood of the scored predictions of a few windows, prefilled side by side in chunks."""
    laid = Laid(runner, pages_of(runner, max(w.end - w.begin for w in group)))
    total = 0.0
    for chunk in laid.chunks([ids[w.begin : w.end] for w in group], [w.scored - w.begin for w in group]):
        targets = np.concatenate([ids[group[i].begin + at + 1] for i, at in chunk.wanted])
        total += _score(laid.logits(chunk), targets)  # not kept: they are most of the memory that this takes
        advance(chunk.tokens)
    return total


def _score(logits: Tensor, targets: np.ndarray) -> float:
    """The negative log likelihood of ``targets`` [M] by logits [M, V], summed in fp64."""
    chosen = torch.log_softmax(logits, -1).gather(-1, torch.from_numpy(targets).to(logits.device).unsqueeze(-1))
    return -float(chosen.double().sum())


def xz_bits_per_byte(piece: bytes) -> float:
    """What `xz -9e` makes of the piece, its container included."""
    packed = lzma.compress(piece, format=lzma.FORMAT_XZ, preset=9 | lzma.PRESET_EXTREME)
    return 8 * len(packed) / len(piece)


def run(g: Given) -> dict:
    """Bits per byte of model and xz on each piece, and their means."""
    e, runner, text = g.settings.evaluate, g.runner, g.text
    check_room(runner, e.context, e.batch, f"evaluate.context={e.context}")
    rows = sum(w.end - w.begin for p in g.held for w in windows(len(sequence(text, p)) - 1, e.context, e.stride))
    with progress("bits per byte", rows, "tokens") as advance:
        model = [bits_per_byte(runner, text, p, e.context, e.stride, e.batch, advance) for p in g.held]
    xz = [xz_bits_per_byte(p) for p in g.held]
    mean = lambda values: sum(values) / len(values)  # noqa: E731
    rows = [(str(i), len(p), model[i], xz[i]) for i, p in enumerate(g.held)]
    report.table(
        "loss", ("held-out piece", "bytes", "bits per byte", "xz -9e"), [*rows, ("mean", None, mean(model), mean(xz))]
    )
    out = {"bits_per_byte": mean(model), "xz_bits_per_byte": mean(xz)}
    for i in range(len(g.held)):
        out |= {f"bits_per_byte_p{i}": model[i], f"xz_bits_per_byte_p{i}": xz[i]}
    return out | {"context": e.context, "stride": e.stride}
