"""The report: one model, and its renderings."""
