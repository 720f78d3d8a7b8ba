"""What every evaluation is given, and logits of text that is not the model's own (teacher forcing). V vocabulary."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from torch import Tensor

from scripts.build import Settings
from scripts.laid import Laid
from scripts.training import corpus
from serve.runner import Runner


@dataclass(frozen=True)
class Given:
    """``settings``, the runner and tokenizer they describe, and the ``held``-out pieces of text."""

    settings: Settings
    runner: Runner
    text: object  # serve.text.Text or scripts.bytetext.ByteText
    held: list[bytes]

    @cached_property
    def ids(self) -> np.ndarray:
        """Ids of all held-out text in a row, int64, without BOS."""
        return np.array(self.text.encode(b"\n".join(self.held).decode("utf-8", "ignore")), np.int64)

    @cached_property
    def lines(self) -> np.ndarray:
        """Where in ``ids`` a token begins with a newline, ascending."""
        begins = np.array([self.text.decode([i]).startswith("\n") for i in range(self.text.vocab_size)])
        return np.flatnonzero(begins[self.ids])


def pieces(s: Settings) -> list[bytes]:
    """The held-out pieces that the checkpoint's ``heldout.json`` lists, the first ``evaluate.bytes`` of each. Random
    weights take what training would hold out of this interpreter's library."""
    if s.random:
        held = corpus.heldout_pieces(corpus.manifest(corpus.collect(corpus.library())))
    else:
        path = Path(s.checkpoint) / "heldout.json"
        if not path.is_file():
            raise ValueError(
                f"no {path}: training writes it beside the weights, and evaluation reads the files it lists"
            )
        held = corpus.heldout_pieces(json.loads(path.read_text(encoding="utf-8")))
    return [p[: s.evaluate.bytes].decode("utf-8", "ignore").encode() for p in held]


def passages(g: Given, count: int, length: int) -> list[np.ndarray]:
    """``count`` stretches of ``length`` ids, BOS first, that begin with a line and are spread evenly over the text.

    Raises ValueError if the text is too short for one.
    """
    begins = g.lines[g.lines + length <= len(g.ids)]
    if not len(begins):
        raise ValueError(f"the held-out text has {len(g.ids)} tokens, too few for passages of {length}")
    chosen = begins[[i * len(begins) // count for i in range(count)]]
    return [np.concatenate(([g.text.bos_id], g.ids[b : b + length - 1])) for b in chosen]


def pages_of(runner: Runner, tokens: int) -> int:
    return -(-tokens // runner.model.layout.page_size)


def check_room(runner: Runner, tokens: int, sequences: int, what: str) -> None:
    """Raise ValueError, naming ``what`` asks for it, where the cache cannot hold ``sequences`` of ``tokens``."""
    most = runner.model.cfg.max_position_embeddings
    if tokens > most:
        raise ValueError(f"{what} needs {tokens} tokens, max_position_embeddings is {most}: make it smaller")
    if sequences > runner.slots - 1:
        raise ValueError(
            f"{what} needs {sequences} sequences at a time, serve.max_batch is {runner.slots - 1}: raise it, or lower "
            "evaluate.batch"
        )
    need, have = sequences * pages_of(runner, tokens), runner.pages - 1
    if need > have:
        size = runner.model.layout.page_size
        raise ValueError(
            f"{what} needs {need} pages of {size}, serve.pages is {have}: raise it, or make {what} smaller"
        )


def forced(runner: Runner, sequences: Sequence[np.ndarray], last: int) -> list[Tensor]:
    """Logits [last, V] that predict the last ``last`` tokens of each sequence [n], prefilled side by side in chunks.

    All of them must fit the cache at once; slots and pages are taken from number 1 on.
    """
    inputs = [s[:-1] for s in sequences]
    laid = Laid(runner, max(pages_of(runner, len(s)) for s in sequences))
    return laid.prefill(inputs, [len(s) - last for s in inputs])


def groups(items: Sequence, size: int, advance: Callable[[int], None]) -> Iterator[Sequence]:
    """``items`` a few at a time; ``advance`` is told of each group once it is done with."""
    for first in range(0, len(items), size):
        group = items[first : first + size]
        yield group
        advance(len(group))
