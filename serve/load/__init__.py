"""Load for a server: traces and lanes, made or read, the driver that plays them, and the card of what came of it."""
