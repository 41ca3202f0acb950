"""A job that stands still: which rank the others wait for, from where all of them stood when they were asked."""
