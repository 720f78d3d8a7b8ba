"""Memory that the processes of a node share, addressed by a string that any channel can carry.

A segment is an anonymous file (memfd). It has no name in /dev/shm: the kernel frees it with its last holder, however
that one ends. Others open it through the file table of its maker, who must live until they have. Its name in that
table holds a nonce drawn at creation, so that what another run left behind, or a reused process number, is never
taken for it."""

import ctypes
import errno
import mmap
import os
import secrets
import weakref
from dataclasses import dataclass

HUGE = 2 << 20  # bytes of a large page
MADV_HUGEPAGE, MADV_NOHUGEPAGE, MADV_COLLAPSE = 14, 15, 25
FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


@dataclass(frozen=True)
class Segment:
    """An open anonymous file; ``address`` opens it in another process of this node. Closed with its last reference."""

    fd: int
    size: int  # bytes
    address: str  # process/descriptor/nonce

    def __post_init__(self):
        weakref.finalize(self, os.close, self.fd)

    @property
    def nonce(self) -> str:
        return self.address.rpartition("/")[2]


def create(size: int) -> Segment:
    """A new segment of ``size`` zero bytes."""
    nonce = secrets.token_hex(16)
    fd = os.memfd_create(f"racklab-{nonce}")
    os.ftruncate(fd, size)
    return Segment(fd, size, f"{os.getpid()}/{fd}/{nonce}")


def attach(address: str) -> Segment:
    """The segment that another process (or this one) made. Raises ValueError where it is not there any more."""
    pid, fd, nonce = address.split("/")
    try:
        own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
    except OSError as error:
        why = "that process is gone or of another user or container" if error.errno in (2, 3, 13) else error.strerror
        raise ValueError(f"shared segment {address} cannot be opened: {why}") from None
    if os.readlink(f"/proc/self/fd/{own}") != f"/memfd:racklab-{nonce} (deleted)":
        os.close(own)
        raise ValueError(f"shared segment {address} is of a run that ended: process {pid} holds something else there")
    return Segment(own, os.fstat(own).st_size, address)


def words(segment: Segment) -> memoryview:
    """The whole segment as int64, mapped for reading and writing as long as the view lives."""
    return memoryview(mmap.mmap(segment.fd, segment.size)).cast("q")


def mapped(size: int, fd: int = -1, writable: bool = True) -> ctypes.Array:
    """``size`` bytes that start on a 2 MB boundary: of the file ``fd``, shared; or our own, without one.

    Unmapped when nothing refers to the array. Writing where not ``writable`` ends the process (SIGSEGV).
    """
    assert size % HUGE == 0, size
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    room = _libc.mmap(None, size + HUGE, 0, private, -1, 0)  # reserves addresses, no memory
    if room == FAILED:
        raise OSError(ctypes.get_errno(), f"mmap of {size} bytes: {os.strerror(ctypes.get_errno())}")
    start = -(-room // HUGE) * HUGE
    if start > room:
        _libc.munmap(room, start - room)
    _libc.munmap(start + size, room + HUGE - start)
    flags = (private if fd < 0 else mmap.MAP_SHARED) | 0x10  # MAP_FIXED
    access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    if _libc.mmap(start, size, access, flags, fd, 0) == FAILED:
        code = ctypes.get_errno()
        _libc.munmap(start, size)
        raise OSError(code, f"mmap of {size} bytes: {os.strerror(code)}")
    array = (ctypes.c_ubyte * size).from_address(start)
    weakref.finalize(array, _libc.munmap, start, size)
    return array


def advise(array: ctypes.Array, offset: int, size: int, advice: int) -> str:
    """madvise on part of a mapping: "" or the name of the kernel's error."""
    if _libc.madvise(ctypes.addressof(array) + offset, size, advice) == 0:
        return ""
    return errno.errorcode.get(ctypes.get_errno(), str(ctypes.get_errno()))


def smaps(array: ctypes.Array) -> dict[str, int]:
    """Sums over the mapping's entries of /proc/self/smaps, in kB: Rss, AnonHugePages, ShmemPmdMapped, FilePmdMapped."""
    begin = ctypes.addressof(array)
    end, inside = begin + len(array), False
    sums = dict.fromkeys(("Rss", "AnonHugePages", "ShmemPmdMapped", "FilePmdMapped"), 0)
    with open("/proc/self/smaps", encoding="ascii", errors="replace") as file:
        for line in file:
            key, _, rest = line.partition(":")
            if inside and key in sums:
                sums[key] += int(rest.split()[0])
            elif " " in key:  # 7f00-7f10 r--p 00000000 fd
                low, _, high = key.split()[0].partition("-")
                inside = int(low, 16) < end and int(high, 16) > begin
    return sums
