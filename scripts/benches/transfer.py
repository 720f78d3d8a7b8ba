"""Pages of KV read from another process by NIXL over host memory: tokens/s by how the bytes lie and are described.

    rows    a pool for each KV source and kind; every row is a descriptor
    merged  the same pools; rows adjacent on both sides are one descriptor
    pages   page-major: all of a page is adjacent, so that a page, or a run of them, is one descriptor

Bytes, pages and their scatter are the same in all three; what arrived is compared by checksum, or there is no figure.
Time runs from spans to the last byte. Pages have the geometry of V4.1-Flash, 890 bytes a token.
"""

import multiprocessing
import os
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from statistics import median

import numpy as np

from parallel import spans
from parallel.offload import Offloaded
from parallel.port import DONE, Link
from scripts import report
from scripts.build import Settings
from scripts.progress import progress
from serve.schedule.pages import Pages

PAGE = 64  # tokens
RATIOS = (2, 2, 2, 1)  # of the four KV sources
ROW = (256, 32, 64, 4)  # bytes: latent codes and scales, index codes and scales
PLANES = np.array([(PAGE // ratio, size) for ratio in RATIOS for size in ROW])  # [16, 2] rows, bytes of one
BYTES = int((PLANES[:, 0] * PLANES[:, 1]).sum())  # of a page
SCATTERED, MAJOR = 0, 1  # regions


@dataclass(frozen=True)
class Sizes:
    """``pages`` of a pool; of them a request has ``small`` for all three forms, ``large`` for pages beside memcpy."""

    pages: int = 2048
    small: int = 96
    large: int = 1024
    turns: int = 12


def link_named(name: str) -> Link:
    """NIXL reads its environment at import, so that is here."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    from parallel.link import LinkSettings, NixlLink

    return NixlLink(name, LinkSettings(progress=False))


def pools(count: int, seed: int | None) -> list[np.ndarray]:
    """The same tokens in both layouts; zeros without a seed."""
    if seed is None:
        return [np.zeros(count * BYTES, np.uint8) for _ in range(2)]
    major = np.random.default_rng(seed).integers(0, 256, (count, BYTES), np.uint8)
    ends = np.cumsum(PLANES[:, 0] * PLANES[:, 1])[:-1]
    return [np.concatenate([plane.ravel() for plane in np.split(major, ends, axis=1)]), major.ravel()]


def churned(seed: int, of: int, count: int) -> np.ndarray:
    """``count`` pages as an allocator gives them out that has served requests of up to 64 pages for a while."""
    pages, rng = Pages(of + 1, PAGE), np.random.default_rng(seed)
    held: list[np.ndarray] = []
    for _ in range(400):
        while held and (pages.used > of // 3 or rng.random() < 0.4):
            pages.release(held.pop(int(rng.integers(len(held)))))
        held.append(np.array(pages.take(int(rng.integers(1, min(65, of // 4))))))
    return np.array(pages.take(count), np.int64) - 1


def rows(pages: np.ndarray, of: int) -> np.ndarray:
    """A span for each row of ``pages`` in pools by source and kind of ``of`` pages [n, 3], page by page."""
    first, out = 0, []
    for count, size in PLANES.tolist():
        at = first + (pages[:, None] * count + np.arange(count)) * size
        out.append(np.stack((np.full_like(at, SCATTERED), at, np.full_like(at, size)), -1))
        first += of * count * size
    return np.concatenate(out, 1).reshape(-1, 3)


def whole(pages: np.ndarray) -> np.ndarray:
    return spans.records(MAJOR, pages, BYTES)


FORMS: dict[str, Callable[[np.ndarray, np.ndarray, int], spans.Pair]] = {
    "rows": lambda here, there, of: (rows(here, of), rows(there, of)),
    "merged": lambda here, there, of: spans.merge(rows(here, of), rows(there, of)),
    "pages": lambda here, there, of: spans.merge(whole(here), whole(there)),
}


def checksum(memory: list[np.ndarray], side: np.ndarray) -> int:
    """Of the bytes of spans of page-major order: rows of a page in order, or whole pages."""
    value = 0
    for region, at, size in side.tolist():
        value = zlib.crc32(memory[region][at : at + size], value)
    return value


def lend(pipe: Connection, count: int) -> None:
    """The other process: its pools are read; it answers with checksums."""
    memory, link = pools(count, 0), link_named("lender")
    for pool in memory:
        link.register(pool)
    pipe.send(link.about())
    link.meet(pipe.recv())
    while True:
        link.notes()
        if pipe.poll(0.001):
            pages = pipe.recv()
            if pages is None:
                return
            pipe.send(checksum(memory, whole(pages)))


@contextmanager
def lender(link: Link, count: int) -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=lend, args=(theirs, count), daemon=True)
    process.start()
    theirs.close()  # so that its end is seen
    try:
        link.meet(ours.recv())
        ours.send(link.about())
        yield ours
    finally:
        if process.is_alive():
            ours.send(None)
        process.join(5)
        process.kill()


@dataclass
class Read:
    seconds: float
    host: float  # of them, before and in `post`
    descriptors: int


def read(link: Link, make: Callable[[], spans.Pair]) -> Read:
    begin = time.perf_counter()
    pair = make()
    ticket = link.post("read", "lender", *pair)
    posted = time.perf_counter()
    while link.poll(ticket) != DONE:
        pass
    return Read(time.perf_counter() - begin, posted - begin, len(pair[0]))


def copied(memory: list[np.ndarray], here: np.ndarray, there: np.ndarray) -> float:
    """Seconds of a copy within the process: the same pages, one after another, from another pool of this size."""
    target, source = memory[MAJOR].reshape(-1, BYTES), memory[SCATTERED].reshape(-1, BYTES)
    begin = time.perf_counter()
    for a, b in zip(here.tolist(), there.tolist()):
        target[a] = source[b]
    return time.perf_counter() - begin


def steps(link: Link, make: Callable[[], spans.Pair], thread: bool, turns: int) -> dict[str, float]:
    """Milliseconds of a step of array work: alone, and with a read posted in front of it; and of the post itself."""
    a = np.random.default_rng(0).standard_normal((384, 384), np.float32)
    loads, alone, beside, posts = Offloaded(link) if thread else link, [], [], []
    for turn in range(2 * turns):
        ticket = None
        begin = time.perf_counter()
        if turn % 2:
            ticket = loads.post("read", "lender", *make())
            posts.append(time.perf_counter() - begin)
        for _ in range(12):
            a @ a
        (beside if turn % 2 else alone).append(time.perf_counter() - begin)
        while ticket is not None and loads.poll(ticket) != DONE:
            time.sleep(0.0005)
    name = "thread" if thread else "inline"
    found = {"post": posts, "step_alone": alone, "step": beside}
    return {f"{key}_ms_{name}": round(median(took) * 1e3, 3) for key, took in found.items()}


def run(s: Settings, sizes: Sizes | None = None) -> dict:
    """Keys ``ratio`` (pages over rows), ``memcpy_share``, ``tok_per_s_{form}``, post and step times."""
    z = sizes or Sizes()
    memory, link = pools(z.pages, None), link_named("borrower")
    for pool in memory:
        link.register(pool)
    small, large = (tuple(churned(seed, z.pages, n) for seed in (1, 2)) for n in (z.small, z.large))
    run_pages = lambda: FORMS["pages"](*large, z.pages)  # noqa: E731
    stepping: dict[str, float] = {}
    with lender(link, z.pages) as pipe, progress("bench=transfer", 6, "parts") as advance:
        reads = {}
        for name in FORMS:
            reads[name] = forms(link, name, small, z)
            equal(link, pipe, memory, name, small)
            advance(1)
        many = [(read(link, run_pages).seconds, copied(memory, *large)) for _ in range(z.turns)]
        equal(link, pipe, memory, "pages", large)
        advance(1)
        for thread in (False, True):
            stepping |= steps(link, run_pages, thread, z.turns)
            advance(1)
    best, memcpy = (median(side) for side in zip(*many))
    speed = {name: z.small * PAGE / median(r.seconds for r in found) for name, found in reads.items()}
    show(reads, speed)
    gb = z.large * BYTES / 1e9
    return {
        "ratio": round(speed["pages"] / speed["rows"], 2),
        "merged_ratio": round(speed["merged"] / speed["rows"], 2),
        "memcpy_share": round(memcpy / best, 3),
        "memcpy_gb_per_s": round(gb / memcpy, 2),
        "pages_gb_per_s": round(gb / best, 2),
        **{f"tok_per_s_{name}": round(value) for name, value in speed.items()},
        **{f"descriptors_{name}": found[0].descriptors for name, found in reads.items()},
        **stepping,
        "checksums_equal": True,
        "bytes_per_token": BYTES / PAGE,
        "tokens": z.small * PAGE,
    }


def forms(link: Link, name: str, pages: tuple[np.ndarray, np.ndarray], z: Sizes) -> list[Read]:
    """Some reads of one form; the first is thrown away."""
    times = 3 if name == "rows" else z.turns
    return [read(link, lambda: FORMS[name](*pages, z.pages)) for _ in range(times)][1:]


def equal(link: Link, pipe: Connection, memory: list, name: str, pages: tuple[np.ndarray, np.ndarray]) -> None:
    """Read once more into zeros; raise ValueError unless what came is what is there."""
    of = len(memory[MAJOR]) // BYTES
    for pool in memory:
        pool[:] = 0
    read(link, lambda: FORMS[name](*pages, of))
    pipe.send(pages[1])
    side = whole(pages[0]) if name == "pages" else rows(pages[0], of)
    if pipe.recv() != checksum(memory, side):
        raise ValueError(f"bench=transfer: form {name} brought other bytes than there are; no figures")


def show(reads: dict[str, list[Read]], speed: dict[str, float]) -> None:
    rows = []
    for name, found in reads.items():
        took, host = median(r.seconds for r in found), median(r.host for r in found)
        n, ratio = found[0].descriptors, speed[name] / speed["rows"]
        rows.append([name, n, took / n * 1e6, took * 1e3, host * 1e3, speed[name], ratio])
    columns = ("form", "descriptors", "us a descriptor", "ms", "host ms", "tokens/s", "ratio")
    report.table("transfer", columns, rows)
