"""The Python standard library's own source as training text, and the held-out set frozen apart from it."""

import hashlib
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

HELDOUT_BYTES = 600_000
PIECE_BYTES = 200_000
SKIPPED_FOLDERS = {"site-packages", "__pycache__", "encodings", "pydoc_data", "ensurepip"}
TEST_FOLDERS = {"test", "tests", "idle_test"}
# Tables made by programs, or by the build of this very interpreter.
GENERATED = ("_sysconfigdata", "config-")
GENERATED_FILES = {"html/entities.py", "stringprep.py", "token.py", "keyword.py", "sre_constants.py", "re/_casefix.py"}
LINE_CHARS = 16  # shorter lines ("return None", "else:") are in every file and say nothing
SHARED_LINES = 0.25  # a file with more of its lines elsewhere is a copy, not a test of the model
FILE_BYTES = (2_000, 120_000)  # held-out files: neither stubs nor a third of a piece each


@dataclass(frozen=True)
class Corpus:
    """Relative paths, sorted: ``code`` and ``tests`` are for training, ``heldout`` is in the order of its pieces."""

    root: Path
    code: tuple[str, ...]
    tests: tuple[str, ...]
    heldout: tuple[str, ...]

    def read(self, path: str) -> str:
        return (self.root / path).read_bytes().decode("utf-8")


def library() -> Path:
    """Folder of the running interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def collect(root: Path, heldout_bytes: int = HELDOUT_BYTES) -> Corpus:
    """Split the library: held-out files are ordinary code, picked by the hash of their path, that share few lines with
    any file left for training. Everything is a function of the files alone."""
    code, tests = _scan(root)
    texts = {p: (root / p).read_bytes().decode("utf-8") for p in code + tests}
    lines = {p: _lines(t) for p, t in texts.items()}
    owners: dict[str, int] = {}
    for found in lines.values():
        for line in found:
            owners[line] = owners.get(line, 0) + 1
    heldout, size = [], 0
    for path in sorted(code, key=lambda p: hashlib.sha256(p.encode()).digest()):
        if size >= heldout_bytes:
            break
        if not _may_hold_out(texts[path]):
            continue
        shared = sum(owners[line] > 1 for line in lines[path]) / max(len(lines[path]), 1)
        if shared <= SHARED_LINES:
            heldout.append(path)
            size += len(texts[path])
    if size < heldout_bytes:
        raise ValueError(f"the library in {root} gives only {size} of {heldout_bytes} held-out bytes")
    kept = set(heldout)
    return Corpus(root, tuple(p for p in code if p not in kept), tuple(tests), tuple(heldout))


def manifest(corpus: Corpus) -> dict:
    """What ``heldout.json`` holds: the files in order with their hashes, so that anyone can make the pieces again."""
    files = [{"path": p, "sha256": _digest(corpus.root / p)} for p in corpus.heldout]
    return {"piece_bytes": PIECE_BYTES, "pieces": HELDOUT_BYTES // PIECE_BYTES, "files": files}


def heldout_pieces(listing: dict, root: Path | None = None) -> list[bytes]:
    """The held-out pieces, cut from the running interpreter's library.

    ValueError names the first file that is missing or differs from the one the checkpoint was trained beside.
    """
    root = root or library()
    joined = b""
    for entry in listing["files"]:
        path = root / entry["path"]
        if not path.is_file():
            raise ValueError(f"held-out file {path} is missing: the pieces need the interpreter of the training run")
        if _digest(path) != entry["sha256"]:
            raise ValueError(f"held-out file {path} differs from the one in heldout.json: another Python version?")
        joined += path.read_bytes()
    size, count = listing["piece_bytes"], listing["pieces"]
    if len(joined) < size * count:
        raise ValueError(f"heldout.json lists {len(joined)} bytes, {count} pieces of {size} need more files")
    return [joined[i * size : (i + 1) * size] for i in range(count)]


def _scan(root: Path) -> tuple[list[str], list[str]]:
    code, tests = [], []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        parts = set(path.relative_to(root).parts)
        if parts & SKIPPED_FOLDERS or name.startswith(GENERATED) or name in GENERATED_FILES:
            continue
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue  # a few test files are in other encodings on purpose
        if not text.strip():
            continue
        is_test = parts & TEST_FOLDERS or path.name.startswith("test_")
        (tests if is_test else code).append(name)
    return code, tests


def _lines(text: str) -> set[str]:
    return {s for s in map(str.strip, text.splitlines()) if len(s) >= LINE_CHARS}


def _may_hold_out(text: str) -> bool:
    """Whole in one-byte characters (pieces are cut by bytes), of middling size, and not a table of numbers."""
    digits = sum(c.isdigit() for c in text)
    return text.isascii() and FILE_BYTES[0] <= len(text) <= FILE_BYTES[1] and digits < 0.08 * len(text)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def documents(corpus: Corpus, paths: Iterable[str]) -> Iterable[str]:
    return (corpus.read(p) for p in paths)
