"""What the router remembers of the past, bounded: pages that were sent to engines, engines that sessions were at."""

from collections import OrderedDict


class Sent:
    """Which engines were sent a page (by its chained hash), as bits: engine e is 1 << e. At most ``limit`` pages; those
    not asked for longest go first, the later pages of a prompt before its earlier ones."""

    def __init__(self, limit: int):
        self.limit = limit
        self._engines: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._engines)

    def runs(self, hashes: list[bytes]) -> dict[int, int]:
        """Engine -> how many of the first pages it was sent; those without the first one are left out."""
        found: dict[int, int] = {}
        left = -1  # engines that have all pages so far; -1: nobody was asked yet
        for count, name in enumerate(hashes):
            there = left & self._engines.get(name, 0)
            if there != left:
                found |= dict.fromkeys(bits(left & ~there) if count else (), count)
                left = there
            if not left:
                return found
        return found | dict.fromkeys(bits(left) if hashes else (), len(hashes))

    def add(self, hashes: list[bytes], engine: int) -> None:
        """These pages, a prompt's first ones, are at ``engine`` now."""
        known, bit = self._engines, 1 << engine
        for name in reversed(hashes):
            known[name] = known.pop(name, 0) | bit  # to the end of the line
        while len(known) > self.limit:
            known.popitem(last=False)

    def forget(self, engine: int) -> None:
        """The engine has lost its pages."""
        kept = ((name, engines & ~(1 << engine)) for name, engines in self._engines.items())
        self._engines = OrderedDict((name, engines) for name, engines in kept if engines)


def bits(value: int) -> list[int]:
    """The numbers of the bits that are set."""
    return [i for i in range(value.bit_length()) if value >> i & 1]


class Sessions:
    """Session -> the engine it was at last; the ``limit`` latest ones."""

    def __init__(self, limit: int):
        self.limit = limit
        self._engines: OrderedDict[str, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._engines)

    def get(self, session: str) -> str | None:
        return self._engines.get(session)

    def put(self, session: str, engine: str) -> None:
        if not session:
            return
        self._engines[session] = engine
        self._engines.move_to_end(session)
        if len(self._engines) > self.limit:
            self._engines.popitem(last=False)
