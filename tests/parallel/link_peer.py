"""A process with one NIXL link and 1 MB of known bytes: `python -m tests.parallel.link_peer NAME`.

Tells what it is on stdout, meets who comes on stdin, then prints each note it gets until stdin ends.
"""

import os
import sys
import threading

os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")

import numpy as np

from parallel.link import LinkSettings, NixlLink

SIZE = 1 << 20


def content(name: str) -> np.ndarray:
    return np.random.default_rng(len(name)).integers(0, 256, SIZE, np.uint8)


def main(name: str) -> None:
    buffer, link = content(name), NixlLink(name, LinkSettings(progress=False))
    link.register(buffer)
    print(link.about().hex(), flush=True)
    link.meet(bytes.fromhex(sys.stdin.readline().strip()))
    print("met", flush=True)
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    while not ended.wait(0.0005):
        for peer, note in link.notes():
            print(peer, note.decode(), int(buffer[:8].sum()), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
