"""Whose a module of a name is, in processes that are ours and in those that are the job's."""
