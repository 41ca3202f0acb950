"""From a hook to the recorder: names, roots, rows, frames, and the code that calls the judge."""
