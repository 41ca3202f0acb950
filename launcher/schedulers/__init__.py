"""The job that a launch is part of: what the environment and a scheduler say of it."""
