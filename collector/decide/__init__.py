"""All ranks: the verdict, its evidence, its order and its words. Pure."""
