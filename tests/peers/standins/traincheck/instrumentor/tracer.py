"""The switch that some programs set."""

DISABLE_WRAPPER = False
