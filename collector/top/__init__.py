"""`gpuwatch top`: hears what a collector shows, makes lines of it, and draws them."""
