NAME = "a sibling in the package"
