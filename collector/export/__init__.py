"""A run's numbers for other tools: one table, written as text, as Parquet or for TensorBoard."""
