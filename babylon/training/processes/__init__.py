"""An update on several processes, one a GPU, which torchrun starts."""
