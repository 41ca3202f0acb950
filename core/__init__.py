"""What all parts share: frames, recorder format, wire messages, settings, errors. It imports none of them."""
