"""One rank: where its first non-finite value came from, as far as its own page tells. Pure."""
