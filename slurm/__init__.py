"""The sbatch template and what submits it."""
