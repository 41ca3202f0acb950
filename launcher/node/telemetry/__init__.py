"""The figures of the node over the run: read every few seconds, thinned with age, sent when something happens."""
