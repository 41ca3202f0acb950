"""What is known of a run: from the messages of all ranks to facts. No socket, no disk."""
