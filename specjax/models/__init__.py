"""Language models: the decoder, its layers and kernels, and the trained heads."""
