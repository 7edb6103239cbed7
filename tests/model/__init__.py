"""The model and the pure functions: against transformers, against the float64 reference, and against themselves."""
