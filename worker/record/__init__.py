"""From a hook to the recorder: names, roots, rows, frames, and the caller of the judge."""
