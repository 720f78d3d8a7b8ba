"""A request moves from the engine that prefilled it to the one that decodes it: leases, letters, loads, copies."""
