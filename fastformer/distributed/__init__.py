"""A model, or its sequences, on several devices."""
