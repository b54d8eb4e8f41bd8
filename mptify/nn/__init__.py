"""What a ticket model is made of: layers, quantizers, norms, frozen weights and the selection of survivors."""
