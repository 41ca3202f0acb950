"""Facts about a run, made from the messages of all ranks. No socket, no disk."""
