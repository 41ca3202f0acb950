"""One report model, and its renderings."""
