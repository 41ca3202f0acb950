"""What follows from the reports of all ranks: who is to blame. Pure; no process, store or device is touched."""
