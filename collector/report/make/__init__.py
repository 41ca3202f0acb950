"""From the facts and the verdict to the report."""
