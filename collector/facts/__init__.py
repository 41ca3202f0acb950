"""Facts about a run, made from the messages of all ranks, and the words for them. No socket, no disk."""
