"""What `gpuwatch run` puts into every Python process below it, and what makes such a process a rank."""
