"""Messages between processes as frames of msgpack, no pickle: of front ends and engines, and letters between engines.

A message is frames: its kind, its body, its large arrays. Arrays travel as their bytes with dtype and shape. What does
not decode to exactly what is expected is dropped and counted, never raised.
"""

from dataclasses import dataclass, make_dataclass, replace
from typing import Any, get_args

import msgspec
import numpy as np

from serve.disagg.handoff import Body, Handoff, Letter, Push
from serve.request import FINISHES, Abort, Ask, Bye, Logprobs, Outputs, Pause

MAX_BYTES = 256 << 20  # of a message
INLINE_BYTES = 1 << 16
DTYPES = ("int32", "int64", "float32")


@dataclass(frozen=True)
class Hello:
    """The engine's first message: it is ready, and this is what fits it."""

    vocab_size: int
    context: int
    page_size: int


@dataclass(frozen=True)
class Failed:
    """The engine's last message: why its process ends. ``users``: what the user can mend, else our own slip."""

    message: str
    users: bool


@dataclass(frozen=True)
class Ping:
    """Are you alive? An engine answers between two steps."""


@dataclass(frozen=True)
class Pong:
    pass


KINDS: dict[bytes, type] = {
    b"ask": Ask,
    b"abort": Abort,
    b"pause": Pause,
    b"bye": Bye,
    b"outputs": Outputs,
    b"hello": Hello,
    b"failed": Failed,
    b"ping": Ping,
    b"pong": Pong,
}
# A letter is told by what is in it: each kind of body has an envelope of its own.
LETTERS: dict[bytes, type] = {
    b"letter " + cls.__name__.lower().encode(): make_dataclass(
        f"{cls.__name__}Letter", [("sender", str), ("born", int), ("to_born", int), ("body", cls)]
    )
    for cls in get_args(Body)
}
TO_ENGINE, TO_FRONT = (b"ask", b"abort", b"pause", b"bye", b"ping"), (b"outputs", b"hello", b"failed", b"pong")


class _Encoder:
    """Small arrays go into the body as their bytes, large ones into frames after it, uncopied."""

    def __init__(self):
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._out)
        self._frames: list = []

    def __call__(self, message: Any) -> list:
        body, frames = self._encoder.encode(message), self._frames
        self._frames = []
        return [body, *frames]

    def _out(self, value: Any) -> Any:
        if isinstance(value, np.generic):
            return value.item()
        if not isinstance(value, np.ndarray):
            raise TypeError(f"cannot send a {type(value).__name__}")
        value = np.ascontiguousarray(value)
        raw = value.data.cast("B") if value.size else b""
        if len(raw) <= INLINE_BYTES:
            return (value.dtype.name, value.shape, raw)
        self._frames.append(raw)
        return (value.dtype.name, value.shape, len(self._frames) - 1)


class _Decoder:
    def __init__(self, cls: type):
        self._decoder = msgspec.msgpack.Decoder(cls, dec_hook=self._in)
        self._frames: list = []

    def __call__(self, body, frames: list) -> Any:
        self._frames = frames
        try:
            return self._decoder.decode(body)
        finally:
            self._frames = []

    def _in(self, kind: type, value: Any) -> Any:
        dtype, shape, raw = value
        if kind is not np.ndarray or dtype not in DTYPES or len(shape) > 2:
            raise ValueError(f"an array of {dtype} with {len(shape)} axes")
        if any(type(s) is not int or s < 0 for s in shape):
            raise ValueError(f"an array of shape {shape}")
        if type(raw) is int:
            if not 0 <= raw < len(self._frames):
                raise ValueError(f"an array in frame {raw} of {len(self._frames)}")
            raw = self._frames[raw]
        return np.frombuffer(raw, dtype).reshape(shape)


_ENCODE = _Encoder()  # messages are made and read on one thread a process
_DECODE = {kind: _Decoder(cls) for kind, cls in {**KINDS, **LETTERS}.items()}
_NAMES = {cls: kind for kind, cls in KINDS.items()}
_ENVELOPES = {cls.__annotations__["body"]: (kind, cls) for kind, cls in LETTERS.items()}


def encode(message: Any) -> list:
    """The frames of a message. Raises ValueError for one that would not be taken: it must not be lost in silence."""
    message = _contract(message)
    _check(message)
    if isinstance(message, Letter):
        kind, envelope = _ENVELOPES[type(message.body)]
        frames = [kind, *_ENCODE(envelope(message.sender, message.born, message.to_born, message.body))]
    else:
        frames = [_NAMES[type(message)], *_ENCODE(message)]
    size = sum(len(f) for f in frames)
    if size > MAX_BYTES:
        raise ValueError(f"a message of {size} bytes; {MAX_BYTES} may be sent")
    return frames


def decode(frames: list, kinds: tuple[bytes, ...]) -> Any:
    """The message of ``frames``, one of ``kinds``. Raises ValueError for anything else."""
    kind = bytes(frames[0])
    if len(frames) < 2 or kind not in kinds:
        raise ValueError(f"{len(frames)} frames, kind {kind[:16]!r}")
    if sum(len(f) for f in frames) > MAX_BYTES:
        raise ValueError("a message over the size limit")
    try:
        message = _DECODE[kind](frames[1], frames[2:])
        if kind in LETTERS:
            message = Letter(message.sender, message.born, message.to_born, message.body)
        _check(message)
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"not a {kind.decode()}: {error}") from None
    return message


def _contract(message: Any) -> Any:
    """Outputs in the dtypes that serve/request.py promises, whatever the engine computes in."""
    if not isinstance(message, Outputs):
        return message
    handles = message.handles.astype(np.int64, copy=False)
    counts, tokens = (a.astype(np.int32, copy=False) for a in (message.counts, message.tokens))
    return replace(message, handles=handles, counts=counts, tokens=tokens)


def _check(message: Any) -> None:
    """Raise ValueError where arrays do not belong together."""
    if isinstance(message, Ask):
        _array(message.tokens, np.int32, 1)
        _array(message.generated, np.int32, 1)
        if not len(message.tokens):
            raise ValueError("an Ask without tokens")
        if message.handoff is not None:
            _check_handoff(message.handoff)
    if isinstance(message, Outputs):
        _array(message.handles, np.int64, 1)
        _array(message.counts, np.int32, 1)
        _array(message.tokens, np.int32, 1)
        if len(message.handles) != len(message.counts) or message.counts.sum() != len(message.tokens):
            raise ValueError("Outputs whose counts do not add up")
        for rows in (*message.logprobs.values(), *message.prompt_logprobs.values()):
            _check_rows(rows)
        if any(f.reason not in FINISHES for f in message.finished):
            raise ValueError(f"a Finish that is none of {FINISHES}")
        for handed in message.handed:
            _check_handoff(handed.handoff)
    if isinstance(message, Letter) and isinstance(message.body, Push):
        _array(message.body.pages, np.int32, 1)
        if message.body.pages.min(initial=0) < 0 or message.body.slot < 0 or message.body.skip < 0:
            raise ValueError("a Push of pages or slots below 0")


def _check_handoff(handoff: Handoff) -> None:
    _array(handoff.pages, np.int32, 1)
    if min(handoff.tokens, handoff.page_size, handoff.slot) < 1 or handoff.pages.min(initial=1) < 1:
        raise ValueError("a Handoff with no tokens, or of pages or slots below 1")
    if len(handoff.pages) != -(-handoff.tokens // handoff.page_size):
        raise ValueError(f"a Handoff of {handoff.tokens} tokens in {len(handoff.pages)} pages of {handoff.page_size}")


def _check_rows(rows: Logprobs) -> None:
    _array(rows.chosen, np.float32, 1)
    _array(rows.ids, np.int32, 2)
    _array(rows.values, np.float32, 2)
    if rows.ids.shape != rows.values.shape or len(rows.ids) != len(rows.chosen):
        raise ValueError("Logprobs of unequal lengths")


def _array(value: np.ndarray, dtype: type, axes: int) -> None:
    if value.dtype != dtype or value.ndim != axes:
        raise ValueError(f"an array of {value.dtype} with {value.ndim} axes")
