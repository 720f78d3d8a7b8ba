"""Messages between processes: their frames (codec), front end and engine (pair), engines with each other (net)."""
