"""What values near trouble come to: one line for what is the same on many ranks, modules and batches, with its mend."""
