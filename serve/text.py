"""Text to token ids and back: byte-level BPE, an incremental decoder, chat prompts. V vocabulary."""

import codecs
import json
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path

from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

BOS, EOS, PAD, NOISE = "<bos>", "<eos>", "<pad>", "<|noise|>"
SPECIALS = (BOS, EOS, PAD, NOISE, "<|user|>", "<|assistant|>", "<|system|>")
# A newline takes the blank lines and the indentation after it, a word the blank, dot, underscore or bracket before it.
SPLIT = r"\n[\n \t]*|[ ._(]?\p{L}+|\p{N}{1,3}|[ ]?[^\s\p{L}\p{N}]+|\s+"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ROLES = ("system", "user", "assistant")
_ONE_BLANK = "\ue000"  # stands for a lone blank while Strip runs
_NORMALISER = normalizers.Sequence(
    [
        normalizers.NFKC(),
        normalizers.NFD(),
        normalizers.StripAccents(),
        normalizers.Lowercase(),
        normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
        normalizers.Replace(Regex(r"^ $"), _ONE_BLANK),
        normalizers.Strip(),
        normalizers.Replace(_ONE_BLANK, " "),
    ]
)


def normalise(text: str) -> str:
    """The reading of a token that the Engram map compares (spec 8.1): case, accents and white space folded."""
    return _NORMALISER.normalize_str(text)


class Text:
    """A tokenizer folder, loaded. Plain text never turns into special tokens; only ``chat`` writes those."""

    def __init__(self, tokenizer: Tokenizer, config: dict):
        self._plain = tokenizer
        self._plain.encode_special_tokens = True
        self._marked = Tokenizer.from_str(tokenizer.to_str())
        self._marked.encode_special_tokens = False
        self._config = config
        self._bytes = _token_bytes(tokenizer)
        template = config.get("chat_template")
        sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        self._template = None if template is None else sandbox.from_string(template)

    @classmethod
    def load(cls, folder: str | Path) -> "Text":
        """Reads ``tokenizer.json`` and ``tokenizer_config.json``; ValueError names a file that is missing or broken."""
        tokens, settings = (Path(folder) / name for name in ("tokenizer.json", "tokenizer_config.json"))
        for path in (tokens, settings):
            if not path.is_file():
                raise ValueError(f"no {path.name} in {path.parent}: a checkpoint folder holds its tokenizer")
        try:
            tokenizer = Tokenizer.from_file(str(tokens))
            _token_bytes(tokenizer)
        except Exception as e:  # the tokenizers library raises plain Exception
            raise ValueError(f"{tokens}: cannot read the tokenizer: {type(e).__name__} {e}") from e
        try:
            made = cls(tokenizer, json.loads(settings.read_text(encoding="utf-8")))
        except Exception as e:  # a template may hold anything
            raise ValueError(f"{settings}: cannot read the tokenizer: {type(e).__name__} {e}") from e
        for name in ("bos_token", "eos_token"):
            piece = made._config.get(name)
            if not isinstance(piece, str) or tokenizer.token_to_id(piece) is None:
                raise ValueError(f"{settings}: {name} is {piece!r}, which is no token of {tokens.name}")
        return made

    def save(self, folder: str | Path) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._marked.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps(self._config, indent=1) + "\n")

    @property
    def vocab_size(self) -> int:
        return len(self._bytes)

    def token_id(self, piece: str) -> int:
        """Id of one vocabulary string, such as ``<bos>``."""
        found = self._plain.token_to_id(piece)
        if found is None:
            raise ValueError(f"the tokenizer has no token {piece!r}")
        return found

    @property
    def bos_id(self) -> int:
        return self.token_id(self._config["bos_token"])

    @property
    def eos_id(self) -> int:
        return self.token_id(self._config["eos_token"])

    def special_ids(self) -> list[int]:
        """Ids that plain text never becomes."""
        return sorted(self._plain.get_added_tokens_decoder())

    def encode(self, text: str) -> list[int]:
        """Ids of the text alone: no BOS, and a literal ``<eos>`` in the text stays text."""
        return self._plain.encode(text, add_special_tokens=False).ids

    def prompt(self, text: str) -> list[int]:
        """Ids of a document's beginning: BOS, then the text."""
        return [self.bos_id, *self.encode(text)]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids, special tokens spelled out; bytes that are no character become U+FFFD."""
        return b"".join(self._bytes[i] for i in ids).decode("utf-8", "replace")

    def stream(self) -> "StreamDecoder":
        return StreamDecoder(self._bytes.__getitem__)

    @cached_property
    def longest(self) -> int:
        """Bytes of the longest token: a text of n bytes has n / longest tokens or more."""
        return max(map(len, self._bytes))

    def piece(self, token: int) -> bytes:
        """The bytes of one token, which need not be whole characters."""
        return self._bytes[token]

    def pieces(self) -> list[str]:
        """Each token decoded alone [V]."""
        return [b.decode("utf-8", "replace") for b in self._bytes]

    def raw_pieces(self) -> list[str]:
        """Each token's vocabulary string [V]."""
        return [self._plain.id_to_token(i) for i in range(self.vocab_size)]

    def chat(self, messages: list[dict], add_generation_prompt: bool = True) -> list[int]:
        """Ids of a conversation by the folder's chat template. Special tokens inside a message's content stay text.

        Raises ValueError without a template, for a message that is none, and where the template refuses.
        """
        if self._template is None:
            raise ValueError("messages need a chat_template in the checkpoint's tokenizer_config.json, which has none")
        marks = {}
        for i, m in enumerate(messages):
            if m.get("role") not in ROLES or not isinstance(m.get("content"), str):
                raise ValueError(f"messages[{i}] needs a role of {', '.join(ROLES)} and a content of text, got {m!r}")
            marks[f"\ue001{i}\ue002"] = m["content"]  # a private-use mark: content joins once special tokens are read
        safe = [{**m, "content": mark} for m, mark in zip(messages, marks, strict=True)]
        try:
            rendered = self._template.render(
                messages=safe,
                add_generation_prompt=add_generation_prompt,
                bos_token=self._config["bos_token"],
                eos_token=self._config["eos_token"],
            )
        except (TemplateError, TypeError, ArithmeticError, LookupError) as error:  # what a template can do wrong
            raise ValueError(f"messages: the chat template fails: {type(error).__name__} {error}") from None
        ids: list[int] = []
        for mark, content in marks.items():
            before, found, after = rendered.partition(mark)
            if not found:
                continue  # the template leaves this message out
            rendered = after
            ids += self._marked.encode(before, add_special_tokens=False).ids + self.encode(content)
        return ids + self._marked.encode(rendered, add_special_tokens=False).ids


class StreamDecoder:
    """Text as its ids arrive. Bytes of an unfinished character wait; ``flush`` gives what is left as U+FFFD."""

    def __init__(self, piece: Callable[[int], bytes]):
        self._piece = piece
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        return self._decoder.decode(b"".join(self._piece(i) for i in ids))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)

    @property
    def waits(self) -> bool:
        """Bytes of an unfinished character are held."""
        return bool(self._decoder.getstate()[0])


def train_bpe(documents: Iterable[str], vocab_size: int) -> Text:
    """A byte-level BPE of exactly ``vocab_size`` entries, specials first. Lossless on any text; no normaliser."""
    tokenizer = Tokenizer(models.BPE())
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(SPLIT), "isolated"), to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        special_tokens=[AddedToken(s, special=True, normalized=False) for s in SPECIALS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(documents, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"the documents give only {tokenizer.get_vocab_size()} of {vocab_size} tokens: use more text")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "add_bos_token": True,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    return Text(tokenizer, config)


def _token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """The bytes behind every id [V]: added tokens as they are spelled, the others through the byte alphabet."""
    added = {i: t.content for i, t in tokenizer.get_added_tokens_decoder().items()}
    byte_of = _byte_alphabet()
    table = []
    for i in range(tokenizer.get_vocab_size()):
        if i in added:
            table.append(added[i].encode())
        else:
            table.append(bytes(byte_of[c] for c in tokenizer.id_to_token(i)))
    return table


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE: printable Latin-1 stands for itself, the rest is shifted past U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}
