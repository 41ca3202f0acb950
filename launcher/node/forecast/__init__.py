"""The forecast: a line through what a module returned, and which modules are worth one."""
