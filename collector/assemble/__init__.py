"""From the facts and the verdict to report.json, and to the exports and differences of a run."""
