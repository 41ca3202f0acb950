"""`gpuwatch run`: a command as it stands, and what becomes a rank below it."""
