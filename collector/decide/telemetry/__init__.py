"""What the figures of the nodes say of an event, and of a slow rank. It changes no verdict."""
