"""Words for people: amounts, ranks, and names that are safe to show."""
