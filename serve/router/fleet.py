"""The engines that a router knows: which are up, and what each has open."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

ROLES = ("prefill", "decode", "both")


@dataclass(frozen=True)
class Post:
    """An engine's place: its name, the group that lives and dies together, and what it does."""

    name: str
    group: str
    role: str  # one of ROLES


@dataclass(eq=False)
class Member:
    """``prompt``: tokens of open requests that it has to compute before their first token; ``tokens``: all that it
    holds for open requests; ``sent``: requests ever, which breaks ties."""

    post: Post
    index: int
    alive: bool = False
    requests: int = 0
    tokens: int = 0
    prompt: int = 0
    sent: int = 0
    stats: dict[str, float] = field(default_factory=dict)  # the latest

    @property
    def name(self) -> str:
        return self.post.name


class Fleet:
    def __init__(self, posts: Sequence[Post]):
        self.members = {post.name: Member(post, i) for i, post in enumerate(posts)}
        assert len(self.members) == len(posts), "two engines of one name"
        self._past: dict[str, float] = {}  # counters of engines that are gone

    def __getitem__(self, name: str) -> Member:
        return self.members[name]

    def __iter__(self) -> Iterator[Member]:
        return iter(self.members.values())

    def up(self, *roles: str) -> list[Member]:
        return [m for m in self if m.alive and m.post.role in roles]

    def of(self, group: str) -> list[Member]:
        return [m for m in self if m.post.group == group]

    def down(self, group: str) -> None:
        """Its counters stay in `sums`."""
        for member in self.of(group):
            member.alive = False
            for name, value in member.stats.items():
                if name.endswith("_total"):
                    self._past[name] = self._past.get(name, 0) + value
            member.stats = {}

    def sums(self) -> dict[str, float]:
        """Each of the engines' stats, summed."""
        out = dict(self._past)
        for member in self:
            for name, value in member.stats.items():
                out[name] = out.get(name, 0) + value
        return out
