"""A run in which ranks ended badly: which one went first, and which ones followed."""
