"""Decides from the reports of all ranks who is to blame. Pure: it uses no process, store or device."""
