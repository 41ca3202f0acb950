"""From a command line to settings: torchrun's parser with our options, and what they mean together."""
