"""Imported by ordinary.py."""

NAME = "a module beside the script"
