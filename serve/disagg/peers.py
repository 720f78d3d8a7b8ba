"""Which engines this one knows: the handshake that compares whole layouts, and the lives of an engine told apart."""

from collections.abc import Callable
from dataclasses import dataclass

from parallel.port import Link, LinkError
from serve.disagg.card import Card, mismatch
from serve.disagg.handoff import Body, Greet, Letter, Refuse, Rules, Stranger, Welcome

GREETING, OPEN, REFUSED = "greeting", "open", "refused"


@dataclass(eq=False)
class Peer:
    """One life of another engine. ``breaks``: how often the connection broke."""

    name: str
    born: int
    state: str = GREETING
    card: Card | None = None
    why: str = ""
    asked_s: float = float("-inf")
    wanted: bool = False  # by us: we greet until it answers
    met: bool = False
    breaks: int = 0


class Peers:
    """``send(name, letter)``. A later life of a peer takes the place of an earlier one, whose loads and leases end."""

    def __init__(self, name: str, born: int, card: Card, link: Link, rules: Rules, send: Callable[[str, Letter], None]):
        self.name, self.born, self.card, self.link, self.rules = name, born, card, link, rules
        self._send = send
        self.known: dict[str, Peer] = {}
        self.ended: list[tuple[str, int]] = []  # lives that ended, for the transfer to take

    def write(self, name: str, to_born: int, body: Body) -> None:
        self._send(name, Letter(self.name, self.born, to_born, body))

    def reach(self, name: str, born: int) -> Peer:
        """The peer, of that life (0: whichever it is in) or a later one; it will be greeted."""
        peer = self._alive(name, born)
        peer.wanted = True
        return peer

    def greet(self, now: float) -> None:
        """Greet those who have not answered."""
        for peer in self.known.values():
            if peer.wanted and peer.state == GREETING and now >= peer.asked_s + self.rules.retry_s:
                peer.asked_s = now
                self.write(peer.name, 0, Greet(self.card, self.link.about()))

    def broke(self, peer: Peer, now: float) -> None:
        """The link lost it: forget the connection, greet again after a while."""
        if self.known.get(peer.name) is not peer:
            return
        self.link.forget(peer.name)
        peer.breaks += 1
        peer.met, peer.asked_s, peer.wanted = False, now, True
        if peer.state == OPEN:
            peer.state = GREETING

    def current(self, letter: Letter) -> bool:
        """Whether a letter is to this life of ours, from the latest life of its sender. Notes a later life."""
        if letter.to_born not in (0, self.born):
            if letter.to_born < self.born:
                self.write(letter.sender, letter.born, Stranger())
            return False
        return self._alive(letter.sender, letter.born).born == letter.born

    def take(self, letter: Letter, now: float) -> None:
        """Greet, Welcome, Refuse of a current letter; Stranger has done its work by then."""
        peer, body = self.known[letter.sender], letter.body
        if isinstance(body, Refuse):
            if peer.state == GREETING:
                peer.state, peer.why = (REFUSED if body.final else GREETING), body.why
            return
        if isinstance(body, Greet | Welcome):
            peer.card = body.card
            why = mismatch(self.card, body.card)
            final, why = bool(why), why or self._meet(peer, body.about)
            if isinstance(body, Greet):
                answer = Refuse(why, final) if why else Welcome(self.card, self.link.about())
                self.write(peer.name, peer.born, answer)
            elif peer.state == GREETING:
                peer.why = why
                peer.state = OPEN if not why else REFUSED if final else GREETING

    def _meet(self, peer: Peer, about: bytes) -> str:
        """Why the link cannot reach it, or empty."""
        if peer.met:
            return ""
        try:
            met = self.link.meet(about)
        except LinkError as error:
            return f"the link does not reach it: {error}"
        if met != peer.name:
            self.link.forget(met)
            return f"engine {peer.name} has a link named {met}"
        peer.met = True
        return ""

    def _alive(self, name: str, born: int) -> Peer:
        peer = self.known.get(name)
        if peer is not None and not peer.born:  # greeted before anything was heard of it
            peer.born = born
        if peer is None or born > peer.born:
            if peer is not None:
                self.link.forget(name)
                self.ended.append((name, peer.born))
            peer = self.known[name] = Peer(name, born)
        return peer
