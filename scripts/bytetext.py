"""A token per byte: what stands in for a tokenizer where random weights have a vocabulary of their own."""

from collections.abc import Iterable

from serve.text import StreamDecoder

FIRST = 8  # ids below it are left to special tokens


class ByteText:
    """As `serve.text.Text`, for any vocabulary of 264 ids or more: byte b is id 8 + b, later ids read as ``<id>``."""

    def __init__(self, vocab_size: int, bos_id: int, eos_id: int):
        if vocab_size < FIRST + 256:
            raise ValueError(f"a token per byte needs model.vocab_size >= {FIRST + 256}, got {vocab_size}")
        self.vocab_size, self.bos_id, self.eos_id = vocab_size, bos_id, eos_id

    longest = 1  # bytes of a token that text becomes

    def special_ids(self) -> list[int]:
        return list(range(FIRST))

    def encode(self, text: str) -> list[int]:
        return [FIRST + b for b in text.encode()]

    def prompt(self, text: str) -> list[int]:
        return [self.bos_id, *self.encode(text)]

    def chat(self, messages: list[dict]) -> list[int]:
        raise ValueError(
            "messages need a chat_template, and these random weights have a tokenizer of bytes without one"
        )

    def piece(self, token: int) -> bytes:
        return bytes([token - FIRST]) if FIRST <= token < FIRST + 256 else f"<{token}>".encode()

    def decode(self, ids: Iterable[int]) -> str:
        stream = self.stream()
        return stream.push(ids) + stream.flush()

    def stream(self) -> StreamDecoder:
        return StreamDecoder(self.piece)
