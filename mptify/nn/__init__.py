"""What a ticket model is made of: layers, quantizers, norms, and frozen weights."""
