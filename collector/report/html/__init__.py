"""The report as one HTML file that needs nothing beside it: no network, no script to be read."""
