"""One process per job: receives what the node agents send, stores it, decides, writes the report. Imports no torch."""
