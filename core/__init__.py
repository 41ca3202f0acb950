"""What the rooms share and what imports none of them: frames, recorder format, wire messages, settings, errors."""
