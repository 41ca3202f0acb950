"""One rank's diagnosis: where its first non-finite value came from, from its own page alone. Pure."""
