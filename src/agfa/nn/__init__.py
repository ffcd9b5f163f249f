"""Parts to use alone, in anyone's training loop: spectra, generators, heads, losses, backbones."""
