"""Tables in shared host memory: one copy, the same rows in every process, and a true account of its pages."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallel import hosttable, shared
from parallel.hosttable import Pages

ROWS, COLUMNS = 40_000, 256  # 9.8 MB: five large pages
HUGE_KB = 2048


def rows() -> torch.Tensor:
    return torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS).to(torch.uint8)


def made(**how) -> hosttable.HostTable:
    return hosttable.create(ROWS, COLUMNS, torch.uint8, rows().split(7_001), **how)


@pytest.mark.parametrize("how", [{"share": True}, {"share": False}, {"share": True, "huge": False}], ids=str)
def test_rows_are_those_of_the_blocks_and_pages_are_counted(how):
    table = made(**how)
    assert torch.equal(table.rows, rows())
    assert table.pages.size_kb == 5 * HUGE_KB and table.pages.kind == ("shared" if how["share"] else "private")
    assert 0 <= table.pages.huge_kb <= table.pages.size_kb
    assert table.rows.data_ptr() % shared.HUGE == 0
    if table.pages.huge_kb == table.pages.size_kb:
        assert str(table.pages) == "2 MB pages" and not table.pages.fallback
    else:  # never silent
        assert "4 KB pages: " in str(table.pages) and table.pages.fallback
    if how.get("huge") is False:
        assert table.pages.huge_kb == 0 and table.pages.fallback == "asked not to"


def test_the_account_agrees_with_smaps():
    table = made(share=False)
    with open("/proc/self/smaps") as file:
        text = file.read()
    start = f"{table.rows.data_ptr():x}-"
    entry = text[text.index(start) :].split("VmFlags", 1)[0]
    assert entry.partition("AnonHugePages:")[2].split()[:2] == [str(table.pages.huge_kb), "kB"]


def test_another_process_reads_the_same_memory():
    """It sees what is written afterwards, too, and a write of its own ends it without a trace in the table."""
    table = made()
    code = (
        "import sys, torch; from parallel import hosttable; t = hosttable.attach(sys.argv[1]);"
        "print(t.rows.shape == (40_000, 256), int(t.rows[39_999].sum()), end=' ');"
        "print(t.pages.size_kb, str(t.pages)[:4], flush=True);"
        "t.rows[0, 0] = 9"
    )
    table.rows[39_999] = 3
    child = subprocess.run([sys.executable, "-c", code, table.address], capture_output=True, text=True, timeout=100)
    same, total, size, pages = child.stdout.split(maxsplit=3)
    assert (same, int(total), int(size)) == ("True", 3 * 256, table.pages.size_kb) and pages.strip() in ("2 MB", "4 KB")
    assert child.returncode == -11 and table.rows[0, 0] == 0


def test_other_types_of_rows():
    scales = torch.rand(1000, 8).to(torch.float8_e4m3fn)
    table = hosttable.create(1000, 8, scales.dtype, [scales[:1], scales[1:]])
    there = hosttable.attach(table.address)
    assert there.rows.dtype == scales.dtype and torch.equal(there.rows.view(torch.uint8), scales.view(torch.uint8))
    assert there.pages.size_kb == HUGE_KB


def test_the_kernels_refusal_is_named(monkeypatch):
    """As on a kernel that has large pages switched off: advice refused, none counted."""
    monkeypatch.setattr(shared, "advise", lambda array, offset, size, advice: "EINVAL")
    none = dict.fromkeys(("AnonHugePages", "ShmemPmdMapped", "FilePmdMapped"), 0)
    monkeypatch.setattr(shared, "smaps", lambda array: none)
    table = made()
    assert torch.equal(table.rows, rows()) and table.address
    assert str(table.pages).startswith("4 KB pages: EINVAL; shmem_enabled: ")
    assert str(Pages("shared", 100, 40, "ENOMEM")) == "2 MB pages for 40.0%, else 4 KB pages: ENOMEM"


def test_bad_blocks_and_addresses_are_refused():
    with pytest.raises(ValueError, match="the blocks hold 100 rows, the table has 40000"):
        hosttable.create(ROWS, COLUMNS, torch.uint8, [rows()[:100]])
    with pytest.raises(ValueError, match=r"a block of \(40000, 256\) torch.uint8 at row 0 does not fit"):
        hosttable.create(ROWS, COLUMNS, torch.int8, [rows()])
    with pytest.raises(ValueError, match="at row 40000 does not fit"):
        hosttable.create(ROWS, COLUMNS, torch.uint8, [rows(), rows()[:1]])
    with pytest.raises(ValueError, match="is no address of a table"):
        hosttable.attach("1/2/3")
    table = made()
    with pytest.raises(ValueError, match="more than its"):
        hosttable.attach(table.address.replace("40000x", "90000x"))


def test_memory_goes_with_the_last_reference():
    before = len(os.listdir("/proc/self/fd"))
    table = made()
    start, part = table.rows.data_ptr(), table.rows[5:6]
    del table
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    assert part[0].tolist() == rows()[5].tolist()  # the mapping lives as long as a view of it
    del part
    gc.collect()
    assert f"{start:x}-" not in open("/proc/self/maps").read()


# --- the ranks of a node ---


def keep(rank: int, file: str, out: Any, orders: Any) -> None:
    """A rank that takes two tables, then does as it is told."""
    node = hosttable.Node(dist.FileStore(file, 3))
    asked = []
    tables = [node.table(n, ROWS, COLUMNS, torch.uint8, lambda n=n: asked.append(n) or [rows()]) for n in "ab"]
    out.put((rank, node.first, asked, node._held[0].segment.nonce, str(node)))
    while (order := orders.get()) is not None:
        if order == "write":
            tables[1][7] = 5
        out.put((rank, bool(torch.equal(tables[0], rows())), tables[1][7].unique().tolist()))


def holders(nonce: str) -> list[str]:
    """Processes that have the segment open or mapped."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            links = [os.readlink(f) for f in (process / "fd").iterdir()]
            if any(nonce in text for text in (*links, (process / "maps").read_text())):
                found.append(process.name)
        except OSError:
            continue
    return found


def test_ranks_of_a_node_share_one_copy_that_goes_with_the_last_of_them(tmp_path):
    """Also when the rank that made it is killed: the others keep it, and nothing is left behind."""
    context = multiprocessing.get_context("spawn")
    out, orders = ([context.Queue() for _ in range(3)] for _ in range(2))  # a killed process may hold its lock
    made = [context.Process(target=keep, args=(r, str(tmp_path / "store"), out[r], orders[r])) for r in range(3)]
    try:
        for process in made:
            process.start()
        told = {t[0]: t[1:] for t in (queue.get(timeout=120) for queue in out)}
        (maker,) = [r for r, t in told.items() if t[0]]
        assert sorted(t[1] for t in told.values()) == [[], [], ["a", "b"]]
        assert len({t[2] for t in told.values()}) == 1
        assert all(t[3].startswith("20,480 kB of host memory, shared, ") for t in told.values())
        nonce = told[maker][2]
        assert len(holders(nonce)) == 3
        orders[maker].put("write")
        assert out[maker].get(timeout=60) == (maker, True, [5])
        os.kill(made[maker].pid, signal.SIGKILL)
        made[maker].join(60)
        others = [r for r in range(3) if r != maker]
        for r in others:
            orders[r].put("read")
            assert out[r].get(timeout=60) == (r, True, [5])
        for r in others:
            orders[r].put(None)
            made[r].join(60)
        assert holders(nonce) == [] and not [f for f in os.listdir("/dev/shm") if "racklab" in f]
    finally:
        for process in made:
            process.kill()


def test_one_rank_has_private_memory():
    node = hosttable.Node()
    table = node.table("a", ROWS, COLUMNS, torch.uint8, lambda: rows().split(999))
    assert torch.equal(table, rows()) and node.pages["a"].kind == "private" and node.first
