"""Stands in for torchvision: small drawn images in place of its data sets, and what the programs call of the rest."""

from . import datasets, models, transforms, utils

__version__ = "0"

__all__ = ["datasets", "models", "transforms", "utils"]
