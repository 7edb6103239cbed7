"""The functional MLA model: parameters, layers, forward pass. Knows pools and tables, never requests or hashes."""
