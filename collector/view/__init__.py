"""The collector's side of `gpuwatch top`: what it shows, and the socket that shows it."""
